"""Items of stored responses that a request refers to by their ids."""

from __future__ import annotations

import sys

import pytest

from stream_fabric.errors import BadRequest
from stream_fabric.limits import RESPONSE_HISTORY_BYTES_MAX
from stream_fabric.stream.ids import StreamId, derived_id
from stream_gw.responses import HistoryTooLong, Item, ReferenceNotFound, ResponseRecord
from stream_gw.responses.references import resolved
from tests.responses.conftest import ACME, GLOBEX, Gateway, Platform
from tests.responses.test_lineage import save, texts
from tests.responses.test_store import NEVER


def reference(item: str) -> Item:
    return {"type": "item_reference", "id": item}


def answer_of(response: StreamId) -> Item:
    return reference(derived_id("msg_", response, 1))


async def question_of(gateway: Gateway, response: StreamId) -> Item:
    [item] = (await gateway.store.input_items(ACME, response)).data
    return reference(item["id"])


@pytest.mark.parametrize("is_saved", [False, True])
async def test_questions_and_answers_of_any_response(gateway: Gateway, is_saved: bool) -> None:
    first, second = [await gateway.stored(text=f"q{number}", answer=f"a{number}") for number in range(2)]
    asked = [answer_of(second), await question_of(gateway, first), {"role": "user", "content": [{"text": "new"}]}]
    if is_saved:
        await save(gateway, [first, second])
    assert texts(await gateway.store.resolved(ACME, [*asked, {"id": asked[0]["id"]}], [])) == ["a1", "q0", "new", "a1"]


async def test_an_item_of_the_history_stands_there_once(gateway: Gateway) -> None:
    first = await gateway.stored(text="q", answer="a")
    history = await gateway.store.history(ACME, first, None)
    new = {"role": "user", "content": "new"}
    own = {"id": "mine", "role": "user", "content": "x"}
    asked = [answer_of(first), reference("mine"), new]
    assert await gateway.store.resolved(ACME, asked, [*history, own]) == [new]


async def test_what_is_not_stored_for_the_caller_is_not_found(gateway: Gateway, platform: Platform) -> None:
    theirs = await gateway.stored(GLOBEX)
    of_a_user = await gateway.stored(user="ann")
    deleted = await gateway.stored()
    assert await gateway.store.delete(ACME, deleted)
    running = platform.response()
    assert await gateway.store.begun(ACME, running)
    await platform.create(running, ACME)
    for item in (
        answer_of(theirs),
        answer_of(deleted),
        answer_of(running.id),
        answer_of(StreamId(NEVER)),
        reference(derived_id("msg_", of_a_user, 9)),
        reference("msg_1"),
    ):
        with pytest.raises(ReferenceNotFound, match="send the item itself") as refused:
            await gateway.store.resolved(ACME, [item], [], user=None)
        assert refused.value.param == "input" and refused.value.http_status == 404
    assert await gateway.store.resolved(ACME, [answer_of(of_a_user)], [], user="ann")
    with pytest.raises(ReferenceNotFound):
        await gateway.store.resolved(ACME, [answer_of(of_a_user)], [], user="bob")


async def test_references_have_bounds_and_a_response_is_read_once(platform: Platform) -> None:
    half = "x" * (RESPONSE_HISTORY_BYTES_MAX // 2)
    record = platform.response()
    item = {"id": f"msg_{record.id[5:]}i0", "role": "user", "content": half}
    reads: list[str] = []

    async def read(response: str) -> ResponseRecord:
        reads.append(response)
        return platform.response(id=record.id, input=[item])

    asked = [reference(item["id"])]
    assert await resolved(asked, [], read) == [item]
    with pytest.raises(HistoryTooLong):
        await resolved(asked * 2, [], read)
    assert reads == [record.id] * 2
    with pytest.raises(BadRequest, match=r"input\.0\.id"):
        await resolved([{"type": "item_reference"}], [], read)


async def test_only_the_items_that_are_named_are_kept(platform: Platform) -> None:
    """A request may name one item of each of a thousand large responses."""
    others: list[Item] = []
    holders: list[int] = []

    async def read(response: str) -> ResponseRecord:
        holders.extend(map(sys.getrefcount, others))
        others.append({"id": f"msg_{response[5:]}i1", "role": "user", "content": "large"})
        named = {"id": f"msg_{response[5:]}i0", "role": "user", "content": "x"}
        return platform.response(id=StreamId(response), input=[named, others[-1]])

    asked = [reference(f"msg_{number:032x}i0") for number in range(3)]
    assert [item["content"] for item in await resolved(asked, [], read)] == ["x"] * 3
    assert holders == [2] * 3, "the list and the call"


async def test_ids_that_are_no_text(platform: Platform) -> None:
    """A socket remembers items as its client has sent them."""
    record = platform.response(input=[{"id": {}, "role": "user", "content": "y"}])

    async def read(response: str) -> ResponseRecord:
        return record

    history: list[Item] = [{"id": [], "role": "user", "content": "x"}]
    with pytest.raises(ReferenceNotFound):
        await resolved([reference(f"msg_{record.id[5:]}i0")], history, read)


@pytest.mark.parametrize("is_saved", [False, True])
async def test_the_responses_of_all_references_are_bounded(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, *, is_saved: bool
) -> None:
    """A thousand small items may lie in a thousand responses of 64 MiB, each of which is read whole."""
    monkeypatch.setattr("stream_gw.responses.references.REFERENCED_BYTES_MAX", 6000)
    responses = [await gateway.stored(text="x" * size, answer="a") for size in (7000, 1000, 1000)]
    await save(gateway, responses, leave=is_saved)
    large, *small = map(answer_of, responses)
    assert texts(await gateway.store.resolved(ACME, [large], [])) == ["a"], "one may have any size"
    assert texts(await gateway.store.resolved(ACME, small, [])) == ["a", "a"]
    with pytest.raises(HistoryTooLong, match="exceed 6000 bytes; send the items themselves"):
        await gateway.store.resolved(ACME, [*small, large], [])
