"""The scaling benchmark: a fleet that changes loses nothing and pays for all it asks for, and the oracle is one."""

from __future__ import annotations

import random

import msgspec
import pytest

from bench import scaling
from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate.elastic import Elastic, Scaler, Step, stepped
from inference.simulate.scalers import ControllerScaler, Fixed, GpuUtilisation, Oracle, Waiting
from inference.simulate.traces import Request

COLD_S = 30.0
SETTINGS = msgspec.structs.replace(scaling.SETTINGS, max_num_seqs=8)


def traffic(seconds: float, per_s: float, seed: int = 0) -> tuple[Request, ...]:
    rng, at_s, out = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(per_s)) < seconds:
        out.append(Request(len(out), at_s, rng.randrange(50, 1500), rng.randrange(5, 150), (), str(len(out))))
    return tuple(out)


REQUESTS = stepped(traffic(600, 1.0), Step(4.0, 200.0, 200.0), 0)


def world(scaler: Scaler, begin: int) -> Elastic:
    fleet = Elastic(REQUESTS, begin, scaler, 0, SETTINGS, cold_start_s=COLD_S, room_ratio=1.25)
    fleet.run()
    return fleet


@pytest.fixture(scope="module")
def fleets() -> dict[str, Elastic]:
    policy = ScalePolicy(replicas_max=40, cold_start_s=COLD_S, low_s=60.0, ttft_objective_s=2.0)
    oracle = Oracle(REQUESTS, SETTINGS, 0.5, COLD_S)
    return {
        "fixed": world(Fixed(), 3),
        "oracle": world(oracle, oracle.needed_at(0)),
        "ours": world(ControllerScaler(policy), 3),
        "gpu": world(GpuUtilisation(1, 40), 3),
        "waiting": world(Waiting(1, 40), 3),
    }


def test_a_step_is_so_many_times_the_requests_and_leaves_the_rest_alone() -> None:
    plain = traffic(600, 1.0)
    inside = sum(230 <= r.at_s < 370 for r in REQUESTS) / sum(230 <= r.at_s < 370 for r in plain)
    assert 3.3 < inside < 4.7
    assert [r.at_s for r in REQUESTS if r.at_s < 200] == [r.at_s for r in plain if r.at_s < 200]
    assert [r.number for r in REQUESTS] == list(range(len(REQUESTS)))


def test_every_request_ends_once_and_a_replica_that_leaves_has_finished(fleets: dict[str, Elastic]) -> None:
    for name, fleet in fleets.items():
        fates = [life.fate for life in fleet.outcome.lives]
        assert set(fates) <= {"done", "expired", "refused"}, name
        made = sum(agent.engine.output_tokens for agent in fleet.agents)
        assert made == sum(life.request.output_tokens for life in fleet.outcome.lives if life.fate == "done"), name
        for life in fleet.outcome.lives:
            if life.fate == "done":
                replica = fleet.replicas[life.replica]
                assert replica.up_s <= life.first_s, f"{name}: a cold replica answers nothing"
                assert replica.gone_s < 0 or life.end_s <= replica.gone_s, f"{name}: and none that is gone"


def test_what_is_asked_for_is_paid_for_from_then_on(fleets: dict[str, Elastic]) -> None:
    fixed = fleets["fixed"]
    assert fixed.gpu_s() == pytest.approx(3 * fixed.outcome.end_s)
    for name, fleet in fleets.items():
        counted = sum(count for _, _, count in fleet.counts)
        assert fleet.gpu_s() == pytest.approx(counted, rel=0.02), name
        assert max(count for _, _, count in fleet.counts) <= 40


def test_the_oracle_serves_all_and_who_only_looks_at_what_waits_comes_late(fleets: dict[str, Elastic]) -> None:
    served = {name: sum(map(scaling.within_slo, fleet.outcome.lives)) / len(REQUESTS) for name, fleet in fleets.items()}
    assert served["oracle"] > 0.97
    assert served["oracle"] > served["ours"] > served["waiting"] > served["fixed"]


def test_what_three_days_have_taught_is_the_day_that_comes() -> None:
    step = Step(4.0, 200.0, 200.0)
    profile = scaling.history(traffic(600, 5.0), step)
    before, during = profile.at(scaling.TODAY_S + 100).requests, profile.at(scaling.TODAY_S + 310).requests
    assert 4 < before < 12 and during > 1.5 * 5
    assert profile.at(scaling.TODAY_S + 86_000).requests == 0
