"""Shares of tenants, tier free and regions in a pool's queue: the law and the scripts alike."""

from __future__ import annotations

from collections import Counter

import pytest

from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, OverloadTerms
from stream_fabric.pool.placement import BATCH_TIER, FREE_TIER, TIERS, Placed, PlacementRequest, Queued, Refused
from stream_fabric.stream.ids import ReplicaId, StreamId
from tests.fabric.test_placement import QUEUE_MAX, LawPool, Pool, RedisPool, ask, info_of, placed, pool, to

__all__ = ["pool"]
EU, US = ReplicaId("eu-1"), ReplicaId("us-1")


async def _next(pool: Pool, name: str, ended: StreamId) -> StreamId | None:
    """End the stream on the replica; return the one that it takes from the queue."""
    await pool.report(info_of(name, slots=1, room=1, region=name[:2]), [ended], None)
    read = await pool.read_inbox(ReplicaId(name))
    return read[0] if read else None


async def _busy(pool: Pool, *names: str) -> dict[str, StreamId]:
    """Replicas of one slot each, which is taken; by name the stream that has it."""
    running = {}
    for name in names:
        await pool.report(info_of(name, slots=1, room=1, region=name[:2]), [], {})
        first = ask()
        assert (await placed(pool, first, to(name)))[0] == name
        await pool.read_inbox(ReplicaId(name))
        running[name] = first.stream
    return running


@pytest.mark.parametrize("shares", [(100, 300), (300, 100), (50, 150)])
async def test_tenants_that_flood_a_pool_are_served_by_their_shares(pool: Pool, shares: tuple[int, int]) -> None:
    at = (await _busy(pool, "eu-1"))["eu-1"]
    weights = dict(zip(("one", "two"), shares, strict=True))
    everyone: dict[StreamId, PlacementRequest] = {}

    async def send(tenant: str) -> None:
        request = ask(tenant=tenant, share=weights[tenant])
        everyone[request.stream] = request
        assert isinstance(await pool.place(request, to("eu-1"), None), Queued)

    for _ in range(QUEUE_MAX // 2):
        for tenant in weights:
            await send(tenant)
    served = Counter[str]()
    for _ in range(160):
        found = await _next(pool, "eu-1", at)
        assert found is not None
        at = found
        served[everyone[at].tenant] += 1
        await send(everyone[at].tenant)  # both have always as much to do as the queue takes
    ratio, wanted = served["two"] / served["one"], shares[1] / shares[0]
    assert wanted * 0.9 <= ratio <= wanted * 1.1, served


async def test_a_light_tenant_does_not_wait_for_one_that_floods(pool: Pool) -> None:
    at = (await _busy(pool, "eu-1"))["eu-1"]
    for _ in range(QUEUE_MAX - 1):
        await pool.place(ask(tenant="flood", share=1000), to("eu-1"), None)
    light = ask(tenant="light", share=100)
    await pool.place(light, to("eu-1"), None)
    order = []
    while light.stream not in order:
        found = await _next(pool, "eu-1", at)
        assert found is not None
        order.append(at := found)
    assert len(order) <= 2, "one that was queued before it at most, though the other has ten times its share"


async def test_a_pinned_request_is_taken_by_its_region_only_and_blocks_no_other(pool: Pool) -> None:
    running = await _busy(pool, "eu-1", "us-1")
    pinned = [ask(regions=("eu",)) for _ in range(QUEUE_MAX // 2)]
    for request in pinned:
        assert isinstance(await pool.place(request, to("eu-1"), None), Queued)
    refused = await pool.place(ask(regions=("eu",)), to("eu-1"), None)
    assert isinstance(refused, Refused) and refused.why == "full", "pinned requests fill half of the queue at most"
    free = ask(tenant="other")
    assert isinstance(await pool.place(free, to("us-1", "eu-1"), None), Queued)
    assert await _next(pool, "us-1", running["us-1"]) == free.stream
    assert await _next(pool, "us-1", free.stream) is None, "what is left is pinned to the other region"
    assert (await placed(pool, ask(), to("us-1")))[0] == "us-1", "it waits behind no request of another region"
    assert await _next(pool, "eu-1", running["eu-1"]) == pinned[0].stream
    assert await pool.line([pinned[1].stream]) == [1]
    assert await pool.leave(pinned[1].stream) == 1
    assert await _next(pool, "eu-1", pinned[0].stream) == pinned[2].stream


async def test_pinned_requests_and_others_are_served_in_one_order(pool: Pool) -> None:
    at = (await _busy(pool, "eu-1"))["eu-1"]
    sent = [ask(tenant=f"t{n}", regions=("eu",) if n % 2 else (), prompt=1000 * (n + 1)) for n in range(6)]
    heads = [ask(tenant=request.tenant, regions=request.regions, prompt=request.prompt_tokens) for request in sent]
    for request in heads + sent:  # the second request of a tenant starts where its first ends
        await pool.place(request, to("eu-1"), None)
    order = []
    for _ in range(len(heads) + len(sent)):
        found = await _next(pool, "eu-1", at)
        assert found is not None
        order.append(at := found)
    assert order == [request.stream for request in heads + sent]


async def test_backlog_of_a_region_without_room_rejects_nobody_elsewhere(pool: Pool) -> None:
    await _busy(pool, "eu-1")
    await pool.report(info_of("us-1", region="us"), [], {})
    for _ in range(QUEUE_MAX // 2):
        assert isinstance(await pool.place(ask(regions=("eu",), prompt=90_000), to("eu-1"), None), Queued)
    marks = OverloadTerms(0.5)
    assert isinstance(await pool.place(ask(), to("us-1", "eu-1"), None, marks), Placed)
    late = await pool.place(ask(regions=("eu",)), to("eu-1"), None, marks)
    assert isinstance(late, Refused) and late.why == "shed"


async def test_a_stream_that_lost_its_replica_waits_for_one_of_its_region(pool: Pool) -> None:
    running = await _busy(pool, "eu-1", "eu-2", "us-1")
    lost = ask(regions=("eu",))
    await pool.report(info_of("eu-1", slots=1, room=1, region="eu"), [running["eu-1"]], None)
    assert (await placed(pool, lost, to("eu-1")))[0] == "eu-1"
    moved = lost._replace(tried=(EU,))
    assert isinstance(await pool.place(moved, to("eu-2"), EU), Queued)
    assert await _next(pool, "us-1", running["us-1"]) is None
    assert await _next(pool, "eu-2", running["eu-2"]) == lost.stream


async def test_tier_free_is_served_last_and_is_no_demand(pool: Pool) -> None:
    at = (await _busy(pool, "eu-1"))["eu-1"]
    sent = [ask(tier=tier) for tier in reversed(range(len(TIERS)))]
    for request in sent:
        assert isinstance(await pool.place(request, to("eu-1"), None), Queued)
    if isinstance(pool, RedisPool):
        assert (await pool.pools.demand_totals(pool.name)).requests == len(TIERS), "the first, and all but the free one"
        assert (await pool.pools.overload_totals(pool.name)).asked[FREE_TIER] == 1
    else:
        assert isinstance(pool, LawPool)
        assert pool.state.demand.arrived[0] == len(TIERS) and pool.state.demand.asked[FREE_TIER] == 1
    order = []
    for _ in sent:
        found = await _next(pool, "eu-1", at)
        assert found is not None
        order.append(at := found)
    assert order == [request.stream for request in reversed(sent)]


async def test_tier_free_yields_with_batch(pool: Pool) -> None:
    at = (await _busy(pool, "eu-1"))["eu-1"]
    free, batch = ask(tier=FREE_TIER), ask(tier=BATCH_TIER)
    for request in (free, batch):
        await pool.place(request, to("eu-1"), None)
    urgent = ask(tier=0)
    await pool.place(urgent, to("eu-1"), None, OverloadTerms(1e-6, batch_yields=True))
    taken = await _next(pool, "eu-1", at)
    if taken == urgent.stream:
        taken = await _next(pool, "eu-1", taken)
    assert taken is None, "neither is handed out while the pool yields"


async def test_a_request_that_may_not_wait_is_refused_and_leaves_nothing(pool: Pool) -> None:
    await _busy(pool, "eu-1")
    request = ask()
    refused = await pool.place(request, to("eu-1"), None, NO_OVERLOAD_TERMS._replace(at_once=True))
    assert isinstance(refused, Refused) and refused.why == "busy"
    assert await pool.where(request.stream) is None and await pool.line([request.stream]) == [0]
