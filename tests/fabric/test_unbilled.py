"""The contract of ``Unbilled``, on the fake in memory and on Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from stream_fabric.accounts.ports import Unbilled
from stream_fabric.redis.tenancy import unbilled as redis_unbilled
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from stream_fabric.stream.cursor import BEGINNING
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import StreamId
from tests.fabric.test_log_contract import (
    ACME,
    EPOCH,
    LOST,
    R1,
    Fabric,
    RedisFabric,
    batch,
    ending,
)
from tests.support import memory_log
from tests.support.memory_log import MemoryUnbilled
from tests.support.waiting import eventually

LATE_S = 0.2
USED = Usage(10, 4, 2, 3, 1)
Late = Callable[[], Awaitable[dict[StreamId, int]]]


def unbilled_of(fabric: Fabric) -> Unbilled:
    if isinstance(fabric, RedisFabric):
        return RedisUnbilled(fabric.log._client, fabric.partitions)
    return MemoryUnbilled(fabric.log)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (redis_unbilled, memory_log):
        monkeypatch.setattr(module, "BILL_LATE_S", LATE_S)


async def begun(fabric: Fabric, count: int) -> list[StreamId]:
    """Begin streams of one partition."""
    streams = [await fabric.create(partition=0) for _ in range(count)]
    for stream in streams:
        await fabric.append(batch(stream, 1, 3, usage=USED))
    return streams


async def test_fenced_streams_are_unbilled_until_removed(fabric: Fabric) -> None:
    unbilled = unbilled_of(fabric)
    completed, cancelled, fenced, later, withdrawn, live = streams = await begun(fabric, 6)
    unborn = await fabric.create(partition=0)
    await fabric.append(ending(completed, 4, usage=USED))
    await fabric.log.cancel(cancelled, ACME)  # its producer lives, or a list has the stream
    before_ms = time.time() * 1000
    for _ in range(2):  # its reply was lost
        assert await fabric.log.fence(fenced, R1, "bb", LOST)
    assert await fabric.log.fence(later, None, "bb", LOST)
    await fabric.log.fence(withdrawn, None, "bb", LOST, withdraws=True)
    await fabric.log.fence(unborn, None, "bb", LOST)
    names = {*streams, unborn}
    assert not names & dict(await unbilled.late(0)).keys(), "their bills are not late yet"

    async def late() -> dict[StreamId, int]:
        return {name: at for name, at in await unbilled.late(0) if name in names}

    found = await eventually(late, "late bills")
    assert found.keys() == {fenced, later}
    if fabric.redis:
        assert before_ms - 2 <= found[fenced] <= found[later] <= time.time() * 1000
    assert await late() == {}, "who reads late bills has time to write them"
    await asyncio.gather(unbilled.remove([fenced, live]), unbilled.remove([]))
    assert await eventually(late, "the other bill") == {later: found[later]}
    await unbilled.remove([later, await fabric.create(partition=1)])
    await asyncio.sleep(LATE_S)  # the claim's time
    assert await late() == {}


@pytest.mark.parametrize("by", ["its reader", "its tenant"])
@pytest.mark.parametrize("owed", [True, False])
async def test_only_the_terms_of_a_bill_that_is_owed_outlive_the_content(fabric: Fabric, by: str, owed: bool) -> None:
    terms = {"pool": "p", "session": "h", "prices": {"output": 123_456_789_012}}
    meta = {"facts": {"stream": "s", "kind": "completion", "model": "m é", "settings": "secret"}, "bill": terms}
    stream = fabric.stream()
    await fabric.log.create(stream, EPOCH, ACME, msgspec.json.encode(meta | {"user": "secret"}), None, retention_s=0)
    await fabric.append(batch(stream, 1, 3, usage=USED))
    assert await fabric.log.fence(stream, R1, "bb", LOST)
    if not owed:
        await unbilled_of(fabric).remove([stream])
    log = fabric.log
    assert await (log.forget(stream, fabric.name("g")) if by == "its reader" else log.delete(stream, ACME))
    assert await log.watch(stream, ACME, None, BEGINNING) is None
    assert await log.watch(stream, None, fabric.name("g"), BEGINNING) is None
    page = await log.watch(stream, None, None, BEGINNING)
    assert (page.tenant, page.status, page.entries, page.structure) == (ACME, "failed", (), b"")
    stays = {"facts": {"kind": "completion", "model": "m é"}, "bill": terms}
    assert page.facts == b"" if not owed else msgspec.json.decode(page.facts) == stays


async def test_deletion_takes_facts_that_are_not_ours_too(fabric: Fabric) -> None:
    for facts in (b"", b"7", b'"secret"', b'{"secret":1}', b'{"facts":7}', b"{"):
        stream = fabric.stream()
        await fabric.log.create(stream, EPOCH, ACME, facts, None, retention_s=0)
        await fabric.append(batch(stream, 1, 3, usage=USED))
        assert await fabric.log.fence(stream, R1, "bb", LOST)
        assert await fabric.log.delete(stream, ACME)
        assert (await fabric.log.watch(stream, None, None, BEGINNING)).facts == b""
