"""The client: keeps one WebSocket connection to the platform alive, with all streams and requests on it."""

from __future__ import annotations

import asyncio
import random as random_module
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import msgspec

from stream_gw.client.backoff import ReconnectPolicy
from stream_gw.client.errors import ConnectionLost, GatewayError
from stream_gw.client.farewells import Farewells
from stream_gw.client.http_cancel import HttpCancels
from stream_gw.client.items import Create, OnPlace
from stream_gw.client.link import Link, LinkOver
from stream_gw.client.position import BEGINNING
from stream_gw.client.requests import PendingRequests
from stream_gw.client.stream import LAG_S, Mode, OnExit, Stream
from stream_gw.client.tokens import GetToken, Tokens
from stream_gw.client.wire import Ack, ErrorMessage, encode

STREAMS_MAX: Final = 128  # over: create and subscribe raise too_many
QUEUE_ITEMS: Final = 512  # items queued for a slow reader; full: unsubscribe until drained
QUEUE_BYTES: Final = 1 << 20
GIVE_UP_S: Final = 900.0  # the platform keeps an ended stream so long; later there is nothing to resume

State: TypeAlias = Literal["idle", "connecting", "connected", "reconnecting", "closed"]


class StreamGateway:
    """Many streams over one socket. An async context manager: the block's end closes the client.

    ``urls``: one or several addresses (http, https, ws or wss), tried in turn. ``token``: an API key or capability
    token. ``get_token``: awaited before each connection and HTTP request, in place of ``token``; its argument is true
    when the gateway refused the last token. It is called again after 60 s without a token, and after any error but one
    that is not retriable.
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
        self.messages_passed_over = 0
        """Messages of types that this client does not know, because a newer gateway sent them."""
        self._urls = [socket_url(url) for url in given]
        self._url_index = 0
        self._tokens = Tokens(token, get_token)
        self._on_state = on_state
        self._give_up_s = give_up_s
        self._policy = ReconnectPolicy(random=random, can_refresh=self._tokens.can_refresh)
        self._streams: dict[Stream, None] = {}  # in the order of their making
        self._requests = PendingRequests(lambda: self.link, random)
        self._farewells = Farewells()
        self._http_cancels = HttpCancels(self._requests, self._urls, self._tokens)
        self._channel = 0
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
        cancelled = isinstance(error, asyncio.CancelledError)
        try:
            if self._farewells and (self.link is not None or not cancelled):  # a cancelled caller waits for no link
                await self._farewells.wait()
        finally:
            self.is_closed = True
            if self._supervisor is not None:
                self._supervisor.cancel()
            self._http_cancels.end()
            self._fail(ConnectionLost("client_closed", "the client was closed"))
            # The group would wrap the block's error in an ExceptionGroup, which the caller does not expect.
            await self._group.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    def create(
        self,
        body: dict[str, Any],
        *,
        dialect: str = "openai.chat",
        key: str | None = None,
        mode: Mode = "tokens",
        on_exit: OnExit = "cancel",
        on_place: OnPlace | None = None,
    ) -> Stream:
        """Start a generation. ``key``: its idempotency key. The same key and body generate again only after a
        retriable error.

        ``on_place`` is called with the request's ``Place`` while it waits in the queue, about once a second, and with
        None afterwards.
        """
        create = Create(msgspec.Raw(encode(body)), key or str(uuid.uuid4()), on_place)
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
        """Read a stream after a cursor (default: from its beginning)."""
        return self._open(stream_id, None, after=after, dialect=dialect, mode=mode, on_exit=on_exit)

    async def cancel(self, stream_id: str) -> Ack:
        """Stop a stream for all its readers. While disconnected, ask by HTTP at once, and over the next connection."""
        pending = self._requests.cancel_of(stream_id)
        if pending is not None:
            return await asyncio.shield(pending)
        self._assert_open()
        id = str(uuid.uuid4())
        if self.link is None:
            self._http_cancels.begin(self._group, self._url_index, id, stream_id)
        return await self._request({"t": "cancel", "id": id, "stream": stream_id})

    async def input(self, stream_id: str, item: str | dict[str, Any], *, id: str | None = None) -> Ack:
        """Steer a running stream with a user's message: the answer is cut, and another one follows in the same stream.
        Retries do not add it twice. ``terminal``: the answer had ended."""
        content = msgspec.Raw(encode(item))  # it may be sent again, after the caller has changed it
        id = id or str(uuid.uuid4())
        # An id counts in its stream alone, but an answer names nothing else: the other stream's must come first
        while (other := self._requests.of_another_stream(id, stream_id)) is not None:
            await asyncio.wait([other])
        return await self._request({"t": "input", "id": id, "stream": stream_id, "item": content})

    def wake(self) -> None:
        """End the pause before the next connection attempt."""
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
        self._channel = self._channel % 0x7FFFFFFF + 1  # a late message finds no channel
        return self._channel

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream, None)

    def cancel_soon(self, stream: Stream) -> None:
        """Cancel the stream in a task of the client, so that the reader need not wait."""
        self._farewells.begin(self._group, stream)

    # Requests, answered by their id

    async def _request(self, message: dict[str, Any]) -> Ack:
        """Send a request, and wait for its answer over all connections."""
        self._assert_open()
        answer = self._requests.send(message)
        self.wake()
        # A cancelled caller leaves the request open, because another caller may wait for the same answer.
        return await asyncio.shield(answer)

    def receive_ack(self, ack: Ack) -> None:
        self._requests.receive_ack(ack)

    def receive_connection_error(self, message: ErrorMessage) -> None:
        error = message.exception()
        if not self._requests.receive_error(message.id, error):
            self._set_state(self.state, error)  # about the connection as a whole; its close code decides what follows

    # The connection

    def _set_state(self, state: State, error: GatewayError | None = None) -> None:
        is_news = state != self.state or error is not None
        self.state = state
        if is_news and self._on_state is not None:
            self._on_state(state, error)

    async def _supervise(self) -> None:
        """Connect whenever a connection is wanted, after the pause that the last failure caused."""
        while True:
            await self._wanted.wait()
            if self._delay_s > 0:
                await _wait_until_set(self._woken, self._delay_s)
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
        if self._policy.rotate:
            self._policy.rotate = False
            self._url_index = (self._url_index + 1) % len(self._urls)
        try:
            token = await self._tokens.current(refresh=self._policy.refresh)
            self._policy.refresh = False
            link = await Link.open(self, self._urls[self._url_index], token)
        except LinkOver as over:
            self._handle_close(over, lived_s=0.0)
        except GatewayError as error:
            if error.retriable:
                self._reconnect_later(error)
            else:
                self._fail(error)
        else:
            self._use_link(link)

    def _use_link(self, link: Link) -> None:
        """Make a new link the current one: move all streams and requests to it, and retire the old link."""
        old, self.link = self.link, link
        self._moves = False
        self._down_since = None
        self._policy.receive_ready()
        self._group.create_task(link.run())
        for stream in list(self._streams):
            stream.attach(link)  # tells the old link to stop, then asks the new one
        self._requests.send_all()
        if old is not None:
            old.retire()
        self._set_state("connected")

    def receive_hint(self, link: Link, after_s: float) -> None:
        """Connect to another gateway after ``after_s``. The old link delivers until the new one is ready."""
        if link is self.link and link.hint is None:
            loop = asyncio.get_running_loop()
            link.hint = loop.call_later(self._policy.hint_s(after_s, loop.time() - link.ready_at), self.leave, link)

    def leave(self, link: Link | None) -> bool:
        """Connect to another gateway now; the streams move when it is ready. False: it is not the current link."""
        if link is None or link is not self.link:
            return False
        if not self._moves:
            self._moves = self._policy.rotate = True
            self._wanted.set()
        return True

    def link_over(self, link: Link, over: LinkOver) -> None:
        if link is not self.link:
            return
        self.link = None
        for stream in list(self._streams):
            stream.lost(link)
        self._handle_close(over, lived_s=asyncio.get_running_loop().time() - link.ready_at, link=link)

    def _handle_close(self, over: LinkOver, *, lived_s: float, link: Link | None = None) -> None:
        fatal = self._policy.receive_close(over.code, over.reason, lived_s)
        if fatal is not None:
            self._fail(fatal)
            return
        if over.code in (1008, 1009) and link is not None:
            error = GatewayError("refused", f"a message was refused: {over}", close_code=over.code)
            self._requests.fail(error, sent_on=link)  # one of them made the gateway close the link, and would again
            for stream in list(self._streams):
                stream.fail_if_unanswered(error)
        self._reconnect_later(ConnectionLost("connection_lost", str(over), retriable=True, close_code=over.code))

    def _reconnect_later(self, error: GatewayError) -> None:
        """Schedule the next connection attempt, or fail all streams after ``give_up_s`` without a connection."""
        now = asyncio.get_running_loop().time()
        if self.link is None:
            self._down_since = self._down_since or now
            if now - self._down_since > self._give_up_s:
                is_given = error.code == "connection_lost"  # else it is from get_token
                self._fail(error if is_given else ConnectionLost("connection_lost", error.message, retriable=True))
                return
            self._set_state("reconnecting", error)
        self._delay_s = self._policy.next_delay_s()
        self._wanted.set()

    def _fail(self, error: GatewayError) -> None:
        """End every stream and request with the error. A later call on the client connects again."""
        self._down_since = None
        self._moves = False
        self._policy = ReconnectPolicy(random=self.random, can_refresh=self._tokens.can_refresh)
        for stream in list(self._streams):
            stream.fail(error)
        self._requests.fail(error)
        link, self.link = self.link, None
        if link is not None:
            link.retire()
        self._set_state("closed", error)


def socket_url(url: str) -> str:
    """Make a gateway's WebSocket URL from its http(s) or ws(s) address. Raises ValueError."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in ("ws", "wss") or not parts.netloc:
        raise ValueError(f"{url!r} is not the http(s) or ws(s) address of a gateway")
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/v1/stream") else f"{path}/v1/stream", "", ""))


async def _wait_until_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, at most ``timeout_s``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
