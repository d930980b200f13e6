"""Time that a reader waits for the next answer after an input of the client, as its gateway sees it."""

from __future__ import annotations

import msgspec

from stream_fabric.stream.frames import InputNote, Note, decode


class Steered:
    """Inputs of one reader's stream. ``early``: in the time before the stream's first token; ``late``: after it."""

    __slots__ = ("_early", "_since_us", "applied", "broke_early_us", "broke_late_us", "early_us", "late_us", "refused")

    def __init__(self) -> None:
        self.applied = self.refused = 0
        self.early_us = self.late_us = 0
        self.broke_early_us = self.broke_late_us = 0
        """Times up to the last frame of the latest producer that died."""
        self._since_us = 0
        """When the note came whose answer has not begun; 0: none waits."""
        self._early = False

    def receive_note(self, line: bytes, now_us: int, *, early: bool) -> None:
        """Take the note of an input."""
        note = decode(line)
        assert isinstance(note, Note)
        if note.body is None or msgspec.json.decode(note.body, type=InputNote).result == "refused":
            self.refused += 1
            return
        self.applied += 1
        if not self._since_us:
            self._since_us, self._early = now_us, early

    def receive_output(self, now_us: int) -> None:
        """Record that an answer begins, or that none follows any more."""
        if self._since_us:
            took_us = max(now_us - self._since_us, 0)
            self._since_us = 0
            if self._early:
                self.early_us += took_us
            else:
                self.late_us += took_us

    def receive_break(self, at_us: int) -> None:
        """Record the last frame of a producer that another one follows: the time after it is recovery."""
        self.receive_output(at_us)
        self.broke_early_us, self.broke_late_us = self.early_us, self.late_us
