"""Backoff doubles up to its longest delay, and spreads those who try again."""

from __future__ import annotations

import pytest

from stream_fabric.process.backoff import Backoff, BackoffPolicy
from stream_fabric.process.host import HostRandom


class _Drawn(HostRandom):
    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def test_delays_double_up_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(BackoffPolicy(0.5, 3.0, jitter=0), HostRandom())
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1, 2, 3, 3]
    assert backoff.attempts == 5
    backoff.reset()
    assert backoff.next_s() == 0.5


@pytest.mark.parametrize(("jitter", "drawn", "delay_s"), [(0.5, 0.0, 2.0), (0.5, 1.0, 1.0), (1.0, 0.75, 0.5)])
def test_jitter_takes_a_random_share_off_a_delay(jitter: float, drawn: float, delay_s: float) -> None:
    assert BackoffPolicy(1.0, 2.0, jitter).delay_s(1, _Drawn(drawn)) == delay_s


def test_a_long_outage_overflows_nothing() -> None:
    assert BackoffPolicy(1.0, 30.0, 0).delay_s(1 << 40, HostRandom()) == 30


def test_impossible_policies_are_refused() -> None:
    for first_s, longest_s, jitter in ((0.0, 1.0, 0.5), (2.0, 1.0, 0.5), (1.0, 2.0, 1.5)):
        with pytest.raises(ValueError, match="jitter"):
            BackoffPolicy(first_s, longest_s, jitter)
