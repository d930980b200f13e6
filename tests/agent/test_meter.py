"""An agent's measurements of its engine, and when its breaker opens."""

from __future__ import annotations

import pytest

from inference.agent.observe.meter import Breaker, DecodeConcurrency, Meter
from stream_fabric.pool.replica_load import PrefillSpeed, TypicalLength


def test_speeds_settle_at_what_passes() -> None:
    meter = Meter(0.0)
    for second in range(1, 60):
        meter.receive_tokens(4 * 50)
        meter.tick(4, float(second))
    assert meter.tokens_per_s == 200
    assert meter.sequence_per_s == pytest.approx(50, rel=0.01)
    meter.tick(0, 61.0)
    assert meter.sequence_per_s == pytest.approx(50, rel=0.01), "idle tells nothing of the speed"


def test_prefill_is_measured_in_rows_and_not_by_short_prompts() -> None:
    speed = PrefillSpeed()
    for _ in range(200):  # twenty at once: 20,000 tokens a second, whatever each of them waited
        for left in range(19, -1, -1):
            speed.receive(1000, 0.05, goes_on=left > 0)
    assert speed.per_s == pytest.approx(20_000, rel=0.01)
    for _ in range(1000):  # a short prompt's time is a step's
        speed.receive(10, 0.5, goes_on=False)
    assert speed.per_s == pytest.approx(20_000, rel=0.01)


def test_the_company_that_a_sequence_had_is_its_mean_over_time() -> None:
    company = DecodeConcurrency(0.0)
    company.receive(1, 10.0)
    began = company.sequence_seconds(10.0)
    company.receive(4, 12.0)
    company.receive(3, 13.0)
    assert company.mean(began, 10.0, 15.0) == (2 * 1 + 1 * 4 + 2 * 3) / 5
    assert company.mean(company.sequence_seconds(15.0), 15.0, 15.0) == 3, "of no time at all: as it is"
    company.receive(0, 15.0)
    assert company.mean(company.sequence_seconds(16.0), 16.0, 20.0) == 1, "whoever asks is one"


def test_the_usual_length_follows_answers_slowly() -> None:
    usual = TypicalLength()
    for _ in range(500):
        usual.receive_end(40)
    assert usual.tokens == pytest.approx(40, rel=0.01)
    usual.receive_end(4000)
    assert usual.tokens < 130


def test_the_usual_length_of_a_new_replica_is_soon_its_own_and_not_that_of_its_first_short_answers() -> None:
    """24 answers of 80 to 240 tokens begin at once, and the short ones end first."""
    usual, seen = TypicalLength(), list[float]()
    for tokens in range(80, 240, 7):
        usual.receive_end(tokens)
        seen.append(usual.tokens)
    assert seen[0] == pytest.approx((4 * 256 + 80) / 5), "its first answer has a fifth of the weight"
    assert all(120 < tokens < 200 for tokens in seen[4:]) and seen[-1] == pytest.approx(160, rel=0.1)


def test_queue_time_is_what_the_prompts_computation_does_not_explain() -> None:
    meter = Meter(0.0)
    for k in range(200):
        meter.receive_wait(800, 0.1, k / 100)
    meter.tick(0, 2.0)
    assert meter.queue_p99_ms < 5
    for k in range(10):
        meter.receive_wait(800, 3.1, 2 + k / 100)
    meter.tick(0, 3.0)
    assert meter.queue_p99_ms == pytest.approx(3000, rel=0.05)
    meter.tick(0, 100.0)
    assert meter.queue_p99_ms == 0, "of the last minute"


def test_bytes_per_token_stays_within_reason() -> None:
    meter = Meter(0.0)
    for _ in range(50):
        meter.receive_prompt(300, 100)
    assert meter.bytes_per_token == pytest.approx(3, rel=0.01)
    for _ in range(50):
        meter.receive_prompt(10_000_000, 1)
    assert meter.bytes_per_token <= 16


def test_the_breaker_opens_after_failures_in_a_row_and_tries_with_one_request() -> None:
    breaker = Breaker(failures_max=3, open_s=2, open_s_max=5)
    for _ in range(2):
        breaker.receive_failure(0.0, "engine_error")
    assert breaker.room(10, 0.0) == 10
    breaker.receive_success()
    for _ in range(3):
        breaker.receive_failure(1.0, "engine_error")
    assert [breaker.room(10, at) for at in (1.0, 2.9, 3.1)] == [0, 0, 1]
    breaker.receive_failure(3.1, "engine_error")  # the try failed: twice as long, bounded
    assert [breaker.room(10, at) for at in (3.2, 7.0, 7.2)] == [0, 0, 1]
    breaker.receive_failure(7.2, "upstream_truncated")
    assert [breaker.room(10, at) for at in (12.1, 12.3)] == [0, 1]
    why = "its engine failed 5 requests in a row, the last one with upstream_truncated"
    assert [breaker.refusal(at) for at in (12.1, 12.3)] == [why, ""]
    breaker.receive_success()
    assert breaker.room(10, 12.4) == 10
