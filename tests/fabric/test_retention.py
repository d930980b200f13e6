"""Retention of a stream's plan: on the fake in memory and on Redis, with the fixture of the log's contract."""

from __future__ import annotations

import msgspec
import pytest

from stream_fabric.limits import RETENTION_S, ZERO_RETENTION_S
from stream_fabric.stream.cursor import BEGINNING
from stream_fabric.stream.ids import StreamId, TenantId
from stream_fabric.stream.log import CreateCode
from tests.fabric.test_log_contract import (
    ACME,
    EPOCH,
    FACTS,
    LOST,
    PARTITIONS,
    R1,
    Fabric,
    batch,
    ending,
)
from tests.support.waiting import eventually


async def kept(fabric: Fabric, retention_s: int | None, *watchers: str) -> StreamId:
    """A stream with frames, an input and these watchers."""
    stream = fabric.stream()
    first, *others = (fabric.name(name) for name in watchers) if watchers else (None,)
    code = await fabric.log.create(stream, EPOCH, ACME, FACTS, first, retention_s=retention_s)
    assert code is CreateCode.CREATED
    for other in others:
        await fabric.watch(stream, gateway=other)
    await fabric.append(batch(stream, 1, 2, structure=b"1 x\n"))
    await fabric.log.input(stream, ACME, "a", msgspec.Raw(b'"secret"'))
    return stream


async def test_each_end_keeps_a_stream_for_its_plans_time(fabric: Fabric) -> None:
    if fabric.redis is None:
        pytest.skip("memory does not expire")
    for retention_s, seconds in ((None, RETENTION_S), (120, 120), (86_400, 86_400), (0, ZERO_RETENTION_S)):
        ended, cancelled, fenced = [await kept(fabric, retention_s) for _ in range(3)]
        for stream in (ended, cancelled, fenced):
            await fabric.log.put_placements([(stream, b"{}")])
        await fabric.append(ending(ended, 3))
        await fabric.log.cancel(cancelled, ACME)
        await fabric.log.fence(fenced, R1, "bb", LOST)
        await fabric.log.put_placements([(ended, b"[]")])  # its record comes after its end
        for stream in (ended, cancelled, fenced):
            ttls = await fabric.keys(stream)
            assert set(ttls) == set("mlip")
            assert all((seconds - 20) * 1000 < ttl <= seconds * 1000 for ttl in ttls.values()), (retention_s, ttls)


async def test_a_short_retention_hides_a_stream_and_no_producer_creates_it_again(fabric: Fabric) -> None:
    """A producer looks for its end longer than that: after a failover it would restore what was lost."""
    if fabric.redis is None:
        pytest.skip("memory does not expire")
    stream = await kept(fabric, 1)
    await fabric.append(ending(stream, 3))
    assert (await fabric.watch(stream)).head == 3

    async def hidden() -> bool:
        return await fabric.log.watch(stream, ACME, None, BEGINNING) is None

    await eventually(hidden, "the stream to be hidden")
    assert await fabric.log.create(stream, EPOCH, ACME, FACTS, None) is CreateCode.EXISTS
    assert (await fabric.append(ending(stream, 3)))[0].code.name == "DUPLICATE"
    ttls = await fabric.keys(stream)
    assert set(ttls) == {"m"} and 0 < ttls["m"] <= ZERO_RETENTION_S * 1000


async def test_what_was_read_is_forgotten_once_it_has_ended(fabric: Fabric) -> None:
    stream = await kept(fabric, 0, "g")
    name = fabric.name("g")
    assert not await fabric.log.forget(stream, name), "it runs"
    await fabric.append(ending(stream, 3))
    assert await fabric.log.forget(stream, name)
    assert await fabric.log.watch(stream, ACME, None, BEGINNING) is None
    assert await fabric.log.watch(stream, ACME, name, BEGINNING) is None
    assert await fabric.log.inputs(stream) == []
    if fabric.redis is not None:
        await fabric.log.put_placements([(stream, b"{}")])
        ttls = await fabric.keys(stream)
        assert set(ttls) == {"m"} and 0 < ttls["m"] <= ZERO_RETENTION_S * 1000


async def test_what_producers_and_accounts_need_stays(fabric: Fabric) -> None:
    """Without it the producer's check would create the stream again, and an overdue reservation would be free."""
    stream = await kept(fabric, 0, "g")
    await fabric.append(ending(stream, 3))
    before = await fabric.head(stream)
    assert await fabric.log.forget(stream, fabric.name("g"))
    head = await fabric.head(stream)
    assert (head.epoch, head.last, head.status) == (before.epoch, 3, "completed")
    assert (await fabric.append(ending(stream, 3)))[0].code.name == "DUPLICATE"
    assert await fabric.log.create(stream, EPOCH, ACME, FACTS, None) is CreateCode.EXISTS
    assert (await fabric.log.cancel(stream, ACME)).result == "terminal"
    assert await fabric.log.watch(stream, ACME, None, BEGINNING) is None
    if fabric.redis is not None:
        status, used = await fabric.log.settled(stream)
        assert (status, used.output) == ("completed", 2)


async def test_the_last_of_its_gateways_forgets_it(fabric: Fabric) -> None:
    stream = await kept(fabric, 0, "g", "h")
    await fabric.append(ending(stream, 3))
    if fabric.counted:  # nobody hears: a publish has removed them
        assert await fabric.log.forget(stream, fabric.name("g"))
        return
    assert not await fabric.log.forget(stream, fabric.name("g"))
    assert (await fabric.watch(stream)).head == 3
    assert await fabric.log.forget(stream, fabric.name("h"))


async def test_gateways_that_listen_forget_it_together(fabric: Fabric) -> None:
    ears = [await fabric.listen(fabric.name(name)) for name in "gh"]
    stream = await kept(fabric, 0, "g", "h")
    await fabric.append(ending(stream, 3))
    assert not await fabric.log.forget(stream, fabric.name("g"))
    assert (await fabric.watch(stream)).head == 3
    assert await fabric.log.forget(stream, fabric.name("h"))
    for ear in ears:
        await ear.close()


async def test_a_gateway_that_begins_to_read_after_the_end_is_waited_for(fabric: Fabric) -> None:
    """Its reader takes page after page."""
    ear = await fabric.listen(fabric.name("g"))
    stream = await kept(fabric, 0, "g")
    await fabric.append(ending(stream, 3))
    await fabric.watch(stream, gateway=fabric.name("h"))
    assert not await fabric.log.forget(stream, fabric.name("g"))
    assert (await fabric.watch(stream, gateway=fabric.name("h"))).head == 3
    assert await fabric.log.forget(stream, fabric.name("h"))
    await ear.close()


@pytest.mark.parametrize("retention_s", [None, 0, 900])
async def test_a_tenant_deletes_its_own_ended_streams(fabric: Fabric, retention_s: int | None) -> None:
    stream = await kept(fabric, retention_s, "g")
    assert not await fabric.log.delete(stream, ACME), "it runs"
    await fabric.append(ending(stream, 3))
    assert not await fabric.log.delete(stream, TenantId("globex"))
    assert not await fabric.log.delete(fabric.stream(), ACME), "no such stream"
    assert (await fabric.watch(stream)).head == 3
    assert await fabric.log.delete(stream, ACME) and not await fabric.log.delete(stream, ACME)
    assert await fabric.log.watch(stream, ACME, None, BEGINNING) is None
    assert await fabric.log.inputs(stream) == []
    head = await fabric.head(stream)
    assert (head.last, head.status) == (3, "completed"), "its producer and the account find what they need"
    if fabric.redis is not None:
        ttls = await fabric.keys(stream)
        assert set(ttls) == {"m"} and 0 < ttls["m"] <= ZERO_RETENTION_S * 1000


@pytest.mark.parametrize("retention_s", [None, 1, 900])
async def test_other_plans_are_never_forgotten(fabric: Fabric, retention_s: int | None) -> None:
    stream = await kept(fabric, retention_s, "g")
    await fabric.append(ending(stream, 3))
    assert not await fabric.log.forget(stream, fabric.name("g"))
    assert not await fabric.log.forget(fabric.stream(), fabric.name("g")), "no such stream"
    assert (await fabric.watch(stream)).facts == FACTS
    assert PARTITIONS
