"""Batch streams yield to higher tiers, wait in the queue, and go on from their last token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate.elastic import CUT_S, Elastic
from inference.simulate.engine import Engine, own_ids
from inference.simulate.scalers import Fixed, WithAdmission
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, Request
from inference.simulate.world import RequestLife
from stream_fabric.limits import LEASE_RENEW_S
from stream_fabric.pool.overload import YIELD_MS
from stream_fabric.pool.placement import BATCH_TIER
from tests.simulate.traffic import slow

ONE = slow(slots=4)


def batch(count: int, tokens: int = 1000, prompt: int = 640) -> list[Request]:
    return [Request(n, n * 1.7, prompt, tokens, (), str(n), tier=BATCH_TIER) for n in range(count)]


def chat(number: int, at_s: float) -> Request:
    return Request(number, at_s, 200, 20, (), str(number), tier=0)


def world(
    requests: Sequence[Request], replicas: int = 1, kills_s: Sequence[float] = (), *, yields: bool = True
) -> Elastic:
    policy = ScalePolicy(ttft_objective_s=2.0, batch_yields=yields)
    fleet = Elastic(requests, replicas, WithAdmission(Fixed(), policy), 0, ONE.settings, cold_start_s=20.0)
    for at_s in kills_s:
        fleet.kill_at(at_s)
    fleet.run()
    return fleet


def by_tier(fleet: Elastic) -> tuple[list[RequestLife], list[RequestLife]]:
    lives = fleet.outcome.lives
    return [x for x in lives if x.request.tier == 0], [x for x in lives if x.request.tier == BATCH_TIER]


PRESSED = [*batch(4), chat(4, 10.0), chat(5, 10.0 + LEASE_RENEW_S + 2 * CUT_S)]
"""Batch streams take all slots. The first chat makes them yield, the second one comes after the next report."""


def test_a_chat_gets_a_slot_after_a_report_and_the_batch_stream_goes_on_later() -> None:
    fleet = world(PRESSED)
    (_, second), batches = by_tier(fleet)
    assert second.fate == "done" and second.ttft_s < 1.0
    assert [life.fate for life in batches] == ["done"] * 4
    cut = [life for life in batches if life.yields]
    assert cut and all(life.attempt == 1 for life in batches), "to yield is no attempt"
    for life in cut:
        assert life.left.said + life.left.output_tokens == 1000
        assert life.left.prompt_tokens == 640 + life.left.said
        assert life.end_s - life.first_s > YIELD_MS / 1000
    made = sum(life.request.output_tokens for life in fleet.outcome.lives if life.fate == "done")
    assert sum(engine.output_tokens for engine in fleet.outcome.engines) == made, "every token once"


def test_where_batch_runs_on_the_chats_are_refused() -> None:
    chats, batches = by_tier(world(PRESSED, yields=False))
    assert all(life.fate == "refused" or life.ttft_s > 2.0 for life in chats)
    assert not any(life.yields for life in batches)


@pytest.mark.parametrize("at_s", [6.9, 7.1, 8.0, 10.0, 10.0333, 30.0, 39.9])
def test_no_token_is_made_twice_or_left_out_whenever_it_is_cut(at_s: float) -> None:
    """In a prompt, in a step, in a stretch of quiet steps, close to its end."""
    fleet = world([*batch(5), *(chat(5 + n, at_s + n * 0.01) for n in range(4))])
    lives = fleet.outcome.lives
    assert {life.fate for life in lives} <= {"done", "refused"}
    made = sum(engine.output_tokens for engine in fleet.outcome.engines)
    assert made == sum(life.request.output_tokens for life in lives if life.fate == "done")
    assert not fleet.pool.at and not any(fleet.pool.flights.values())
    assert not any(agent.running or agent.yielded for agent in fleet.agents)


@pytest.mark.parametrize("kill_s", [10.0, 10.9, 11.0, 11.01, 12.0])
def test_a_replica_that_dies_beside_a_cut_loses_no_token(kill_s: float) -> None:
    fleet = world([*batch(9), *(chat(9 + n, 10.0 + n * 0.05) for n in range(6))], 2, [kill_s])
    lives = fleet.outcome.lives
    assert {life.fate for life in lives} <= {"done", "refused"}
    made = sum(engine.output_tokens for engine in fleet.outcome.engines)
    assert made == sum(life.request.output_tokens for life in lives if life.fate == "done")
    for life in lives:
        assert life.fate == "refused" or life.left.said + life.left.output_tokens == life.request.output_tokens


def test_a_cut_stream_finds_what_it_computed_in_the_cache_of_its_replica() -> None:
    settings, now_s = ONE.settings, 0.0
    due: list[float] = []
    engine = Engine(settings, due.append)
    request = Request(3, 0.0, 1000, 500, (), "")
    assert engine.add(request, now_s)
    while engine.tokens_streamed(request, now_s) < 100:
        now_s = min(due[-1], now_s + 1.0)
        engine.wake(now_s)
    said = engine.tokens_streamed(request, now_s)
    engine.abort(request, now_s)
    assert engine.replica.idle and engine.replica.blocks.used == 0
    rest = Request(3, 0.0, 1000 + said, 500 - said, (), "", said=said)
    hits = engine.replica.prefix_hits
    assert engine.add(rest, now_s)
    engine.wake(due[-1])
    assert engine.replica.prefix_hits - hits == (1000 + said - 1) // ENGINE_BLOCK_TOKENS * ENGINE_BLOCK_TOKENS
    assert not set(own_ids(3, 20)) & set(own_ids(4, 20))


def test_the_least_output_is_cut_first_and_all_that_has_none() -> None:
    requests = [*batch(3), Request(3, 9.9, 60_000, 10, (), "long", tier=BATCH_TIER), chat(4, 10.0)]
    fleet = world(requests)
    _, batches = by_tier(fleet)
    assert batches[3].yields and not any(life.yields for life in batches[:3]), "its prompt is in the way, not the slots"
