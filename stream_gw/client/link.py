"""One socket, from its opening until nothing more can come of it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from stream_gw.client.wire import SUBPROTOCOL, Ack, ErrorMessage, Hi, Ping, ReconnectHint, decode, encode

if TYPE_CHECKING:
    from stream_gw.client.gateway import StreamGateway
    from stream_gw.client.stream import Stream

CONNECT_S: Final = 10.0  # until `hi`
SILENCE_PINGS: Final = 2.5  # no message for so many ping intervals: the socket is dead
OUTBOX_MAX: Final = 1024  # messages not yet written; over: the peer does not read, the socket is dead
MESSAGE_BYTES_MAX: Final = 32 << 20  # a snapshot of the longest stream, spelled as JSON

_CLOSE_CODE_OF_STATUS: Final = {401: 4401, 403: 4403, 429: 4429, 503: 1013}


class LinkOver(Exception):
    """The socket is of no use any more; ``code`` says why, as a close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"closed ({code}{', ' + reason if reason else ''})")
        self.code = code
        self.reason = reason


class Link:
    def __init__(self, gateway: StreamGateway, socket: ClientConnection, ping_s: float) -> None:
        self._gateway = gateway
        self._socket = socket
        self._silence_s = ping_s * SILENCE_PINGS
        self._channels: dict[int, Stream] = {}
        self._outbox: deque[bytes] = deque()
        self._to_send = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._is_retired = False
        self.ready_at = asyncio.get_running_loop().time()
        self.hint: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, gateway: StreamGateway, url: str, token: str | None) -> Link:
        """Raises LinkOver."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with asyncio.timeout(CONNECT_S):
                socket = await connect(
                    url,
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    additional_headers=headers,
                    compression=None,
                    max_size=MESSAGE_BYTES_MAX,
                    open_timeout=None,
                    close_timeout=1,
                )
                try:
                    while not isinstance(message := decode(await socket.recv()), Hi):
                        if isinstance(message, ErrorMessage):
                            gateway.receive_connection_error(message)
                except BaseException:
                    socket.transport.abort()
                    raise
        except InvalidStatus as error:
            status = error.response.status_code
            raise LinkOver(_CLOSE_CODE_OF_STATUS.get(status, 1006), f"HTTP {status}") from error
        except ConnectionClosed as error:
            raise LinkOver(_code(error), _reason(error)) from error
        except (OSError, TimeoutError, InvalidHandshake, msgspec.DecodeError) as error:
            raise LinkOver(1006, str(error) or type(error).__name__) from error
        return cls(gateway, socket, message.ping_ms / 1000)

    async def run(self) -> None:
        """Deliver until the socket is over, then tell the gateway once."""
        writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())
        if self._is_retired:
            self._reader.cancel()
        try:
            await self._reader
        except LinkOver as over:
            self._gateway.link_over(self, over)
        except asyncio.CancelledError:
            if not self._is_retired:
                raise
            await self._socket.close()
        finally:
            self._reader.cancel()
            writer.cancel()
            self._forget_channels()
            self._socket.transport.abort()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._silence_s) as deadline:
                while True:
                    text = await self._socket.recv(decode=False)
                    deadline.reschedule(loop.time() + self._silence_s)
                    self._receive(text)
        except ConnectionClosed as error:
            raise LinkOver(_code(error), _reason(error)) from error
        except (TimeoutError, msgspec.DecodeError) as error:
            raise LinkOver(1006, str(error) or "silent") from error

    def _receive(self, text: bytes) -> None:
        message = decode(text)
        match message:
            case None | Hi():
                pass
            case Ping():
                self.post({"t": "pong"})
                for ch, head in message.head.items():
                    if stream := self._channels.get(ch):
                        stream.receive_head(head)
            case ReconnectHint():
                self._gateway.receive_hint(self, message.after_ms / 1000)
            case Ack():
                self._gateway.receive_ack(message)
            case ErrorMessage():
                if message.ch is None:
                    self._gateway.receive_connection_error(message)
                elif stream := self._channels.get(message.ch):
                    stream.receive_error(message)
            case _:
                if stream := self._channels.get(message.ch):
                    stream.receive(message, len(text))

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._socket.send(self._outbox.popleft(), text=True)
                self._to_send.clear()
                await self._to_send.wait()
        except ConnectionClosed:
            pass  # the reader sees the same and tells why

    def post(self, message: dict[str, Any]) -> None:
        if self._is_retired:
            return
        self._outbox.append(encode(message))
        self._to_send.set()
        if len(self._outbox) > OUTBOX_MAX:
            self._socket.transport.abort()

    def claim(self, stream: Stream) -> int:
        ch = self._gateway.next_channel()
        self._channels[ch] = stream
        return ch

    def release(self, ch: int, *, tell: bool) -> None:
        if self._channels.pop(ch, None) is not None and tell:
            self.post({"t": "unsub", "ch": ch})

    def retire(self) -> None:
        """Close; the gateway does not want to hear of it."""
        self._is_retired = True
        self._forget_channels()
        if self._reader is not None:
            self._reader.cancel()

    def _forget_channels(self) -> None:
        if self.hint is not None:
            self.hint.cancel()
        for stream in list(self._channels.values()):
            stream.lost(self)
        self._channels.clear()


def _code(error: ConnectionClosed) -> int:
    return error.rcvd.code if error.rcvd else 1006


def _reason(error: ConnectionClosed) -> str:
    return error.rcvd.reason if error.rcvd else ""
