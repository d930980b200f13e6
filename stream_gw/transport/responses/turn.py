"""One request on a Responses socket, and the outlet of its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from stream_fabric.errors import StreamGwError
from stream_fabric.events import ReadEnd
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import Status, is_end
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.delivery.collected import CollectingOutlet
from stream_gw.dialects.responses.encoder import ResponsesEncoder
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.opened import OpenedStream
from stream_gw.transport.responses.errors import error_event
from stream_gw.transport.sockets.base import Handle

if TYPE_CHECKING:
    from stream_gw.transport.responses.socket import ResponsesSocket

_ERROR = b'{"type":"error"'
_FAILED = b'{"type":"response.failed"'


class Submission(NamedTuple):
    """An input for a response that runs."""

    id: str
    """Empty: it was refused before it got one."""
    parent: str
    """The response that it steers."""
    input: msgspec.Raw
    """As the client sent it."""
    items: list[dict[str, Any]]


class Turn:
    """One ``response.create``: waits in its lane, then is the ``Outlet`` of its response.

    A response has one last event on a socket. The event ``error`` of a stream that failed is left out: clients take it
    as the end of the turn, and ``response.failed``, which has the same error, as the end of the next one.
    """

    __slots__ = (
        "_send", "_socket", "_tail", "carries", "done", "encoder", "failed", "full", "handle", "lane", "message",
        "on_refused", "parent", "required", "response", "settings", "settled", "status", "steers", "trace",
    )  # fmt: skip

    def __init__(self, socket: ResponsesSocket, lane: str | None, message: bytes) -> None:
        self._socket = socket
        self._send: Callable[[bytes], None] = socket.send
        self.lane = lane
        self._tail = None if lane is None else b',"stream_id":"%b"}' % lane.encode()
        self.message = message
        """The event as it came, until it is read."""
        self.parent: str | None = None
        """The response that this one builds on."""
        self.response = ""
        """Id of the response; empty: it has none yet."""
        self.trace: ReaderTrace | None = None
        """Trace of the reader; None: the request was not read."""
        self.encoder: ResponsesEncoder | None = None
        self.handle: Handle | None = None
        self.full = socket.full
        self.failed = False
        self.status: Status = "live"
        self.settings: bytes | None = None
        """The request without input and parent, which a successor inherits; None: the response is not steered."""
        self.steers: list[Submission] = []
        """Inputs that the response's successor gets."""
        self.required: list[dict[str, Any]] = []
        """Items that the client has to send before a successor can be made."""
        self.carries: tuple[Submission, ...] = ()
        """Inputs for which this response is made, as a successor."""
        self.on_refused: Callable[[Turn, StreamGwError], None] | None = None
        """Tells that a successor was refused, in place of the event ``error``: the client has not asked for it."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the last event was written, or the reader has gone."""
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when the socket remembers the response, or does not."""

    @property
    def is_open(self) -> bool:
        """False once the turn has ended or the socket has gone."""
        return not self.done.done()

    def begin(self, response: str, encoder: ResponsesEncoder) -> None:
        """Send the events before the first frame."""
        self.response, self.encoder = response, encoder
        self.tell(encoder.begin())

    def conclude(self, response: str, encoder: ResponsesEncoder, bodies: list[bytes]) -> None:
        """Send all events of a response that no stream makes."""
        self.response, self.encoder = response, encoder
        self._send = self._socket.reply_text
        self.tell(bodies)
        self._finish()

    def tell(self, bodies: list[bytes]) -> None:
        """Send events with the name of the lane."""
        for body in bodies:
            if not body.startswith(_ERROR):
                self._send(body if self._tail is None else body[:-1] + self._tail)
        if bodies and bodies[-1].startswith(_FAILED):
            self.failed = True

    def refuse(self, error: StreamGwError) -> None:
        """Tell that the request failed, which ends the turn."""
        self.failed = True
        socket = self._socket
        if self.on_refused is not None:
            self.on_refused(self, error)
        else:
            socket.reply_text(error_event(error, self.lane, socket.name, is_open=socket.is_open_profile))
        self._finish()

    def outlet_of(self, opened: OpenedStream) -> CollectingOutlet:
        """Make the outlet of a request of the gateway's own, which ends when the socket has gone."""
        outlet = CollectingOutlet(opened.facts)
        self.done.add_done_callback(lambda _: outlet.leave())
        return outlet

    def leave(self, why: ReadEnd) -> None:
        """End the subscription, because the socket has gone; the stream goes on."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.close(why)
        self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    # --- Outlet --------------------------------------------------------------------------------------------

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        encoder = self.encoder
        assert encoder is not None, "begin comes before the first frame"
        bodies = encoder.chunks(lines, first)
        if is_end(lines[-1]):
            self.tell(bodies)
            return
        send, tail = self._send, self._tail
        for body in bodies:
            send(body if tail is None else body[:-1] + tail)

    def gap(self, gap: Gap) -> bool:
        return False  # the events only make sense after all events before them

    def reset(self, reset: Reset) -> bool:
        return False

    def epoch_changed(self, epoch: str, head: int) -> None:
        pass  # the same response goes on

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        pass  # the API has no event for it; pings keep the connection

    def end(self, status: Status) -> None:
        self.handle = None
        self.status = status
        self._finish()

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        """Tell that this gateway cannot deliver the rest, and where the client may read on."""
        self.handle = None
        self.failed = True
        socket, number = self._socket, self.encoder.next_number - 1 if self.encoder is not None else -1
        more = {"response_id": self.response, "starting_after": number}
        self._send(error_event(error, self.lane, socket.name, is_open=socket.is_open_profile, **more))
        self._finish()
