"""Idempotency keys: a repeated request attaches to the stream that the first one created."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from stream_fabric.errors import (
    BadRequest,
    IdempotencyMismatch,
    NotFound,
    StreamCancelled,
    StreamGwError,
    StreamLost,
)
from stream_fabric.limits import IDEMPOTENCY_KEY_CHARS_MAX, RECONNECT_S_MAX
from stream_fabric.stream.cursor import BEGINNING
from stream_fabric.stream.frames import End, decode
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import CreateCode
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.follow import StreamReads
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.parts import GatewayParts

_RETRY_S = 0.05


def fingerprint(body: msgspec.Raw) -> str:
    """Return a digest of a body that is independent of key order and whitespace."""
    canonical = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    return hashlib.sha256(canonical).hexdigest()


class IdempotencyKeys:
    """Binds keys to streams, and opens the streams that keys are bound to."""

    def __init__(self, parts: GatewayParts, reads: StreamReads) -> None:
        self._parts = parts
        self._reads = reads

    async def claim(self, call: CreateCall, stream: StreamId) -> StreamId:
        """Bind the key to the stream, unless it is bound. Returns the stream that the key is bound to."""
        key, request = call.scoped_key, call.request
        asked = request.body if request.asked is None else request.asked
        if not 0 < len(call.key or "") <= IDEMPOTENCY_KEY_CHARS_MAX:
            raise BadRequest(f"an Idempotency-Key has 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters", param="key")
        digest = await off_loop(len(bytes(asked)), lambda: fingerprint(asked))
        if self._parts.authenticator.keys.plan(call.who.tenant).retention_s == 0:
            # The binding outlives the stream: without the caller's key it must not tell which body it was
            digest = hashlib.sha256(f"{key}\0{digest}".encode()).hexdigest()[: len(digest)]
        print_ = f"{digest}:{int(request.stream)}"
        bound, bound_print = await self._parts.index.claim(call.who.tenant, key, stream, print_)
        if bound_print != print_:
            raise IdempotencyMismatch("this Idempotency-Key was used with another body; use a new key")
        return bound

    async def bind(self, call: CreateCall, stream: StreamId) -> tuple[StreamId, bool, OpenedStream | None]:
        """Bind the key to the stream, or open the stream that it is bound to.

        Returns the stream to create and False; it is another stream than given if the request that bound the key has
        died before it created that stream. Or returns True and what was opened.
        """
        now, held, deadline = asyncio.get_running_loop().time, stream, 0.0
        while (bound := await self.claim(call, stream)) != stream:  # again: its holder may have been refused meanwhile
            if bound != held:
                if await self._may_succeed_now(call, bound):
                    await self.release(call, bound)
                    continue
                held, deadline = bound, now() + RECONNECT_S_MAX + self._checking_s(call)
            elif now() >= deadline:
                if await self._parts.log.settled(bound) is not None:  # it has ended, and is deleted
                    return bound, True, await self.open(call, bound)
                return bound, False, None
            found, opened = await self._attach(call, bound)
            if found:
                return bound, True, opened
        return bound, False, None

    async def _may_succeed_now(self, call: CreateCall, stream: StreamId) -> bool:
        """Whether the key's stream failed with a retriable error, and the caller asks for the request, not for its end.

        Such an error tells the client to send the request again, and SDKs do so with the same key.
        """
        ended = await self._parts.log.settled(stream) if call.after is None else None
        if ended is None or ended[0] != "failed":
            return False
        try:
            _, terminal = await self._reads.end_of(call.who, stream)
        except StreamLost:
            return True
        except NotFound:  # deleted, as the plan wants
            return False
        end = decode(terminal)
        return isinstance(end, End) and end.error is not None and end.error.retriable

    def _checking_s(self, call: CreateCall) -> float:
        """Seconds that the holder of the key may spend on moderation before it creates its stream."""
        parts = self._parts
        if parts.moderator is None or parts.authenticator.keys.plan(call.who.tenant).moderation == "off":
            return 0.0
        return parts.moderator.seconds_max(len(bytes(call.request.body)))

    async def _attach(self, call: CreateCall, stream: StreamId) -> tuple[bool, OpenedStream | None]:
        """Open the stream that the key is bound to. Returns (False, None) when nobody created it within a moment."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECONNECT_S_MAX
        while True:
            try:
                return True, await self.open(call, stream)
            except NotFound:
                if loop.time() > deadline:
                    return False, None
                await asyncio.sleep(_RETRY_S)

    async def adopt(self, call: CreateCall, stream: StreamId, pool: str) -> bool:
        """Create the stream for a request that a dead gateway placed, in the epoch that its replica appends in.

        Returns False when no pool holds the request.
        """
        parts = self._parts
        smaller = parts.authenticator.keys.plan(call.who.tenant).fallbacks.get(call.request.model, ())
        pools = (pool, *parts.directory.hosts(pool), *filter(None, map(parts.directory.homes.find, smaller)))
        for cell in [cell for name in pools for cell in parts.directory.cells(name)]:
            try:
                work = await parts.pools.work(cell, stream)
            except msgspec.MsgspecError:  # written by another version: this gateway cannot know its epoch
                continue
            if work is not None:
                code = await parts.log.create(
                    stream,
                    work.parsed_epoch(),
                    call.who.tenant,
                    work.facts,
                    parts.name,
                    work.request.model,
                    reserved=work.reserved,
                    retention_s=work.retention_s,
                )
                if code is CreateCode.CANCELLED:
                    raise StreamCancelled("the stream was cancelled before it began")
                return True
        return False

    async def open(self, call: CreateCall, stream: StreamId) -> OpenedStream | None:
        """Open the existing stream that the key is bound to, after checking that the caller can read it."""
        opened = await self._reads.open(
            call.who, stream, call.after or BEGINNING, call.trace, exact=True, dialect=call.dialect
        )
        if opened is not None:
            call.check_facts(opened.facts)
            if call.trace.role == "refused":
                call.trace.role = "attached"
        return opened

    async def release(self, call: CreateCall, stream: StreamId) -> None:
        """Unbind the key of a request that created no stream, so that a retry at once finds it free."""
        if call.key is not None:
            await self._parts.index.release(call.who.tenant, call.scoped_key, stream)

    @asynccontextmanager
    async def freeing(self, call: CreateCall, stream: StreamId, *, is_new: bool) -> AsyncIterator[None]:
        """Release the key of a request that ends here. ``is_new``: no other request may create this stream."""
        try:
            yield
        except StreamGwError:
            await self.release(call, stream)
            raise
        except asyncio.CancelledError:
            if is_new:
                self._parts.hub.spawn(self.release(call, stream))
            raise
