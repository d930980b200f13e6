"""Timing of one attempt."""

from __future__ import annotations

import pytest

from inference.agent.observe.attempt_timing import AttemptTiming, TokenTiming
from stream_fabric.events import TOKEN_TIMES_MAX
from tests.support.events import SetClock


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def test_of_a_sampled_try_each_tokens_time_is_told(clock: SetClock) -> None:
    times = TokenTiming(clock, 0, 0)
    for ms, tokens in ((40, 1), (5, 1), (1900, 3), (5, 1)):
        clock.at_us += ms * 1000
        times.receive_tokens(tokens)
    assert times.token_us() == (40_000, 5_000, 1_900_000, 0, 0, 5_000)
    assert times.itl_max_us == 1_900_000
    assert sum(times.sketch()) == 5


def test_of_others_nothing(clock: SetClock) -> None:
    times = AttemptTiming(clock, 0, 0)
    times.receive_tokens(1)
    assert times.token_us() == ()


def test_what_is_told_is_the_same_but_for_the_tokens(clock: SetClock) -> None:
    plain, each = AttemptTiming(clock, 1, 2), TokenTiming(clock, 1, 2)
    for ms in (40, 5, 7, 0, 3):
        clock.at_us += ms * 1000
        for times in (plain, each):
            times.receive_tokens(1)
    assert (plain.summary(), plain.sketch(), plain.generated) == (each.summary(), each.sketch(), each.generated)


def test_of_so_many_tokens_at_most(clock: SetClock) -> None:
    times = TokenTiming(clock, 0, 0)
    for _ in range(TOKEN_TIMES_MAX // 7 + 10):
        clock.at_us += 1_000
        times.receive_tokens(7)
    assert len(times.token_us()) == TOKEN_TIMES_MAX
    assert times.generated > TOKEN_TIMES_MAX


def test_a_gap_of_hours_is_no_overflow(clock: SetClock) -> None:
    times = TokenTiming(clock, 0, 0)
    clock.at_us += 3 * 3600 * 1_000_000
    times.receive_tokens(1)
    assert times.token_us() == ((1 << 32) - 1,)


def test_the_engines_own_times_go_before_our_guess(clock: SetClock) -> None:
    times = AttemptTiming(clock, 0, 0)
    times.prefill_s = 0.9
    clock.at_us += 1000_000
    times.receive_tokens(1)
    clock.at_us += 500_000
    assert times.estimated
    times.receive_computed(0.25, 0.7)
    told = times.summary()
    assert (told.queue_us, told.prefill_us, told.decode_us) == (250_000, 700_000, 500_000)
    assert not times.estimated


def test_they_are_no_longer_than_it_took(clock: SetClock) -> None:
    """Its clock is another."""
    times = AttemptTiming(clock, 0, 0)
    clock.at_us += 100_000
    times.receive_tokens(1)
    times.receive_computed(0.08, 0.03)
    assert (times.summary().queue_us, times.summary().prefill_us) == (80_000, 20_000)
    times.receive_computed(5.0, 5.0)
    assert (times.summary().queue_us, times.summary().prefill_us) == (100_000, 0)


def test_of_what_had_no_token_our_own_clock_tells(clock: SetClock) -> None:
    times = AttemptTiming(clock, 0, 0)
    times.receive_computed(0.08, 0.03)
    clock.at_us += 100_000
    times.receive_end()
    assert times.estimated
    assert times.summary().prefill_us == 100_000
