"""Timing of one attempt."""

from __future__ import annotations

import pytest

from inference.agent.observe.attempt_timing import AttemptTiming, TokenTiming
from stream_fabric.events import TOKEN_TIMES_MAX, InputTimes
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


def test_the_time_after_an_input_is_a_part_of_its_own(clock: SetClock) -> None:
    times = AttemptTiming(clock, 0, 0)
    times.prefill_s = 0.03
    clock.at_us += 40_000
    times.receive_tokens(1)
    clock.at_us += 5_000
    times.receive_tokens(1)
    came_us = clock.at_us
    clock.at_us += 7_000
    times.receive_cut()
    told = times.receive_input(came_us, "applied")
    assert (told.waited_us, told.answered_us) == (7_000, 0)
    times.receive_input(0, "refused", "no_text")
    clock.at_us += 60_000
    assert times.summary().steer_us == 60_000, "it grows while no token comes"
    times.receive_tokens(2)
    clock.at_us += 5_000
    times.receive_tokens(1)
    clock.at_us += 1_000
    times.receive_end()
    told_all = times.summary()
    assert (told_all.queue_us, told_all.prefill_us, told_all.steer_us) == (10_000, 30_000, 60_000)
    assert told_all.decode_us == 5_000 + 7_000 + 5_000 + 1_000
    assert times.itl_max_us == 5_000 and sum(times.sketch()) == 2, "the wait for the next answer is no gap"
    assert times.inputs == (
        InputTimes(came_us, "applied", "", 7_000, 60_000),
        InputTimes(0, "refused", "no_text", 0),
    )


def test_an_input_before_the_first_token_ends_the_first_prefill(clock: SetClock) -> None:
    times = AttemptTiming(clock, 0, 0)
    times.prefill_s = 0.03
    for _ in range(2):  # two inputs, one after the other
        clock.at_us += 20_000
        times.receive_cut()
        times.receive_input(clock.at_us - 1_000, "applied")
    clock.at_us += 50_000
    times.receive_tokens(1)
    clock.at_us += 8_000
    told = times.summary()
    assert (told.queue_us + told.prefill_us, told.steer_us, told.decode_us) == (20_000, 70_000, 8_000)
    assert [each.answered_us for each in times.inputs] == [70_000, 50_000]


def test_an_input_at_the_end_counts_from_the_end(clock: SetClock) -> None:
    times = AttemptTiming(clock, 0, 0)
    times.receive_tokens(1)
    clock.at_us += 5_000
    times.receive_reply_end()
    clock.at_us += 2_000
    times.receive_end()
    clock.at_us += 3_000
    times.receive_cut()
    clock.at_us += 9_000
    times.receive_tokens(1)
    clock.at_us += 4_000
    times.receive_end()
    told = times.summary()
    assert (told.decode_us, told.check_us, told.steer_us) == (5_000 + 4_000, 2_000, 12_000)
    assert times.generated == 2
    without = AttemptTiming(clock, 0, 0)
    clock.at_us += 1_000
    without.receive_cut()
    clock.at_us += 2_000
    without.receive_end()
    assert (without.summary().prefill_us, without.summary().steer_us) == (1_000, 2_000), "no token ever came"
