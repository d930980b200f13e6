"""One connection of either protocol: it tells a listener at once when it is full, drained or lost, and its input is
parsed in slices, so that no peer's small requests or frames hold the loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol, cast

import uvicorn

from stream_fabric.errors import StreamGwError
from stream_fabric.limits import UNSENT_COUNTED_BYTES
from stream_fabric.ports import Clock
from stream_fabric.stream.ids import TenantId
from stream_gw.transport.connection.unsent import UnsentBytes
from stream_gw.transport.sweeping import StallTimer

CONNECTION = "stream_gw.connection"
"""Key of the connection in a scope's ``state``."""
RESPONSE = "stream_gw.response"
"""Key of the response's writer in a scope's ``state``."""

_TURN_US = 2000
"""Time for which one connection's input is parsed before others have their turn."""


class ConnectionListener(Protocol):
    """Takes a connection's events while a response or a socket is open."""

    def connection_paused(self) -> None: ...

    def connection_resumed(self) -> None: ...

    def connection_lost(self) -> None: ...


class SocketListener(ConnectionListener, Protocol):
    """Takes a WebSocket's events."""

    @property
    def tenant(self) -> TenantId | None:
        """Tenant of the caller; None: it is not authenticated yet."""

    def message_grew(self, size: int) -> None:
        """``size`` bytes of the message that is arriving are held; 0: none is incomplete."""

    def frame_arrived(self) -> bool:
        """Count a frame that takes the work of a message and is none. False: the peer has sent too many."""


class Config(uvicorn.Config):
    """uvicorn's configuration with what its connections share: a clock, limits, and whether the server drains."""

    clock: Clock
    unsent: UnsentBytes
    """Bytes that the connections hold because their peers do not read."""
    draining: bool = False
    connections_max: int
    on_cut: Callable[[], None]
    """Called for each connection that is cut because there are too many."""
    cut: int = 0
    """Number of these."""


class Connection(asyncio.Protocol, ABC):
    """Passes a connection's events to a listener, beside uvicorn, and parses its input in slices.

    A read of 256 KiB can hold 13,000 requests or 43,000 frames, which would hold the loop for most of a second.
    """

    __slots__ = ("_goes_on", "_held", "_stall", "_unsent", "listener")

    slice_bytes: ClassVar[int]
    """Input that is parsed in one piece: as many of the smallest requests or frames take about 5 ms."""
    listener: ConnectionListener | None
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    config: uvicorn.Config
    _stall: StallTimer | None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.listener = self._stall = None
        self._unsent: tuple[TenantId, int] | None = None
        """Bytes that are counted as unsent, and whose they are; None: none are."""
        self._held = b""
        """Input that is not parsed yet. No more is read while there is some."""
        self._goes_on = False
        """Whether the loop has been told to parse what is held."""
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._held or len(data) > self.slice_bytes:
            self._parse_slices(self._held + data)
        else:
            self._parse(data)

    def _parse_slices(self, data: bytes) -> None:
        """Parse input until the connection's turn is over or an earlier request or message must be taken first."""
        monotonic_us = cast(Config, self.config).clock.monotonic_us
        self._held, at, until = b"", 0, monotonic_us() + _TURN_US
        while at < len(data):
            if at and (self._input_waits() or monotonic_us() >= until):
                self._held = data[at:]
                self._hold()
                return
            self._parse(data[at : at + self.slice_bytes])
            at += self.slice_bytes

    def _hold(self) -> None:
        """Stop reading. Without an earlier request or message that waits, the loop goes on after its other work."""
        if self.transport.is_closing():
            self._held = b""
            return
        self.transport.pause_reading()
        if not self._input_waits():
            self.go_on()

    def go_on(self) -> bool:
        """Have held input parsed in a turn of its own: the caller may be in the middle of an event. False: none is."""
        if self._held and not self._goes_on:
            self._goes_on = True
            self.loop.call_soon(self._parse_held)
        return bool(self._held)

    def _parse_held(self) -> None:
        self._goes_on = False
        if self.transport.is_closing():
            self._held = b""
        elif not self._input_waits():
            self._parse_slices(self._held)
            if not self._held and not self._input_waits() and not self.transport.is_closing():
                self._read_on()

    @abstractmethod
    def _parse(self, data: bytes) -> None:
        """Parse input that is at most as long as a slice, or the rest of a handshake."""

    @abstractmethod
    def _input_waits(self) -> bool:
        """Whether what was parsed must be taken before more is."""

    @abstractmethod
    def _read_on(self) -> None:
        """Read more, as nothing is held."""

    @property
    @abstractmethod
    def owner(self) -> TenantId | None:
        """Tenant for whom the connection holds what is unsent; None: it is not counted."""

    def check_room(self) -> None:
        """Check that the connection may hold another large answer. Raises TooMany or GatewayFull."""
        if self.owner is not None:
            cast(Config, self.config).unsent.check_room(self.owner)

    def count_unsent(self) -> None:
        """Count what the peer has not taken yet, if it is large. Cut the peer of a tenant that has too much of it."""
        size = self.transport.get_write_buffer_size()
        self._count(size if size > UNSENT_COUNTED_BYTES else 0)

    def _count(self, size: int) -> None:
        owner, counted = self._unsent or (self.owner, 0)
        if owner is None or size == counted:
            return
        unsent = cast(Config, self.config).unsent
        if not counted:
            try:
                unsent.check_room(owner)
            except StreamGwError:
                self.loop.call_soon(self.transport.abort)  # not within the write
        unsent.add(owner, size - counted)
        self._unsent = (owner, size) if size else None

    def release_unsent(self) -> None:
        """Count nothing of this connection any more."""
        self._count(0)

    def sweep(self, now: float) -> None:
        """Cut a connection that does not take what it was sent, unless a listener does that.

        Without a listener, a closed connection would stay until its last byte is taken.
        """
        self.count_unsent()
        if self.listener is not None and not self.transport.is_closing():
            self._stall = None  # it ran for an earlier answer
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent:
            self._stall = None
            return
        self._stall = self._stall or StallTimer()
        if self._stall.is_stalled(unsent, now):
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.listener is not None:
            self.listener.connection_paused()
        self.count_unsent()
        self.loop.call_soon(self.count_unsent)  # with what this loop turn still writes

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.listener is not None:
            self.listener.connection_resumed()
        self.count_unsent()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.release_unsent()
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.connection_lost()
