"""When a try's tokens came."""

from __future__ import annotations

import pytest

from inference.agent.times import EachTime, Times
from stream_fabric.events import TOKEN_TIMES_MAX


class Clock:
    def __init__(self) -> None:
        self.ns = 5_000_000_000

    def monotonic_ns(self) -> int:
        return self.ns

    def pass_ms(self, ms: int) -> None:
        self.ns += ms * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("inference.agent.times.time", clock)
    return clock


def test_of_a_sampled_try_each_tokens_time_is_told(clock: Clock) -> None:
    times = EachTime(0, 0, 0)
    for ms, tokens in ((40, 1), (5, 1), (1900, 3), (5, 1)):
        clock.pass_ms(ms)
        times.receive_tokens(tokens)
    assert times.token_us() == (40_000, 5_000, 1_900_000, 0, 0, 5_000)
    assert times.itl_max_us == 1_900_000
    assert sum(times.sketch()) == 5


def test_of_others_nothing(clock: Clock) -> None:
    times = Times(0, 0, 0)
    times.receive_tokens(1)
    assert times.token_us() == ()


def test_what_is_told_is_the_same_but_for_the_tokens(clock: Clock) -> None:
    plain, each = Times(1, 2, 3), EachTime(1, 2, 3)
    for ms in (40, 5, 7, 0, 3):
        clock.pass_ms(ms)
        for times in (plain, each):
            times.receive_tokens(1)
    assert (plain.timing(), plain.sketch(), plain.generated) == (each.timing(), each.sketch(), each.generated)


def test_of_so_many_tokens_at_most(clock: Clock) -> None:
    times = EachTime(0, 0, 0)
    for _ in range(TOKEN_TIMES_MAX // 7 + 10):
        clock.pass_ms(1)
        times.receive_tokens(7)
    assert len(times.token_us()) == TOKEN_TIMES_MAX
    assert times.generated > TOKEN_TIMES_MAX


def test_a_gap_of_hours_is_no_overflow(clock: Clock) -> None:
    times = EachTime(0, 0, 0)
    clock.pass_ms(3 * 3600 * 1000)
    times.receive_tokens(1)
    assert times.token_us() == ((1 << 32) - 1,)


def test_the_engines_own_times_go_before_our_guess(clock: Clock) -> None:
    times = Times(0, 0, 0)
    times.prefill_s = 0.9
    clock.pass_ms(1000)
    times.receive_tokens(1)
    clock.pass_ms(500)
    assert times.estimated
    times.receive_computed(0.25, 0.7)
    told = times.timing()
    assert (told.queue_us, told.prefill_us, told.decode_us) == (250_000, 700_000, 500_000)
    assert not times.estimated


def test_they_are_no_longer_than_it_took(clock: Clock) -> None:
    """Its clock is another."""
    times = Times(0, 0, 0)
    clock.pass_ms(100)
    times.receive_tokens(1)
    times.receive_computed(0.08, 0.03)
    assert (times.timing().queue_us, times.timing().prefill_us) == (80_000, 20_000)
    times.receive_computed(5.0, 5.0)
    assert (times.timing().queue_us, times.timing().prefill_us) == (100_000, 0)


def test_of_what_had_no_token_our_own_clock_tells(clock: Clock) -> None:
    times = Times(0, 0, 0)
    times.receive_computed(0.08, 0.03)
    clock.pass_ms(100)
    times.receive_end()
    assert times.estimated
    assert times.timing().prefill_us == 100_000
