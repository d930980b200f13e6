"""Batch requests try the batch host first: nothing else runs there, none waits there, and a reclaim loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate import study
from inference.simulate.batch_host import BatchHost, HostPlan, Reclaim, tiered
from inference.simulate.elastic import Elastic
from inference.simulate.scalers import Fixed
from inference.simulate.study import WITH_HOST, Objective, Study
from inference.simulate.traces import Request
from inference.simulate.world import RequestLife
from stream_fabric.pool.placement import BATCH_TIER
from tests.simulate.traffic import chats, slow

SLOTS = 4
ONE = slow(slots=SLOTS)


def mixed(count: int, tokens: int = 1000, every_s: float = 0.01) -> list[Request]:
    """Batch and interactive requests take turns."""
    return [Request(n, n * every_s, 100, tokens, (), str(n), tier=(BATCH_TIER, 0)[n % 2]) for n in range(count)]


def of_tier(tier: int, requests: Sequence[Request]) -> list[Request]:
    return [replace(r, number=n) for n, r in enumerate(r for r in requests if r.tier == tier)]


def fleets(requests: Sequence[Request], home: int, plan: HostPlan) -> tuple[Elastic, BatchHost]:
    pool = Elastic(requests, home, Fixed(), 0, ONE.settings, cold_start_s=20.0)
    host = BatchHost(pool, plan, 0, cold_start_s=20.0)
    pool.run()
    return pool, host


def numbers(lives: Sequence[RequestLife]) -> list[int]:
    return [life.request.number for life in lives]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_batch_requests_that_come_first_fill_the_host_and_no_other_runs_there(replicas: int) -> None:
    """All come within 0.4 s and run for 40 s: each free slot of the host is for exactly one of the first."""
    pool, host = fleets(mixed(40), 6, HostPlan(replicas))
    free = replicas * SLOTS
    hosted = [life for life in pool.outcome.lives if life.hosted]
    assert numbers(hosted) == list(range(0, 2 * free, 2))
    assert sum(engine.output_tokens for engine in host.outcome.engines) == 1000 * free
    assert sum(engine.output_tokens for engine in pool.outcome.engines) == 1000 * (40 - free)
    assert [life.fate for life in pool.outcome.lives] == ["done"] * 40
    assert not host.pool.queue.tiers[BATCH_TIER] and not host.pool.at


def test_what_runs_at_the_host_is_nobody_s_demand() -> None:
    pool, host = fleets(mixed(40), 6, HostPlan(3))
    alone, _ = fleets(of_tier(0, mixed(40)), 6, HostPlan(3))
    at_home = sum(not life.hosted for life in pool.outcome.lives)
    assert sum(host.pool.demand.arrived) == 0
    assert pool.pool.demand.arrived[0] == at_home == alone.pool.demand.arrived[0] + 20 - 3 * SLOTS


def test_without_batch_requests_a_host_changes_nothing() -> None:
    requests = chats(120, 3.0)
    plain = Elastic(requests, 4, Fixed(), 0, ONE.settings, cold_start_s=20.0)
    plain.run()
    pool, host = fleets(requests, 4, HostPlan(3))
    assert [(x.fate, x.first_s, x.end_s) for x in pool.outcome.lives] == [
        (x.fate, x.first_s, x.end_s) for x in plain.outcome.lives
    ]
    assert not any(engine.output_tokens for engine in host.outcome.engines)


def test_a_reclaim_moves_streams_to_free_slots_of_the_host_and_the_others_home() -> None:
    """Six streams at a host of two replicas: two of a dead replica's find a slot at most, the others go home."""
    pool, host = fleets(of_tier(BATCH_TIER, mixed(12)), 1, HostPlan(2, [Reclaim(10.0)]))
    lives = pool.outcome.lives
    assert [life.fate for life in lives] == ["done"] * 6 and all(life.hosted for life in lives)
    (death,) = host.deaths
    assert [life.attempt for life in lives].count(2) == death.streams == 3
    assert sum(life.went_home for life in lives) == 3 - (SLOTS - 3)
    assert len(host.replicas) == 2, "nobody brings it back"
    made = sum(engine.output_tokens for fleet in (pool, host) for engine in fleet.outcome.engines)
    assert made == 6000, "every token once"
    assert not pool.pool.at and not host.pool.at and not any(host.pool.flights.values())


@pytest.mark.parametrize("at_s", [0.005, 0.06, 3.0, 20.0, 39.0])
def test_no_token_is_made_twice_or_left_out_whenever_all_of_the_host_is_reclaimed(at_s: float) -> None:
    pool, host = fleets(mixed(20), 4, HostPlan(2, [Reclaim(at_s), Reclaim(at_s)]))
    assert [life.fate for life in pool.outcome.lives] == ["done"] * 20
    made = sum(engine.output_tokens for fleet in (pool, host) for engine in fleet.outcome.engines)
    assert made == 20_000
    assert len(host.deaths) == 2
    assert not pool.pool.at and not host.pool.at


def test_gpu_hours_of_the_host_are_its_own_and_end_with_a_reclaim() -> None:
    requests = mixed(400, tokens=20, every_s=0.5)
    plan = HostPlan(2, [Reclaim(50.0, 120.0)])
    pool, host = fleets(requests, 3, plan)
    end_s = pool.outcome.end_s
    assert pool.gpu_s() == pytest.approx(3 * end_s)
    assert host.gpu_s() == pytest.approx(end_s + 50 + (end_s - 120))
    back = host.agents[2]
    first_s = min(x.first_s for x in pool.outcome.lives if x.hosted and x.replica == 2 and x.attempt == 1)
    assert back.engine.output_tokens and first_s > 140, "it starts cold"


def test_a_study_tells_what_the_host_does_for_the_interactive_tier() -> None:
    """One home replica cannot carry both tiers; with a host for batch it carries the interactive one."""
    requests = tiered(chats(200, 3.0), 0.6, 0)
    policy = ScalePolicy(replicas_max=1, cold_start_s=20.0)
    asked = Study(
        requests, replace(slow(slots=16), gpu_hour=2.5), policy, Objective(2.0, 1e-3, 0.1),
        host=HostPlan(3, [Reclaim(100.0)], gpu_hour=1.0),
    )  # fmt: skip
    without, have = study.run(replace(asked, host=None), "fixed:1"), study.run(asked, "fixed:1")
    assert (without.policy, have.policy) == ("fixed:1", "fixed:1" + WITH_HOST)
    assert without.hosted == without.host_gpu_h == without.host_dollars == without.reclaims == 0
    assert have.batch == without.batch == sum(request.tier == BATCH_TIER for request in requests) > have.hosted > 0
    assert have.slo_interactive > without.slo_interactive + 0.1
    assert have.batch_done > without.batch_done
    assert have.reclaims == 1
    assert have.gpu_h == pytest.approx(2 * have.end_s / 3600), "the home pool's alone"
    assert have.host_gpu_h == pytest.approx(2 * (2 * have.end_s + 100) / 3600)
    assert have.host_dollars == pytest.approx(have.host_gpu_h)
    assert have.dollars == pytest.approx(2.5 * have.gpu_h)


def test_the_oracle_sizes_the_home_pool_without_the_work_of_the_host() -> None:
    """With all of the host the home pool has the replicas that the interactive requests alone need."""
    requests = tiered(chats(600, 6.0), 0.6, 0)
    asked = Study(requests, slow(slots=16), ScalePolicy(cold_start_s=20.0), Objective(2.0, 1e-3, 0.1))
    alone = study.run(replace(asked, requests=of_tier(0, requests)), "oracle")
    without, have = study.run(asked, "oracle"), study.run(replace(asked, host=HostPlan(8)), "oracle")
    assert have.replicas_most == alone.replicas_most < without.replicas_most
    assert have.hosted == have.batch == have.batch_done
    gone = HostPlan(8, [Reclaim(0.0)] * 8)
    assert study.run(replace(asked, host=gone), "oracle").replicas_most == without.replicas_most
    back = HostPlan(2, [Reclaim(10.0, 40.0)])
    assert [back.replicas_at(at_s, 20.0) for at_s in (9.9, 10.0, 59.9, 60.0)] == [2, 1, 1, 2]
