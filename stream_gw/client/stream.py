"""One response's frames, in order and once each, for one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, assert_never

from stream_gw.client.backoff import backoff_s
from stream_gw.client.errors import ConnectionLost, GatewayError, StreamBroken
from stream_gw.client.position import BEGINNING, Filter, Position, Verdict
from stream_gw.client.wire import Ack, ChannelMessage, D, End, ErrorMessage, GapMessage, Ok, ResetMessage

if TYPE_CHECKING:
    from stream_gw.client.gateway import StreamGateway
    from stream_gw.client.link import Link

TERMINAL: Final = frozenset({"completed", "cancelled", "failed", "incomplete"})
TRIES_WITHOUT_PROGRESS_MAX: Final = 8
LAG_S: Final = 3.0  # a head above our cursor is believed to be on its way for so long

Mode: TypeAlias = Literal["tokens", "coalesce", "snapshot"]
OnExit: TypeAlias = Literal["cancel", "detach"]


@dataclass(frozen=True, slots=True)
class Data:
    """Frames up to ``seq``. ``cursor`` is the position to persist together with what was made of the chunks."""

    cursor: str
    seq: int
    chunks: list[Any]


@dataclass(frozen=True, slots=True)
class Gap:
    """The frames ``first`` to ``seq`` are lost for good."""

    cursor: str
    seq: int
    first: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Everything that was read above ``seq`` is void; what follows continues after it."""

    cursor: str
    seq: int


Item: TypeAlias = Data | Gap | Reset


@dataclass(frozen=True, slots=True)
class Create:
    body: dict[str, Any]
    key: str


class Stream:
    """Iterate it once. Ends when the stream completed or was cancelled (see ``status``); raises when it failed.

    Used as an async context manager, leaving the block before the end does what ``on_exit`` says: ``cancel`` stops
    the generation (the default of a create), ``detach`` only stops reading (the default of a subscribe).
    """

    def __init__(
        self,
        gateway: StreamGateway,
        *,
        id: str | None,
        create: Create | None,
        after: str,
        dialect: str,
        mode: Mode,
        on_exit: OnExit,
    ) -> None:
        self.id = id
        self.cursor = after
        """Of the last item handed to the reader."""
        self.status = "new"
        self.usage: dict[str, Any] | None = None
        self.error: GatewayError | None = None
        self.dialect = dialect
        self._gateway = gateway
        self._create = create
        self._mode = mode
        self._on_exit = on_exit
        self._filter = Filter(Position.parse(after))
        self._queue: deque[tuple[Item, int]] = deque()
        self._queue_bytes = 0
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._has_id = asyncio.Event()
        self._paused = False
        self._muted = False  # the reader is gone, the stream is still being cancelled
        self._stops = 0  # cancels without an answer
        self._leaves = False  # closed; only they are waited for
        self._asked = False  # a create of ours may be known to a gateway
        self._tries = 0
        self._timer: asyncio.TimerHandle | None = None
        self._lag_timer: asyncio.TimerHandle | None = None
        self._link: Link | None = None
        self._ch = 0

    @property
    def key(self) -> str | None:
        """The idempotency key of a create."""
        return self._create.key if self._create else None

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_exit == "cancel" and not self._ended.is_set() and not self._gateway.is_closed:
            # The generation must stop also when the reader is being cancelled itself: the gateway's own task sends it.
            self._muted = True
            self._clear()
            self._gateway.cancel_soon(self)
        else:
            self.close()

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        while not self._queue:
            if self._ended.is_set() or self._leaves:
                self._over()
            self._news.clear()
            await self._news.wait()
        item, size = self._queue.popleft()
        self._queue_bytes -= size
        self.cursor = item.cursor
        if isinstance(item, Data):
            self._filter.delivered(item.seq)
        if self._paused and self._drained():
            self._paused = False
            self._attach_soon(0)
        return item

    async def text(self) -> AsyncIterator[str]:
        """The answer's text as it grows, of the dialects openai.chat and openai.completions."""
        async for item in self:
            if not isinstance(item, Data):
                kind = type(item).__name__.lower()
                raise StreamBroken(f"stream_{kind}", f"text already read is no longer the stream's: a {kind}")
            text = text_of(item.chunks)
            if text:
                yield text

    async def ready(self) -> str:
        """The stream's id, once the gateway has accepted the create."""
        await self._has_id.wait()
        if self.id is None:
            raise self.error or ConnectionLost("client_closed", "the stream was closed before it was created")
        return self.id

    async def wait(self) -> str:
        """The status at the end. Needs a reader: one that stops reading without closing holds the end back."""
        await self._ended.wait()
        return self.status

    async def cancel(self) -> Ack:
        """Stop the generation. Works while disconnected (then as soon as connected) and before the first token."""
        if self._ended.is_set() and self.status in TERMINAL:
            return Ack(id="", result="terminal", at=str(self._filter.tail), status=self.status)
        if self.id is None and not self._asked and not self._ended.is_set():
            self._finish("cancelled")
            return Ack(id="", result="accepted", at=BEGINNING, status="cancelled")
        self._gateway.wake()
        self._stops += 1
        try:
            return await self._gateway.cancel(await self.ready())
        finally:
            self._stops -= 1
            if self._leaves and not self._stops:
                self._finish("detached")

    def close(self) -> None:
        """Stop reading. The generation goes on, as long as its ``on_disconnect`` says."""
        if self._ended.is_set():
            return
        self._clear()
        if self.id is None and self._stops:  # a cancel still waits for the id: only the reader goes now
            self._muted = self._leaves = True
            self._news.set()
        else:
            self._finish("detached")

    def _clear(self) -> None:
        self._queue.clear()
        self._queue_bytes = 0

    def _over(self) -> None:
        if self.error is not None:
            raise self.error
        self.cursor = str(self._filter.tail)
        raise StopAsyncIteration

    def _drained(self) -> bool:
        gateway = self._gateway
        return len(self._queue) <= gateway.queue_items // 4 and self._queue_bytes <= gateway.queue_bytes // 4

    def _push(self, item: Item, size: int) -> None:
        if self._muted:
            return
        self._queue.append((item, size))
        self._queue_bytes += size
        self._news.set()
        if len(self._queue) >= self._gateway.queue_items or self._queue_bytes >= self._gateway.queue_bytes:
            self._paused = True  # the log is the queue: come back with the cursor once the reader has caught up
            self._detach(tell=True)

    # The wire

    def attach(self, link: Link) -> None:
        self._detach(tell=True)
        if self._ended.is_set() or self._paused or self._timer is not None:
            return
        self._link = link
        self._ch = link.claim(self)
        if self.id is not None:
            # A snapshot says what came before as one chunk; after a first part that is the rest, joined.
            tail = self._filter.tail
            mode = "coalesce" if self._mode == "snapshot" and tail.seq else self._mode
            message: dict[str, Any] = {"t": "sub", "stream": self.id, "after": str(tail), "mode": mode}
        else:
            assert self._create is not None, "a stream has an id or makes one"
            self._asked = True
            message = {"t": "create", "body": self._create.body, "key": self._create.key, "mode": self._mode}
        link.post(message | {"ch": self._ch, "dialect": self.dialect})

    def _detach(self, *, tell: bool) -> None:
        if self._lag_timer is not None:
            self._lag_timer.cancel()
            self._lag_timer = None
        link, self._link = self._link, None
        if link is not None:
            link.release(self._ch, tell=tell)

    def lost(self, link: Link) -> None:
        if self._link is link:
            self._detach(tell=False)

    def _attach_soon(self, delay_s: float) -> None:
        self._detach(tell=True)
        if self._timer is not None:
            self._timer.cancel()
        if delay_s > 0:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._attach_now)
        else:
            self._attach_now()

    def _attach_now(self) -> None:
        self._timer = None
        if self._gateway.link is not None:
            self.attach(self._gateway.link)

    def _retry(self, error: GatewayError, delay_s: float | None = None) -> None:
        """Ask again from our cursor. What brings nothing new is asked less and less often, and not for ever."""
        self._tries += 1
        if self._tries > TRIES_WITHOUT_PROGRESS_MAX:
            self._finish("failed", error)
            return
        at_once = self._tries == 1 and delay_s is None
        self._attach_soon(0 if at_once else max(delay_s or 0, backoff_s(self._tries, self._gateway.random)))

    def _hole(self, message: str) -> None:
        self._retry(GatewayError("protocol_error", message, retriable=True))

    def receive(self, message: ChannelMessage, size: int) -> None:
        match message:
            case D():
                self._receive_data(message, size)
            case Ok():
                self._receive_ok(message)
            case End():
                self._receive_end(message)
            case GapMessage():
                self._receive_gap(message)
            case ResetMessage():
                self._receive_reset(message)
            case _:
                assert_never(message)

    def _receive_ok(self, message: Ok) -> None:
        """Also of a stream that has ended: how, its ``end`` says, which follows."""
        self.id = message.stream
        self.status = message.status
        self._filter.receive_epoch(message.epoch)
        self._has_id.set()

    def _receive_data(self, message: D, size: int) -> None:
        verdict = self._filter.receive(message.s - 1 if message.a is None else message.a, message.s)
        if verdict is Verdict.HOLE:
            self._hole(f"frames between {self._filter.tail.seq} and {message.s} are missing")
        elif verdict is Verdict.APPLY:
            self._tries = 0
            self._push(Data(str(self._filter.tail), message.s, message.f), size)

    def _receive_end(self, message: End) -> None:
        self._detach(tell=False)
        if self._filter.receive(message.s - 1, message.s) is Verdict.HOLE:
            self._hole(f"the stream ended at {message.s}; frames after {self._filter.tail.seq} are missing")
            return
        self.usage = message.usage
        error = None
        if message.status == "failed":
            error = message.error.exception() if message.error else GatewayError("failed", "the stream failed")
        self._finish(message.status, error)

    def _receive_gap(self, message: GapMessage) -> None:
        verdict = self._filter.receive_gap(message.first, message.last)
        if verdict is Verdict.HOLE:
            self._hole(f"frames between {self._filter.tail.seq} and {message.first} are missing")
        elif verdict is Verdict.APPLY:
            self._tries = 0
            self._push(Gap(str(self._filter.tail), message.last, message.first), 0)

    def _receive_reset(self, message: ResetMessage) -> None:
        while self._queue and self._queue[-1][0].seq > message.to:
            self._queue_bytes -= self._queue.pop()[1]
        told = self._filter.rewind(message.epoch, message.to, self._queue[-1][0].seq if self._queue else None)
        tail = self._filter.tail
        if told:
            self._push(Reset(str(tail), tail.seq), 0)
        if tail.seq < message.to:
            self._attach_soon(0)

    def receive_error(self, message: ErrorMessage) -> None:
        self._detach(tell=False)
        error = message.exception()
        if self.id is None:
            self._asked = False  # refused: nothing runs
        if error.retriable:
            self._retry(error, error.retry_after_s or 0)
        else:
            self._finish("failed", error)

    def receive_head(self, head: int) -> None:
        """A ping told a head above ours. Frames may be on their way, so only a lasting lag counts."""
        before = self._filter.tail.seq
        if head <= before or self._lag_timer is not None:
            return

        def look() -> None:
            self._lag_timer = None
            if self._filter.tail.seq == before:
                self._hole(f"the head is {head} and nothing came after {before}")

        self._lag_timer = asyncio.get_running_loop().call_later(self._gateway.lag_s, look)

    def blame(self, error: GatewayError) -> None:
        """The connection was closed over a message: ours, if it was still unanswered."""
        if self.id is None and self._asked:
            self._finish("failed", error)

    def fail(self, error: GatewayError) -> None:
        self._finish("failed", error)

    def _finish(self, status: str, error: GatewayError | None = None) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self.status = status
        self.error = error
        self._detach(tell=True)
        if self._timer is not None:
            self._timer.cancel()
        self._gateway.forget(self)
        self._has_id.set()
        self._news.set()


def text_of(chunks: list[Any]) -> str:
    """The text that chunks of openai.chat or openai.completions add to the first choice."""
    parts: list[str] = []
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            if choice.get("index", 0) == 0:
                parts.append((choice.get("delta") or {}).get("content") or choice.get("text") or "")
    return "".join(parts)
