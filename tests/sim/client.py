"""Readers, outside of the platform: each reads one stream to its end, wherever it has to reconnect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from inference.engines.sim.answer import Answer
from inference.engines.sim.text import Prompt
from stream_fabric.errors import FabricUnavailable, NotFound, StreamGwError
from stream_fabric.limits import ORPHAN_GRACE_S
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import ChoiceEnd, Delta, Open, Status, is_end
from stream_fabric.stream.ids import StreamId, TenantId
from stream_fabric.stream.reader import Gap, Reset, Run
from stream_gw.auth import ALL_SCOPES, Principal
from stream_gw.delivery.local_stream import Subscription
from stream_gw.dialects.requests import CreateRequest, parse_create
from stream_gw.observe.trace import ReaderTrace, Tracer
from stream_gw.streams.create_call import CreateCall
from tests.sim.witness import require

if TYPE_CHECKING:
    from tests.sim.hosts import GatewayHost
    from tests.sim.world import World

TENANT = TenantId("t")
WHO = Principal(TENANT, ALL_SCOPES)
OUTBOX_MAX = 12


class Spec:
    """A request, and the response of an undisturbed replica to it."""

    def __init__(self, number: int, fields: dict[str, Any], kind: Literal["chat", "completions"] = "chat") -> None:
        content = f"stream {number} " + "x" * (number % 3) * 20
        prompt = {"messages": [{"role": "user", "content": content}]} if kind == "chat" else {"prompt": content}
        body = {"model": "m", "stream": True, **prompt, **fields}
        self.number = number
        self.kind: Literal["chat", "completions"] = kind
        self.fields = fields
        self.request: CreateRequest = parse_create(msgspec.json.encode(body), kind)
        self.key: str | None = None
        self.streams: list[StreamId] = []
        """As which it was made; more than one when its client had to ask again."""

    def said(self, world: World) -> Undisturbed:
        """The response when nothing fails."""
        prompt = Prompt(msgspec.json.decode(self.request.body))
        texts: dict[int, str] = {}
        ends: dict[int, str] = {}
        tokens = 0
        answers = [Answer(StreamId("resp_"), prompt, k, self.request.n, world.engine) for k in range(self.request.n)]
        for answer in answers:
            while not answer.ended:
                for piece in answer.token():
                    match piece:
                        case str() as text:
                            texts[answer.block] += text
                            answer.tokens_since_text()
                        case Open(block=block):
                            texts[block] = ""
                        case Delta(block=block, text=text):
                            texts[block] += text
                        case ChoiceEnd(choice=choice, finish_reason=reason):
                            ends[choice] = reason
            tokens += answer.tokens_made
        return Undisturbed(texts, ends, tokens, prompt.tokens)

    @property
    def continuable(self) -> bool:
        return not self.fields.keys() & {"response_format", "reasoning_effort"}


class Undisturbed(NamedTuple):
    texts: dict[int, str]
    """By block."""
    ends: dict[int, str]
    """Finish reason of each choice."""
    tokens: int
    prompt_tokens: int


class Told(NamedTuple):
    """The connection says how it ended."""

    why: str


class Reading:
    """One connection to a gateway: the ``Outlet`` there, and the wire to the client."""

    def __init__(self, client: Client, host: GatewayHost, after: Cursor) -> None:
        self.client = client
        self.host = host
        self.w = client.w
        self.full = False
        self.subscription: Subscription | None = None
        self.gone = False
        self.served = False
        """It had frames: its gateway watches the stream."""
        self._seq = after.seq
        self._full_at = 0.0
        self._exact = True
        self._ended = False
        self._items: list[Run | Reset | Gap | Told] = []
        self._frames = 0
        self._moving = False

    def open(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self._exact = subscription.exact
        self._move()

    # --- Outlet --------------------------------------------------------------------------------------------

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        require(not self._ended, "3: a frame after the end")
        require(not self.full or self._full_at == self.w.loop.now, "8: a full outbox took more")
        if self._exact:
            require(first == self._seq + 1, f"3: frame {first} written after {self._seq}")
        require(first > self._seq, f"3: frame {first} written after {self._seq}")
        self._seq = first + len(lines) - 1
        self.served = True
        self._frames += len(lines)
        if is_end(lines[-1]):
            self.client.ended_at = self.w.loop.now
        self._put(Run(epoch, first, lines))
        self._fill()

    def _fill(self) -> None:
        if self._frames >= OUTBOX_MAX and not self.full and self.subscription is not None:
            self.full, self._full_at = True, self.w.loop.now

    def gap(self, gap: Gap) -> bool:
        if self.client.plain:
            return False
        self._seq = gap.stop
        self._put(gap)
        return True

    def reset(self, reset: Reset) -> bool:
        if self.client.plain:
            return False
        self._seq = reset.to
        self._put(reset)
        return True

    def epoch_changed(self, epoch: str, head: int) -> None:
        require(head >= self._seq, f"4: a new epoch begins after {head} for a reader at {self._seq}")

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        require(0 < position <= of, f"7: place {position} of {of} in line")

    def end(self, status: Status) -> None:
        require(not self._ended, "4: a stream ends twice")
        self._ended = True
        self._put(Told("end"))

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        require(not self._ended, "4: a stream fails after its end")
        self._ended = True
        require(error.code != StreamGwError.code, f"4: {error.message}")
        self._put(Told(error.code))

    # --- the wire ------------------------------------------------------------------------------------------

    def _put(self, item: Run | Reset | Gap | Told) -> None:
        self._items.append(item)
        self._move()

    def _move(self) -> None:
        if not self._moving and self.subscription is not None:
            self._moving = True
            self.w.loop.at(self.client.pause_s(), self.host.process, self._drain)

    def _drain(self) -> None:
        """The socket takes what there is."""
        self._moving = False
        if self.gone:
            return
        items, self._items, self._frames = self._items, [], 0
        for item in items:
            self.client.receive(self, item)
            if self.gone:
                return
        if self.full:
            self.full = False
            self._exact = False
            assert self.subscription is not None
            self.subscription.resume()

    def hang_up(self) -> None:
        """The client closes the connection."""
        self.gone = True
        self.w.loop.at(0.001, self.host.process, self._closed)

    def _closed(self) -> None:
        if self.subscription is not None:
            self.subscription.close()


class Trace(ReaderTrace):
    """Hears a new stream's id before anything of it is in the fabric."""

    __slots__ = ("_client",)

    def __init__(self, client: Client, tracer: Tracer) -> None:
        super().__init__(tracer, "r", "sse")
        self._client = client

    def traceparent(self, stream: StreamId) -> str:
        self._client.named(stream)
        return super().traceparent(stream)


class Client:
    """``told``: what it heard went wrong. ``plain``: of a dialect that cannot be told of gaps and resets."""

    def __init__(self, world: World, spec: Spec, stream: StreamId | None, *, slow: bool, plain: bool) -> None:
        self.w = world
        self.spec = spec
        self.stream = stream
        self.creator = stream is None
        self.slow = slow
        self.plain = plain
        self.lines: list[tuple[int, bytes]] = []
        """Applied frames, each with the last seq that it contains."""
        self.epoch = 1
        self.seq = 0
        self.told: list[str] = []
        self.done = ""
        self.ended_at = 0.0
        """When its gateway had its terminal."""
        self.left = False
        self.reading: Reading | None = None
        self._missing_since: float | None = None
        self._tries = 0

    @property
    def applied(self) -> list[bytes]:
        return [line for _, line in self.lines]

    def pause_s(self) -> float:
        if self.slow and self.w.loop.now < self.w.faults_end_s:
            return self.w.random.uniform(0.5, 4.0)
        return 0.01

    def connect(self) -> None:
        if self.done or self.left:
            return
        host = self.w.any_gateway()
        if host is None:
            self.w.after(0.3, self.connect)
            return
        self.reading = Reading(self, host, Cursor(self.epoch, self.seq))
        host.serve(self._open(host, self.reading))

    async def _open(self, host: GatewayHost, reading: Reading) -> None:
        """In the gateway's process."""
        gateway, spec = host.gateway, self.spec
        assert gateway is not None
        trace = Trace(self, gateway.parts.tracer)
        try:
            if self.stream is None:
                opened = await gateway.streams.create(CreateCall(WHO, spec.request, trace, key=spec.key))
            else:
                after = Cursor(self.epoch, self.seq)
                opened = await gateway.reads.follow(WHO, self.stream, after, trace, exact=not self.plain, dialect=None)
            if opened is None:
                self._answer(reading, lambda: self.finish("past"))
                return
            self.named(opened.id)
            subscription = opened.subscribe(reading)
        except StreamGwError as error:
            why = error
            self._answer(reading, lambda: self._refused(why))
            return
        if reading.gone:
            subscription.close()
            return
        stream = opened.id
        self._answer(reading, lambda: self._opened(stream))
        reading.open(subscription)

    def named(self, stream: StreamId) -> None:
        """A gateway has given the request a stream."""
        if stream not in self.spec.streams:
            self.spec.streams.append(stream)
            self.w.appeared(stream, self.spec)

    def _answer(self, reading: Reading, what: Callable[[], None]) -> None:
        def heard() -> None:
            if self.reading is reading and not reading.gone:
                what()

        # Part of the connection: a gateway that dies now has not said it
        self.w.loop.at(0.001, reading.host.process, heard)

    def _opened(self, stream: StreamId) -> None:
        self._missing_since = None
        if self.stream is None:
            self.stream = stream
            self.w.after(0.0, self.w.known, self.spec, stream)

    def _refused(self, error: StreamGwError) -> None:
        self.reading = None
        if isinstance(error, NotFound) and self.stream is not None:
            self._missing_since = self._missing_since or self.w.loop.now
            if self.w.loop.now - self._missing_since > ORPHAN_GRACE_S + 2:
                self.finish("lost")
                return
        elif not error.retriable or (self._tries > 20 and not isinstance(error, FabricUnavailable)):
            self.finish(error.code)
            return
        self._tries += 1
        self.w.after(self.w.random.uniform(0.2, 0.5), self.connect)

    def disconnected(self) -> None:
        """The gateway has gone."""
        if self.reading is not None:
            self.reading.gone = True
            self.reading = None
            self.w.after(self.w.random.uniform(0.1, 1.0), self.connect)

    def leave(self) -> None:
        """Closes its connection for good."""
        self.left = True
        if self.reading is not None:
            self.reading.hang_up()
            self.reading = None

    def receive(self, reading: Reading, item: Run | Reset | Gap | Told) -> None:
        match item:
            case Run(epoch, first, lines):
                require(not self.done, "3: a frame after the terminal")
                require(first > self.seq, f"3: frame {first} applied after {self.seq}")
                self.lines += enumerate(lines, first)
                self.epoch, self.seq = epoch, first + len(lines) - 1
                if is_end(lines[-1]):
                    self.finish("end")
            case Reset(epoch, to):
                self._reset(reading, epoch, to)
            case Gap(_, stop):
                self.told.append("gap")
                self.seq = stop
            case Told("end"):
                require(self.done == "end", f"4: a connection ends without a terminal at {self.seq}")
            case Told(why):
                self.finish(why)

    def _reset(self, reading: Reading, epoch: int, to: int) -> None:
        require(to <= self.seq, f"4: reset to {to} with {self.seq} applied")
        self.told.append("reset")
        while self.lines and self.lines[-1][0] > to:
            self.lines.pop()
        # A chunk that joined several frames goes as a whole
        self.epoch, self.seq = epoch, self.lines[-1][0] if self.lines else 0
        if self.seq != to:
            reading.hang_up()
            self.reading = None
            self.w.after(0.0, self.connect)

    def finish(self, why: str) -> None:
        self.done = why
        if why not in ("end", "past"):
            self.told.append(why)
