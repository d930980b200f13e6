"""Output of one stream within its budgets, sans I/O: frames beyond the grant wait for the reply to a question."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from stream_fabric.accounts.budgets import CHUNK_MIN
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, Frame, Open

ASK_AHEAD = 64
"""Tokens left of the grant at which a stream asks for more, so that the reply comes before it needs it."""
BUDGET_REASON = "budget"
"""Finish reason of a choice that a budget ended."""
NO_BUDGET = 1 << 62
"""Mark that no stream's tokens reach."""


class Allowance:
    """The grant of one stream, and the frames that wait behind it.

    ``prompt``: prompt tokens that the budgets have reserved. ``limit``: output tokens that the request allows.
    """

    __slots__ = (
        "_answer_limit", "_asking", "_choices", "_ended", "_held", "_held_tokens", "_limit", "_open", "_prompt",
        "_reserved_prompt", "_short", "denied", "granted", "held_bytes",
    )  # fmt: skip

    def __init__(self, granted: int, prompt: int, limit: int, choices: int) -> None:
        self.granted = granted
        """Output tokens that the stream may have, those of earlier producers included."""
        self._limit = self._answer_limit = limit
        self._choices = choices
        self._prompt = 0
        """Tokens of the prompt, once the engine has counted them."""
        self._reserved_prompt = prompt
        self._held: deque[tuple[Frame, int]] = deque()
        """Each frame with its size."""
        self._held_tokens = 0
        self.held_bytes = 0
        self._asking = False
        self._short = False
        """The last reply granted less than was asked for: it is asked again when the grant is used up."""
        self.denied = False
        """The stream has to end here."""
        self._open: set[int] = set()
        self._ended: set[int] = set()

    # --- frames --------------------------------------------------------------------------------------------

    @property
    def holds_all(self) -> bool:
        """True while each frame has to wait: for those before it, or for room for a prompt longer than estimated."""
        return bool(self._held) or self._prompt > self._reserved_prompt

    @property
    def ask_at(self) -> int:
        """Output tokens above which ``hold`` must see each frame before it is appended."""
        if self.holds_all:
            return -1
        if self._asking or self._short or self.granted >= self._limit:
            return self.granted
        return self.granted - ASK_AHEAD

    def hold(self, frame: Frame, used: int, size: int) -> bool:
        """Take the next frame, if it has to wait. ``used``: output tokens so far; ``size``: its bytes, about."""
        tokens = frame.tokens if isinstance(frame, Delta) else 0
        if not self.holds_all and used + tokens <= self.granted:
            return False
        self._held.append((frame, size))
        self._held_tokens += tokens
        self.held_bytes += size
        return True

    def release(self, used: int) -> Frame | None:
        """Return the next frame that may be appended now; None: there is none."""
        if not self._held or self._prompt > self._reserved_prompt:
            return None
        frame, size = self._held[0]
        tokens = frame.tokens if isinstance(frame, Delta) else 0
        if used + tokens > self.granted:
            return None
        self._held_tokens -= tokens
        self.held_bytes -= size
        self._held.popleft()
        return frame

    def observe(self, frame: Frame) -> None:
        """Note which blocks and choices are open."""
        match frame:
            case Open(block=block):
                self._open.add(block)
            case Close(block=block):
                self._open.discard(block)
            case ChoiceEnd(choice=choice):
                self._ended.add(choice)

    def take_over(self, blocks: Iterable[int], ended: Iterable[int]) -> None:
        """Note the blocks that earlier producers have left open, and the choices that have ended."""
        self._open.update(blocks)
        self._ended.update(ended)

    def begin_answer(self, used: int) -> None:
        """Drop what waits, because an input has cut the answer after ``used`` tokens; the next one may be as long."""
        self._held.clear()
        self._held_tokens = self.held_bytes = 0
        self._open.clear()
        self._ended.clear()
        self._limit = used + self._answer_limit

    def closing_frames(self) -> list[Frame]:
        """Return the frames that end everything that is open."""
        closes: list[Frame] = [Close(block) for block in sorted(self._open)]
        return closes + [
            ChoiceEnd(choice, BUDGET_REASON) for choice in range(self._choices) if choice not in self._ended
        ]

    # --- asking --------------------------------------------------------------------------------------------

    def receive_prompt(self, tokens: int) -> None:
        """Take the length of the prompt as the engine counted it."""
        self._prompt = max(self._prompt, tokens)

    def question(self, used: int) -> tuple[int, int] | None:
        """Return what to ask for: (output tokens in total, tokens of the prompt or 0). None: nothing, or not now."""
        needed = self.holds_all or (not self._short and used > self.granted - ASK_AHEAD and self.granted < self._limit)
        if self._asking or self.denied or not needed:
            return None
        self._asking, self._short = True, False
        return self._wanted(used), self._prompt

    def _wanted(self, used: int) -> int:
        needed = used + self._held_tokens
        return max(needed, min(needed + ASK_AHEAD + CHUNK_MIN, self._limit))

    def receive_reply(self, asked: tuple[int, int], granted: int) -> None:
        """Take the reply to a question. Then ``release`` the frames, and call ``finish_release``."""
        self._asking = False
        wanted, prompt = asked
        self._short = granted < wanted
        if prompt > self._reserved_prompt:
            self._reserved_prompt, self.granted = prompt, granted
        else:
            self.granted = max(self.granted, granted)

    def finish_release(self) -> None:
        """Note that ``release`` gave all that it could: what is still held has been denied, or is asked for again."""
        self.denied = bool(self._held) and self._short and self._prompt <= self._reserved_prompt
