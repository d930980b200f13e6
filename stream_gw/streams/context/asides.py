"""Requests of the gateway's own for a caller's: a count of tokens, a summary. Each is a stream like any other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stream_fabric.errors import StreamCancelled, StreamFailed, StreamLost, Unsupported
from stream_gw.auth import Principal
from stream_gw.delivery.collected import CollectingOutlet
from stream_gw.dialects.requests import CreateRequest, read_fields
from stream_gw.dialects.whole import count_request
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream

OutletOf = Callable[[OpenedStream], CollectingOutlet]
"""Makes the outlet of an aside, which gives up when the caller leaves: nobody else reads an aside."""


class _Counted(msgspec.Struct):
    input_tokens: int


class Asides:
    """Asks for one caller, while its own request waits."""

    def __init__(self, gateway: Gateway, who: Principal, trace: ReaderTrace | str, outlet_of: OutletOf) -> None:
        """``trace``: that of the only aside, or the request's id, from which each gets a trace of its own."""
        self._gateway = gateway
        self._who = who
        self._trace = trace
        self._outlet_of = outlet_of

    async def ask(self, request: CreateRequest) -> tuple[OpenedStream, bytes]:
        """Create a stream and return it with its whole answer. Raises StreamGwError."""
        trace = self._trace
        if isinstance(trace, str):
            trace = ReaderTrace(self._gateway.parts.tracer, trace, "whole")
        opened = await self._gateway.streams.create(CreateCall(self._who, request, trace))
        if opened is None:
            raise StreamLost("the stream of a request of the gateway has ended before it was read; retry")
        outlet = self._outlet_of(opened)
        subscription = opened.subscribe(outlet)
        try:
            body, error, *_ = await outlet.done
        finally:
            subscription.close()
        if error is not None:
            raise error
        if body is None:
            raise StreamCancelled("the client left before its request was placed")
        return opened, body

    async def count(self, request: CreateRequest) -> int | None:
        """Return the tokens of a chat's prompt as the engine counts them; None: the engine cannot count."""
        body = bytes(request.body)
        counting = await off_loop(len(body), lambda: count_request(read_fields(body)))
        counting = msgspec.structs.replace(
            counting, user=request.user, tier=request.tier, deadline_s=request.deadline_s, fallback=False
        )
        try:
            _, answer = await self.ask(counting)
        except StreamFailed as error:
            if error.code == Unsupported.code:
                return None
            raise
        return msgspec.json.decode(answer, type=_Counted).input_tokens
