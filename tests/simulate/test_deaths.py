"""A replica dies: its streams are found by its lease, go on elsewhere from what was said, or end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate.elastic import Elastic, Scaler
from inference.simulate.scalers import ControllerScaler, Fixed, GpuUtilisation, Oracle, Waiting
from inference.simulate.traces import TRACE_BLOCK_TOKENS, Request
from stream_fabric.limits import ATTEMPTS_MAX, LEASE_RENEW_S, LEASE_TTL_S, REAP_EVERY_S
from stream_fabric.recovery.lease_reaper import SEEN_DEAD_S
from tests.simulate.traffic import chats, slow

COLD_S = 20.0
ONE = slow()
FOUND_S = (LEASE_TTL_S - LEASE_RENEW_S + SEEN_DEAD_S, LEASE_TTL_S + SEEN_DEAD_S + REAP_EVERY_S)
"""At the earliest, and at the latest."""


def world(
    requests: Sequence[Request], replicas: int, kills_s: Sequence[float], scaler: Scaler | None = None
) -> Elastic:
    fleet = Elastic(requests, replicas, scaler or Fixed(), 0, ONE.settings, cold_start_s=COLD_S)
    for at_s in kills_s:
        fleet.kill_at(at_s)
    fleet.run()
    return fleet


def long(count: int = 1, tokens: int = 500, ids: tuple[int, ...] = ()) -> list[Request]:
    return [Request(n, n * 0.1, 1000, tokens, ids, str(n)) for n in range(count)]


def test_a_stream_goes_on_from_what_was_said_once_the_lease_is_over() -> None:
    fleet = world(long(), 2, [10.0])
    (life,), (death,) = fleet.outcome.lives, fleet.deaths
    assert (life.fate, life.attempt, death.streams) == ("done", 2, 1)
    said = life.request.output_tokens - life.left.output_tokens
    assert 200 < said < 250, "a token in 40 ms for somewhat less than 10 s"
    assert life.left.prompt_tokens == 1000 + said
    prefill_s = life.left.prompt_tokens / ONE.settings.prefill_tokens_per_s
    assert FOUND_S[0] < life.paused_s - prefill_s < FOUND_S[1] + 0.1
    made = [agent.engine.output_tokens for agent in fleet.agents]
    assert sum(made) == life.request.output_tokens, "every token once"
    assert sorted(made)[-2:] == sorted([said, life.left.output_tokens])


@pytest.mark.parametrize("at_s", [0.01, 0.3, 0.75, 3.3333, 20.0, 20.98, 21.0])
def test_no_token_is_made_twice_or_left_out_whenever_it_dies(at_s: float) -> None:
    """Before the prompt is computed, in a step, in a stretch of quiet steps, in the last step."""
    requests = long(3, ids=(7, 8))
    fleet = world(requests, 2, [at_s])
    assert [life.fate for life in fleet.outcome.lives] == ["done"] * 3
    assert sum(agent.engine.output_tokens for agent in fleet.agents) == 1500
    for life in fleet.outcome.lives:
        assert life.left.prompt_tokens + life.left.output_tokens == 1500
        assert life.left.ids in ((7, 8), (7, 8)[: 1000 // TRACE_BLOCK_TOKENS])


def test_a_stream_has_so_many_producers_and_no_more() -> None:
    kills_s = [5.0 * (n + 1) for n in range(ATTEMPTS_MAX)]
    requests = long(tokens=3000)
    (saved,) = world(requests, 5, kills_s[:-1]).outcome.lives
    (lost,) = world(requests, 5, kills_s).outcome.lives
    assert (saved.fate, saved.attempt) == ("done", ATTEMPTS_MAX)
    assert (lost.fate, lost.attempt) == ("lost", ATTEMPTS_MAX)


def test_where_nobody_else_is_a_stream_is_lost() -> None:
    fleet = world(long(), 1, [5.0])
    (life,) = fleet.outcome.lives
    assert (life.fate, life.attempt) == ("lost", 1)


def test_a_dead_replica_is_placed_on_while_its_lease_lasts_and_what_came_to_it_is_not_lost() -> None:
    requests = [Request(n, at_s, 100, 200, (), "pinned") for n, at_s in enumerate((0.0, 0.1, 1.5, 7.0))]
    fleet = world(requests, 2, [1.0])
    *before, into_the_lease, after = fleet.outcome.lives
    assert [life.fate for life in fleet.outcome.lives] == ["done"] * 4
    assert [(life.attempt, life.paused_s > 0) for life in before] == [(2, True)] * 2
    assert (into_the_lease.attempt, into_the_lease.paused_s) == (2, 0.0)
    assert FOUND_S[0] < into_the_lease.ttft_s + 0.5 < FOUND_S[1] + 0.5
    assert (after.attempt, after.ttft_s < 1) == (1, True)
    dead = next(index for index, replica in enumerate(fleet.replicas) if replica.dead)
    assert after.replica != dead and fleet._names[dead] not in fleet.pool.replicas


def test_its_process_starts_again_and_takes_requests_a_cold_start_later() -> None:
    fleet = world(chats(120, 3.0), 3, [30.0])
    ready = {sample.at_s: sample.ready for sample in fleet.samples}
    coming = {sample.at_s: sample.coming for sample in fleet.samples}
    assert (ready[29.0], ready[31.0], ready[49.0], ready[51.0]) == (3, 2, 2, 3)
    assert (coming[29.0], coming[31.0], coming[51.0]) == (0, 1, 0)
    assert fleet.gpu_s() == pytest.approx(3 * fleet.outcome.end_s), "paid for all the while"


REQUESTS = chats(400, 4.0)
SCALERS = {
    "fixed": lambda: Fixed(),
    "ours": lambda: ControllerScaler(ScalePolicy(replicas_max=20, cold_start_s=COLD_S, low_s=60.0)),
    "hpa": lambda: GpuUtilisation(1, 20),
    "waiting": lambda: Waiting(1, 20),
    "oracle": lambda: Oracle(REQUESTS, ONE.settings, 0.5, COLD_S),
}


@pytest.mark.parametrize("name", SCALERS)
def test_whoever_scales_every_request_ends_once_and_tokens_add_up(name: str) -> None:
    fleet = world(REQUESTS, 8, [50.0, 90.0, 90.0, 200.0, 210.0], SCALERS[name]())
    assert len(fleet.deaths) == 5
    lives = fleet.outcome.lives
    assert {life.fate for life in lives} <= {"done", "lost", "expired", "refused"}
    assert sum(life.fate == "done" and life.attempt > 1 for life in lives) > 5
    made = sum(agent.engine.output_tokens for agent in fleet.agents)
    said = sum(life.request.output_tokens - (0 if life.fate == "done" else life.left.output_tokens) for life in lives)
    assert made == said
    for life in lives:
        gone_s = fleet.replicas[life.replica].gone_s
        assert life.fate != "done" or gone_s < 0 or life.end_s <= gone_s
    assert not fleet.pool.at and not any(fleet.pool.flights.values())


def test_the_oracle_lets_go_of_who_has_yet_to_come_before_who_serves() -> None:
    requests = [Request(n, n * (0.2 if n < 200 else 1.0), 400, 60, (), str(n)) for n in range(400)]
    oracle = Oracle(requests, ONE.settings, 0.5, 200.0)
    fleet = Elastic(requests, oracle.needed_at(0.0), oracle, 0, ONE.settings, cold_start_s=200.0)
    fleet.kill_at(25.0)
    fleet.run()
    assert oracle.needed_at(0.0) > oracle.needed_at(300.0) == 1
    assert len(fleet.deaths) == 1
    assert min(sample.ready for sample in fleet.samples) >= 1
    assert fleet.samples[-1].ready == 1 and fleet.samples[-1].coming == 0


def test_who_waits_for_the_first_replica_of_all_waits_longer() -> None:
    requests = [Request(0, 1.0, 100, 10, (), "0"), Request(1, 2.0, 100, 10, (), "1")]

    class AskAtOnce(Fixed):
        def scale(self, fleet: Elastic) -> None:
            if not fleet.replicas:
                fleet.request_replicas(1)

    fleet = Elastic(requests, 0, AskAtOnce(), 0, ONE.settings, cold_start_s=90.0)
    fleet.run()
    assert [(life.fate, life.waited) for life in fleet.outcome.lives] == [("done", True)] * 2
    assert fleet.outcome.lives[0].ttft_s > 88
