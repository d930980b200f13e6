"""The connection to the platform: keeps one socket alive and every stream and request on it."""

from __future__ import annotations

import asyncio
import logging
import random as random_module
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from stream_gw.client.backoff import Judge, backoff_s
from stream_gw.client.errors import ConnectionLost, GatewayError
from stream_gw.client.link import Link, LinkOver
from stream_gw.client.position import BEGINNING
from stream_gw.client.stream import LAG_S, Create, Mode, OnExit, Stream
from stream_gw.client.wire import Ack, ErrorMessage

STREAMS_MAX: Final = 128  # over: create and subscribe raise too_many
REQUESTS_MAX: Final = 256  # cancels and inputs without an answer; over: they raise too_many
REQUEST_TRIES_MAX: Final = 8
QUEUE_ITEMS: Final = 512  # what a slow reader leaves waiting; at it: unsubscribe until drained
QUEUE_BYTES: Final = 1 << 20
GIVE_UP_S: Final = 900.0  # what the gateway keeps of an ended stream; later there is nothing to resume
FAREWELL_S: Final = 5.0  # cancels of abandoned streams are waited for so long on leaving
HINT_S_MAX: Final = 60.0

State: TypeAlias = Literal["idle", "connecting", "connected", "reconnecting", "closed"]
GetToken: TypeAlias = Callable[[bool], Awaitable[str]]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Request:
    message: dict[str, Any]
    answer: asyncio.Future[Ack]
    tries: int = 0
    sent_on: Link | None = None
    timer: asyncio.TimerHandle | None = None


class StreamGateway:
    """Many streams over one socket. An async context manager: what it started ends with its block.

    ``urls``: one or several addresses (http, https, ws or wss), taken in turn. ``token``: a key or capability token.
    ``get_token``: awaited before every connection instead; its argument is true when the last token was refused. Its
    OSError or retriable GatewayError is tried again.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        get_token: GetToken | None = None,
        on_state: Callable[[State, GatewayError | None], None] | None = None,
        random: Callable[[], float] = random_module.random,
        give_up_s: float = GIVE_UP_S,
        lag_s: float = LAG_S,
        queue_items: int = QUEUE_ITEMS,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        given = [urls] if isinstance(urls, str) else list(urls)
        if not given:
            raise ValueError("urls is empty")
        self.state: State = "idle"
        self.link: Link | None = None
        self.random = random
        self.lag_s = lag_s
        self.queue_items = queue_items
        self.queue_bytes = queue_bytes
        self.is_closed = False
        self._urls = [socket_url(url) for url in given]
        self._url_index = 0
        self._token = token
        self._get_token = get_token
        self._on_state = on_state
        self._give_up_s = give_up_s
        self._judge = Judge(random=random, can_refresh=get_token is not None)
        self._streams: dict[Stream, None] = {}  # in the order of their making
        self._requests: dict[str, _Request] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self._channel = 0
        self._request_number = 0
        self._group = asyncio.TaskGroup()
        self._supervisor: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._woken = asyncio.Event()
        self._delay_s = 0.0
        self._moves = False
        self._down_since: float | None = None

    async def __aenter__(self) -> StreamGateway:
        await self._group.__aenter__()
        self._supervisor = self._group.create_task(self._supervise())
        self._wanted.set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._farewells and not isinstance(error, asyncio.CancelledError):
            await asyncio.wait(self._farewells, timeout=FAREWELL_S)
        self.is_closed = True
        if self._supervisor is not None:
            self._supervisor.cancel()
        self._fail(ConnectionLost("client_closed", "the client was closed"))
        # An error of the block is the block's own: as a part of an exception group nobody would catch it.
        cancelled = isinstance(error, asyncio.CancelledError)
        await self._group.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    def create(
        self,
        body: dict[str, Any],
        *,
        dialect: str = "openai.chat",
        key: str | None = None,
        mode: Mode = "tokens",
        on_exit: OnExit = "cancel",
    ) -> Stream:
        """Start a generation. ``key`` is its idempotency key: the same key and body never generate twice."""
        create = Create(body, key or str(uuid.uuid4()))
        return self._open(None, create, after=BEGINNING, dialect=dialect, mode=mode, on_exit=on_exit)

    def subscribe(
        self,
        stream_id: str,
        *,
        after: str = BEGINNING,
        dialect: str = "openai.chat",
        mode: Mode = "tokens",
        on_exit: OnExit = "detach",
    ) -> Stream:
        """Follow a stream after a cursor; from its beginning when none is given."""
        return self._open(stream_id, None, after=after, dialect=dialect, mode=mode, on_exit=on_exit)

    async def cancel(self, stream_id: str) -> Ack:
        """Stop a stream, whoever reads it. While disconnected it is sent as soon as there is a connection."""
        for request in self._requests.values():
            if request.message["t"] == "cancel" and request.message["stream"] == stream_id:
                return await asyncio.shield(request.answer)
        self._request_number += 1
        return await self._request({"t": "cancel", "id": f"k{self._request_number}", "stream": stream_id})

    async def input(self, stream_id: str, item: dict[str, Any], *, id: str | None = None) -> Ack:
        """Hand an item to a running stream, once, however often it has to be sent."""
        return await self._request({"t": "input", "id": id or str(uuid.uuid4()), "stream": stream_id, "item": item})

    def wake(self) -> None:
        """Connect now if it is only waiting to."""
        if self.link is None and not self.is_closed:
            self._woken.set()
            self._wanted.set()

    def _open(
        self, id: str | None, create: Create | None, *, after: str, dialect: str, mode: Mode, on_exit: OnExit
    ) -> Stream:
        self._assert_open()
        if len(self._streams) >= STREAMS_MAX:
            raise GatewayError("too_many", f"{STREAMS_MAX} streams are open; close one first")
        stream = Stream(self, id=id, create=create, after=after, dialect=dialect, mode=mode, on_exit=on_exit)
        self._streams[stream] = None
        if self.link is not None:
            stream.attach(self.link)
        else:
            self.wake()
        return stream

    def _assert_open(self) -> None:
        if self.is_closed or self._supervisor is None:
            raise ConnectionLost("client_closed", "use the client inside its `async with` block")

    # Called by streams

    def next_channel(self) -> int:
        self._channel = self._channel % 0x7FFFFFFF + 1  # a new number each time: what is late for the old one misses
        return self._channel

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream, None)

    def cancel_soon(self, stream: Stream) -> None:
        task = self._group.create_task(self._farewell(stream))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _farewell(self, stream: Stream) -> None:
        try:
            await stream.cancel()
        except GatewayError as error:
            _log.warning("an abandoned stream could not be cancelled (%s): %s", stream.id, error)
        stream.close()

    # Requests: what is answered by its id

    async def _request(self, message: dict[str, Any]) -> Ack:
        self._assert_open()
        if len(self._requests) >= REQUESTS_MAX:
            raise GatewayError("too_many", f"{REQUESTS_MAX} requests wait for an answer")
        if message["id"] in self._requests:
            return await asyncio.shield(self._requests[message["id"]].answer)
        request = _Request(message, asyncio.get_running_loop().create_future())
        request.answer.add_done_callback(_retrieve)
        self._requests[message["id"]] = request
        self._send(request)
        self.wake()
        # It stays until answered even when its caller is cancelled: somebody may wait for the same answer.
        return await asyncio.shield(request.answer)

    def _send(self, request: _Request) -> None:
        request.timer = None
        if self.link is not None:
            request.sent_on = self.link
            self.link.post(request.message)

    def _settle(self, id: str | None) -> asyncio.Future[Ack] | None:
        request = self._requests.pop(id, None) if id is not None else None
        if request is None:
            return None
        if request.timer is not None:
            request.timer.cancel()
        return request.answer

    def receive_ack(self, ack: Ack) -> None:
        if answer := self._settle(ack.id):
            answer.set_result(ack)

    def receive_connection_error(self, message: ErrorMessage) -> None:
        error = message.exception()
        request = self._requests.get(message.id) if message.id is not None else None
        if request is None:
            self._set_state(self.state, error)  # of the connection as a whole; its close code decides
            return
        request.tries += 1
        if error.retriable and request.tries < REQUEST_TRIES_MAX:
            delay_s = max(error.retry_after_s or 0, backoff_s(request.tries, self.random))
            request.timer = asyncio.get_running_loop().call_later(delay_s, self._send, request)
        elif answer := self._settle(message.id):
            answer.set_exception(error)

    # The connection

    def _set_state(self, state: State, error: GatewayError | None = None) -> None:
        if state == self.state and error is None:
            return
        self.state = state
        if self._on_state is not None:
            self._on_state(state, error)

    async def _supervise(self) -> None:
        while True:
            await self._wanted.wait()
            if self._delay_s > 0:
                await _sleep_until(self._woken, self._delay_s)
            self._delay_s = 0.0
            self._wanted.clear()
            self._woken.clear()
            if self.link is None or self._moves:
                await self._connect()

    async def _connect(self) -> None:
        if self.link is None:
            self._down_since = self._down_since or asyncio.get_running_loop().time()
            if self.state in ("idle", "closed"):
                self._set_state("connecting")
        if self._judge.rotate:
            self._judge.rotate = False
            self._url_index = (self._url_index + 1) % len(self._urls)
        try:
            if self._get_token is not None:
                self._token = await self._get_token(self._judge.refresh)
                self._judge.refresh = False
            link = await Link.open(self, self._urls[self._url_index], self._token)
        except LinkOver as over:
            self._down(over, lived_s=0.0)
        except OSError as error:  # of get_token, as the next
            self._later(ConnectionLost("token_unavailable", f"no token can be had: {error!r}", retriable=True))
        except GatewayError as error:
            if error.retriable:
                self._later(error)
            else:
                self._fail(error)
        else:
            self._adopt(link)

    def _adopt(self, link: Link) -> None:
        old, self.link = self.link, link
        self._moves = False
        self._down_since = None
        self._judge.receive_ready()
        self._group.create_task(link.run())
        for stream in list(self._streams):
            stream.attach(link)  # tells the old link to stop, then asks the new one
        for request in self._requests.values():
            if request.timer is None:
                self._send(request)
        if old is not None:
            old.retire()
        self._set_state("connected")

    def receive_hint(self, link: Link, after_s: float) -> None:
        """The gateway drains. Its socket delivers until the new one is ready, so nothing waits for the move."""

        def move() -> None:
            if link is self.link:
                self._moves = True
                self._judge.rotate = True
                self._wanted.set()

        if link is self.link and link.hint is None:
            link.hint = asyncio.get_running_loop().call_later(min(after_s, HINT_S_MAX), move)

    def link_over(self, link: Link, over: LinkOver) -> None:
        if link is not self.link:
            return
        self.link = None
        for stream in list(self._streams):
            stream.lost(link)
        self._down(over, lived_s=asyncio.get_running_loop().time() - link.ready_at, link=link)

    def _down(self, over: LinkOver, *, lived_s: float, link: Link | None = None) -> None:
        fatal = self._judge.receive_close(over.code, over.reason, lived_s)
        if fatal is not None:
            self._fail(fatal)
            return
        if over.code in (1008, 1009) and link is not None:
            self._blame(link, GatewayError("refused", f"over a message of ours: {over}", close_code=over.code))
        self._later(ConnectionLost("connection_lost", str(over), retriable=True, close_code=over.code))

    def _blame(self, link: Link, error: GatewayError) -> None:
        """Sent again, what the gateway closed the connection over would close the next one."""
        for id, request in list(self._requests.items()):
            if request.sent_on is link and (answer := self._settle(id)):
                answer.set_exception(error)
        for stream in list(self._streams):
            stream.blame(error)

    def _later(self, error: GatewayError) -> None:
        now = asyncio.get_running_loop().time()
        if self.link is None:
            self._down_since = self._down_since or now
            if now - self._down_since > self._give_up_s:
                self._fail(error)
                return
            self._set_state("reconnecting", error)
        self._delay_s = self._judge.next_delay_s()
        self._wanted.set()

    def _fail(self, error: GatewayError) -> None:
        """Nothing can be had any more: everybody is told why. A later call starts afresh."""
        self._down_since = None
        self._moves = False
        self._judge = Judge(random=self.random, can_refresh=self._get_token is not None)
        for stream in list(self._streams):
            stream.fail(error)
        for id in list(self._requests):
            if answer := self._settle(id):
                answer.set_exception(error)
        link, self.link = self.link, None
        if link is not None:
            link.retire()
        self._set_state("closed", error)


def socket_url(url: str) -> str:
    """The WebSocket address of a gateway given by its http(s) or ws(s) address."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.netloc:
        raise ValueError(f"{url!r} is not the http(s) or ws(s) address of a gateway")
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/v1/stream") else f"{path}/v1/stream", "", ""))


async def _sleep_until(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def _retrieve(answer: asyncio.Future[Ack]) -> None:
    """Its callers may have left; an error that nobody awaits any more is not one of the program."""
    if not answer.cancelled():
        answer.exception()
