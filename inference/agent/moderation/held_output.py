"""Output that waits for moderation, sans I/O: takes the engine's calls, says what to check, returns what may go on.

Text goes on only when it was checked together with the ``HOLD_CHARS`` after it, so that no reader gets the beginning of
a phrase whose end is flagged. Calls go on in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from stream_fabric.limits import MODERATION_HOLD_CHARS, MODERATION_OVERLAP_CHARS

Call = Callable[[], None]


class Window(NamedTuple):
    """Text to check: the end of what was checked before, and everything new of one block."""

    block: int
    text: str
    upto: int
    """Characters of the block that are checked with it."""


class _Block:
    """One block's text. Positions count its characters from the first one."""

    __slots__ = ("checked", "cleared", "final", "received", "tail")

    def __init__(self) -> None:
        self.tail = ""
        """Text that is not checked, after some that is."""
        self.received = self.checked = self.cleared = 0
        self.final = False


class HeldOutput:
    """``step``: characters of a block that gather before they are checked."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._calls: deque[tuple[Call, _Block | None, int, int]] = deque()
        """Call, block, position where its text ends, characters of its text."""
        self._blocks: dict[int, _Block] = {}
        self.chars = 0
        """Characters that wait."""

    @property
    def empty(self) -> bool:
        return not self._calls

    def go_on(self, block: int, said: str) -> None:
        """Receive that a block goes on from this text, which was checked: its end is checked again with the new one."""
        found = self._blocks[block] = _Block()
        found.tail = said[-MODERATION_OVERLAP_CHARS:]

    def add_text(self, block: int, text: str, call: Call) -> None:
        """Take a call that brings text of a block."""
        found = self._blocks.get(block)
        if found is None:
            found = self._blocks[block] = _Block()
        found.tail += text
        found.received += len(text)
        self.chars += len(text)
        self._calls.append((call, found, found.received, len(text)))

    def add(self, call: Call) -> None:
        """Take a call without text."""
        self._calls.append((call, None, 0, 0))

    def close(self, block: int | None = None) -> None:
        """Receive that a block, or every block, gets no more text."""
        for number, found in self._blocks.items():
            if block in (None, number):
                found.final = True

    def windows(self) -> list[Window]:
        """Return what is to be checked now."""
        due = []
        for number, block in self._blocks.items():
            new = block.received - block.checked
            if new >= self._step or (block.final and block.cleared < block.received):
                due.append(Window(number, block.tail, block.received))
        return due

    def pass_(self, windows: list[Window]) -> None:
        """Receive that these windows are not flagged."""
        for window in windows:
            block = self._blocks[window.block]
            block.checked = max(block.checked, window.upto)
            whole = block.final and block.checked == block.received
            block.cleared = block.received if whole else max(block.cleared, block.checked - MODERATION_HOLD_CHARS)
            kept = block.received - block.checked + MODERATION_OVERLAP_CHARS
            block.tail = block.tail[-kept:]

    def released(self) -> Iterator[Call]:
        """Remove and return the calls that may go on, in their order."""
        while self._calls:
            call, block, stop, chars = self._calls[0]
            if block is not None and stop > block.cleared:
                return
            self._calls.popleft()
            self.chars -= chars
            yield call

    def drop(self) -> None:
        """Drop everything that waits."""
        self._calls.clear()
        self._blocks.clear()
