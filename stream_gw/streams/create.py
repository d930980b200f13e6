"""Creates streams: makes the stream's record, places its request, and opens it for the caller."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stream_fabric.errors import (
    FabricUnavailable,
    StreamCancelled,
    StreamGwError,
)
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.placement import TIERS, Placed, Queued, Refused
from stream_fabric.pool.prefix import block_hashes
from stream_fabric.pool.records import Work
from stream_fabric.recovery.failover import placement_record, wait_s
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import ErrorInfo, Usage
from stream_fabric.stream.ids import StreamId, TenantId, UserId, created_ms, new_stream_id
from stream_fabric.stream.log import CreateCode
from stream_gw.delivery.local_stream import Subscription
from stream_gw.dialects.context import check_context
from stream_gw.dialects.facts import StreamFacts
from stream_gw.privacy.kv_isolation import cache_salt, prefix_scope
from stream_gw.privacy.prompt_moderation import moderate_prompt
from stream_gw.routing.place_request import Outcome, place, refusal
from stream_gw.streams.admission import Admission, Headers, Terms
from stream_gw.streams.budgets.claims import session_key
from stream_gw.streams.budgets.reservation import Reservation
from stream_gw.streams.chats.turn import bindings
from stream_gw.streams.checks.caller import permitted
from stream_gw.streams.checks.early import terms_of
from stream_gw.streams.checks.media import check_media
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.follow import StreamReads
from stream_gw.streams.idempotency import IdempotencyKeys
from stream_gw.streams.ladder import Ladder, ladder_of
from stream_gw.streams.new_work import make_work, new_id
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.placements import PlacementRecords
from stream_gw.streams.readiness import Readiness

_RETRY_S = 0.05


@dataclass(frozen=True)
class _NewStream:
    """A stream on its way into the fabric."""

    call: CreateCall
    work: Work
    cell: str
    user: str | None
    created_ms: int
    subscription: Subscription
    ladder: Ladder | None
    reservation: Reservation

    @property
    def id(self) -> StreamId:
        return self.work.request.stream


class StreamCreation:
    """Creates streams for all transports of a gateway."""

    def __init__(
        self,
        parts: GatewayParts,
        reads: StreamReads,
        readiness: Readiness,
        placements: PlacementRecords,
        admission: Admission,
    ) -> None:
        self._parts = parts
        self._admission = admission
        self._keys = IdempotencyKeys(parts, reads)
        self._readiness = readiness
        self._placements = placements

    async def create(self, call: CreateCall) -> OpenedStream | None:
        """Make a stream and place it on a replica, or attach to the stream that the key is bound to.

        Returns None when the caller attached to a stream that has ended at the cursor. Raises StreamGwError.
        """
        trace = call.trace
        trace.tenant, trace.dialect = call.who.tenant, call.request.own_dialect
        try:
            opened = await self._create(call)
        except StreamGwError as error:
            if trace.role == "refused" and not trace.has_ended:  # the subscription may have finished it
                if error.http_status >= 500 and not trace.pool:  # it counts against the pool that should have served it
                    directory, model = self._parts.directory, call.request.model
                    trace.pool = directory.homes.find(model) or directory.seen_models.get(model, "")
                trace.finish("refused", error=error)
            raise
        if opened is not None and opened.facts.model != call.request.model:
            served = (b"x-served-model", opened.facts.model.encode())
            opened = replace(opened, headers=(*opened.headers, served))
        return opened

    async def prepare(self, call: CreateCall) -> StreamFacts:
        """Check a request and name its stream without making it: nothing is placed, and no limit is charged.

        Raises StreamGwError, like ``create``.
        """
        call, user, *_ = await _checked(self._parts, self._readiness, call)
        who, records = call.who, self._parts.authenticator.keys
        now_ms = self._parts.clock.now_us() // 1000
        stream = new_stream_id(now_ms, self._parts.random.token_bytes(10))
        facts = StreamFacts.of(stream, now_ms // 1000, call.request)
        call.check_facts(facts)
        subjects = records.subjects(who, user, call.request.model)
        async with self._admission.prepared(who.tenant, stream, subjects):
            await moderate_prompt(self._parts.moderator, records.plan(who.tenant), call.request.body)
            if call.on_named is not None:
                await call.on_named.named(facts, user)
        return facts

    async def _create(self, call: CreateCall) -> OpenedStream | None:
        call, user, regions, pool, media = await _checked(self._parts, self._readiness, call)
        who, trace, parts, request = call.who, call.trace, self._parts, call.request
        records = parts.authenticator.keys
        salt = cache_salt(who.tenant if records.plan(who.tenant).kv_isolation else None, request.cache_salt)
        scope = prefix_scope(request.model, salt)
        hashes = await off_loop(request.prompt_bytes, lambda: block_hashes(scope, request.prompt))
        trace.session = session_key(who.tenant, request.affinity)
        cell = parts.directory.choose_cell(pool, request.model, trace.session, hashes, regions)
        now_ms = parts.clock.now_us() // 1000
        stream = claimed = new_id(parts, cell, now_ms)
        if call.key is not None:
            stream, found, attached = await self._keys.bind(call, stream)
            if found:
                return attached
        facts = StreamFacts.of(stream, created_ms(stream) // 1000, request)
        trace.facts, trace.user, trace.pool, trace.tier = facts, user, pool, request.tier
        trace.prices = records.prices(who.tenant, request.model, request.tier)
        epoch = Epoch(1, parts.random.token_hex(4))
        is_new = stream == claimed
        async with self._keys.freeing(call, stream, is_new=is_new):
            call.check_facts(facts)  # before anything else is kept
        terms = terms_of(parts, who, request, user, now_ms)
        work = make_work(parts, call, epoch, facts, cell, now_ms, hashes, salt=salt, reserved=terms.any, media=media)
        headers: Headers = ()
        trace.placing = trace.placing or parts.clock.monotonic_us()
        if terms.any:
            async with self._keys.freeing(call, stream, is_new=is_new):
                headers, grant = await self._admit(call, work, terms, is_new=is_new)
            work = msgspec.structs.replace(work, grant=grant)
        ladder = ladder_of(parts, call, work, user, salt)
        # Moderation may take longer than others wait for the key: they may then have created the stream
        waits = call.key is not None and records.plan(who.tenant).moderation != "off"
        replaces_in = pool if waits or not is_new else None
        reservation = self._reservation(work, is_new=is_new)
        try:
            async with self._keys.freeing(call, stream, is_new=is_new):
                # After the limits: a tenant that has reached them must not load the moderation endpoint
                await moderate_prompt(parts.moderator, records.plan(who.tenant), request.body)
                if call.on_named is not None:
                    await call.on_named.named(facts, user)
                parts.hub.check_capacity(stream)  # after all that takes time: the rest of the create cannot refuse it
            return await self._make_stream(call, work, cell, user, replaces_in, headers, ladder, reservation)
        except BaseException:
            if call.on_named is not None and is_new:
                parts.hub.spawn(call.on_named.withdrawn(facts))
            reservation.give_back()
            raise

    def _reservation(self, work: Work, *, is_new: bool) -> Reservation:
        """Return the reservation of a request."""
        if not work.reserved or not is_new:  # another's stream of this id may run, and its end settles it
            return Reservation(None)
        tenant, stream = work.tenant, work.request.stream
        return Reservation(lambda: self._parts.hub.spawn(self._admission.withdraw(tenant, stream)))

    async def _make_stream(
        self,
        call: CreateCall,
        work: Work,
        cell: str,
        user: str | None,
        replaces_in: str | None,
        headers: Headers,
        ladder: Ladder | None,
        reservation: Reservation,
    ) -> OpenedStream | None:
        """Create the stream and place it. ``replaces_in``: the pool, if it replaces a stream that may exist."""
        who, request, trace, parts = call.who, call.request, call.trace, self._parts
        stream, epoch, now_ms = work.request.stream, work.parsed_epoch(), parts.clock.now_us() // 1000
        if replaces_in is not None:
            if await self._keys.adopt(call, stream, replaces_in):
                return await self._keys.open(call, stream)
            # Others may have waited for the same key: the first to create its stream places it, the rest follow
            code = await self._create_record(who.tenant, work)
            if code is CreateCode.TAKEN:
                return await self._keys.open(call, stream)
        subscription = parts.hub.expect(stream, who.tenant, epoch, trace)
        if parts.contents is not None:
            parts.contents.receive_prompt(who.tenant, stream, request.body)
        try:
            new = _NewStream(call, work, cell, user, now_ms, subscription, ladder, reservation)
            queued = await self._create_and_place(new)
        except BaseException as error:
            trace.role = "refused"
            if isinstance(error, StreamGwError):
                subscription.finish_trace("refused", error=error)
            subscription.close()
            raise
        assert trace.facts is not None
        return OpenedStream(
            stream, str(epoch), trace.facts, Cursor(epoch.n, 0), (), subscription.attach,
            attached=False, queued=queued, headers=headers,
        )  # fmt: skip

    def _create_record(self, tenant: TenantId, work: Work) -> Coroutine[Any, Any, CreateCode]:
        """Create the stream's record with this gateway as first watcher."""
        return self._parts.log.create(
            work.request.stream,
            work.parsed_epoch(),
            tenant,
            work.facts,
            self._parts.name,
            work.request.model,
            reserved=work.reserved,
            retention_s=work.retention_s,
        )

    # --- limits --------------------------------------------------------------------------------------------

    async def _admit(self, call: CreateCall, work: Work, terms: Terms, *, is_new: bool) -> tuple[Headers, int]:
        """Check the request against the limits and budgets of its tenant. Raises RateLimited.

        ``is_new``: no other request may have reserved for this stream.
        """
        request = call.request
        output = work.output_tokens if request.max_tokens is None else work.output_limit
        fail_open = self._parts.settings.limits_fail_open
        try:
            return await self._admission.admit(
                work, terms, work.prompt_tokens + output, dialect=request.own_dialect, fail_open=fail_open
            )
        except asyncio.CancelledError:
            if is_new:  # the account may have reserved, and nobody has heard of it
                self._parts.hub.spawn(self._admission.withdraw(work.tenant, work.request.stream))
            raise

    # --- a new stream --------------------------------------------------------------------------------------

    async def _create_and_place(self, new: _NewStream) -> bool:
        """Create the stream and place its request at the same time. Return whether it waits in the queue.

        Raises StreamGwError; the stream is then withdrawn, and its key is free once that is certain.
        """
        parts, work, trace = self._parts, new.work, new.call.trace
        tenant, model = new.call.who.tenant, work.request.model
        hashes = array("I", work.prefix)
        candidates = parts.directory.candidates(new.cell, model, hashes, work.regions)
        wait_max_s = wait_s(work, parts.clock.now_us(), self._wait_s_max(new.cell))
        # Their slots differ, so they travel side by side. A half-done pair heals: an agent drops a request whose
        # stream does not exist, and the watchdog ends a stream that no replica claims.
        creating: Awaitable[CreateCode] = self._create_stream(new.call, work)
        if new.ladder is None:
            jitter = parts.random.random()
            placing = place(
                parts.pools, parts.directory, work, new.cell, candidates, hashes, wait_max_s, jitter,
                retried=new.call.retried,
            )  # fmt: skip
        else:
            creating = asyncio.ensure_future(creating)
            placing = new.ladder.place(creating, new.cell, candidates, hashes, wait_max_s)
        calls: list[Awaitable[Any]] = [creating, placing]
        if new.user is not None:
            calls.append(parts.index.add_live(tenant, UserId(new.user), new.id, new.created_ms))
        if new.call.chat is not None:
            calls += bindings(parts, new.call.who, new.user, new.call.chat, new.id)
        created, outcome, *_ = await self._all_or_withdraw(new, calls)
        if created is CreateCode.CANCELLED:
            raise StreamCancelled("the stream was cancelled before it began")
        placed = outcome.placed
        if isinstance(placed, Refused):
            trace.overflow = ("", placed.backlog_s)
            plan = parts.directory.plans.get(pool_of(outcome.cell))
            recovery_s = plan.recovery_s(TIERS[work.rank], parts.clock.now_us()) if plan is not None else 0.0
            error = refusal(work, placed, recovery_s, parts.random.random())
            # A caller that retries at once must find its key free
            await asyncio.shield(self._withdraw(new, error))
            raise error
        self._note_placed(new, placed, outcome, hashes)
        return isinstance(placed, Queued)

    async def _create_stream(self, call: CreateCall, work: Work) -> CreateCode:
        """Create the stream. It may end before the reply of its placement is read: its reader has created it then."""
        code = await self._create_record(work.tenant, work)
        if code is not CreateCode.CANCELLED:
            call.trace.role = "created"
        return code

    async def _all_or_withdraw(self, new: _NewStream, calls: Sequence[Awaitable[Any]]) -> list[Any]:
        """Return the results of all calls.

        If one call fails or the caller leaves, the others end before the stream is withdrawn: a create that came after
        the withdrawal would live on.
        """
        ended = asyncio.gather(*calls, return_exceptions=True)
        try:
            results = await asyncio.shield(ended)
        except asyncio.CancelledError:
            left = FabricUnavailable("the caller left before its request was placed")
            self._withdraw(new, left, ended)
            raise
        for result in results:
            if isinstance(result, BaseException):
                error = result if isinstance(result, StreamGwError) else StreamGwError("the request was not placed")
                self._withdraw(new, error)
                raise result
        return results

    def _withdraw(
        self, new: _NewStream, error: StreamGwError, after: asyncio.Future[Any] | None = None
    ) -> asyncio.Task[None]:
        """End the stream in the background, once ``after`` is done. Its request then counts as never sent."""
        return self._parts.hub.spawn(self._end_withdrawn(new, error, after, new.reservation.handed_over()))

    async def _end_withdrawn(
        self, new: _NewStream, error: StreamGwError, after: asyncio.Future[Any] | None, reservation: Reservation
    ) -> None:
        """End the stream, then free its key and its reservation.

        What a replica has made of it meanwhile counts nowhere. If the stream cannot be ended, or has ended before with
        an answer, its end settles the reservation. Its key stays bound: a retry finds the stream instead of generating
        twice.
        """
        if after is not None:
            await after
        new.call.trace.role = "refused"  # before its reader sees the fence
        log, nonce = self._parts.log, self._parts.random.token_hex(4)
        if not await log.fence(new.id, None, nonce, ErrorInfo.of(error), withdraws=True):
            _, used = await log.settled(new.id) or ("", Usage())
            if used != Usage():
                return
        reservation.give_back()
        await self._keys.release(new.call, new.id)

    def _note_placed(self, new: _NewStream, placed: Placed | Queued, outcome: Outcome, hashes: Sequence[int]) -> None:
        """Record the placement in the trace, the log, and the directory or queue positions."""
        parts, elsewhere, work = self._parts, outcome.elsewhere, outcome.work or new.work
        new.call.trace.receive_placed(placed, elsewhere)
        if outcome.work is not None:
            new.call.trace.prices, hashes = work.prices, array("I", work.prefix)
        self._placements.add(new.id, placement_record(work, placed, parts.clock.now_us(), elsewhere))
        if isinstance(placed, Placed):
            parts.directory.sent(placed.replica, hashes)
        else:
            parts.queue_positions.add(outcome.cell, new.subscription)

    def _wait_s_max(self, pool: str) -> float:
        """Maximum seconds in the queue; longer while the pool has a cold start."""
        warming = self._parts.directory.warming(pool)
        return max(self._parts.settings.queue_wait_s, warming.patience_s if warming else 0.0)


async def _checked(
    parts: GatewayParts, readiness: Readiness, call: CreateCall
) -> tuple[CreateCall, str | None, tuple[str, ...], str, bool]:
    """Check the request, and that its caller may make it.

    Returns the call with the tier that it gets, its user, its regions, its pool, and False if it holds no media.
    """
    request, user, regions, pool = await permitted(parts, readiness, call.who, call.request)
    call.trace.regions = regions
    size = memoryview(request.body).nbytes
    media = await off_loop(size, lambda: check_media(request.body, parts.settings.media_domains))
    if context := parts.directory.context(pool, request.model, regions):
        await off_loop(request.prompt_bytes, lambda: check_context(request, context))
    return call if request is call.request else replace(call, request=request), user, regions, pool, media
