"""The budget of an engine step, on engines that are a formula with noise, and in the simulator."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engines.plugin.stream_gw_budget import PROMPT_TOKENS_MIN, TARGET, StepBudget, prompt_tokens_in
from inference.engines.sim.model import Replica
from inference.engines.sim.settings import SimSettings

OBJECTIVE_S = 0.12
WHOLE = 1024

Engine = Callable[[int, int], float]
"""Seconds of a step with so many answers and prompt tokens."""


def noisy(tokens_s: float, answer_s: float, prompt_token_s: float, seed: int, spread: float = 0.05) -> Engine:
    rng = random.Random(seed)
    return lambda answers, prompt: (
        (tokens_s + answers * answer_s + prompt * prompt_token_s) * rng.uniform(1 - spread, 1 + spread)
    )


def serve(budget: StepBudget, engine: Engine, answers: Callable[[int], int], steps: int) -> list[float]:
    """Run steps with as much prompt as the budget lets, every third without; the durations of those with prompt."""
    took = []
    for number in range(steps):
        running = answers(number)
        limit = budget.prompt_tokens_max(running)
        prompt = 0 if number % 3 == 0 else WHOLE if limit is None else min(limit, WHOLE)
        seconds = engine(running, prompt)
        budget.receive(running, prompt, seconds)
        if prompt and running:
            took.append(seconds)
    return took


@pytest.mark.parametrize(
    ("tokens_s", "answer_s", "prompt_token_s"),
    [(0.04, 5e-4, 5e-4), (0.008, 5e-5, 3e-5), (0.002, 1e-5, 2e-4), (0.09, 5e-4, 1e-3)],
)
def test_steps_come_to_the_target_and_stay_there(tokens_s: float, answer_s: float, prompt_token_s: float) -> None:
    engine = noisy(tokens_s, answer_s, prompt_token_s, 1)
    took = serve(StepBudget(OBJECTIVE_S), engine, lambda number: 4 + number % 20, 400)
    settled = took[60:]
    if tokens_s + 24 * answer_s + WHOLE * prompt_token_s > OBJECTIVE_S:
        assert statistics.fmean(settled) == pytest.approx(TARGET * OBJECTIVE_S, rel=0.1), "nothing is left unused"
    assert max(settled) < 1.2 * OBJECTIVE_S
    assert sum(seconds > OBJECTIVE_S for seconds in settled) < 0.05 * len(settled)


def test_the_number_of_answers_changes_the_budget_at_once() -> None:
    budget = StepBudget(OBJECTIVE_S)
    serve(budget, noisy(0.04, 1e-3, 5e-4, 2, 0.0), lambda number: 1 + number % 40, 300)
    few, many = budget.prompt_tokens_max(2), budget.prompt_tokens_max(40)
    assert few == pytest.approx(prompt_tokens_in(OBJECTIVE_S, 0.042, 2000), rel=0.05)
    assert many == pytest.approx(prompt_tokens_in(OBJECTIVE_S, 0.080, 2000), rel=0.05)


def test_a_step_in_which_a_kernel_was_compiled_costs_few_steps() -> None:
    budget = StepBudget(OBJECTIVE_S)
    engine = noisy(0.04, 5e-4, 5e-4, 3, 0.0)
    serve(budget, engine, lambda _: 10, 120)
    before = budget.prompt_tokens_max(10)
    assert before is not None
    budget.receive(10, before, 20.0)
    budget.receive(10, 0, 20.0)
    shaken = budget.prompt_tokens_max(10)
    assert shaken is not None and shaken > before / 2
    serve(budget, engine, lambda _: 10, 60)
    assert budget.prompt_tokens_max(10) == pytest.approx(before, rel=0.1)


def test_prompts_are_whole_while_nobody_is_reading_and_before_anything_is_known() -> None:
    budget = StepBudget(OBJECTIVE_S)
    assert budget.prompt_tokens_max(5) is None
    budget.receive(0, 500, 0.3)
    assert budget.prompt_tokens_max(0) is None
    limit = budget.prompt_tokens_max(1)
    assert limit == pytest.approx(TARGET * OBJECTIVE_S / 0.3 * 500, rel=0.01), "the first prompt alone says something"


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 4096), st.floats(0, 100)), max_size=60))
def test_prompts_go_on_whatever_was_measured(steps: list[tuple[int, int, float]]) -> None:
    budget = StepBudget(OBJECTIVE_S)
    for answers, prompt, seconds in steps:
        budget.receive(answers, prompt, seconds)
        limit = budget.prompt_tokens_max(3)
        assert limit is None or limit >= PROMPT_TOKENS_MIN


SLOW = SimSettings(itl_ms=40, batch_slope_us=500, ttft_ms=0, prefill_tokens_per_s=2000, max_num_batched_tokens=1024)
LIMITED = msgspec.structs.replace(SLOW, itl_objective_ms=OBJECTIVE_S * 1000)


def gaps_beside_prompts(settings: SimSettings) -> tuple[list[float], float]:
    """Gaps of an answer beside which four long prompts are computed, and the time until the last has its token."""
    replica: Replica[str] = Replica(settings)
    replica.add("answer", 20, (), 400)
    while "answer" not in replica.step().tokens:
        pass
    for number in range(4):
        replica.add(f"prompt {number}", 3000, (), 1)
    gaps, passed_s, first = [], 0.0, 0
    while first < 4:
        step = replica.step()
        passed_s += step.duration_s
        first += sum(key != "answer" for key, _ in step.first)
        gaps.append(step.duration_s)
        assert "answer" in step.tokens
    return gaps, passed_s


def test_a_long_prompt_makes_no_long_gap_and_is_done_as_soon_as_its_share_of_the_steps_allows() -> None:
    without, whole_s = gaps_beside_prompts(SLOW)
    within, pieces_s = gaps_beside_prompts(LIMITED)
    assert max(without) > 4 * OBJECTIVE_S, "what the objective is for"
    assert max(within) <= OBJECTIVE_S
    # 12,000 tokens in pieces of 136 beside a token of 40 ms each; whole they share twelve steps
    assert pieces_s == pytest.approx(12_000 / 2000 + 12_000 / 136 * 0.04, rel=0.03) and pieces_s < 1.6 * whole_s


def test_a_prompt_alone_is_computed_in_pieces_of_the_engines_size() -> None:
    replica: Replica[str] = Replica(LIMITED)
    replica.add("prompt", 3000, (), 1)
    steps = 0
    while not replica.step().first:
        steps += 1
    assert steps == 2
