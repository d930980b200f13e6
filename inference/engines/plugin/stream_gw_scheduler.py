"""vLLM's side of the step budget: its own scheduler, which gives a step fewer prompt tokens while answers are running.

vLLM imports this file by its name (``--scheduler-cls stream_gw_scheduler.make``) in its engine process, in an
environment without stream-gw. The scheduler reads ``max_num_scheduled_tokens`` anew in each step, so the budget needs
none of vLLM's code.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from stream_gw_budget import IN_FORCE, OBJECTIVE, StepBudget
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

_UNDER_WAY_MAX = 64
log = logging.getLogger("vllm.stream_gw")


def make(vllm_config: Any, **rest: Any) -> Any:
    """Return the scheduler that vLLM would use, with a budget if this model's prompts may be divided anywhere."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = type("BudgetScheduler", (_Budgeted, kind), {})(vllm_config=vllm_config, **rest)
    reason = _unfit(vllm_config, scheduler)
    if reason:
        log.warning("stream-gw leaves the size of vLLM's steps as it is: reason=%s", reason)
    else:
        scheduler.limit_steps(float(os.environ[OBJECTIVE]))
        Path(os.environ[IN_FORCE]).touch()
    return scheduler


def _unfit(vllm_config: Any, scheduler: Any) -> str:
    """Reason why steps are not limited; empty: they are. A prompt that cannot be divided might never fit."""
    if not hasattr(scheduler, "max_num_scheduled_tokens"):
        return "this version of vLLM has another scheduler"
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return "chunked prefill is off"
    if vllm_config.model_config.is_multimodal_model:
        return "the model takes images or audio, which are not divided"
    if getattr(scheduler, "need_mamba_block_aligned_split", False):
        return "the model's prompts are divided at blocks only"
    return ""


class _Budgeted:
    """The part that is added to vLLM's class. It comes before it in the order of methods."""

    max_num_scheduled_tokens: int
    """vLLM's limit for the tokens of a step."""
    running: list[Any]
    """vLLM's requests that have begun."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget: StepBudget | None = None
        self._whole = 0
        self._steps: deque[tuple[Any, int, int, float]] = deque(maxlen=_UNDER_WAY_MAX)
        """Steps under way: vLLM's record of each, its running answers, its prompt tokens, and when it was made."""
        self._ended_at = 0.0

    def limit_steps(self, objective_s: float) -> None:
        """Limit the steps from now on, so that they take less than ``objective_s`` while answers are running."""
        self._budget = StepBudget(objective_s)
        self._whole = self.max_num_scheduled_tokens

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._budget is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        answers: dict[str, None] = {}
        needed = 0
        for request in self.running:
            # Tokens that are sampled and not known yet count as computed in vLLM
            left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            if left <= 1 + len(request.spec_token_ids):
                answers[request.request_id] = None
                needed += left
        limit = self._budget.prompt_tokens_max(len(answers))
        self.max_num_scheduled_tokens = self._whole if limit is None else min(needed + limit, self._whole)
        made = super().schedule(*args, **kwargs)  # type: ignore[misc]
        prompt = sum(tokens for name, tokens in made.num_scheduled_tokens.items() if name not in answers)
        self._steps.append((made, len(made.num_scheduled_tokens.keys() & answers), prompt, time.monotonic()))
        return made

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._budget is not None:
            now = time.monotonic()
            while self._steps:
                made, answers, prompt, at = self._steps.popleft()
                if made is scheduler_output:
                    # A step that was made while the one before was computed begins when that one ends
                    self._budget.receive(answers, prompt, now - max(at, self._ended_at))
                    break
            self._ended_at = now
        return super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
