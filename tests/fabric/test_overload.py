"""Overload of a pool: the law, and that it holds under concurrent requests."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.pool.overload import (
    BATCH_AHEAD_MS,
    DUTY_MS,
    RETRIES_MS,
    RETRY_S_MAX,
    SPAN,
    UNDER_SHARE,
    YIELD_MS,
    OverloadMarks,
    OverloadTerms,
    is_rejected,
    overflow_in_backlog_s,
    rejection_draw,
    relief,
    retry_after_s,
)
from stream_fabric.pool.placement import TIERS, Placed, PlacementRequest, Queued, Refused, ReplicaSlot
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.pool.state import PoolState
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools, pool_prefix, pool_slot
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, new_stream_id

BATCH = TIERS.index("batch")
SEAT = ReplicaSlot(1e15, True, 4, 5, 0, 0.0, 0.0, 1000.0, 100.0)
HALF = 0.5 + 0.5 / 1024
"""A jitter whose second draw is also one half."""
seconds = st.floats(0, 1000)
marks = st.floats(0.01, 100)
draws = st.floats(0, 1, exclude_max=True)


def asked(
    *, tier: int = 1, tenant: str = "acme", session: str = "", prompt: int = 100, output: int = 90, jitter: float = HALF
) -> PlacementRequest:
    stream = new_stream_id(1_700_000_000_000, os.urandom(10))
    return PlacementRequest(stream, TenantId(tenant), tier, "m", session, prompt, output, 1e15, jitter)


def pool(replicas: int = 1, **seat: float) -> tuple[PoolState, list[ReplicaId]]:
    state, names = PoolState(10_000), [ReplicaId(f"r{k}") for k in range(replicas)]
    for name in names:
        state.report(name, SEAT._replace(**seat), ("m",), (), {}, 0)
    return state, names


def place(
    state: PoolState, names: list[ReplicaId], ask: PlacementRequest, surge: OverloadTerms, held: int = 0
) -> Placed | Queued | Refused:
    return state.place(ask, names, [held] * len(names), 0, None, surge)


# --- the law -------------------------------------------------------------------------------------------------


def share_rejected(backlog_s: float, mark_s: float) -> float:
    """Share of a tier's requests that is rejected: none at the mark, all at ``SPAN`` times the mark."""
    return min(max((backlog_s - mark_s) / ((SPAN - 1) * mark_s), 0.0), 1.0) if mark_s else 0.0


@given(seconds, seconds, marks)
def test_the_longer_the_backlog_the_more_are_refused_from_none_at_the_mark_to_all_at_twice(
    one_s: float, other_s: float, mark_s: float
) -> None:
    low_s, high_s = sorted((one_s, other_s))
    assert 0 <= share_rejected(low_s, mark_s) <= share_rejected(high_s, mark_s) <= 1
    assert share_rejected(mark_s, mark_s) == 0 and share_rejected(SPAN * mark_s, mark_s) == 1
    assert share_rejected(high_s, 0) == 0, "a tier without a mark is never refused"


@given(seconds, marks, draws)
def test_a_request_is_refused_where_its_draw_is_under_the_share(backlog_s: float, mark_s: float, draw: float) -> None:
    share = share_rejected(backlog_s, mark_s)
    if abs(draw - share) > 1e-9:  # what rounding decides
        assert is_rejected(backlog_s, mark_s, draw) == (draw < share)


@given(seconds, st.tuples(marks, marks, marks), draws)
def test_a_tier_is_never_refused_where_a_better_one_is_and_it_is_not(
    backlog_s: float, unordered: tuple[float, float, float], draw: float
) -> None:
    batch_s, standard_s, interactive_s = sorted(unordered)
    refused = [is_rejected(backlog_s, mark_s, draw) for mark_s in (batch_s, standard_s, interactive_s)]
    assert refused == sorted(refused, reverse=True)


@given(seconds, marks, draws)
def test_who_is_refused_is_told_a_time_within_which_the_backlog_is_done(
    backlog_s: float, mark_s: float, draw: float
) -> None:
    told = retry_after_s(backlog_s, mark_s, draw)
    assert 1 <= told <= RETRY_S_MAX
    spread_s = min(backlog_s - mark_s, RETRY_S_MAX / 1.5)
    assert spread_s <= told <= max(1, math.ceil(1.5 * spread_s))


@given(draws)
def test_the_second_draw_is_another(jitter: float) -> None:
    assert 0 <= rejection_draw(jitter) < 1


def test_a_host_takes_guests_only_far_from_its_own_marks() -> None:
    home = OverloadMarks((20.0, 10.0, 0.5), 1.0, ("b",))
    assert overflow_in_backlog_s(home, None) == 0.5
    assert overflow_in_backlog_s(home, OverloadMarks((0.0, 2.0, 0.2), 4.0)) == 0.2
    assert overflow_in_backlog_s(home, OverloadMarks((0.0, 0.0, 0.0))) == 0.5


# --- a pool --------------------------------------------------------------------------------------------------


def test_an_unloaded_pool_refuses_nobody_whatever_its_marks() -> None:
    state, names = pool()
    for _ in range(4):
        assert isinstance(place(state, names, asked(tier=BATCH), OverloadTerms(0.45, 0.45)), Placed)
    assert state.rejected == [0, 0, 0, 0] and state.overflowed == 0


def test_what_waits_behind_a_tier_is_not_ahead_of_it() -> None:
    state, names = pool(in_flight=5)
    state.report(names[0], SEAT, ("m",), (), {StreamId(f"s{k}"): "" for k in range(5)}, 0)
    for _ in range(10):  # a second each
        assert isinstance(place(state, names, asked(tier=BATCH), OverloadTerms()), Queued)
    assert place(state, names, asked(tier=BATCH), OverloadTerms(5.0)) == Refused(7, "shed", 10.0)
    assert isinstance(place(state, names, asked(tier=0), OverloadTerms(5.0)), Queued), "it goes before them all"
    refused = place(state, names, asked(tier=BATCH), OverloadTerms(5.5))
    assert refused == Refused(7, "shed", 11.0)
    assert state.rejected == [0, 0, 2, 0]


def test_what_has_no_first_token_yet_counts_where_there_is_no_line() -> None:
    state, names = pool(2, prefill_ms=3000)
    assert place(state, names, asked(), OverloadTerms(1.0)) == Refused(3, "shed", 3.0)
    assert isinstance(place(state, names, asked(), OverloadTerms(3.0)), Placed)


def test_a_large_pools_line_is_shared_by_all_its_replicas() -> None:
    state, names = pool(2)
    for name in names:
        state.report(name, SEAT, ("m",), (), {StreamId(f"{name}-{k}"): "" for k in range(5)}, 0)
    for _ in range(10):
        place(state, names, asked(), OverloadTerms())
    named = place(state, names, asked(), OverloadTerms(1.0))
    of_ten = place(state, names, asked(), OverloadTerms(0.4, replicas=10))
    assert isinstance(named, Refused) and isinstance(of_ten, Refused)
    assert (named.backlog_s, of_ten.backlog_s) == (5.0, 1.0)


def test_replicas_that_come_up_in_time_shorten_the_line_and_not_what_a_replica_has_already() -> None:
    assert relief([2.0, 5.0, 10.0, 30.0], 10.0) == pytest.approx(0.8 + 0.5)
    assert relief([], 10.0) == relief([3.0], 3.0) == 0
    state, names = pool(in_flight=5)
    state.report(names[0], SEAT._replace(prefill_ms=1000), ("m",), (), {StreamId(f"s{k}"): "" for k in range(5)}, 0)
    for _ in range(10):  # a second each
        place(state, names, asked(), OverloadTerms())
    alone = place(state, names, asked(), OverloadTerms(1.0))
    with_four = place(state, names, asked(), OverloadTerms(1.0, relief=4.0))
    assert isinstance(alone, Refused) and isinstance(with_four, Refused)
    assert (alone.backlog_s, with_four.backlog_s) == (11.0, 3.0)
    assert isinstance(place(state, names, asked(), OverloadTerms(3.0, relief=4.0)), Queued)


def test_a_tenant_under_its_share_of_the_line_is_refused_later() -> None:
    state, names = pool(in_flight=5)
    state.report(names[0], SEAT, ("m",), (), {StreamId(f"s{k}"): "" for k in range(5)}, 0)
    for _ in range(10):
        place(state, names, asked(tenant="greedy"), OverloadTerms())
    surge = OverloadTerms(10 / SPAN)
    assert isinstance(place(state, names, asked(tenant="greedy"), surge), Refused)
    assert isinstance(place(state, names, asked(tenant="modest"), surge), Queued)
    for _ in range(int(10 * UNDER_SHARE)):
        place(state, names, asked(tenant="greedy"), OverloadTerms())
    assert isinstance(place(state, names, asked(tenant="modest"), surge), Refused), "later, not never"


def test_only_who_tolerates_a_miss_goes_elsewhere() -> None:
    state, names = pool(prefill_ms=1500)
    home = OverloadTerms(0.0, 1.0)
    assert isinstance(place(state, names, asked(session="s"), OverloadTerms()), Placed)  # 1.6 s ahead of the next
    assert isinstance(place(state, names, asked(session="s"), home), Placed), "its session's replica is here"
    assert isinstance(place(state, names, asked(prompt=2000), home, held=1500), Placed), "a second and a half is spared"
    elsewhere = place(state, names, asked(prompt=2000), home, held=100)
    assert isinstance(elsewhere, Refused) and elsewhere.why == "elsewhere" and elsewhere.backlog_s >= 1.6
    state.retire(names[0])
    state.report(ReplicaId("r1"), SEAT._replace(prefill_ms=1500), ("m",), (), {}, 0)
    gone = place(state, [ReplicaId("r0"), ReplicaId("r1")], asked(session="s"), home)
    assert isinstance(gone, Refused) and gone.why == "elsewhere", "what it was bound to is gone"
    assert state.overflowed == 2


def test_where_no_replica_takes_requests_they_may_go_elsewhere_and_are_not_refused() -> None:
    state, names = pool(ready=False)
    assert isinstance(place(state, names, asked(), OverloadTerms(0.1)), Queued), "it is a waiting room"
    assert place(state, names, asked(), OverloadTerms(0.1, 1.0)) == Refused(0, "elsewhere", 0.0)


def test_a_tier_that_is_refused_first_is_not_shifted_and_the_others_are_not_refused_before() -> None:
    state, names = pool(prefill_ms=4000)
    assert place(state, names, asked(tier=BATCH), OverloadTerms(0.5, 1.0)) == Refused(5, "shed", 4.0)
    assert place(state, names, asked(tier=1), OverloadTerms(2.0, 1.0)) == Refused(0, "elsewhere", 4.0)
    assert place(state, names, asked(tier=1), OverloadTerms(2.0, again=True)) == Refused(3, "shed", 4.0)
    assert (state.overflowed, state.returned) == (1, 1)


def test_demand_is_counted_once_and_at_home() -> None:
    home, names = pool(prefill_ms=4000)
    host, others = pool()
    asks = asked()
    place(home, names, asks, OverloadTerms(0.0, 1.0))
    place(host, others, asks, OverloadTerms(0.5, overflow_in_max=0.6))
    place(home, names, asks, OverloadTerms(0.0, again=True))
    assert home.demand.arrived == (1, 100, 90) and host.demand.arrived == (0, 0, 0)


def test_a_retry_was_counted_when_it_was_refused() -> None:
    state, names = pool(prefill_ms=3000)
    retry = OverloadTerms(1.0, retried=True)

    def requests_after(ask: PlacementRequest, terms: OverloadTerms, now_ms: float) -> int:
        state.place(ask, names, [0] * len(names), now_ms, None, terms)
        return state.demand.arrived[0]

    assert requests_after(asked(), retry, 0) == 1, "nothing was refused: it was refused for another reason, or lost"
    assert requests_after(asked(), OverloadTerms(1.0), 1000) == 2
    assert requests_after(asked(), retry, 1000 + RETRIES_MS - 1) == 2 and state.rejected[1] == 3
    state.replicas[names[0]] = SEAT._replace(expires_ms=1e15)
    assert requests_after(asked(), retry, 1500 + RETRIES_MS) == 2, "it gets in, and was counted"
    assert requests_after(asked(), retry, 1001 + 2 * RETRIES_MS) == 3
    assert state.demand.asked[1] == 5, "the share of refused requests is of all"


def test_a_retry_after_a_full_queue_is_no_new_demand() -> None:
    state = PoolState(0)
    state.report(ReplicaId("r0"), SEAT._replace(room=0), ("m",), (), {}, 0)
    for terms in (OverloadTerms(), OverloadTerms(retried=True)):
        assert isinstance(place(state, [ReplicaId("r0")], asked(), terms), Refused)
    assert state.demand.arrived[0] == 1


def test_a_guest_is_taken_at_once_or_not_at_all() -> None:
    host, names = pool(slots=10, room=12)
    guest = OverloadTerms(0.5, overflow_in_max=0.6)
    answers = [place(host, names, asked(prompt=1), guest) for _ in range(7)]
    assert all(isinstance(answer, Placed) for answer in answers[:6])
    assert answers[6] == Refused(0, "crowded", 0.6)
    busy, names = pool(prefill_ms=600)
    assert isinstance(place(busy, names, asked(), guest), Refused), "its own are behind already"
    assert not any(host.queue.tiers) and not any(busy.queue.tiers)


def test_under_a_steady_overload_what_is_refused_settles_and_does_not_swing() -> None:
    """Ten seconds' worth of twice what the pool can do, over and over: about half is refused in each of them."""
    rng = random.Random(7)
    state, (name,) = pool()
    ahead_ms, shares = 0.0, []
    for _ in range(30):
        refused = 0
        for _ in range(200):  # of 100 ms each, in ten seconds
            ahead_ms = max(ahead_ms - 50, 0.0)
            state.inboxes[name].clear()
            state.report(name, SEAT._replace(prefill_ms=ahead_ms, room=10_000, slots=10_000), ("m",), (), {}, 0)
            answer = place(state, [name], asked(tier=BATCH, output=0, jitter=rng.random()), OverloadTerms(1.0))
            refused += isinstance(answer, Refused)
            ahead_ms += 0 if isinstance(answer, Refused) else 100
        shares.append(refused / 200)
    assert all(0.4 < share < 0.6 for share in shares[1:]), shares
    assert all(abs(after - before) < 0.15 for before, after in pairwise(shares[1:])), shares


def full(decode_ms: float, replicas: int = 1, **seat: float) -> tuple[PoolState, list[ReplicaId]]:
    """Replicas that run five streams in four slots, which need ``decode_ms`` in all."""
    state, names = pool(replicas)
    for name in names:
        running = {StreamId(f"{name}-{k}"): "" for k in range(5)}
        state.report(name, SEAT._replace(decode_ms=decode_ms, **seat), ("m",), (), running, 0)
    return state, names


def test_who_would_wait_for_a_slot_longer_than_its_mark_is_refused_although_nobody_is_in_line() -> None:
    state, names = full(10_000)
    assert place(state, names, asked(), OverloadTerms(1.0)) == Refused(4, "shed", 4.0), "two of five have to end"
    assert isinstance(place(state, names, asked(), OverloadTerms(4.0)), Queued)
    assert place(state, names, asked(), OverloadTerms(1.0)) == Refused(5, "shed", 5.0), "and one is in line"


def test_the_first_slot_of_any_replica_ends_the_wait() -> None:
    state, names = full(10_000, replicas=3)
    running = {StreamId(f"r1-{k}"): "" for k in range(5)}
    state.report(names[1], SEAT._replace(decode_ms=500), ("m",), (), running, 0)
    assert isinstance(place(state, names, asked(), OverloadTerms(0.2)), Queued)


def test_who_waits_for_a_slot_may_go_elsewhere() -> None:
    state, names = full(10_000)
    assert place(state, names, asked(), OverloadTerms(8.0, 2.0)) == Refused(0, "elsewhere", 4.0)
    assert isinstance(place(state, names, asked(), OverloadTerms(8.0, 5.0)), Queued)


# --- prefill duty --------------------------------------------------------------------------------------------


def at(state: PoolState, names: list[ReplicaId], ask: PlacementRequest, terms: OverloadTerms, now_ms: float) -> bool:
    """Whether the request is admitted; replicas are idle again at once."""
    for name in names:
        state.inboxes.get(name, []).clear()
        state.report(name, SEAT._replace(room=10_000, slots=10_000), ("m",), (), {}, now_ms)
    answer = state.place(ask, names, [0] * len(names), now_ms, None, terms)
    return not isinstance(answer, Refused)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("prompt", [50, 400])
def test_of_a_flood_as_much_prefill_gets_in_as_the_duty_leaves_room_for(replicas: int, prompt: int) -> None:
    """Ten times what is admitted arrives, for a minute. Short prompts and long ones get the same share.

    The first ten seconds are not counted: an idle pool takes a burst.
    """
    state, names = pool(replicas)
    terms, admitted_ms = OverloadTerms(duty_max=0.5), 0.0
    every_ms = prompt / 1000 / 5 / replicas * 1000
    for number in range(int(60_000 / every_ms)):
        if at(state, names, asked(prompt=prompt), terms, number * every_ms) and number * every_ms >= 10_000:
            admitted_ms += prompt
    assert admitted_ms / 50_000 / replicas == pytest.approx(0.5, rel=0.1)


def test_a_cached_prompt_costs_no_duty_and_each_tier_has_its_own_limit() -> None:
    state, names = pool()
    for _ in range(100):
        assert isinstance(place(state, names, asked(), OverloadTerms(duty_max=0.01), held=100), Placed | Queued)
    state, names = pool(room=10_000, slots=10_000)
    tiers = [OverloadTerms(duty_max=share) for share in (0.5, 0.4)]
    while isinstance(place(state, names, asked(tier=BATCH), tiers[1]), Placed):
        pass
    refused = place(state, names, asked(tier=BATCH), tiers[1])
    assert isinstance(refused, Refused) and refused.why == "shed" and refused.retry_after_s >= 1
    assert isinstance(place(state, names, asked(tier=0), tiers[0]), Placed)


def test_a_clock_that_is_set_back_keeps_no_request_out() -> None:
    """Redis may fail over to a host whose clock is behind."""
    state, names = pool()
    terms, now_ms = OverloadTerms(duty_max=0.01, batch_yields=True), 3_600_000.0
    assert at(state, names, asked(tier=0), terms, now_ms) and not at(state, names, asked(tier=0), terms, now_ms)
    assert state.yield_to(now_ms) == 0
    assert state.yield_to(now_ms - 30_000) is None and state.yield_to(0) is None
    assert not at(state, names, asked(), terms, now_ms - 1), "a small step forgets nothing"
    assert at(state, names, asked(), terms, now_ms - 60_000)
    assert at(state, names, asked(), terms, 0)


def test_what_the_duty_refuses_goes_to_an_adjacent_pool_first() -> None:
    state, names = pool(room=10_000, slots=10_000)
    terms = OverloadTerms(0.0, 100.0, duty_max=0.1)
    answers = [place(state, names, asked(), terms) for _ in range(20)]
    assert answers[-1] == Refused(0, "elsewhere", answers[-1].backlog_s)  # type: ignore[union-attr]
    assert isinstance(place(state, names, asked(), terms._replace(overflow_s=0.0, again=True)), Refused)
    guest = OverloadTerms(100.0, overflow_in_max=0.9, duty_max=0.1)
    assert place(state, names, asked(), guest).why == "crowded"  # type: ignore[union-attr]


# --- batch work yields ---------------------------------------------------------------------------------------

YIELDING = OverloadTerms(2.0, batch_yields=True)


def full_of_batch(decode_ms: float = 60_000, **seat: float) -> tuple[PoolState, list[ReplicaId], dict[StreamId, str]]:
    """A replica whose slots are taken by batch streams that run for a long time yet."""
    state, names = pool()
    running = {StreamId(f"s{k}"): "" for k in range(5)}
    state.report(names[0], SEAT._replace(decode_ms=decode_ms, yieldable=5, **seat), ("m",), (), running, 0)
    return state, names, running


@pytest.mark.parametrize("tier", [0, 1])
def test_batch_yields_to_a_request_that_would_wait_longer_than_its_mark(tier: int) -> None:
    state, names, running = full_of_batch()
    assert state.yield_to(0) is None
    assert isinstance(place(state, names, asked(tier=tier), YIELDING), Queued)
    assert state.yield_to(0) == 1, "one request waits for a slot"
    assert state.yield_to(YIELD_MS) is None
    ended = [running.popitem()[0], running.popitem()[0]]
    assert isinstance(place(state, names, asked(tier=BATCH), OverloadTerms()), Queued)
    (pulled,) = state.report(names[0], SEAT, ("m",), ended, None, 1)
    assert state.queue.position(pulled) == 0 and len(state.queue.tiers[BATCH]) == 1, "there is room, and batch yields"
    assert state.yield_to(1) == 0
    assert len(state.report(names[0], SEAT, ("m",), (), None, YIELD_MS)) == 1


def test_batch_yields_to_no_request_that_is_served_in_time_or_is_batch_or_may_not_ask() -> None:
    state, names, _ = full_of_batch(decode_ms=4000)
    place(state, names, asked(tier=0), YIELDING)
    assert state.yield_to(0) is None, "the first slot is free within the mark"
    state, names, _ = full_of_batch()
    place(state, names, asked(tier=BATCH), YIELDING)
    place(state, names, asked(tier=0), OverloadTerms(2.0))
    place(state, names, asked(tier=0), OverloadTerms(0.0, batch_yields=True))
    assert state.yield_to(0) is None


def test_only_batch_streams_yield_so_a_request_waits_for_the_slots_of_the_others() -> None:
    state, names, _ = full_of_batch()
    assert isinstance(place(state, names, asked(tier=0), YIELDING), Queued)
    state, names = full(60_000, yieldable=2)
    assert isinstance(place(state, names, asked(tier=0), YIELDING), Queued), "two go, and one slot is free"
    state, names = full(60_000, yieldable=1)
    assert place(state, names, asked(tier=0), YIELDING) == Refused(13, "shed", 12.0), "one goes, and one has to end"
    assert state.yield_to(0) == 0, "its slot is for the next"
    state, names = full(60_000, yieldable=2)
    assert isinstance(place(state, names, asked(tier=0), OverloadTerms(2.0)), Refused), "here batch does not yield"


def test_a_request_is_placed_beside_batch_streams_that_yield_to_it() -> None:
    state, names = pool()
    running = {StreamId(f"s{k}"): "" for k in range(4)}
    seat = SEAT._replace(decode_ms=60_000, yieldable=4)
    state.report(names[0], seat, ("m",), (), running, 0)
    assert isinstance(place(state, names, asked(tier=0), YIELDING), Placed)
    assert state.yield_to(0) == 0
    state.report(names[0], seat._replace(yieldable=0), ("m",), (), running, 0)
    assert isinstance(place(state, names, asked(tier=0), YIELDING), Refused)


def test_the_replica_that_begins_the_request_soonest_is_called_to_report() -> None:
    state, names = pool(3)
    running = {StreamId(f"s{k}"): "" for k in range(5)}
    for name, decode_ms, yieldable in zip(names, (60_000, 90_000, 30_000), (1, 2, 0), strict=True):
        state.report(name, SEAT._replace(decode_ms=decode_ms, yieldable=yieldable), ("m",), (), running, 0)
        running = {StreamId(f"{stream}{name}"): "" for stream in running}
    assert isinstance(place(state, names, asked(tier=0), YIELDING), Queued)
    assert state.calls == {names[1]}, "two of its streams give it a slot"


def test_the_replica_that_gets_the_request_is_called_and_none_without_streams_that_yield() -> None:
    state, names = pool(2)
    for name, room, yieldable in zip(names, (5, 6), (5, 2), strict=True):
        running = {StreamId(f"{name}{k}"): "" for k in range(5)}
        state.report(name, SEAT._replace(decode_ms=60_000, room=room, yieldable=yieldable), ("m",), (), running, 0)
    answer = place(state, names, asked(tier=0), YIELDING)
    assert isinstance(answer, Placed) and state.calls == {answer.replica} == {names[1]}
    state, names = pool(prefill_ms=4000)
    place(state, names, asked(tier=0), YIELDING)
    assert state.yield_to(0) == 0 and not state.calls


def hot(in_time: int, late: int, wait_ms: float = 9000) -> tuple[PoolState, list[ReplicaId], list[int]]:
    """A pool in which ``late`` replicas have a long queue, and the last of these has the prompt cached."""
    state, names = pool(in_time + late)
    for name in names[in_time:]:
        state.report(name, SEAT._replace(prefill_ms=wait_ms), ("m",), (), {}, 0)
    return state, names, [0] * (in_time + late - 1) + [60_000]


def test_a_queue_at_the_replica_with_the_prompt_refuses_nobody_while_others_begin_it_in_time() -> None:
    state, names, cached = hot(2, 2)
    answer = state.place(asked(tier=0, prompt=60_000), names, cached, 0, None, YIELDING)
    assert isinstance(answer, Placed) and answer.replica in names[:2] and answer.reason == "spill"
    assert state.yield_to(0) is None, "the pool is not short"
    state, names, cached = hot(2, 2, wait_ms=2500)
    kept = asked(tier=0, prompt=60_000)._replace(jitter=0.999)  # its draw rejects it only near twice the mark
    answer = state.place(kept, names, cached, 0, None, YIELDING)
    assert isinstance(answer, Placed) and (answer.replica, answer.reason) == (names[3], "prefix")
    assert state.yield_to(0) is None


def test_a_pool_where_most_replicas_are_late_refuses_and_batch_yields() -> None:
    state, names, cached = hot(1, 2)
    assert isinstance(state.place(asked(tier=0, prompt=60_000), names, cached, 0, None, YIELDING), Refused)
    assert state.yield_to(0) == 0


def test_a_replica_with_prompts_to_compute_takes_no_batch_from_the_queue() -> None:
    state, names, _ = full_of_batch()
    for _ in range(3):
        assert isinstance(place(state, names, asked(tier=BATCH, prompt=1500), OverloadTerms()), Queued)
    assert isinstance(place(state, names, asked(tier=0), OverloadTerms()), Queued)
    busy = SEAT._replace(prefill_ms=BATCH_AHEAD_MS + 1)
    assert len(state.report(names[0], busy, ("m",), (), {}, 0)) == 1, "the interactive one"
    pulled = state.report(names[0], SEAT, ("m",), (), {}, 0)
    assert len(pulled) == 2, "1.5 s of prompts each: the second one makes it more than two"


def test_batch_yields_also_to_a_request_that_is_refused() -> None:
    state, names = pool(prefill_ms=4000)
    assert isinstance(place(state, names, asked(tier=0), YIELDING), Refused)
    assert state.yield_to(0) == 0
    assert isinstance(place(state, names, asked(tier=BATCH), OverloadTerms()), Queued), "the replica has room"
    state, names = pool()
    terms = OverloadTerms(duty_max=0.01, batch_yields=True)
    while isinstance(place(state, names, asked(tier=0), terms), Placed):
        pass
    assert state.yield_to(0) == 0, "its prompts are what the duty leaves no room for"


def test_terms_of_a_pool_that_yields_are_told_from_others() -> None:
    assert len({OverloadTerms(1.0).packed(), YIELDING.packed(), OverloadTerms(1.0, batch_yields=True).packed()}) == 3


# --- many gateways at once, on Redis -------------------------------------------------------------------------

GATEWAYS = 8


@pytest.fixture
async def gateways(redis_url: str) -> AsyncIterator[list[RedisPools]]:
    clients = [RedisClient(redis_url) for _ in range(GATEWAYS)]
    for client in clients:
        await client.start()
    yield [RedisPools(client) for client in clients]
    for client in clients:
        await client.close()


def work_of(tier: int, prompt: int, output: int) -> Work:
    stream = new_stream_id(1_700_000_000_000, os.urandom(10))
    request = EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}"))
    return Work(request, "1.aa", TenantId("acme"), b"", 2.0, tier, "", prompt, output)


async def joined(pools: RedisPools, pool: str, slots: int, room: int) -> ReplicaId:
    replica = ReplicaId(f"r-{os.urandom(4).hex()}")
    load = EngineLoad(0, 0, slots)
    info = ReplicaInfo(replica, pool, "sim", ("m",), "ready", load, room=room, prefill_per_s=1000.0, decode_per_s=100.0)
    await pools.report(info, ttl_s=3600, running={})
    return replica


async def test_of_a_burst_over_many_gateways_no_more_gets_in_than_the_marks_allow(gateways: list[RedisPools]) -> None:
    """Nobody's figure is old: the last that gets in finds less than twice its mark ahead of it, whoever asks it."""
    name, mark_s = f"pool-{os.urandom(4).hex()}", 4.0
    candidates = [Candidate(await joined(gateways[0], name, 4, 5), 0)]

    async def ask(number: int) -> Placed | Queued | Refused:
        work = work_of(BATCH, 100, 90)  # a second in line
        pools = gateways[number % GATEWAYS]
        return await pools.place(name, work, candidates, wait_s=60, jitter=random.random(), terms=OverloadTerms(mark_s))

    answers = await asyncio.gather(*(ask(number) for number in range(400)))
    shed = [answer for answer in answers if isinstance(answer, Refused)]
    queued = [answer for answer in answers if isinstance(answer, Queued)]
    assert sum(isinstance(answer, Placed) for answer in answers) == 5
    assert len(queued) <= SPAN * mark_s and {answer.why for answer in shed} == {"shed"}
    assert all(answer.backlog_s > mark_s for answer in shed)
    lines = await gateways[0].tier_queues(name)
    assert lines[BATCH].depth == len(queued)
    assert (await gateways[0].overload_totals(name)).rejected == (0, 0, len(shed), 0)
    assert (await gateways[0].demand_totals(name)).requests == 400, "who is refused is demand"


async def test_of_a_burst_over_many_gateways_no_more_prefill_gets_in_than_the_duty_allows(
    gateways: list[RedisPools],
) -> None:
    name, terms = f"pool-{os.urandom(4).hex()}", OverloadTerms(duty_max=0.5)
    candidates = [Candidate(await joined(gateways[0], name, 1000, 1000), 0) for _ in range(2)]

    async def ask(number: int) -> Placed | Queued | Refused:
        pools = gateways[number % GATEWAYS]
        work = work_of(BATCH, 100, 0)  # a tenth of a second
        return await pools.place(name, work, candidates, wait_s=60, jitter=random.random(), terms=terms)

    begun = asyncio.get_running_loop().time()
    answers = await asyncio.gather(*(ask(number) for number in range(400)))
    passed_s = asyncio.get_running_loop().time() - begun
    admitted = sum(isinstance(answer, Placed) for answer in answers)
    room_s = 0.5 * 2 * DUTY_MS / 1000
    assert room_s <= admitted * 0.1 <= room_s * (1 + passed_s * 1000 / DUTY_MS) + 0.2
    assert (await gateways[0].overload_totals(name)).rejected == (0, 0, 400 - admitted, 0)


async def test_a_pool_takes_requests_after_the_clock_of_redis_went_back(
    gateways: list[RedisPools], redis_client: RedisClient
) -> None:
    name, terms, pools = f"pool-{os.urandom(4).hex()}", OverloadTerms(duty_max=0.01, batch_yields=True), gateways[0]
    replica = await joined(pools, name, 4, 5)

    async def ask(tier: int) -> Placed | Queued | Refused:
        work = work_of(tier, 100, 0)
        return await pools.place(name, work, [Candidate(replica, 0)], wait_s=60, jitter=0.0, terms=terms)

    assert isinstance(await ask(0), Placed) and isinstance(await ask(0), Refused)
    for moment in ("paat", "yields"):
        key = f"{pool_prefix(name)}stat"
        assert await redis_client.execute(pool_slot(name), "HINCRBY", key, moment, 3_600_000) > 3_600_000
    assert isinstance(await ask(0), Placed)
    assert isinstance(
        await pools.place(name, work_of(BATCH, 1, 0), [Candidate(replica, 0)], wait_s=60, jitter=0.0), Placed
    )


async def test_of_guests_over_many_gateways_no_more_get_in_than_there_is_room_for(gateways: list[RedisPools]) -> None:
    name = f"pool-{os.urandom(4).hex()}"
    candidates = [Candidate(await joined(gateways[0], name, 20, 25), 0) for _ in range(2)]

    async def ask(number: int) -> Placed | Queued | Refused:
        pools, surge = gateways[number % GATEWAYS], OverloadTerms(0.5, overflow_in_max=0.6)
        return await pools.place(name, work_of(1, 1, 10), candidates, wait_s=0, jitter=random.random(), terms=surge)

    answers = await asyncio.gather(*(ask(number) for number in range(300)))
    assert sum(isinstance(answer, Placed) for answer in answers) == 24
    assert {answer.why for answer in answers if isinstance(answer, Refused)} == {"crowded"}
    assert (await gateways[0].demand_totals(name)).requests == 0
    assert await gateways[0].waiting(name) == []


async def test_what_is_counted_of_a_line_is_the_line_also_after_all_have_left_it(gateways: list[RedisPools]) -> None:
    name, pools = f"pool-{os.urandom(4).hex()}", gateways[0]
    candidates = [Candidate(await joined(pools, name, 1, 1), 0)]
    works = [work_of(1, 100 + number, 50) for number in range(6)]

    async def backlog_s() -> float:
        probe = await pools.place(name, work_of(1, 1, 1), candidates, wait_s=60, jitter=0.0, terms=OverloadTerms(1e-9))
        return probe.backlog_s if isinstance(probe, Refused) else 0.0

    await pools.place(name, work_of(1, 1000, 1), candidates, wait_s=60, jitter=0.0)
    for work in works:
        await pools.place(name, work, candidates, wait_s=60, jitter=0.0)
    in_line_s = sum((100 + number) / 1000 + 0.5 for number in range(6))
    assert await backlog_s() == pytest.approx(1.01 + in_line_s), "the slot is free after its one token"
    await pools.remove_queued(name, [works[2].request.stream])
    assert await backlog_s() == pytest.approx(1.01 + in_line_s - 0.602)
    await pools.remove_queued(name, [work.request.stream for work in works])
    assert await backlog_s() == pytest.approx(1.01), "what the replica has yet to begin is left"
