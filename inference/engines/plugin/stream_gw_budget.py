"""Budget of an engine step: the prompt tokens that it may hold, so that running answers get their tokens in time. Pure.

A step computes one token of each running answer and a piece of the waiting prompts. The answers wait for the whole
step, so a step with much prompt makes a gap in all of them. A budget keeps each step below the objective for the time
between tokens: a prompt is then computed in more and smaller pieces, beside the answers instead of before them.

vLLM imports this file by its name, in an environment without stream-gw.
"""

from __future__ import annotations

OBJECTIVE = "STREAM_GW_ITL_OBJECTIVE_S"
"""Environment variable with the objective for the time between tokens, in seconds."""
IN_FORCE = "STREAM_GW_BUDGET"
"""Environment variable with the path of a file; vLLM's scheduler makes it once the budget is in force."""
TARGET = 0.9
"""Share of the objective that a step is planned to take: its duration varies."""
PROMPT_TOKENS_MIN = 16
"""Prompt tokens that each step may hold in any case: prompts go on even where tokens alone take too long."""
_PROMPT_TOKENS_MAX = 2**31
"""No step holds as many: it keeps the number finite where a prompt token took no measurable time."""
_KEPT = 0.98
"""Weight that older steps keep when a new one comes."""
_OUTLIER = 3.0
"""Steps that take this multiple of the expected time are counted as no longer: a kernel was compiled, or Python
collected garbage."""
_KNOWN_STEPS = 8
_PULL = 0.2
"""Part of the way to a new step's cost of a prompt token that the estimate goes, for a step with a full budget."""


def prompt_tokens_in(objective_s: float, tokens_s: float, prompt_tokens_per_s: float) -> int:
    """Prompt tokens that fit into a step besides ``tokens_s`` seconds for the tokens of the running answers."""
    fit = (TARGET * objective_s - tokens_s) * prompt_tokens_per_s
    return int(min(max(fit, PROMPT_TOKENS_MIN), _PROMPT_TOKENS_MAX))


class StepBudget:
    """Learns from an engine's steps what a prompt token costs, and limits the next step. Times are in seconds."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._weight = self._sum_n = self._sum_nn = self._sum_s = self._sum_ns = 0.0
        """Decaying sums over steps without prompts: their number, running answers n, and duration s."""
        self._prompt_token_s = 0.0
        """Time that one prompt token adds to a step; 0: unknown."""

    def prompt_tokens_max(self, answers: int) -> int | None:
        """Prompt tokens that the next step may hold besides a token of each of ``answers``; None: any number.

        There is no limit while no answer is running, and until the first prompt was computed.
        """
        if not answers or not self._prompt_token_s:
            return None
        return prompt_tokens_in(self._objective_s, self._tokens_s(answers), 1 / self._prompt_token_s)

    def receive(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        """Take a step that has ended: the answers that got a token, its prompt tokens, and its duration."""
        if prompt_tokens:
            self._receive_prompt(answers, prompt_tokens, seconds)
        elif answers:
            self._receive_tokens(answers, seconds)

    def _receive_tokens(self, answers: int, seconds: float) -> None:
        if self._weight > _KNOWN_STEPS:
            seconds = min(seconds, _OUTLIER * self._tokens_s(answers))
        self._weight = self._weight * _KEPT + 1
        self._sum_n = self._sum_n * _KEPT + answers
        self._sum_nn = self._sum_nn * _KEPT + answers * answers
        self._sum_s = self._sum_s * _KEPT + seconds
        self._sum_ns = self._sum_ns * _KEPT + answers * seconds

    def _receive_prompt(self, answers: int, prompt_tokens: int, seconds: float) -> None:
        cost_s = max(seconds - self._tokens_s(answers), 0.0) / prompt_tokens
        known = self._prompt_token_s
        if not known:
            self._prompt_token_s = cost_s
            return
        full = self.prompt_tokens_max(answers) or prompt_tokens
        pull = _PULL * min(prompt_tokens / full, 1.0)  # a small piece says little: most of its step is tokens
        ratio = min(max(cost_s / known, 1 / _OUTLIER), _OUTLIER)
        self._prompt_token_s = known * ratio**pull

    def _tokens_s(self, answers: int) -> float:
        """Duration of a step with a token of each of ``answers`` and no prompt: a line through the last steps."""
        if not self._weight:
            return 0.0
        spread = self._weight * self._sum_nn - self._sum_n * self._sum_n
        slope = 0.0
        if spread > 1e-6 * self._sum_nn * self._weight:
            slope = max((self._weight * self._sum_ns - self._sum_n * self._sum_s) / spread, 0.0)
        return max((self._sum_s + slope * (answers * self._weight - self._sum_n)) / self._weight, 0.0)
