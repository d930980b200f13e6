"""The shares of all sequences add up to the time in which the replica computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.agent.observe.gpu_time import GpuPrice, GpuTime


def test_two_sequences_share_the_time_in_which_both_are_computed() -> None:
    gpu = GpuTime(0.0)
    gpu.begin("a", 2, 1.0)
    gpu.begin("b", 2, 3.0)
    assert gpu.end("a", 2, 5.0) == 2.0 + 1.0
    assert gpu.end("b", 2, 6.0) == 1.0 + 1.0
    assert gpu.busy_s == 5.0
    assert gpu.end("b", 2, 9.0) == 0.0, "it is counted once"


def test_a_sequence_without_a_slot_costs_nothing() -> None:
    gpu = GpuTime(0.0)
    gpu.begin("a", 1, 0.0)
    gpu.begin("b", 1, 0.0)
    gpu.begin("c", 1, 0.0)
    assert gpu.end("c", 1, 3.0) == 0.0
    assert gpu.end("a", 1, 4.0) == 4.0
    assert gpu.end("b", 1, 6.0) == 2.0


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.floats(0, 5, allow_nan=False), st.floats(0.001, 9, allow_nan=False)), min_size=1, max_size=30
    ),
)
def test_the_shares_add_up_to_the_busy_time(slots: int, streams: list[tuple[float, float]]) -> None:
    gpu, at, steps = GpuTime(0.0), 0.0, []
    for number, (gap, takes) in enumerate(streams):
        at += gap
        steps += [(at, 1, number), (at + takes, 0, number)]
    shares, busy, running, before = 0.0, 0.0, 0, 0.0
    for now, begins, number in sorted(steps):
        busy += (now - before) if running else 0.0
        before, running = now, running + (1 if begins else -1)
        if begins:
            gpu.begin(number, slots, now)
        else:
            shares += gpu.end(number, slots, now)
    assert shares == pytest.approx(busy)
    assert gpu.busy_s == pytest.approx(busy)


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**8), max_size=50))
def test_costs_add_up_to_the_cost_of_the_whole_time(hour_micro: int, parts: list[int]) -> None:
    price = GpuPrice(hour_micro)
    assert sum(map(price.cost_of, parts)) == sum(parts) * hour_micro // 3_600_000_000
