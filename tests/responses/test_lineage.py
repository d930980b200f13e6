"""Chains of responses that a new one builds on, wherever each of them is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from stream_fabric.errors import BadRequest, TooMany
from stream_fabric.stream.ids import StreamId
from stream_gw.responses import HistoryTooLong, Item, PreviousResponseNotFound, PreviousResponseRunning
from tests.responses.conftest import ACME, GLOBEX, Gateway, Platform
from tests.responses.test_store import NEVER
from tests.support.waiting import eventually


async def chained(gateway: Gateway, count: int, previous: str | None = None) -> list[StreamId]:
    """Make a chain of responses; the n-th asks ``q<n>`` and answers ``a<n>``."""
    chain: list[StreamId] = []
    for number in range(count):
        chain.append(await gateway.stored(text=f"q{number}", answer=f"a{number}", previous_response_id=previous))
        previous = chain[-1]
    return chain


async def save(gateway: Gateway, responses: Sequence[StreamId], *, leave: bool = True) -> None:
    """Have the database alone hold these responses."""
    for response in responses:
        await gateway.store.read(ACME, response)
        assert await gateway.records.save(ACME, response)
        if leave:
            await gateway.leaves_redis(response)


def texts(items: list[Item]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


WHOLE = ["q0", "a0", "q1", "a1", "q2", "a2", "q3", "a3"]


@pytest.mark.parametrize("saved", [0, 2, 4])
async def test_a_chain_is_flattened_wherever_its_responses_are(gateway: Gateway, saved: int) -> None:
    chain = await chained(gateway, 4)
    await save(gateway, chain[:saved])
    assert texts(await gateway.store.history(ACME, chain[-1], None)) == WHOLE
    assert texts(await gateway.store.history(ACME, chain[1], None)) == WHOLE[:4]


async def test_a_chain_continues_in_redis_below_the_database(gateway: Gateway) -> None:
    """A child was written while its parent's write failed."""
    chain = await chained(gateway, 4)
    await save(gateway, [chain[2], chain[3]])
    await save(gateway, [chain[0]])
    assert texts(await gateway.store.history(ACME, chain[-1], None)) == WHOLE


async def test_a_fork_has_its_own_chain(gateway: Gateway) -> None:
    chain = await chained(gateway, 2)
    [fork] = await chained(gateway, 1, chain[0])
    assert texts(await gateway.store.history(ACME, fork, None)) == ["q0", "a0", "q0", "a0"]


@pytest.mark.parametrize("in_database", [False, True])
async def test_a_chain_over_a_deleted_response_is_not_found(gateway: Gateway, in_database: bool) -> None:
    chain = await chained(gateway, 3)
    if in_database:
        await save(gateway, chain)
    assert await gateway.store.delete(ACME, chain[1])
    with pytest.raises(PreviousResponseNotFound) as raised:
        await gateway.store.history(ACME, chain[2], None)
    error = raised.value
    assert (error.http_status, error.code, error.param) == (404, "previous_response_not_found", "previous_response_id")
    assert texts(await gateway.store.history(ACME, chain[0], None)) == WHOLE[:2]


@pytest.mark.parametrize("in_database", [False, True])
async def test_chains_of_others_look_unknown(gateway: Gateway, in_database: bool) -> None:
    mine = await gateway.stored(user="ann")
    if in_database:
        await save(gateway, [mine])
    for tenant, user in ((GLOBEX, None), (ACME, "bob")):
        with pytest.raises(PreviousResponseNotFound) as raised:
            await gateway.store.history(tenant, mine, None, user=user)
        assert raised.value.message.replace(mine, NEVER) == PreviousResponseNotFound(NEVER).message
    assert texts(await gateway.store.history(ACME, mine, None, user="ann")) == ["Hi", "Hello"]
    for unknown in (NEVER, "x", ""):
        with pytest.raises(PreviousResponseNotFound):
            await gateway.store.history(ACME, unknown, None)


async def test_a_parent_that_runs_is_refused(platform: Platform, gateway: Gateway) -> None:
    record = platform.response()
    await gateway.store.begun(ACME, record)
    await platform.create(record)
    with pytest.raises(PreviousResponseRunning):
        await gateway.store.history(ACME, record.id, None)
    await platform.end(record)
    assert texts(await gateway.store.history(ACME, record.id, None)) == ["Hi", "Hello"]


@pytest.mark.parametrize("in_database", [False, True])
async def test_chains_are_bounded_in_depth_and_bytes(
    gateway: Gateway, in_database: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = await chained(gateway, 4)
    if in_database:
        await save(gateway, chain)
    for module in ("lineage", "database"):
        monkeypatch.setattr(f"stream_gw.responses.{module}.RESPONSE_CHAIN_MAX", 3)
    with pytest.raises(HistoryTooLong, match="more than 3 others"):
        await gateway.store.history(ACME, chain[3], None)
    assert len(await gateway.store.history(ACME, chain[2], None)) == 6
    monkeypatch.setattr("stream_gw.responses.lineage.RESPONSE_HISTORY_BYTES_MAX", 700)
    with pytest.raises(HistoryTooLong, match="700 bytes"):
        await gateway.store.history(ACME, chain[2], None)
    assert len(await gateway.store.history(ACME, chain[0], None)) == 2


async def test_a_chain_that_names_itself_ends(gateway: Gateway, platform: Platform) -> None:
    """No create makes one; a row that was tampered with must not hang a request."""
    record = platform.response()
    looped = await gateway.stored(id=record.id, previous_response_id=record.id)
    for in_database in (False, True):
        if in_database:
            await save(gateway, [looped])
        with pytest.raises(HistoryTooLong):
            await gateway.store.history(ACME, looped, None)


async def test_a_chain_and_a_conversation_exclude_each_other(gateway: Gateway) -> None:
    assert await gateway.store.history(ACME, None, None) == []
    with pytest.raises(BadRequest, match="not both"):
        await gateway.store.history(ACME, NEVER, "conv_x")


async def test_a_long_chain_takes_two_queries(gateway: Gateway) -> None:
    chain = await chained(gateway, 30)
    await save(gateway, chain)
    assert gateway.rows is not None
    asked = []
    ask = gateway.rows._ask

    async def counted(tenant: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
        asked.append(work)
        return await ask(tenant, work)

    gateway.rows._ask = counted  # type: ignore[method-assign]
    assert len(await gateway.store.history(ACME, chain[-1], None)) == 60
    assert len(asked) == 2
    await eventually(lambda: not gateway.rows._running)  # type: ignore[union-attr]


async def test_what_a_response_builds_on_is_counted_while_it_is_read(gateway: Gateway) -> None:
    """In Redis and in the database, in a chain and in a conversation. A limit ends the reading."""
    first = await gateway.stored(text="x" * 5000)
    second = await gateway.stored(text="y" * 5000, previous_response_id=first)
    made = await gateway.store.conversations.create(ACME, {}, [{"role": "user", "content": "z" * 9000}])

    def stop(size: int) -> None:
        raise TooMany("no more")

    for is_saved in (False, True):
        if is_saved:
            await save(gateway, [first, second])
        for ids in ((second, None), (None, made.id)):
            sizes: list[int] = []
            history = await gateway.store.history(ACME, *ids, count=sizes.append)
            assert history.size > 9000 and 9000 < sum(sizes) < 13_000
            with pytest.raises(TooMany):
                await gateway.store.history(ACME, *ids, count=stop)
