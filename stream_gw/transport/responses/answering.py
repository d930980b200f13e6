"""Makes the response of one request on a Responses socket, and remembers it for the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from stream_fabric.errors import StreamGwError, StreamLost
from stream_fabric.limits import RESPONSE_HISTORY_BYTES_MAX
from stream_fabric.stream.frames import End, Usage, encode
from stream_gw.auth import Principal
from stream_gw.dialects.responses.client_events import CreateEvent, read_create
from stream_gw.dialects.responses.encoder import ResponsesEncoder
from stream_gw.dialects.responses.requests import Asked
from stream_gw.dialects.responses.whole import encoder_of
from stream_gw.observe.trace import ReaderTrace
from stream_gw.responses import History, HistoryTooLong, PreviousResponseRunning, pack, unpack_lists
from stream_gw.streams.context.asides import Asides
from stream_gw.streams.context.fit import fitted
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.stored_responses import Prepared, StoredRequest, check_early, failures_traced, with_history
from stream_gw.transport.responses.recent import Recent
from stream_gw.transport.responses.socket import ResponsesSocket
from stream_gw.transport.responses.steering import SocketSteering, with_waiting
from stream_gw.transport.responses.turn import Turn


class _Output(msgspec.Struct):
    """The part of a response that the next one builds on."""

    output: list[dict[str, Any]]


class TurnAnswers:
    """Answers the turns of one socket. ``dialect``: that of its profile."""

    __slots__ = ("_dialect", "_gateway", "_socket", "_steering")

    def __init__(self, socket: ResponsesSocket, gateway: Gateway, steering: SocketSteering, dialect: str) -> None:
        self._socket = socket
        self._gateway = gateway
        self._steering = steering
        self._dialect = dialect

    async def answer(self, who: Principal, turn: Turn) -> StreamGwError | None:
        """Make the response and deliver it to its end; return the error with which the request was refused."""
        refused: StreamGwError | None = None
        lineage: Recent | None = None
        try:
            try:
                lineage = await self._begin(who, turn)
                await turn.done
                if turn.steers:
                    turn.required = self._steering.required(turn)
            except StreamGwError as error:
                refused = error
                turn.refuse(error)
            await self._settle(turn, lineage)
        finally:  # also after an error that nobody expects: forks of the response wait for it
            turn.encoder = None
            turn.settled.set_result(None)
        return refused

    async def _begin(self, who: Principal, turn: Turn) -> Recent | None:
        """Create the stream and begin its delivery. Returns what to remember of the request; None: nothing."""
        message = turn.message
        try:
            event = await off_loop(len(message), lambda: read_create(message, self._dialect))
            turn.parent = event.asked.previous_response_id
            if waiting := self._steering.waiting(turn.parent, turn.lane):
                items = with_waiting(waiting, event.asked.items)
                event = event._replace(asked=msgspec.structs.replace(event.asked, items=items))
            if event.generate and event.asked.conversation is None:
                turn.settings = inherited(event.asked)
            with self._gateway.bodies.adding(who.tenant) as count:
                opened, lineage = await self._create(who, turn, event, count)
            self._steering.commit(turn.parent, turn.lane)
        finally:
            turn.message = b""
            self._gateway.bodies.remove(who.tenant, len(message))
        if event.generate:
            if opened is None:
                raise StreamLost("the stream of this idempotency_key has ended without an event; use a new key")
            await self._deliver(turn, opened)
        return lineage

    async def _create(
        self, who: Principal, turn: Turn, event: CreateEvent, count: Callable[[int], None]
    ) -> tuple[OpenedStream | None, Recent | None]:
        """Create the stream, or answer the request that generates nothing. Returns also what to remember."""

        def make_trace() -> ReaderTrace:
            return ReaderTrace(self._gateway.parts.tracer, self._socket.name, "ws", event.traceparent)

        with failures_traced(who, self._dialect, make_trace):
            await check_early(self._gateway, who, event.asked, event.key, prepares=not event.generate)
            prepared, lineage = await self._history(who, event.asked, count)
        asides = Asides(self._gateway, who, self._socket.name, turn.outlet_of)
        request = await fitted(self._gateway, who, prepared, self._dialect, asides)
        store, asked, last_seq = self._gateway.parts.responses, prepared.asked, prepared.history.last_seq
        stored = None if store is None or not asked.store else StoredRequest(store, who, asked, last_seq)
        turn.trace = trace = make_trace()
        # Readers leave with their socket, so streams that they can read again get the longer grace
        kept = asked.store
        call = CreateCall(who, request, trace, key=event.key, kept=kept, dialect=self._dialect, on_named=stored)
        if event.generate:
            return await self._gateway.streams.create(call), lineage
        await self._prepare(turn, call, event)
        return None, lineage

    async def _deliver(self, turn: Turn, opened: OpenedStream) -> None:
        """Deliver a stream to its turn. Raises StreamGwError."""
        socket, encoder = self._socket, await opened.encoder(self._dialect)
        assert isinstance(encoder, ResponsesEncoder)
        is_open = turn.is_open
        turn.full = socket.full
        turn.begin(opened.id, encoder)
        subscription = opened.subscribe(turn)
        if not is_open:  # the socket has gone while the stream was being opened
            subscription.close(socket.read_end)
        elif turn.is_open:  # else a short stream has ended already
            turn.handle = subscription

    async def _prepare(self, turn: Turn, call: CreateCall, event: CreateEvent) -> None:
        """Answer a request that generates nothing. Its response can be continued, and is stored if it asks for it."""
        facts = await self._gateway.streams.prepare(call)
        encoder = encoder_of(facts, self._dialect)
        bodies = [*encoder.begin(), *encoder.chunks([encode(End("completed", Usage()))], 1)]
        store = self._gateway.parts.responses
        if store is not None and store.stores(call.who.tenant, store=event.asked.store):
            await store.completed(call.who.tenant, facts.stream, msgspec.json.decode(encoder.response()))
        turn.conclude(facts.stream, encoder, bodies)

    # --- what the next response builds on --------------------------------------------------------------------

    async def _history(
        self, who: Principal, asked: Asked, count: Callable[[int], None]
    ) -> tuple[Prepared, Recent | None]:
        """Return the request with what it builds on, and what to remember.

        Raises StreamGwError.
        """
        store, parent = self._gateway.parts.responses, asked.previous_response_id
        recent = None if parent is None else await self._recent(parent)
        if recent is not None:
            count(recent.size)
        known = None if recent is None else History(await unpack_lists(recent.pieces), size=recent.size)
        prepared = await with_history(store, who, asked, count, known)
        is_stored = store is not None and store.stores(who.tenant, store=asked.store)
        if is_stored and recent is None:  # the store has the whole chain
            return prepared, None
        before = (recent.pieces, recent.size) if recent is not None else ((), 0)
        own = prepared.asked.items  # compactions as they came: they may stand for the pieces before
        packed, size = await pack(own if recent is not None else [*prepared.history, *own])
        return prepared, Recent("", (*before[0], packed), before[1] + size)

    async def _recent(self, parent: str) -> Recent | None:
        """Return a response that this socket remembers. Raises PreviousResponseRunning or HistoryTooLong."""
        running = self._socket.running(parent)
        if running is not None:
            if running.is_open:
                raise PreviousResponseRunning(parent)
            await running.settled
        recent = self._socket.recent.find(parent)
        if recent is not None and recent.size > RESPONSE_HISTORY_BYTES_MAX:
            raise HistoryTooLong(
                f"what the response builds on exceeds {RESPONSE_HISTORY_BYTES_MAX} bytes; compact the conversation "
                "with POST /v1/responses/compact",
                param="previous_response_id",
            )
        return recent

    async def _settle(self, turn: Turn, lineage: Recent | None) -> None:
        """Remember the response of a turn that has ended, or forget what its failure makes void."""
        socket = self._socket
        if turn.failed:
            if turn.parent is not None and not turn.carries:  # else the client may still continue it
                socket.recent.evict(turn.parent, turn.lane, everywhere=socket.is_open_profile)
        elif lineage is None or turn.encoder is None:
            socket.recent.forget(turn.lane)
        elif socket.is_live:
            whole = turn.encoder.response()
            output = await off_loop(len(whole), lambda: msgspec.json.decode(whole, type=_Output).output)
            packed, size = await pack(output)
            made = Recent(turn.response, (*lineage.pieces, packed), lineage.size + size)
            socket.recent.keep(turn.lane, made)


def inherited(asked: Asked) -> bytes:
    """Encode what a successor inherits of a request: everything but its input and its parent."""
    fields = {name: raw for name, raw in asked.fields.items() if name not in ("input", "previous_response_id")}
    return msgspec.json.encode(fields)
