"""One WebSocket connection, from its opening to its end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Final, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidProxy, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from stream_gw.client.errors import GatewayError
from stream_gw.client.wire import (
    SUBPROTOCOL,
    Ack,
    ChannelMessage,
    ErrorBody,
    ErrorMessage,
    Hi,
    Ping,
    ReconnectHint,
    decode,
    encode,
)

CONNECT_S: Final = 10.0  # until `hi` has arrived
CONNECT_NO_TOKEN_S: Final = 20.0  # the same without a token: a gateway waits 10 s for one, and closes within 5 s more
SILENCE_PINGS: Final = 2.5  # ping intervals without a message, after which the socket counts as dead
WATCH_S: Final = 1.0  # pause between two looks at the wall clock
SLEPT_S: Final = 5.0  # jump of the wall clock that counts as a sleep of the machine
PROBE_S: Final = 3.0  # time for the answer to a ping after a sleep; over: the socket counts as dead
OUTBOX_MAX: Final = 1024  # unwritten messages; over: the peer does not read, and the socket counts as dead
MESSAGE_BYTES_MAX: Final = 32 << 20  # a snapshot of the longest stream as JSON

_CLOSE_CODE_OF_STATUS: Final = {401: 4401, 403: 4403, 429: 4429, 503: 1013}


class _Refusal(msgspec.Struct):
    error: ErrorBody


_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class LinkOver(Exception):
    """Ends a link; ``code`` is the close code that says why."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"closed ({code}{', ' + reason if reason else ''})")
        self.code = code
        self.reason = reason


class Channel(Protocol):
    """Receives the messages of one channel."""

    def receive(self, message: ChannelMessage, size: int) -> None:
        """Receive a message of ``size`` bytes."""

    def receive_error(self, message: ErrorMessage) -> None: ...

    def receive_head(self, head: int) -> None:
        """Receive the last seq of the channel's stream, as a ping named it."""

    def lost(self, link: Link) -> None:
        """Receive the end of the link, which ends the channel too."""


class LinkOwner(Protocol):
    """Receives what concerns the connection as a whole."""

    messages_passed_over: int

    def next_channel(self) -> int:
        """Return a new channel number, so that a late message finds no channel."""

    def receive_ack(self, ack: Ack) -> None: ...

    def receive_connection_error(self, message: ErrorMessage) -> None: ...

    def receive_hint(self, link: Link, after_s: float) -> None:
        """Receive the request of a draining gateway to reconnect elsewhere after ``after_s``."""

    def link_over(self, link: Link, over: LinkOver) -> None:
        """Receive the end of a link that was not retired."""


class Link:
    """One open connection: sends messages, and hands each received message to its channel or to the owner."""

    def __init__(self, owner: LinkOwner, socket: ClientConnection, ping_s: float) -> None:
        self._owner = owner
        self._socket = socket
        self._silence_s = ping_s * SILENCE_PINGS
        self._channels: dict[int, Channel] = {}
        self._outbox: deque[bytes] = deque()
        self._to_send = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._is_retired = False
        self.ready_at = asyncio.get_running_loop().time()
        self.hint: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, owner: LinkOwner, url: str, token: str | None) -> Link:
        """Connect and wait for ``hi``. Raises LinkOver, and GatewayError when no retry can help."""
        if token and not (token.isascii() and token.isprintable()):  # else the error would repeat the token
            raise LinkOver(4401, "the token has a character that no header carries")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with asyncio.timeout(CONNECT_S if token else CONNECT_NO_TOKEN_S):
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
                            owner.receive_connection_error(message)
                except BaseException:
                    socket.transport.abort()
                    raise
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (400, 404) and (refusal := _refusal(error.response.body)) is not None:
                raise GatewayError("address_refused", f"{url}: {refusal.message}") from error
            raise LinkOver(_CLOSE_CODE_OF_STATUS.get(status, 1006), f"HTTP {status}") from error
        except ConnectionClosed as error:
            raise LinkOver(_close_code(error), _close_reason(error)) from error
        except (OSError, TimeoutError, InvalidHandshake, msgspec.DecodeError) as error:
            raise LinkOver(1006, str(error) or type(error).__name__) from error
        except (InvalidURI, InvalidProxy, ImportError, ValueError) as error:  # redirect, proxy, name
            raise GatewayError("address_refused", f"{url} cannot be used: {error}") from error
        return cls(owner, socket, message.ping_ms / 1000)

    async def run(self) -> None:
        """Deliver messages until the connection ends; then call the owner's ``link_over`` once."""
        writer = asyncio.create_task(self._write())
        watcher = asyncio.create_task(self._watch_for_sleep())
        self._reader = asyncio.create_task(self._read())
        if self._is_retired:
            self._reader.cancel()
        try:
            await self._reader
        except LinkOver as over:
            self._owner.link_over(self, over)
        except asyncio.CancelledError:
            if not self._is_retired:
                raise
            await self._socket.close()
        finally:
            self._reader.cancel()
            writer.cancel()
            watcher.cancel()
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
            raise LinkOver(_close_code(error), _close_reason(error)) from error
        except (TimeoutError, msgspec.DecodeError) as error:
            raise LinkOver(1006, str(error) or "silent") from error

    def _receive(self, text: bytes) -> None:
        message = decode(text)
        match message:
            case None:
                self._owner.messages_passed_over += 1
            case Hi():
                pass
            case Ping():
                self.post({"t": "pong"})
                for ch, head in message.head.items():
                    if channel := self._channels.get(ch):
                        channel.receive_head(head)
            case ReconnectHint():
                self._owner.receive_hint(self, message.after_ms / 1000)
            case Ack():
                self._owner.receive_ack(message)
            case ErrorMessage():
                if message.ch is None:
                    self._owner.receive_connection_error(message)
                elif channel := self._channels.get(message.ch):
                    channel.receive_error(message)
            case _:
                if channel := self._channels.get(message.ch):
                    channel.receive(message, len(text))

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._socket.send(self._outbox.popleft(), text=True)
                self._to_send.clear()
                await self._to_send.wait()
        except ConnectionClosed:
            pass  # the reader meets the same error and reports it

    async def _watch_for_sleep(self) -> None:
        """After a sleep of the machine, abort a socket that answers no ping: the gateway may have dropped it long ago.

        The event loop's clock stands still meanwhile, so that the socket would count as alive for another silence.
        """
        try:
            while True:
                before = time.time()
                await asyncio.sleep(WATCH_S)
                if time.time() - before > WATCH_S + SLEPT_S:
                    async with asyncio.timeout(PROBE_S):
                        await (await self._socket.ping())
        except TimeoutError:
            self._socket.transport.abort()
        except ConnectionClosed:
            pass  # the reader meets the same error and reports it

    def post(self, message: dict[str, Any]) -> None:
        """Queue a message for the gateway. A link with too many queued messages is aborted."""
        if self._is_retired:
            return
        self._outbox.append(encode(message))
        self._to_send.set()
        if len(self._outbox) > OUTBOX_MAX:
            self._socket.transport.abort()

    def claim(self, channel: Channel) -> int:
        """Register the channel under a new channel number, and return the number."""
        ch = self._owner.next_channel()
        self._channels[ch] = channel
        return ch

    def release(self, ch: int, *, tell: bool) -> None:
        """Stop delivering to the channel. ``tell``: also unsubscribe at the gateway."""
        if self._channels.pop(ch, None) is not None and tell:
            self.post({"t": "unsub", "ch": ch})

    def retire(self) -> None:
        """Close the link without calling the owner's ``link_over``."""
        self._is_retired = True
        self._forget_channels()
        if self._reader is not None:
            self._reader.cancel()

    def _forget_channels(self) -> None:
        if self.hint is not None:
            self.hint.cancel()
        for channel in list(self._channels.values()):
            channel.lost(self)
        self._channels.clear()


def _refusal(body: bytes | bytearray) -> ErrorBody | None:
    """Return a gateway's error in the answer to a handshake; None: it is another server's."""
    try:
        return _decode_refusal(body).error
    except msgspec.DecodeError:
        return None


def _close_code(error: ConnectionClosed) -> int:
    return error.rcvd.code if error.rcvd else 1006


def _close_reason(error: ConnectionClosed) -> str:
    return error.rcvd.reason if error.rcvd else ""
