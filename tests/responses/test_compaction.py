"""Compactions: the summary is sealed for its tenant, and stands for the conversation in later requests."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import BadRequest
from stream_fabric.process.host import HostRandom
from stream_fabric.stream.ids import StreamId, TenantId
from stream_gw.dialects.requests import parse_create
from stream_gw.dialects.responses.translate import chat_messages
from stream_gw.responses import HistoryTooLong, Item, compaction_of, is_window, lineage, summary_request, window_of
from stream_gw.responses.seal import SUMMARY_TITLE, Seals
from tests.responses.conftest import ACME, GLOBEX, Gateway

STREAM = StreamId("resp_" + "1" * 32)
OLD, NEW = b"the secret of yesterday", b"the secret of today"
ITEMS: list[Item] = [
    {"role": "user", "content": "What is in data.csv?"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hidden"}]},
    {"type": "function_call", "call_id": "c", "name": "read", "arguments": '{"path":"data.csv"}'},
    {"type": "function_call_output", "call_id": "c", "output": "a,b"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two columns."}]},
    {
        "role": "user",
        "content": [{"type": "input_image", "image_url": "data:x"}, {"type": "input_text", "text": "And?"}],
    },
]


@given(st.text(), st.sampled_from([ACME, TenantId("ü")]))
def test_only_the_tenant_opens_what_was_sealed_for_it(text: str, tenant: TenantId) -> None:
    text = text.encode("utf-8", "replace").decode()
    seals = Seals([NEW], HostRandom())
    sealed = seals.seal(tenant, text)
    assert seals.open(tenant, sealed) == text
    assert seals.open(GLOBEX, sealed) is None
    assert seals.seal(tenant, text) != sealed, "a nonce is used once"


def test_secrets_change_without_losing_what_was_sealed() -> None:
    sealed = Seals([OLD], HostRandom()).seal(ACME, "before")
    assert Seals([NEW, OLD], HostRandom()).open(ACME, sealed) == "before"
    assert Seals([NEW], HostRandom()).open(ACME, sealed) is None


@pytest.mark.parametrize("change", [lambda s: s[:-8] + "AAAAAAA=", lambda s: s[:20], lambda s: "é" + s, lambda s: ""])
def test_what_was_changed_is_refused(change) -> None:  # type: ignore[no-untyped-def]
    seals = Seals([NEW], HostRandom())
    item = {"type": "compaction", "encrypted_content": change(seals.seal(ACME, "a text"))}
    with pytest.raises(BadRequest, match="compaction item cannot be read"):
        seals.expanded(ACME, item)


async def test_a_compaction_expands_into_a_message(gateway: Gateway) -> None:
    output = compaction_of(gateway.store.seals, ACME, STREAM, ITEMS, "They spoke of data.csv.")
    assert [item["type"] for item in output] == ["message", "message", "compaction"]
    assert "data.csv" not in msgspec.json.encode(output[2]).decode()
    response = await gateway.stored(input=[*output, {"role": "user", "content": "Go on"}])
    items = await gateway.store.history(ACME, response, None)
    assert [item.get("role") for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert items[2]["content"][0]["text"].endswith("They spoke of data.csv.")
    stored = await gateway.store.read(ACME, response)
    assert stored is not None and stored.input[2] == output[2], "it is stored sealed"
    with pytest.raises(BadRequest):
        gateway.store.expanded(GLOBEX, output)
    assert gateway.store.expanded(ACME, ITEMS) is ITEMS


def test_the_model_gets_everything_but_thoughts_and_images() -> None:
    request = parse_create(summary_request("m", "Be brief", ITEMS), "chat")
    messages = msgspec.json.decode(request.body)["messages"]
    assert [message["role"] for message in messages] == ["system", "user"]
    told = messages[1]["content"]
    for text in (
        "Be brief",
        "What is in data.csv?",
        "[call of tool read]",
        '{"path":"data.csv"}',
        "a,b",
        "[input_image]",
    ):
        assert text in told
    assert "hidden" not in told and "data:x" not in told
    assert request.max_tokens and request.model == "m"


# --- windows ----------------------------------------------------------------------------------------------------------

KEPT: list[Item] = [
    {"type": "message", "role": "developer", "content": "Be brief."},
    {"role": "user", "content": "And?"},
    {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a,b"},
]


def window_item(gateway: Gateway) -> Item:
    window = window_of(KEPT, "They met.")
    return {"type": "compaction", "encrypted_content": gateway.store.seals.seal_window(ACME, window)}


def test_the_summary_begins_the_users_message() -> None:
    messages = chat_messages(None, window_of(KEPT, "They met."))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert [part["text"] for part in messages[1]["content"]] == [SUMMARY_TITLE + "They met.", "And?"]
    for kept in ([], KEPT[:1], KEPT[2:]):
        roles = [message["role"] for message in chat_messages(None, window_of(kept, "They met."))]
        assert next(role for role in roles if role != "system") == "user"


async def test_a_window_stands_for_all_items_before_it(gateway: Gateway) -> None:
    item = window_item(gateway)
    made = gateway.store.expanded(ACME, [*ITEMS, item, ITEMS[0]])
    assert made == [*window_of(KEPT, "They met."), ITEMS[0]]
    assert is_window(item) and not any(map(is_window, ITEMS))
    summary = {"type": "compaction", "encrypted_content": gateway.store.seals.seal(ACME, "x")}
    assert not is_window(summary) and not is_window({"type": "compaction", "encrypted_content": "é"})
    with pytest.raises(BadRequest, match="cannot be read"):
        gateway.store.expanded(GLOBEX, [item])
    forged = {"type": "compaction", "encrypted_content": item["encrypted_content"][:-8] + "AAAAAAA="}
    with pytest.raises(BadRequest, match="cannot be read"):
        gateway.store.expanded(ACME, [forged])


@pytest.mark.parametrize("saved", [0, 3])
async def test_a_chain_ends_at_a_window(gateway: Gateway, saved: int) -> None:
    first = await gateway.stored(text="q0", answer="a0")
    middle = await gateway.stored(input=[*ITEMS[:1], window_item(gateway)], previous_response_id=first, answer="a1")
    last = await gateway.stored(text="q2", answer="a2", previous_response_id=middle)
    for response in (first, middle, last)[:saved]:
        await gateway.store.read(ACME, response)
        assert await gateway.records.save(ACME, response)
        await gateway.leaves_redis(response)
    items = await gateway.store.history(ACME, last, None)
    assert items[: len(KEPT)] == window_of(KEPT, "They met.")
    assert [item["content"][0]["text"] for item in items[len(KEPT) :]] == ["a1", "q2", "a2"]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(("name", "limit"), [("RESPONSE_CHAIN_MAX", 3), ("RESPONSE_HISTORY_BYTES_MAX", 20_000)])
async def test_limits_of_a_chain_count_from_its_window(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, name: str, limit: int, saved: bool
) -> None:
    chain: list[StreamId] = []
    for number in range(8):
        items: list[Item] = [{"role": "user", "content": "".join(map(str, range(1500)))}]
        more = [window_item(gateway)] if number == 5 else []
        previous = chain[-1] if chain else None
        chain.append(await gateway.stored(input=[*items, *more], previous_response_id=previous))
        if saved:
            await gateway.store.read(ACME, chain[-1])
            assert await gateway.records.save(ACME, chain[-1])
            await gateway.leaves_redis(chain[-1])
    monkeypatch.setattr(lineage, name, limit)
    assert len(await gateway.store.history(ACME, chain[7], None)) == len(KEPT) + 5
    with pytest.raises(HistoryTooLong):
        await gateway.store.history(ACME, chain[4], None)


async def test_responses_before_a_window_need_not_be_there(gateway: Gateway) -> None:
    middle = await gateway.stored(input=[window_item(gateway)], previous_response_id="resp_" + "9" * 32, answer="a1")
    items = await gateway.store.history(ACME, middle, None)
    assert items[-1]["content"][0]["text"] == "a1"
