"""A ``StreamOwner`` that keeps what a stream tells it."""

from __future__ import annotations

from inference.agent.running import RunningStream
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.log import Unwatched
from stream_fabric.stream.producer import Outcome


class Owner:
    def __init__(self) -> None:
        self.first = 0
        """Number of first tokens."""
        self.prompts: list[int] = []
        self.questions: list[tuple[int, int]] = []
        """Those to the account; the test answers them."""
        self.aborted = False

    def on_first_token(self, stream: RunningStream) -> None:
        self.first += 1
        stream.first_at = 0.0

    def on_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None:
        self.prompts.append(tokens)

    def on_failure(self, stream: RunningStream, error: ErrorInfo) -> bool:
        return False

    def on_too_large(self, stream: RunningStream) -> None:
        self.aborted = True

    def on_budget_used(self, stream: RunningStream, question: tuple[int, int]) -> None:
        self.questions.append(question)

    def on_budget_spent(self, stream: RunningStream) -> None:
        self.aborted = True

    def on_outcome(self, stream: RunningStream, outcome: Outcome) -> None: ...

    def on_unwatched(self, stream: RunningStream, why: Unwatched, for_s: float) -> None: ...
