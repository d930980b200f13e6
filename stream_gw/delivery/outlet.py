"""The port between a stream and one reader's connection: SSE, a WebSocket channel or a collected answer."""

from __future__ import annotations

from typing import Any, Protocol

from stream_fabric.errors import StreamGwError
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import Status
from stream_fabric.stream.reader import Gap, Reset

_HELD_WRITES_MAX = 64


class Outlet(Protocol):
    """Takes one stream's frames for one reader. Calls never block and never raise.

    ``write`` may turn ``full`` true; the connection's owner then calls ``Subscription.resume`` once it has drained.
    """

    full: bool

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        """Write the frames ``first``, ``first + 1``, …; the hot call."""

    def gap(self, gap: Gap) -> bool:
        """Report frames that are lost for good. Returns whether this dialect can go on after a gap."""

    def reset(self, reset: Reset) -> bool:
        """Report that frames which were written are void. Returns whether this dialect can go on after a reset."""

    def epoch_changed(self, epoch: str, head: int) -> None:
        """Report that another producer has taken the stream over after frame ``head``."""

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        """Report the stream's position in its pool's queue, from 1; called once a second.

        ``warming_s``: the pool has no ready replica yet; seconds until one is expected. None: the pool has one.
        """

    def end(self, status: Status) -> None:
        """Report that the terminal frame was written; no call follows."""

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        """Report that this gateway cannot deliver the stream beyond the cursor; no call follows."""


class HeldOutlet:
    """The outlet of a new stream until its transport subscribes: keeps calls and passes them on in order.

    After ``_HELD_WRITES_MAX`` writes it is full: the reader then refills from the log, as with any full outlet.
    """

    __slots__ = ("_calls", "full")

    def __init__(self) -> None:
        self.full = False
        self._calls: list[tuple[str, tuple[Any, ...]]] = []

    def pass_on(self, outlet: Outlet) -> bool:
        """Repeat the held calls on ``outlet``. Returns False when that outlet cannot go on after a gap or a reset."""
        calls, self._calls = self._calls, []
        return all(getattr(outlet, name)(*args) is not False for name, args in calls)

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        self._calls.append(("write", (epoch, first, lines)))
        self.full = len(self._calls) >= _HELD_WRITES_MAX

    def gap(self, gap: Gap) -> bool:
        self._calls.append(("gap", (gap,)))
        return True

    def reset(self, reset: Reset) -> bool:
        self._calls.append(("reset", (reset,)))
        return True

    def epoch_changed(self, epoch: str, head: int) -> None:
        self._calls.append(("epoch_changed", (epoch, head)))

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        pass

    def end(self, status: Status) -> None:
        self._calls.append(("end", (status,)))

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        self._calls.append(("fail", (error, cursor)))
