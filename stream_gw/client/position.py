"""The reader's position in a stream, and which frames continue it. Pure."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple

from stream_gw.client.errors import GatewayError

_CURSOR = re.compile(r"(0|[1-9][0-9]{0,14})-(0|[1-9][0-9]{0,14})")


class Position(NamedTuple):
    """The last frame applied. Its text form is the wire's cursor."""

    epoch: int
    seq: int

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read a cursor. Raises GatewayError ``cursor_invalid``."""
        match = _CURSOR.fullmatch(text)
        if match is None:
            raise GatewayError("cursor_invalid", f"{text[:64]!r} is not a cursor such as {BEGINNING}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.epoch}-{self.seq}"


BEGINNING = "1-0"


class Verdict(Enum):
    """Decision about received frames, compared with the position."""

    APPLY = auto()
    DROP = auto()
    HOLE = auto()
    """Frames before it are missing: subscribe again."""


class Filter:
    """Position in one stream, and the earlier positions that a reset may go back to."""

    __slots__ = ("_boundaries", "_input_seq", "epoch", "tail")

    BOUNDARIES_MAX = 1024

    def __init__(self, after: Position) -> None:
        self.tail = after
        self.epoch = after.epoch  # of the channel: the tail keeps the epoch under which it was applied
        self._boundaries = [str(after)]
        self._input_seq = after.seq

    def receive_epoch(self, epoch: str) -> None:
        """Set the epoch of the frames that follow."""
        self.epoch = int(epoch.partition(".")[0])

    def receive(self, first_after: int, seq: int) -> Verdict:
        """Judge frames that continue from ``first_after`` and go up to ``seq``; move the position if they apply."""
        if seq <= self.tail.seq:
            return Verdict.DROP
        if first_after != self.tail.seq:
            return Verdict.HOLE
        self.tail = Position(self.epoch, seq)
        return Verdict.APPLY

    def receive_gap(self, first: int, last: int) -> Verdict:
        """Judge a gap, and move the position to its end. Frames already applied may overlap the gap."""
        if last <= self.tail.seq:
            return Verdict.DROP
        if first > self.tail.seq + 1:
            return Verdict.HOLE
        self.tail = Position(self.epoch, last)
        return Verdict.APPLY

    def receive_input(self, seq: int) -> bool:
        """Whether the result of the input at ``seq`` is new to the reader, who has the frames before it."""
        if not self._input_seq < seq <= self.tail.seq:
            return False
        self._input_seq = seq
        return True

    def delivered(self, cursor: str) -> None:
        """Note that an item up to ``cursor`` was handed to the reader: a later reset may go back to it."""
        self._boundaries.append(cursor)
        if len(self._boundaries) > self.BOUNDARIES_MAX:
            del self._boundaries[1]  # the start stays

    def rewind(self, epoch: str, to: int, queued: Position | None) -> bool:
        """Go back to ``to``, or to the last item boundary before it: joined frames are dropped together.

        ``queued`` is the position of the last item that stays in the reader's queue. Returns whether the reader has
        already been handed something that is void now.
        """
        self.receive_epoch(epoch)
        if to >= self.tail.seq:
            return False
        handed = [Position.parse(cursor) for cursor in self._boundaries]
        told = handed[-1].seq > to
        here = Position(self.epoch, to)
        kept = queued or next((each for each in reversed(handed) if each.seq <= to), here)
        self.tail = here if kept.seq == to else kept  # frames up to ``to`` keep their epoch in the log
        if told:
            self._boundaries = [*(str(each) for each in handed if each.seq < kept.seq), str(self.tail)]
        self._input_seq = min(self._input_seq, self.tail.seq)
        return told
