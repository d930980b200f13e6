"""One stream for one reader: its frames in order, each once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final, Literal, Protocol, TypeAlias, assert_never

from stream_gw.client.backoff import backoff_s, is_waited_out
from stream_gw.client.errors import ConnectionLost, GatewayError
from stream_gw.client.items import Create, Data, Gap, InputResult, Item, Place, Reset, Waits, texts
from stream_gw.client.link import Link
from stream_gw.client.position import BEGINNING, Filter, Position, Verdict
from stream_gw.client.queue import ItemQueue
from stream_gw.client.wire import (
    Ack,
    ChannelMessage,
    D,
    End,
    ErrorMessage,
    GapMessage,
    Ok,
    QueuedMessage,
    ResetMessage,
    SteeredMessage,
)

TERMINAL: Final = frozenset({"completed", "cancelled", "failed", "incomplete"})
TRIES_WITHOUT_PROGRESS_MAX: Final = 8
LAG_S: Final = 3.0  # time for announced frames to arrive, before they are asked for again

Mode: TypeAlias = Literal["tokens", "coalesce", "snapshot"]
OnExit: TypeAlias = Literal["cancel", "detach"]


class StreamOwner(Protocol):
    """The client, as far as a stream needs it: its connection, its limits, and requests about the stream."""

    is_closed: bool
    link: Link | None
    random: Callable[[], float]
    lag_s: float
    queue_items: int
    queue_bytes: int

    def wake(self) -> None:
        """End the pause before the next connection attempt."""

    def leave(self, link: Link | None) -> bool:
        """Connect to another gateway now, because the one behind the link drains. False: it is not the current link."""

    def forget(self, stream: Stream) -> None:
        """Remove a stream that has ended."""

    def cancel_soon(self, stream: Stream) -> None:
        """Cancel the stream in a task of the client, so that the reader need not wait."""

    async def cancel(self, stream_id: str) -> Ack: ...

    async def input(self, stream_id: str, item: str | dict[str, Any], *, id: str | None = None) -> Ack: ...


def _gap(message: str) -> GatewayError:
    """Make the retriable error of a stream whose next frames are missing."""
    return GatewayError("protocol_error", message, retriable=True)


def _opening(id: str | None, create: Create | None, tail: Position, mode: Mode, refused: int) -> dict[str, Any]:
    """Return the message that opens a channel: after the position ``tail``, or of a new stream.

    ``refused``: how often the create was refused.
    """
    if id is not None:
        # A snapshot is one chunk of all that came before; after a first part, ``coalesce`` joins the rest.
        joined = "coalesce" if mode == "snapshot" and tail.seq else mode
        return {"t": "sub", "stream": id, "after": str(tail), "mode": joined}
    assert create is not None, "a stream has an id or makes one"
    message = {"t": "create", "body": create.body, "key": create.key, "mode": mode, "queued": bool(create.on_place)}
    return message | {"retry": refused} if refused else message


class Stream:
    """One stream, with one reader. The iteration ends with the stream (see ``status``), and raises when it failed.

    As an async context manager, a block left before the end does what ``on_exit`` says: ``cancel`` stops the
    generation (the default of a create), ``detach`` only stops reading (the default of a subscribe).
    """

    def __init__(
        self,
        gateway: StreamOwner,
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
        """Cursor of the last item that the reader has taken."""
        self.status = "new"
        """``new``, ``live``, ``detached`` (reading ended), ``completed``, ``incomplete``, ``cancelled``, ``failed``."""
        self.usage: dict[str, Any] | None = None
        self.structured_output: list[dict[str, Any]] | None = None
        """Checks of the choices against the JSON schema of the request; None: it asks for none."""
        self.error: GatewayError | None = None
        self.dialect = dialect
        self._gateway = gateway
        self._create = create
        self._waits = Waits(create.on_place if create else None)
        self._mode = mode
        self._on_exit = on_exit
        self._filter = Filter(Position.parse(after))
        self._queue = ItemQueue()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._has_id = asyncio.Event()
        # asked: a gateway may know our create; refused: how often it was; has_end: the gateway told the end
        self._paused, self._asked, self._refused, self._has_end = False, False, 0, False
        self._muted = False  # the reader is gone, the stream is still being cancelled
        self._tries = self._stops = 0  # stops: cancels without an answer
        self._leaves = False  # closed; only they are waited for
        self._timer: asyncio.TimerHandle | None = None
        self._lag_timer: asyncio.TimerHandle | None = None
        self._link: Link | None = None
        self._ch = 0

    @property
    def key(self) -> str | None:
        """Idempotency key of a create; None: the stream was subscribed to."""
        return self._create.key if self._create else None

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_exit == "cancel" and not self._ended.is_set() and not self._gateway.is_closed:
            # The generation must stop even while the reader is cancelled, so a task of the client sends the cancel.
            self._muted = True
            self._queue.clear()
            self._gateway.cancel_soon(self)
        else:
            self.close()

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        while not self._queue:
            if self._ended.is_set() or self._leaves:
                self._raise_end()
            self._news.clear()
            await self._news.wait()
        item = self._queue.pop()
        self.cursor = item.cursor
        if isinstance(item, Data | Gap):
            self._filter.delivered(item.cursor)
        if self._paused and self._queue.is_within(self._gateway.queue_items // 4, self._gateway.queue_bytes // 4):
            self._paused = False
            self._attach_soon(0)
        return item

    def text(self) -> AsyncIterator[str]:
        """Yield the text of all answers as it arrives, for dialects openai.chat and openai.completions."""
        return texts(self)

    async def ready(self) -> str:
        """Wait until the gateway has accepted the create; return the stream's id."""
        await self._has_id.wait()
        if self.id is None:
            raise self.error or ConnectionLost("client_closed", "the stream was closed before it was created")
        return self.id

    async def wait(self) -> str:
        """Wait for the end and return the status. The end comes only while a reader iterates, or after ``close``."""
        await self._ended.wait()
        return self.status

    async def cancel(self) -> Ack:
        """Stop the generation, also before the first token and while disconnected."""
        if self._has_end or (self.id is None and not self._asked and self.status in TERMINAL):
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

    async def input(self, item: str | dict[str, Any], *, id: str | None = None) -> Ack:
        """Steer the stream with a user's message; an ``InputResult`` item says where it was applied."""
        return await self._gateway.input(await self.ready(), item, id=id)

    def close(self) -> None:
        """Stop reading. The generation goes on for as long as its ``on_disconnect`` says."""
        if self._ended.is_set():
            return
        self._queue.clear()
        if self.id is None and self._stops:  # a cancel still waits for the id; only reading ends now
            self._muted = self._leaves = True
            self._news.set()
        else:
            self._finish("detached")

    def _raise_end(self) -> None:
        if self.error is not None:
            raise self.error
        self.cursor = str(self._filter.tail)
        raise StopAsyncIteration

    def _push(self, item: Item, size: int) -> None:
        if self._muted:
            return
        self._queue.push(item, size)
        self._news.set()

    def attach(self, link: Link) -> None:
        self._detach(tell=True)
        if self._ended.is_set() or self._paused or self._timer is not None:
            return
        self._link = link
        self._ch = link.claim(self)
        self._asked = self._asked or self.id is None
        opening = _opening(self.id, self._create, self._filter.tail, self._mode, self._refused)
        link.post(opening | {"ch": self._ch, "dialect": self.dialect})

    def _detach(self, *, tell: bool) -> None:
        if self._lag_timer is not None:
            self._lag_timer.cancel()
            self._lag_timer = None
        self._waits.set(None)  # who reads on after a cut is not told
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
        """Subscribe again from the cursor. Attempts without a new frame back off, and their number is limited."""
        self._tries += 1
        if self._tries > TRIES_WITHOUT_PROGRESS_MAX:
            self._finish("failed", error)
            return
        at_once = self._tries == 1 and delay_s is None
        self._attach_soon(0 if at_once else max(delay_s or 0, backoff_s(self._tries, self._gateway.random)))

    def receive(self, message: ChannelMessage, size: int) -> None:
        match message:
            case D() | GapMessage() if self._queue.is_full(self._gateway.queue_items, self._gateway.queue_bytes):
                self._paused = True  # the log keeps the rest: subscribe again once the reader has caught up
                self._detach(tell=True)  # not before: the result of an input follows its frame, and is not repeated
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
            case SteeredMessage():
                if self._filter.receive_input(message.s):
                    told = (message.s, message.id, message.result, message.reason)
                    self._push(InputResult(str(self._filter.tail), *told), 0)
            case QueuedMessage():
                self._waits.set(Place(message.position, message.of, message.warming_s))
            case _:
                assert_never(message)

    def _receive_ok(self, message: Ok) -> None:
        """Receive the answer that the channel is open. An ended stream sends ``ok`` too; its ``end`` follows."""
        self.id = message.stream
        self.status = message.status
        self._filter.receive_epoch(message.epoch)
        self._has_id.set()

    def _receive_data(self, message: D, size: int) -> None:
        verdict = self._filter.receive(message.s - 1 if message.a is None else message.a, message.s)
        if verdict is Verdict.HOLE:
            self._retry(_gap(f"frames between {self._filter.tail.seq} and {message.s} are missing"))
        elif verdict is Verdict.APPLY:
            self._tries = 0
            self._waits.set(None)
            self._push(Data(str(self._filter.tail), message.s, message.f), size)

    def _receive_end(self, message: End) -> None:
        self._detach(tell=False)
        if self._filter.receive(message.s - 1, message.s) is Verdict.HOLE:
            self._retry(_gap(f"the stream ended at {message.s}; frames after {self._filter.tail.seq} are missing"))
            return
        self._has_end, self.usage, self.structured_output = True, message.usage, message.structured_output
        error = message.error.exception() if message.error else GatewayError("failed", "the stream failed")
        self._finish(message.status, error if message.status == "failed" else None)

    def _receive_gap(self, message: GapMessage) -> None:
        verdict = self._filter.receive_gap(message.first, message.last)
        if verdict is Verdict.HOLE:
            self._retry(_gap(f"frames between {self._filter.tail.seq} and {message.first} are missing"))
        elif verdict is Verdict.APPLY:
            self._tries = 0
            self._push(Gap(str(self._filter.tail), message.last, message.first), 0)

    def _receive_reset(self, message: ResetMessage) -> None:
        told = self._filter.rewind(message.epoch, message.to, self._queue.drop_after(message.to))
        tail = self._filter.tail
        if told:
            self._push(Reset(str(tail), tail.seq), 0)
        if tail.seq < message.to:
            self._attach_soon(0)

    def receive_error(self, message: ErrorMessage) -> None:
        link, error = self._link, message.exception()
        self._detach(tell=False)
        if self.id is None:
            self._asked, self._refused = False, self._refused + 1  # refused: nothing runs
        if not is_waited_out(error):
            self._finish("failed", error)
        elif error.code == "draining" and not self._tries and self._gateway.leave(link):
            self._tries = 1  # the next link attaches this stream
        else:
            self._retry(error, error.retry_after_s or 0)

    def receive_head(self, head: int) -> None:
        """Subscribe again if a ping names a later frame and no frame comes within ``lag_s``."""
        before = self._filter.tail.seq
        if head <= before or self._lag_timer is not None:
            return

        def retry_if_stuck() -> None:
            self._lag_timer = None
            if self._filter.tail.seq == before:
                self._retry(_gap(f"the head is {head} and nothing came after {before}"))

        self._lag_timer = asyncio.get_running_loop().call_later(self._gateway.lag_s, retry_if_stuck)

    def fail_if_unanswered(self, error: GatewayError) -> None:
        """Fail the stream if its create is unanswered: the gateway closed the connection because of a message."""
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
