"""The law of placement and the scripts that implement it: the same answers to the same calls."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import count

import msgspec
import pytest

from stream_fabric.pool.overload import BATCH_HOST_TERMS, NO_OVERLOAD_TERMS, OverloadTerms
from stream_fabric.pool.placement import (
    BATCH_TIER,
    FREE_TIER,
    PASSED_MAX,
    Placed,
    PlacementRequest,
    Queued,
    Refused,
    ReplicaSlot,
    choose,
)
from stream_fabric.pool.queue import admits
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, OverloadTotals, ReplicaInfo, Work
from stream_fabric.pool.state import PoolState
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.pools import RedisPools, pool_prefix, pool_slot
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id

FAR_S = 60.0
QUEUE_MAX = 12


_made = count(time.time_ns() // 1_000_000)


def new_stream() -> StreamId:
    """Ids in the order of their making, as streams have them that are made milliseconds apart."""
    return new_stream_id(next(_made), os.urandom(10))


class LawPool:
    """The law behind the calls that ``RedisPools`` has."""

    def __init__(self, queue_max: int) -> None:
        self.state = PoolState(queue_max)
        self.yield_to: int | None = None
        """Part of the last report's reply."""

    async def place(
        self,
        ask: PlacementRequest,
        candidates: Sequence[Candidate],
        instead: ReplicaId | None,
        surge: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> Placed | Queued | Refused:
        names, matched = [c.replica for c in candidates], [c.matched_tokens for c in candidates]
        return self.state.place(ask, names, matched, _now_ms(), instead, surge)

    async def report(
        self, info: ReplicaInfo, ended: Sequence[StreamId], running: dict[StreamId, str] | None
    ) -> tuple[int, int]:
        expires = _now_ms() + FAR_S * 1000
        seat = info.slot()._replace(expires_ms=expires)
        taken = self.state.report(info.replica, seat, info.models, ended, running, _now_ms(), info.region)
        self.yield_to = self.state.yield_to(_now_ms(), info.replica)
        return len(taken), sum(map(len, self.state.queue.tiers))

    async def leave(self, stream: StreamId) -> int:
        return int(self.state.remove_queued(stream))

    async def line(self, streams: Sequence[StreamId]) -> list[int]:
        return [self.state.queue.position(stream) for stream in streams]

    async def where(self, stream: StreamId) -> str | None:
        return (self.state.at[stream] or "queue") if stream in self.state.at else None

    async def flight(self, replica: ReplicaId) -> set[StreamId]:
        return set(self.state.flights.get(replica, {}))

    async def take_calls(self, names: Sequence[str]) -> set[str]:
        calls, self.state.calls = set[str](self.state.calls), set()
        return calls

    async def read_inbox(self, replica: ReplicaId) -> list[StreamId]:
        streams, self.state.inboxes[replica] = self.state.inboxes.get(replica, []), []
        return streams


class RedisPool:
    def __init__(self, client: RedisClient, queue_max: int) -> None:
        self.client = client
        self.pools = RedisPools(client, queue_max)
        self.yield_to: int | None = None
        self.name = f"pool-{os.urandom(4).hex()}"

    async def place(
        self,
        ask: PlacementRequest,
        candidates: Sequence[Candidate],
        instead: ReplicaId | None,
        surge: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> Placed | Queued | Refused:
        wait_s = (ask.wait_until_ms - _now_ms()) / 1000
        return await self.pools.place(
            self.name, work_of(ask), candidates, wait_s=wait_s, jitter=ask.jitter, instead=instead, terms=surge
        )

    async def report(
        self, info: ReplicaInfo, ended: Sequence[StreamId], running: dict[StreamId, str] | None
    ) -> tuple[int, int]:
        info = msgspec.structs.replace(info, pool=self.name)
        ttl_s = None if running is None else FAR_S
        reply = await self.pools.report(info, ttl_s=ttl_s, ended=ended, running=running)
        self.yield_to = reply.yield_to
        return reply.pulled, reply.waiting

    async def leave(self, stream: StreamId) -> int:
        return await self.pools.remove_queued(self.name, [stream])

    async def line(self, streams: Sequence[StreamId]) -> list[int]:
        return (await self.pools.queue_positions(self.name, streams))[1]

    async def where(self, stream: StreamId) -> str | None:
        return await self.pools.holder(self.name, stream)

    async def flight(self, replica: ReplicaId) -> set[StreamId]:
        return set(await self.pools.in_flight(self.name, replica))

    async def take_calls(self, names: Sequence[str]) -> set[str]:
        """Return the replicas among ``names`` that were called since the last time."""
        slot, prefix = pool_slot(self.name), pool_prefix(self.name)
        return {name for name in names if await self.client.execute(slot, "DEL", f"{prefix}{name}:calls")}

    async def read_inbox(self, replica: ReplicaId) -> list[StreamId]:
        inbox = RedisInbox(self.client, self.name, replica)
        entries = (await inbox.read(0.001)).arrivals
        if entries:
            await inbox.read(0.001, [(e.entry, e.stream) for e in entries])
        inbox.close()
        return [e.stream for e in entries]


def _now_ms() -> float:
    return time.time() * 1000


def work_of(ask: PlacementRequest) -> Work:
    request = EngineRequest(ask.stream, "chat", ask.model, msgspec.Raw(b"{}"))
    return Work(
        request, "1.aa", ask.tenant, b"", 2.0, min(ask.tier, BATCH_TIER), ask.session, ask.prompt_tokens,
        ask.output_tokens, tried=ask.tried, free=ask.tier == FREE_TIER, regions=ask.regions, share=ask.share,
    )  # fmt: skip


def info_of(
    name: str, *, ready: bool = True, slots: int = 4, room: int = 5, prefill_ms: float = 0, decode_ms: float = 0,
    prefill_per_s: float = 8000, decode_per_s: float = 2000, models: tuple[str, ...] = ("m",), kv: int = 0,
    kv_used: float = 0.0, region: str = "", yieldable: int = 0,
) -> ReplicaInfo:  # fmt: skip
    state = "ready" if ready else "draining"
    load = EngineLoad(0, 0, slots, kv_capacity_tokens=kv, kv_used_ratio=kv_used)
    return ReplicaInfo(
        ReplicaId(name), "", "sim", models, state, load, room=room, prefill_ms=prefill_ms,
        decode_ms=decode_ms, prefill_per_s=prefill_per_s, decode_per_s=decode_per_s, region=region,
        yieldable=yieldable,
    )  # fmt: skip


def ask(
    *, tenant: str = "acme", tier: int = 1, session: str = "", prompt: int = 1000, output: int = 100,
    wait_s: float = 60, jitter: float = 0.0, model: str = "m", regions: tuple[str, ...] = (), share: int = 100,
) -> PlacementRequest:  # fmt: skip
    until = _now_ms() + wait_s * 1000
    return PlacementRequest(
        new_stream(), TenantId(tenant), tier, model, session, prompt, output, until, jitter, regions=regions,
        share=share,
    )  # fmt: skip


Pool = LawPool | RedisPool


@pytest.fixture(params=["law", "redis", "cluster"])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    if request.param == "law":
        yield LawPool(QUEUE_MAX)
        return
    client = RedisClient(request.getfixturevalue("redis_url" if request.param == "redis" else "redis_cluster_url"))
    await client.start()
    yield RedisPool(client, QUEUE_MAX)
    await client.close()


def to(*names: str, **matched: int) -> list[Candidate]:
    return [Candidate(ReplicaId(name), matched.get(name, 0)) for name in names]


async def placed(pool: Pool, asked: PlacementRequest, candidates: Sequence[Candidate]) -> tuple[str, str]:
    reply = await pool.place(asked, candidates, None)
    assert isinstance(reply, Placed), reply
    return reply.replica, reply.reason


async def test_least_time_to_the_first_token_wins(pool: Pool) -> None:
    await pool.report(info_of("a", prefill_ms=400), [], {})
    await pool.report(info_of("b", prefill_ms=100), [], {})
    assert await placed(pool, ask(), to("a", "b")) == ("b", "load")
    # A prefix that saves more than the wait costs
    assert await placed(pool, ask(prompt=8000), to("a", "b", a=7000)) == ("a", "prefix")


async def test_what_placement_adds_counts_until_the_agent_says_otherwise(pool: Pool) -> None:
    for name in ("a", "b"):
        await pool.report(info_of(name), [], {})
    took = Counter([(await placed(pool, ask(jitter=k / 10), to("a", "b")))[0] for k in range(8)])
    assert took == {"a": 4, "b": 4}


async def test_a_session_stays_until_its_replica_is_over_the_bound(pool: Pool) -> None:
    for name in ("a", "b", "c"):
        await pool.report(info_of(name, slots=100, room=125), [], {})
    first, _ = await placed(pool, ask(session="s", jitter=0.5), to("a", "b", "c"))
    for jitter in (0.1, 0.9, 0.4):
        await pool.read_inbox(ReplicaId(first))
        await pool.report(info_of(first, slots=100, room=125, prefill_ms=50), [], {})
        assert await placed(pool, ask(session="s", jitter=jitter), to("a", "b", "c")) == (first, "pin")
    await pool.report(info_of(first, slots=100, room=125, prefill_ms=60_000), [], {})
    elsewhere, reason = await placed(pool, ask(session="s"), to("a", "b", "c"))
    assert elsewhere != first and reason == "load"
    assert await placed(pool, ask(session="s"), to("a", "b", "c")) == (elsewhere, "pin")


async def test_no_prefix_leads_into_an_overloaded_replica(pool: Pool) -> None:
    await pool.report(info_of("hot", slots=100, room=125, decode_ms=50_000), [], {})
    for name in ("b", "c"):
        await pool.report(info_of(name, slots=100, room=125, decode_ms=1000), [], {})
    replica, reason = await placed(pool, ask(prompt=40_000), to("hot", "b", "c", hot=40_000))
    assert replica != "hot" and reason == "spill"


async def test_above_85_percent_hits_spill_more_the_fuller(pool: Pool) -> None:
    running = {new_stream(): "" for _ in range(95)}
    reasons = []
    for jitter in (0.0, 0.2, 0.4, 0.6, 0.99):
        await pool.report(info_of("full", slots=100, room=100, prefill_ms=200), [], running)
        await pool.report(info_of("free", slots=100, room=100, prefill_ms=50), [], {})
        reply = await pool.place(ask(prompt=8000, jitter=jitter), to("full", "free", full=8000), None)
        assert isinstance(reply, Placed)
        reasons.append(reply.replica)
        await pool.read_inbox(reply.replica)
    assert reasons == ["full", "full", "free", "free", "free"]


async def test_a_candidate_without_room_in_its_kv_cache_is_passed_over(pool: Pool) -> None:
    for name, used in (("a", 0.9), ("b", 0.2)):
        await pool.report(info_of(name, kv=10_000, kv_used=used, prefill_ms=50 * (name == "b")), [], {new_stream(): ""})
    reply = await pool.place(ask(prompt=1000, output=100), to("a", "b"), None)
    assert isinstance(reply, Placed) and (reply.replica, reply.reason) == ("b", "load")
    assert [scored.barred for scored in reply.candidates] == ["kv", ""]
    # Cached tokens need no room; and a small request fits
    assert await placed(pool, ask(prompt=1000, output=100), to("a", a=900)) == ("a", "prefix")
    assert (await placed(pool, ask(prompt=100, output=100), to("a")))[0] == "a"


async def test_what_placement_adds_takes_room_in_the_kv_cache_until_the_next_report(pool: Pool) -> None:
    """A prompt of 1,000 tokens and half of an output of 800 are pending for each: the sixth finds no room."""
    await pool.report(info_of("a", slots=64, room=64, kv=8000), [], {new_stream(): ""})
    replies = [await pool.place(ask(prompt=1000, output=800), to("a"), None) for _ in range(6)]
    assert [type(reply) for reply in replies] == [Placed] * 5 + [Queued]
    await pool.read_inbox(ReplicaId("a"))
    running = {new_stream(): ""}
    assert (await pool.report(info_of("a", slots=64, room=64, kv=8000, kv_used=0.9), [], running))[0] == 0
    assert (await pool.report(info_of("a", slots=64, room=64, kv=8000, kv_used=0.5), [], running))[0] == 1


async def test_an_idle_replica_takes_a_request_that_its_kv_cache_may_not_hold(pool: Pool) -> None:
    await pool.report(info_of("a", kv=1000), [], {})
    assert (await placed(pool, ask(prompt=5000), to("a")))[0] == "a"


async def test_no_small_request_overtakes_one_that_waits_for_the_kv_cache(pool: Pool) -> None:
    running = {new_stream(): ""}
    await pool.report(info_of("a", kv=10_000, kv_used=0.9), [], running)
    large, small, urgent = ask(prompt=3000), ask(prompt=10), ask(prompt=10, tier=0)
    for asked in (large, small):
        assert isinstance(await pool.place(asked, to("a"), None), Queued)
    assert (await placed(pool, urgent, to("a")))[0] == "a", "of a better tier"
    await pool.read_inbox(ReplicaId("a"))
    assert await pool.report(info_of("a", kv=10_000, kv_used=0.8), [urgent.stream], running) == (0, 2)
    assert await pool.report(info_of("a", kv=10_000, kv_used=0.5), [], running) == (2, 0)
    assert await pool.read_inbox(ReplicaId("a")) == [large.stream, small.stream]


async def test_a_refusal_tells_that_only_kv_caches_lack_room(pool: Pool) -> None:
    running = {new_stream(): ""}
    await pool.report(info_of("a", kv=10_000, kv_used=1.0), [], running)
    for _ in range(QUEUE_MAX):
        assert isinstance(await pool.place(ask(), to("a", "gone"), None), Queued)
    refused = await pool.place(ask(), to("a", "gone"), None)
    assert isinstance(refused, Refused) and refused.why == "full" and refused.lacks_kv
    await pool.report(info_of("b", room=0), [], running)
    refused = await pool.place(ask(), to("a", "b"), None)
    assert isinstance(refused, Refused) and not refused.lacks_kv, "one has no free slot"


async def test_asked_again_the_answer_is_the_same_and_nothing_is_handed_out_twice(pool: Pool) -> None:
    await pool.report(info_of("a", room=1), [], {})
    first, second = ask(), ask()
    assert (await placed(pool, first, to("a")))[0] == "a"
    assert isinstance(await pool.place(second, to("a"), None), Queued)
    assert (await placed(pool, first, to("a")))[0] == "a"
    again = await pool.place(second, to("a"), None)
    assert isinstance(again, Queued) and again.position == 1
    assert await pool.read_inbox(ReplicaId("a")) == [first.stream]


async def test_who_waits_goes_when_a_slot_frees_better_tiers_first_and_fair_between_tenants(pool: Pool) -> None:
    await pool.report(info_of("a", slots=1, room=1), [], {})
    running = ask()
    await placed(pool, running, to("a"))
    greedy = [ask(tenant="greedy") for _ in range(5)]
    late = [ask(tenant="modest") for _ in range(2)]
    batch, urgent = ask(tier=2), ask(tier=0)
    for waiting in (batch, *greedy, *late, urgent):
        assert isinstance(await pool.place(waiting, to("a"), None), Queued)
    assert await pool.line([urgent.stream, greedy[0].stream, late[0].stream, batch.stream]) == [1, 2, 3, 9]
    order: list[StreamId] = []
    await pool.read_inbox(ReplicaId("a"))
    ended = running.stream
    for _ in range(9):
        pulled, _ = await pool.report(info_of("a", slots=1, room=1), [ended], None)
        assert pulled == 1
        (ended,) = await pool.read_inbox(ReplicaId("a"))
        order.append(ended)
    g, m = [a.stream for a in greedy], [a.stream for a in late]
    assert order == [urgent.stream, g[0], m[0], g[1], m[1], *g[2:], batch.stream]
    assert await pool.report(info_of("a", slots=1, room=1), [ended], None) == (0, 0)


async def test_of_those_who_wait_a_replica_takes_whose_prompt_it_holds_and_none_is_passed_over_for_ever(
    pool: Pool,
) -> None:
    for name in "ab":
        await pool.report(info_of(name, slots=1, room=1), [], {})
    running = {name: ask() for name in "ab"}
    for name, asked in running.items():
        await placed(pool, asked, to(name))
    cold, here, elsewhere = ask(prompt=3000), ask(prompt=3000), ask(prompt=3000)
    for waiting, candidates in (
        (elsewhere, to("a", "b", b=3000)),
        (cold, to("a", "b")),
        (here, to("a", "b", a=2500, b=100)),
    ):
        assert isinstance(await pool.place(waiting, candidates, None), Queued)

    async def next_of(name: str, ended: StreamId) -> StreamId:
        await pool.read_inbox(ReplicaId(name))
        assert (await pool.report(info_of(name, slots=1, room=1), [ended], None))[0] == 1
        (taken,) = await pool.read_inbox(ReplicaId(name))
        return taken

    at_a = running["a"].stream
    order: list[StreamId] = []
    for _ in range(3):
        at_a = await next_of("a", at_a)
        order.append(at_a)
    # It takes the one that another holds rather than that it stands idle
    assert order == [here.stream, cold.stream, elsewhere.stream]
    # One that another replica holds is first in line, and others come that this one holds
    poor = ask(prompt=3000)
    await pool.place(poor, to("a", "b", b=3000), None)
    passed = 0
    for _ in range(PASSED_MAX + 1):
        rich = ask(tenant=f"t{passed}", prompt=3000)
        await pool.place(rich, to("a", "b", a=3000), None)
        at_a = await next_of("a", at_a)
        if at_a == poor.stream:
            break
        passed += 1
    assert passed == PASSED_MAX


async def test_a_tenant_whose_prompts_are_held_gets_little_more_than_its_share(pool: Pool) -> None:
    await pool.report(info_of("a", slots=1, room=1), [], {})
    at_a = ask()
    await placed(pool, at_a, to("a"))
    served = Counter[str]()
    waiting = {"held": [ask(tenant="held") for _ in range(5)], "cold": [ask(tenant="cold") for _ in range(5)]}
    for tenant, line in waiting.items():
        for asked in line:
            await pool.place(asked, to("a", a=1000 * (tenant == "held")), None)
    everyone = {asked.stream: asked for line in waiting.values() for asked in line}
    await pool.read_inbox(ReplicaId("a"))
    for _ in range(120):
        await pool.report(info_of("a", slots=1, room=1), [at_a.stream], None)
        (stream,) = await pool.read_inbox(ReplicaId("a"))
        at_a = everyone[stream]
        served[at_a.tenant] += 1
        again = ask(tenant=at_a.tenant)  # both have always as much to do as the line takes
        everyone[again.stream] = again
        await pool.place(again, to("a", a=1000 * (at_a.tenant == "held")), None)
    assert served["held"] - served["cold"] in range(4, 20), served


async def test_a_waiting_session_goes_back_to_its_replica(pool: Pool) -> None:
    for name in "ab":
        await pool.report(info_of(name, slots=1, room=1), [], {})
    before = ask(session="chat")
    assert await placed(pool, before, to("b")) == ("b", "load")
    other = ask()
    await placed(pool, other, to("a"))
    turn, stranger = ask(session="chat"), ask()
    for waiting in (turn, stranger):
        assert isinstance(await pool.place(waiting, to("a", "b"), None), Queued)
    await pool.read_inbox(ReplicaId("a"))
    await pool.report(info_of("a", slots=1, room=1), [other.stream], None)
    assert await pool.where(stranger.stream) == "a"
    await pool.read_inbox(ReplicaId("b"))
    await pool.report(info_of("b", slots=1, room=1), [before.stream], None)
    assert await pool.where(turn.stream) == "b"


async def test_the_queue_is_bounded_and_says_when_to_come_back(pool: Pool) -> None:
    await pool.report(info_of("a", room=1), [], {})
    await placed(pool, ask(), to("a"))
    for _ in range(QUEUE_MAX):
        assert isinstance(await pool.place(ask(), to("a"), None), Queued)
    refused = await pool.place(ask(), to("a"), None)
    assert isinstance(refused, Refused) and refused.retry_after_s >= 1


async def test_who_came_first_is_not_overtaken_when_room_comes_up(pool: Pool) -> None:
    """A replica joins: the next request's place finds room there, and the one before it in line gets it."""
    first, second = ask(), ask()
    assert isinstance(await pool.place(first, [], None), Queued)
    await pool.report(info_of("a", room=1, models=("other",)), [], {})
    await pool.report(info_of("b", room=1, ready=False), [], {})
    assert isinstance(await pool.place(second, to("b"), None), Queued)
    await pool.report(info_of("b", room=1), [], {})
    assert await pool.where(first.stream) == "b"


async def test_what_leaves_or_waits_too_long_is_not_handed_out(pool: Pool) -> None:
    gone, overdue, kept = ask(), ask(wait_s=0), ask()
    for waiting in (gone, overdue, kept):
        assert isinstance(await pool.place(waiting, [], None), Queued)
    assert await pool.leave(gone.stream) == 1
    assert await pool.leave(gone.stream) == 0
    pulled, waiting_count = await pool.report(info_of("a"), [], {})
    assert (pulled, waiting_count) == (1, 1)
    assert await pool.where(kept.stream) == "a"
    assert await pool.where(overdue.stream) == "queue"
    assert await pool.where(gone.stream) is None


async def test_a_stream_is_taken_from_a_replica_that_can_run_it_no_more(pool: Pool) -> None:
    for name in ("a", "b"):
        await pool.report(info_of(name), [], {})
    asked = ask()
    assert (await placed(pool, asked, to("a")))[0] == "a"
    moved = await pool.place(asked, to("b"), ReplicaId("a"))
    assert isinstance(moved, Placed) and moved.replica == "b"
    assert await pool.flight(ReplicaId("a")) == set()
    # The second placement finds it there
    assert (await pool.place(asked, to("a"), ReplicaId("a"))) == Placed(ReplicaId("b"), "only", ())
    # and the first one's late word that it has ended does not take it from the second
    await pool.report(info_of("a"), [asked.stream], None)
    assert await pool.where(asked.stream) == "b"


async def test_a_stream_that_a_batch_host_has_no_room_for_stays_on_its_replicas_list(pool: Pool) -> None:
    for name in ("a", "b"):
        await pool.report(info_of(name, slots=1, room=2), [], {})
    mine, other = ask(tier=2), ask(tier=2)
    assert (await placed(pool, mine, to("a")))[0] == "a"
    assert (await placed(pool, other, to("b")))[0] == "b"
    refused = await pool.place(mine, to("b"), ReplicaId("a"), BATCH_HOST_TERMS)
    assert isinstance(refused, Refused) and refused.why == "crowded"
    assert await pool.where(mine.stream) == "a" and await pool.flight(ReplicaId("a")) == {mine.stream}
    await pool.report(info_of("b", slots=1, room=2), [other.stream], None)
    moved = await pool.place(mine, to("b"), ReplicaId("a"), BATCH_HOST_TERMS)
    assert isinstance(moved, Placed) and moved.replica == "b"
    assert await pool.flight(ReplicaId("a")) == set()


async def test_who_lost_a_replica_is_first_of_its_tier_also_where_the_queue_is_full(pool: Pool) -> None:
    for name in ("a", "b"):
        await pool.report(info_of(name, room=1), [], {})
    mine, other = ask(), ask()
    assert (await placed(pool, mine, to("a")))[0] == "a"
    assert (await placed(pool, other, to("b")))[0] == "b"
    line = [ask() for _ in range(QUEUE_MAX - 1)]
    for waiting in line:
        assert isinstance(await pool.place(waiting, to("a", "b"), None), Queued)
    better = ask(tier=0)
    assert isinstance(await pool.place(better, to("b"), None), Queued)
    assert isinstance(await pool.place(ask(), to("b"), None), Refused)
    moved = await pool.place(mine, to("b"), ReplicaId("a"))
    assert isinstance(moved, Queued) and moved.position == 2
    assert await pool.line([better.stream, mine.stream, line[0].stream]) == [1, 2, 3]
    # It costs its tenant no turn: what comes from it now goes where it would have gone
    await pool.report(info_of("b", room=1), [other.stream], None)
    await pool.report(info_of("b", room=1), [better.stream], None)
    assert await pool.where(mine.stream) == "b" and await pool.line([line[0].stream]) == [1]


async def test_a_stream_waits_for_a_replica_that_has_not_lost_it_while_one_lives(pool: Pool) -> None:
    for name in "abc":
        await pool.report(info_of(name, room=1, models=("m",) if name != "c" else ("other",)), [], {})
    mine, other, behind = ask(), ask(), ask()
    assert (await placed(pool, mine, to("a")))[0] == "a"
    assert (await placed(pool, other, to("b")))[0] == "b"
    moved = await pool.place(mine._replace(tried=(ReplicaId("a"),)), to("b"), ReplicaId("a"))
    assert isinstance(moved, Queued) and moved.position == 1
    assert isinstance(await pool.place(behind, to("b"), None), Queued)
    # It has room again, and takes the next one; the other replica gets the stream
    await pool.report(info_of("a", room=1), [mine.stream], None)
    assert [await pool.where(asked.stream) for asked in (mine, behind)] == ["queue", "a"]
    await pool.report(info_of("b", room=1), [other.stream], None)
    assert await pool.where(mine.stream) == "b"
    # Without another one that serves the model, it is better than nobody
    lost = mine._replace(tried=(ReplicaId("a"), ReplicaId("b")))
    assert isinstance(await pool.place(lost, [], ReplicaId("b")), Queued)
    await pool.report(info_of("a", room=1), [behind.stream], None)
    assert await pool.where(mine.stream) == "a"


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["redis", "cluster"])
async def test_the_scripts_keep_the_law(seed: int, kind: str, request: pytest.FixtureRequest) -> None:
    """Random lives of a pool, the same calls to both: the same answers, scores and positions at every step."""
    client = RedisClient(request.getfixturevalue("redis_url" if kind == "redis" else "redis_cluster_url"))
    await client.start()
    law, real = LawPool(QUEUE_MAX), RedisPool(client, QUEUE_MAX)
    rng = random.Random(seed)
    names = [f"r{k}" for k in range(rng.choice([1, 3, 6]))]
    known: list[PlacementRequest] = []
    running: dict[str, dict[StreamId, str]] = {name: {} for name in names}
    kinds = Counter[str]()
    may_yield, yielded, called = seed % 3 == 0, False, set[str]()
    kv = 50_000 * (seed % 3 == 1)
    barred = Counter[str]()
    places = {name: rng.choice(["", "eu", "us"]) if seed % 2 else "" for name in names}
    pins: list[tuple[str, ...]] = [(), ("eu",), ("us",), ("eu", "us")] if seed % 2 else [()]
    for _ in range(400 if may_yield or kv else 150):
        match rng.choice(["place"] * 5 + ["again", "end", "end", "renew", "read", "read", "leave", "move"]):
            case "place":
                asked = ask(
                    tenant=rng.choice("xyz"), tier=rng.randrange(4), session=rng.choice(["", "", "s1", "s2"]),
                    prompt=rng.choice([1, 50, 3000, 40_000]), output=rng.choice([1, 200, 4000]),
                    wait_s=rng.choice([0, 600, 600]), jitter=rng.random(), model=rng.choice(["m", "m", "lora"]),
                    regions=rng.choice(pins), share=rng.choice([100, 100, 30, 700]),
                )  # fmt: skip
                known.append(asked)
                able = [name for name in names if admits(asked.regions, places[name])]
                some = rng.sample(able, rng.randint(0, len(able)))
                candidates = [Candidate(ReplicaId(n), rng.choice([0, 0, 512, 30_000])) for n in some]
                surge = _random_surge(rng)
                surge = surge._replace(at_once=surge.counts_as_demand and rng.random() < 0.1)
                surge = surge._replace(retried=rng.random() < 0.2)
                if may_yield and surge.counts_as_demand:
                    surge = surge._replace(batch_yields=rng.random() < 0.8)
                if rng.random() < 0.05:  # the pressure is over
                    await forget_yield(law, real)
                ours, theirs = [await pool.place(asked, candidates, None, surge) for pool in (law, real)]
                _check_same(ours, theirs)
                if not isinstance(ours, Refused):
                    barred.update(scored.barred for scored in ours.candidates)
                kinds[ours.why if isinstance(ours, Refused) else type(ours).__name__] += 1
            case "again" if known:
                asked = rng.choice(known)
                if await law.where(asked.stream) is not None:
                    _check_same(await law.place(asked, [], None), await real.place(asked, [], None))
            case "move" if known:
                asked = rng.choice(known)
                at = await law.where(asked.stream)
                if at not in (None, "queue"):
                    assert at is not None
                    running[at].pop(asked.stream, None)
                    others = to(*(n for n in names if n != at and admits(asked.regions, places[n])))
                    asked = asked._replace(
                        tried=tuple(map(ReplicaId, {at, *rng.sample(names, rng.randint(0, 2) % len(names))}))
                    )
                    terms = BATCH_HOST_TERMS if not may_yield and len(known) % 2 else NO_OVERLOAD_TERMS
                    moved = [await pool.place(asked, others, ReplicaId(at), terms) for pool in (law, real)]
                    _check_same(*moved)
            case "end":
                name = rng.choice(names)
                ended = [s for s in running[name] if rng.random() < 0.5]
                for stream in ended:
                    del running[name][stream]
                info = _random_info(rng, kv, name, places[name])
                assert await law.report(info, ended, None) == await real.report(info, ended, None)
            case "renew":
                name = rng.choice(names)
                info = _random_info(rng, kv, name, places[name])
                assert await law.report(info, [], running[name]) == await real.report(info, [], running[name])
            case "read":
                name = rng.choice(names)
                mine = await law.read_inbox(ReplicaId(name))
                assert mine == await real.read_inbox(ReplicaId(name))
                sessions = {a.stream: a.session for a in known}
                running[name] |= {s: sessions[s] for s in mine if await law.where(s) == name}
            case "leave" if known:
                stream = rng.choice(known).stream
                assert await law.leave(stream) == await real.leave(stream)
        streams = [a.stream for a in known]
        if streams:
            assert await law.line(streams) == await real.line(streams)
        for asked in known[-30:]:
            at = await law.where(asked.stream)
            assert at == await real.where(asked.stream)
            assert at in (None, "queue") or admits(asked.regions, places[str(at)]), "it never leaves its regions"
        for name in names:
            assert await law.flight(ReplicaId(name)) == await real.flight(ReplicaId(name))
        assert await real.pools.demand_totals(real.name) == law.state.demand.arrived
        assert law.yield_to == real.yield_to
        calls = await law.take_calls(names)
        assert calls == await real.take_calls(names)
        called |= calls
        state = law.state
        yielded = yielded or law.yield_to is not None
        assert await real.pools.overload_totals(real.name) == OverloadTotals(
            tuple(state.rejected),
            max(state.overflowed - state.returned, 0),
            tuple(state.demand.asked),
            state.yielded_to,
        )
    assert len(kinds) > 1 and {"shed", "elsewhere", "crowded"} & kinds.keys(), kinds
    assert barred["kv"] or not kv, barred
    assert (yielded and called) or not may_yield, (places, kinds)
    await client.close()


async def forget_yield(law: LawPool, real: RedisPool) -> None:
    """Batch work of both pools yields no more."""
    law.state.yields_until_ms = 0.0
    await real.client.execute(pool_slot(real.name), "HDEL", pool_prefix(real.name) + "stat", "yields")


def _random_surge(rng: random.Random) -> OverloadTerms:
    mark_s = rng.choice([0, 0.05, 0.5, 4])
    duty_max = rng.choice([0, 0, 1e-9, 1e9])  # far from every duty: the two clocks differ by milliseconds
    relief = rng.choice([0, 0, 0.5, 20])
    match rng.choice(["none", "none", "home", "home", "guest", "again"]):
        case "home":
            overflow_s, replicas = rng.choice([0, 0.1, 1]), rng.choice([0, 0, 9])
            return OverloadTerms(mark_s, overflow_s, replicas=replicas, duty_max=duty_max, relief=relief)
        case "again":
            return OverloadTerms(mark_s, again=True, duty_max=duty_max, relief=relief)
        case "guest":
            return OverloadTerms(rng.choice([0.5, 60]), overflow_in_max=rng.choice([0.3, 0.6, 1]), duty_max=duty_max)
        case _:
            return NO_OVERLOAD_TERMS


def _random_info(rng: random.Random, kv: int, name: str, region: str) -> ReplicaInfo:
    return info_of(
        name, ready=rng.random() < 0.85, slots=rng.choice([1, 4]), room=rng.choice([1, 3, 5]),
        prefill_ms=rng.choice([0, 10.5, 4000]), decode_ms=rng.choice([0, 33.25, 90_000]),
        prefill_per_s=rng.choice([800.5, 8000, 20_000]), decode_per_s=rng.choice([100, 2000]),
        models=rng.choice([("m",), ("m", "lora")]), kv=kv,
        kv_used=rng.random() if kv else 0, region=region,
        yieldable=rng.choice([0, 0, 1, 4]),
    )  # fmt: skip


def _check_same(ours: Placed | Queued | Refused, theirs: Placed | Queued | Refused) -> None:
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, Refused) or isinstance(theirs, Refused):
        assert isinstance(ours, Refused) and isinstance(theirs, Refused)
        assert ours._replace(backlog_s=0) == theirs._replace(backlog_s=0)
        assert theirs.backlog_s == pytest.approx(ours.backlog_s)
        return
    if isinstance(ours, Placed) and isinstance(theirs, Placed):
        assert ours[:2] == theirs[:2] and theirs.expected_ms == pytest.approx(ours.expected_ms)
    else:
        assert ours[:-1] == theirs[:-1]
    assert len(ours.candidates) == len(theirs.candidates)
    for mine, other in zip(ours.candidates, theirs.candidates, strict=True):
        assert (mine.replica, mine.matched_tokens, mine.in_flight, mine.barred) == (
            other.replica, other.matched_tokens, other.in_flight, other.barred,
        )  # fmt: skip
        assert other.score_ms == pytest.approx(mine.score_ms)
        assert other.load_ms == pytest.approx(mine.load_ms)


def test_every_candidate_is_explained() -> None:
    seat = ReplicaSlot(1e15, True, 4, 5, 0, 0.0, 0.0, 8000.0, 2000.0)
    seats = [seat, None, seat._replace(in_flight=5), seat._replace(ready=False), seat._replace(decode_ms=1e6)]
    names = [ReplicaId(f"r{k}") for k in range(5)]
    choice = choose(names, seats, [100, 0, 0, 0, 5000], ask(), "", 0.0)
    assert [c.barred for c in choice.candidates] == ["", "dead", "full", "dead", "over"]
    assert (choice.taken, choice.reason) == (0, "spill")
