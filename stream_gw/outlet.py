"""Where a stream's frames go: one reader's connection, SSE, WebSocket channel or a collected answer."""

from __future__ import annotations

from typing import Protocol

from stream_fabric.cursor import Cursor
from stream_fabric.errors import StreamGwError
from stream_fabric.frames import Status
from stream_fabric.reader import Gap, Reset


class Outlet(Protocol):
    """Calls never block and never raise. ``write`` may turn ``full`` true; the owner then calls
    ``Subscription.resume`` once it has drained."""

    full: bool

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        """Frames ``first`` and on; the hot call."""

    def gap(self, gap: Gap) -> bool:
        """Frames are lost for good. Whether the stream can go on after it in this dialect."""

    def reset(self, reset: Reset) -> bool:
        """Frames that were shown are void. Whether the stream can go on after it in this dialect."""

    def rise(self, epoch: str, head: int) -> None:
        """Another producer took over."""

    def waits(self, position: int, of: int, warming_s: float | None) -> None:
        """The stream stands in its pool's queue, first is 1; told each second to whoever can be told. ``warming_s``: no
        replica takes requests yet, and one is expected to in so long."""

    def end(self, status: Status) -> None:
        """The terminal has been written."""

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        """The stream cannot be delivered beyond the cursor."""
