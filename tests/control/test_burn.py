"""How fast what may be slow is used up."""

from __future__ import annotations

import msgspec
import pytest

from inference.control.policy.burn import LONG_S, SHORT_S, Burn
from inference.control.policy.fleet_view import Observation
from inference.control.policy.pool_scaler import PoolScaler
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.pool.records import DemandTotals, EngineLoad, ReplicaInfo, TierQueue
from stream_fabric.pool.replica_load import TTFT_BUCKETS_S
from stream_fabric.stream.ids import ReplicaId
from stream_gw.cli.commands.pools import Row, as_text


def replica(**at: int) -> ReplicaInfo:
    """``at``: first tokens of the last minute by the bound of their bucket, ``le_1_5`` or ``above``."""
    counts = [0] * (len(TTFT_BUCKETS_S) + 1)
    for bound, count in at.items():
        where = bound.removeprefix("le_").replace("_", ".")
        counts[-1 if bound == "above" else TTFT_BUCKETS_S.index(float(where))] = count
    load = EngineLoad(0, 0, 10)
    return ReplicaInfo(ReplicaId("r"), "p", "sim", ("m",), "ready", load, ttft_counts=tuple(counts))


def looked(burn: Burn, infos: list[ReplicaInfo], seconds: int, now: float) -> float:
    for _ in range(seconds):
        now += 1
        burn.receive(infos, 1.0, now)
    return now


def test_it_is_the_share_that_was_slow_to_the_share_that_may_be() -> None:
    burn = Burn(1.0, 0.99)
    now = looked(burn, [replica(le_0_5=95), replica(le_0_5=95, le_30_0=10)], 300, 0.0)
    assert burn.rate(SHORT_S, now) == burn.rate(LONG_S, now) == pytest.approx(0.05 / 0.01)


def test_a_bucket_that_the_objective_divides_is_taken_as_even() -> None:
    burn = Burn(0.9, 0.9)  # between 0.75 and 1
    now = looked(burn, [replica(le_1_0=100)], 60, 0.0)
    assert burn.rate(SHORT_S, now) == pytest.approx(0.4 / 0.1)


def test_the_short_window_forgets_first() -> None:
    burn = Burn(1.0, 0.99)
    now = looked(burn, [replica(above=60)], 300, 0.0)
    assert burn.rate(SHORT_S, now) == pytest.approx(100)
    now = looked(burn, [replica(le_0_01=60)], 600, now)
    assert burn.rate(SHORT_S, now) == 0
    assert burn.rate(LONG_S, now) == pytest.approx(100 / 3)
    now = looked(burn, [replica(le_0_01=60)], 3400, now)
    assert burn.rate(LONG_S, now) == 0
    assert len(burn._slots) <= LONG_S / 10 + 1, "of an hour, however long it looks"


def test_of_a_few_nobody_can_tell() -> None:
    burn = Burn(1.0, 0.99)
    now = looked(burn, [replica(above=2)], 300, 0.0)
    assert burn.rate(SHORT_S, now) == 0
    assert Burn(1.0, 0.99).rate(LONG_S, 0.0) == 0


def test_a_look_stands_for_the_time_since_the_one_before() -> None:
    """A minute of slow ones is told at each of its looks, and is a minute all the same."""
    often, seldom = Burn(1.0, 0.5), Burn(1.0, 0.5)
    for step in range(1, 2401):
        infos = [replica(above=600)] if step <= 1200 else [replica(le_0_01=600)]
        often.receive(infos, 0.1, step / 10)
        if step % 20 == 0:
            seldom.receive(infos, 2.0, step / 10)
    assert often.rate(SHORT_S, 240.0) == pytest.approx(1.0, abs=0.02)
    assert seldom.rate(SHORT_S, 240.0) == pytest.approx(1.0, abs=0.02)


def test_it_is_a_figure_of_every_decision_and_an_operator_sees_it() -> None:
    policy = ScalePolicy(replicas_min=1, ttft_objective_s=1.0, slo_share=0.9)
    scaler, now = PoolScaler(policy), 0.0
    lines = [TierQueue(0, 0.0, 0, 0)] * 4
    for running in [5] * 150 + [10] * 50:
        now += 1
        busy = msgspec.structs.replace(replica(above=30, le_0_5=70), load=EngineLoad(running, 0, 10))
        plan, _, figures = scaler.decide(Observation([busy], lines, DemandTotals(0, 0, 0)), now)
    assert figures.burn_5m == figures.burn_1h == pytest.approx(3.0)
    assert plan.ready > 1 and plan.figures["burn_1h"] == pytest.approx(3.0)
    said = as_text("a", [Row("p", plan, [busy], 0, 0.0)], now)
    assert (
        "burn rate of the first-token objective then (1: the whole error budget): 3.0 over 5 min, 3.0 over 1 h" in said
    )
