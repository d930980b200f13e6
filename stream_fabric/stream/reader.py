"""One reader of one stream, sans I/O: the delivery filter.

For every source (a publish, a page of the log, a repeat after a failover) it passes frame ``seq + 1`` and nothing else,
so a client sees neither duplicates nor reordering. Frames published while it reads the log are dropped, because the log
has them: a reader needs constant memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from stream_fabric.errors import CursorGone, CursorInvalid
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import is_end
from stream_fabric.stream.log import Page

_BRACE: Final = 0x7B
_STRUCTURE: Final = b"\n{"
"""Beginning of a frame other than a text delta, after another frame."""


class Need(Enum):
    """The input that the reader waits for."""

    LIVE = "the next publish"
    PAGE = "a page of the log after its cursor"
    DRAIN = "its connection to drain"
    NOTHING = "it is done"


class Run(NamedTuple):
    """Frames to write: the lines of ``first`` to ``first + len(lines) - 1``, in epoch ``epoch``."""

    epoch: int
    first: int
    lines: list[bytes]


class Gap(NamedTuple):
    """Frames ``start`` to ``stop`` are gone from the log for good."""

    start: int
    stop: int


class Reset(NamedTuple):
    """Frames above ``to`` that the client has seen are void: they were lost with their producer."""

    epoch: int
    to: int


Step = Run | Gap | Reset


class Reader:
    """Follows one stream from a cursor, and returns the steps to write to its client."""

    __slots__ = ("_nonce", "_origin", "_seen", "_start", "_sure", "epoch", "need", "seq")

    def __init__(self, after: Cursor, nonce: str = "") -> None:
        self.epoch = after.epoch
        self.seq = after.seq
        self.need = Need.PAGE
        self._nonce = nonce
        """Nonce of the epoch, once known: a failover may lose a takeover, and another takeover then gets its number."""
        self._seen = 0
        """Highest seq of any publish so far."""
        self._start = after.seq
        """Seq at which the client started; -1 after a reset."""
        self._origin = after.epoch
        self._sure = -1
        """Last seq of the epoch this reader started in; -1 while it is still in that epoch."""

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, self.seq)

    def take_live(self, epoch: int, first: int, last: int, frames: bytes) -> list[bytes] | None:
        """Take published frames if they are all text and directly follow ``seq`` in the current epoch; return lines.

        This is the fast path of ``receive_live``. None: nothing was taken; call ``receive_live``.
        """
        if self.need is not Need.LIVE or first != self.seq + 1 or epoch != self.epoch or frames[0] == _BRACE:
            return None
        if first == last:
            lines = [frames]
        elif _STRUCTURE in frames:
            return None
        else:
            lines = frames.split(b"\n")
        self.seq = last
        return lines

    def receive_live(self, epoch: int, first: int, last: int, frames: bytes) -> list[Step]:
        """Take published frames; return the steps to write: none if the frames are known or the log must be read."""
        if self.need is not Need.LIVE:
            if last > self._seen:
                self._seen = last
            if last <= self.seq and epoch == self.epoch and _ends(frames):
                self._seen = max(self._seen, self.seq + 1)  # a page that was read before the end does not count
            return []
        if epoch == self.epoch and first <= self.seq + 1:
            if last <= self.seq:
                if _ends(frames):  # of a stream cancelled below what was shown, which a failover had lost
                    self.need = Need.PAGE
                return []
            lines = frames.split(b"\n") if last != first else [frames]
            return [self._deliver(epoch, first, lines)]
        if epoch < self.epoch:
            return []
        # A hole, or a new epoch: only the log knows after which frame it took over
        self._seen = max(self._seen, last)
        self.need = Need.PAGE
        return []

    def receive_page(self, page: Page) -> list[Step]:
        """Take a page of the log that was read after ``cursor``; return the steps to write."""
        rival = self._nonce not in ("", page.epoch.nonce) and page.epoch.n == self.epoch
        steps = self._apply_page(page, self.epoch if rival else self.epoch + 1)
        self._nonce = page.epoch.nonce if page.epoch.n == self.epoch else ""
        return steps

    def _apply_page(self, page: Page, next_epoch: int) -> list[Step]:
        """Apply a page; ``next_epoch``: first epoch whose takeover can make delivered frames void."""
        if page.epoch.n < self.epoch:  # a failover has lost our epoch, and with it what was shown of it
            sure = self._sure if page.epoch.n >= self._origin else 0
            return [self._reset(page.epoch.n, min(max(sure, 0), self.seq))]
        steps: list[Step] = []
        n, base = next((taken for taken in page.bases if taken[0] >= next_epoch), (self.epoch, self.seq))
        if base < self.seq:
            steps.append(self._reset(n, base))
            if not page.entries or page.entries[0].first > base + 1:
                return steps  # the page was read after a void cursor: ask again
        for entry in page.entries:
            if entry.last <= self.seq or entry.epoch < self.epoch:
                continue
            if entry.first > self.seq + 1:
                steps.append(Gap(self.seq + 1, entry.first - 1))
                self.seq = entry.first - 1
            steps.append(self._deliver(entry.epoch, entry.first, entry.frames.split(b"\n")))
            if self.need is Need.NOTHING:
                return steps
        if self.seq < page.head:
            if not page.entries:  # evicted: what should follow is not there
                steps.append(Gap(self.seq + 1, page.head))
                self.seq = page.head
                if page.status != "live":
                    self.need = Need.NOTHING
            return steps
        if page.status != "live" and page.epoch.n == self.epoch:
            if self.seq == page.head == self._start:
                self.need = Need.NOTHING  # the client began after the terminal
            else:  # cancelled or steered after a failover had lost the tail: what was shown in place of the end is void
                ends = 2 if page.status == "incomplete" else 1  # a steer ends the choice, too
                steps.append(self._reset(self.epoch, max(page.head - ends, 0)))
        elif self.seq >= self._seen or page.epoch.n > self.epoch:
            # Ahead of the head: a failover lost the tail, and the producer will send the same bytes again
            self.need = Need.LIVE
            self._enter_epoch(page.epoch.n)
            self._seen = 0
        return steps

    def pause(self) -> None:
        """Ignore publishes until ``resume``, because the connection's outbox is full."""
        if self.need is not Need.NOTHING:
            self.need = Need.DRAIN

    def resume(self) -> None:
        """Ask for a page of the log, because the outbox has drained."""
        if self.need is Need.DRAIN:
            self.need = Need.PAGE

    def recheck(self) -> None:
        """Ask for a page of the log, because the log is ahead or publishes may have been missed."""
        if self.need is Need.LIVE:
            self.need = Need.PAGE

    def close(self) -> None:
        self.need = Need.NOTHING

    def _deliver(self, epoch: int, first: int, lines: list[bytes]) -> Run:
        """Advance the cursor over the lines from seq ``first`` on; return those after the old cursor."""
        skip = self.seq + 1 - first
        if skip:
            lines = lines[skip:]
        first += skip
        self._enter_epoch(epoch)
        self.seq += len(lines)
        if is_end(lines[-1]):
            self.need = Need.NOTHING
        return Run(epoch, first, lines)

    def _reset(self, epoch: int, to: int) -> Reset:
        """Move the cursor back to ``to``, because the frames above it are void."""
        self.seq, self._start = to, -1
        self._enter_epoch(epoch)
        if epoch < self.epoch:
            self.epoch, self._origin, self._sure = epoch, min(epoch, self._origin), -1
        return Reset(epoch, to)

    def _enter_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the current epoch, if it is newer."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._sure = self.seq if self._sure < 0 else min(self.seq, self._sure)


def _ends(frames: bytes) -> bool:
    """Return whether the last of these frames is a terminal."""
    return is_end(frames[frames.rfind(b"\n") + 1 :])


def check_cursor(after: Cursor, epoch: Epoch, head: int, bases: Sequence[tuple[int, int]]) -> None:
    """Check that a client's cursor is a position of this stream.

    Raises CursorInvalid when it lies in the future, CursorGone when its frame was lost with a producer.
    """
    if after.epoch < 1 or after.epoch > epoch.n or (after.epoch == epoch.n and after.seq > head):
        raise CursorInvalid(f"cursor {after} lies ahead of the stream, which is at {epoch.n}-{head}; is it another's?")
    base = min((base for n, base in bases if n > after.epoch), default=after.seq)
    if after.seq > base:
        raise CursorGone(f"cursor {after} was lost with its producer; read again after {after.epoch}-{base}")
