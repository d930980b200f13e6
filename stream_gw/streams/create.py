"""Creates streams: makes the stream's record, places its request, and opens it for the caller."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from stream_fabric.accounts.account import Subject
from stream_fabric.accounts.records import NO_BUDGETS
from stream_fabric.errors import (
    BadRequest,
    Draining,
    FabricUnavailable,
    StreamCancelled,
    StreamGwError,
)
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.home import home_partition
from stream_fabric.pool.placement import TIERS, Placed, Queued, Refused
from stream_fabric.pool.plan import route_key
from stream_fabric.pool.prefix import block_hashes
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.recovery.failover import placement_record, wait_s
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import StreamId, TenantId, UserId, created_ms, moved_to, new_stream_id
from stream_fabric.stream.log import CreateCode
from stream_gw.auth import Principal
from stream_gw.delivery.local_stream import Subscription
from stream_gw.dialects.context import check_context
from stream_gw.dialects.facts import StreamFacts
from stream_gw.routing.place_request import Outcome, place, refusal
from stream_gw.streams.admission import Admission, Headers
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.follow import StreamReads
from stream_gw.streams.idempotency import IdempotencyKeys
from stream_gw.streams.kv_isolation import cache_salt, prefix_scope, salted_body
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream, StreamMeta, meta_encoder
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.placements import PlacementRecords
from stream_gw.streams.readiness import Readiness

_NO_LIMIT = 1 << 31
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
        trace.tenant = call.who.tenant
        try:
            return await self._create(call)
        except StreamGwError as error:
            if trace.role == "refused" and not trace.has_ended:  # the subscription may have finished it
                trace.finish("refused", error=error)
            raise

    async def _create(self, call: CreateCall) -> OpenedStream | None:
        who, trace, parts = call.who, call.trace, self._parts
        if self._readiness.draining:
            raise Draining("this gateway is shutting down; retry, another gateway will answer", retry_after_s=1)
        who.require("create")
        ended = parts.authenticator.reason_to_end(who, parts.unix_s())
        if ended is not None:  # revoked while the body came in
            raise ended
        call, records = self._lower_tier(call), parts.authenticator.keys
        request = call.request
        user = _stream_user(who, request.user)
        parts.authenticator.check_user(who.tenant, user)
        # The plan of now: a socket's caller was authenticated long ago
        pool = await parts.directory.pool_of(request.model, records.allowed_models(who.tenant, who.models))
        if context := parts.directory.context(pool, request.model):
            await off_loop(request.prompt_bytes, lambda: check_context(request, context))
        salt = cache_salt(who.tenant if records.plan(who.tenant).kv_isolation else None, request.cache_salt)
        scope = prefix_scope(request.model, salt)
        hashes = await off_loop(request.prompt_bytes, lambda: block_hashes(scope, request.prompt))
        trace.session = _session_key(who.tenant, request.session_id)
        cell = parts.directory.choose_cell(pool, request.model, trace.session, hashes)
        now_ms = parts.clock.now_us() // 1000
        stream = claimed = self._new_id(cell, now_ms)
        if call.key is not None:
            bound = await self._keys.claim(call, stream)
            if bound != stream:
                found, attached = await self._keys.attach(call, bound)
                if found:
                    return attached
                stream = bound  # the request that claimed the key died before it created the stream: replace it
        facts = StreamFacts.of(stream, created_ms(stream) // 1000, request)
        trace.facts, trace.user, trace.pool, trace.tier = facts, user, pool, request.tier
        trace.prices = records.prices(who.tenant, request.model)
        meta = meta_encoder.encode(StreamMeta(facts, user))
        epoch = Epoch(1, parts.random.token_hex(4))
        call.check_facts(facts)  # before anything is kept
        subjects = records.subjects(who, user, request.model)
        work = self._work(call, stream, epoch, meta, cell, now_ms, hashes, salt=salt, reserved=bool(subjects))
        headers = await self._admit(call, work, subjects) if subjects else ()
        try:
            return await self._make_stream(call, work, cell, user, pool if stream != claimed else None, headers)
        except BaseException:
            if work.reserved and stream == claimed:  # else a stream of this id may run, and its end settles it
                parts.hub.spawn(self._admission.withdraw(who.tenant, stream))
            raise

    async def _make_stream(
        self, call: CreateCall, work: Work, cell: str, user: str | None, replaces_in: str | None, headers: Headers
    ) -> OpenedStream | None:
        """Create the stream and place it. ``replaces_in``: the pool, if it replaces a stream that may exist."""
        who, request, trace, parts = call.who, call.request, call.trace, self._parts
        stream, epoch, now_ms = work.request.stream, work.parsed_epoch(), parts.clock.now_us() // 1000
        if replaces_in is not None:
            if await self._keys.adopt(call, stream, replaces_in):
                return await self._keys.open(call, stream)
            # Others may have waited for the same key: the first to create its stream places it, the rest follow
            code = await parts.log.create(
                stream, epoch, who.tenant, work.facts, parts.name, request.model, reserved=work.reserved
            )
            if code is CreateCode.TAKEN:
                return await self._keys.open(call, stream)
        subscription = parts.hub.expect(stream, who.tenant, epoch, trace)
        if parts.contents is not None:
            parts.contents.receive_prompt(who.tenant, stream, request.body)
        try:
            await self._create_and_place(_NewStream(call, work, cell, user, now_ms, subscription))
        except BaseException as error:
            trace.role = "refused"
            if isinstance(error, StreamGwError):
                subscription.finish_trace("refused", error=error)
            subscription.close()
            raise
        assert trace.facts is not None
        return OpenedStream(
            stream,
            str(epoch),
            trace.facts,
            Cursor(epoch.n, 0),
            (),
            subscription.attach,
            attached=False,
            headers=headers,
        )

    # --- limits --------------------------------------------------------------------------------------------

    def _lower_tier(self, call: CreateCall) -> CreateCall:
        """Lower the request's tier to the highest one of the tenant's plan."""
        highest = TIERS.index(self._parts.authenticator.keys.plan(call.who.tenant).tier)
        if call.request.tier >= highest:
            return call
        return replace(call, request=msgspec.structs.replace(call.request, tier=highest))

    async def _admit(self, call: CreateCall, work: Work, subjects: Sequence[Subject]) -> Headers:
        """Check the request against the limits of its tenant. Raises RateLimited; its key is then free."""
        request, tenant, stream = call.request, call.who.tenant, work.request.stream
        output = work.output_tokens if request.max_tokens is None else work.output_limit
        call.trace.placing = self._parts.clock.monotonic_us()
        plan = self._parts.authenticator.keys.plan(tenant)
        fail_open = self._parts.settings.limits_fail_open and plan.budgets == NO_BUDGETS
        try:
            tokens = work.prompt_tokens + output
            return await self._admission.admit(tenant, stream, subjects, tokens, fail_open=fail_open)
        except StreamGwError:
            await self._keys.release(call, stream)
            raise

    # --- a new stream --------------------------------------------------------------------------------------

    def _new_id(self, cell: str, now_ms: int) -> StreamId:
        """Make the id of a new stream, in one of the home partitions of its cell."""
        parts, entropy = self._parts, self._parts.random.token_bytes(10)
        stream, draw = new_stream_id(now_ms, entropy), int.from_bytes(entropy[4:8], "big")
        partitions, replicas = parts.log.partitions, len(parts.directory.by_pool.get(cell, ()))
        home = home_partition(cell, replicas, partitions, draw)
        return stream if home is None else moved_to(stream, home, partitions)

    def _work(
        self,
        call: CreateCall,
        stream: StreamId,
        epoch: Epoch,
        meta: bytes,
        cell: str,
        now_ms: int,
        hashes: Sequence[int],
        *,
        salt: str,
        reserved: bool,
    ) -> Work:
        """Make the record of the request that a replica will run."""
        request, trace, tenant = call.request, call.trace, call.who.tenant
        estimates = self._parts.directory.estimates(
            cell, route_key(request.model, f"openai.{request.kind}", TIERS[request.tier])
        )
        limit = _NO_LIMIT if request.max_tokens is None else request.max_tokens
        deadline_ms = 0 if request.deadline_s is None else now_ms + int(request.deadline_s * 1000)
        body = salted_body(request.body, salt)
        return Work(
            EngineRequest(stream, request.kind, request.model, body, deadline_ms, trace.traceparent(stream)),
            str(epoch),
            tenant,
            meta,
            self._grace_s(call),
            tier=request.tier,
            session=trace.session,
            prompt_tokens=max(1, int(request.prompt_bytes / estimates.bytes_per_token)),
            # Most requests stop far below their limit
            output_tokens=max(1, int(min(limit, estimates.output_tokens))) * request.n,
            output_limit=min(limit * request.n, _NO_LIMIT),
            prefix=array("I", hashes).tobytes(),
            prices=trace.prices,
            reserved=reserved,
        )

    def _grace_s(self, call: CreateCall) -> float | None:
        """Seconds that the stream runs on after its last reader has left; None: to its end."""
        request, settings = call.request, self._parts.settings
        if request.on_disconnect_s is not msgspec.UNSET:
            return request.on_disconnect_s
        if request.background:
            return None
        kept = call.kept or call.key is not None or request.session_id is not None
        return settings.kept_grace_s if kept else settings.plain_grace_s

    async def _create_and_place(self, new: _NewStream) -> None:
        """Create the stream and place its request at the same time.

        Raises StreamGwError; the stream is then withdrawn, and its key is free once that is certain.
        """
        parts, work, trace = self._parts, new.work, new.call.trace
        tenant, model = new.call.who.tenant, work.request.model
        hashes = array("I", work.prefix)
        candidates = parts.directory.candidates(new.cell, model, hashes)
        trace.placing = trace.placing or parts.clock.monotonic_us()
        wait_max_s = wait_s(work, parts.clock.now_us(), self._wait_s_max(new.cell))
        # Their slots differ, so they travel side by side. A half-done pair heals: an agent drops a request whose
        # stream does not exist, and the watchdog ends a stream that no replica claims.
        calls: list[Coroutine[Any, Any, Any]] = [
            self._create_stream(new),
            place(parts.pools, parts.directory, work, new.cell, candidates, hashes, wait_max_s, parts.random.random()),
        ]
        if new.user is not None:
            calls.append(parts.index.add_live(tenant, UserId(new.user), new.id, new.created_ms))
        created, outcome, *_ = await self._all_or_withdraw(new, calls)
        if created is CreateCode.CANCELLED:
            raise StreamCancelled("the stream was cancelled before it began")
        placed = outcome.placed
        if isinstance(placed, Refused):
            trace.overflow = ("", placed.backlog_s)
            plan = parts.directory.plans.get(pool_of(outcome.cell))
            recovery_s = plan.recovery_s(TIERS[work.tier], parts.clock.now_us()) if plan is not None else 0.0
            error = refusal(work, placed, recovery_s, parts.random.random())
            # A caller that retries at once must find its key free
            await asyncio.shield(parts.hub.spawn(self._withdraw(new, error)))
            raise error
        self._note_placed(new, placed, outcome, hashes)

    async def _create_stream(self, new: _NewStream) -> CreateCode:
        """Create the stream. It may end before the reply of its placement is read: its reader has created it then."""
        work, parts = new.work, self._parts
        code = await parts.log.create(
            new.id,
            work.parsed_epoch(),
            new.call.who.tenant,
            work.facts,
            parts.name,
            work.request.model,
            reserved=work.reserved,
        )
        if code is not CreateCode.CANCELLED:
            new.call.trace.role = "created"
        return code

    async def _all_or_withdraw(self, new: _NewStream, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return the results of all calls.

        If one call fails or the caller leaves, the others end before the stream is withdrawn: a create that came after
        the withdrawal would live on.
        """
        ended = asyncio.gather(*calls, return_exceptions=True)
        try:
            results = await asyncio.shield(ended)
        except asyncio.CancelledError:
            left = FabricUnavailable("the caller left before its request was placed")
            self._parts.hub.spawn(self._withdraw_after(new, ended, left))
            raise
        for result in results:
            if isinstance(result, BaseException):
                error = result if isinstance(result, StreamGwError) else StreamGwError("the request was not placed")
                self._parts.hub.spawn(self._withdraw(new, error))
                raise result
        return results

    async def _withdraw_after(self, new: _NewStream, ended: asyncio.Future[Any], error: StreamGwError) -> None:
        """Wait until all calls have ended, then withdraw the stream."""
        await ended
        await self._withdraw(new, error)

    async def _withdraw(self, new: _NewStream, error: StreamGwError) -> None:
        """End the stream, then free its key.

        If the stream cannot be ended, its key stays bound: a retry finds the stream instead of generating twice.
        """
        new.call.trace.role = "refused"  # before its reader sees the fence
        nonce = self._parts.random.token_hex(4)
        await self._parts.log.fence(new.id, None, nonce, ErrorInfo.of(error))
        await self._keys.release(new.call, new.id)

    def _note_placed(self, new: _NewStream, placed: Placed | Queued, outcome: Outcome, hashes: Sequence[int]) -> None:
        """Record the placement in the trace, the log, and the directory or queue positions."""
        parts, elsewhere = self._parts, outcome.elsewhere
        new.call.trace.receive_placed(placed, elsewhere)
        self._placements.add(new.id, placement_record(new.work, placed, parts.clock.now_us(), elsewhere))
        if isinstance(placed, Placed):
            parts.directory.sent(placed.replica, hashes)
        else:
            parts.queue_positions.add(outcome.cell, new.subscription)

    def _wait_s_max(self, pool: str) -> float:
        """Maximum seconds in the queue; longer while the pool has a cold start."""
        warming = self._parts.directory.warming(pool)
        return max(self._parts.settings.queue_wait_s, warming.patience_s if warming else 0.0)


def _stream_user(who: Principal, requested: str | None) -> str | None:
    """Return the user of a new stream. Raises BadRequest when the token belongs to another user."""
    if who.user is None:
        return requested
    if requested is not None and requested != who.user:
        raise BadRequest(f"this token belongs to user {who.user!r}; leave user out or name that user", param="user")
    return who.user


def _session_key(tenant: TenantId, session: str | None) -> str:
    """Return a hash of tenant and session; empty: there is no session."""
    if session is None:
        return ""
    return hashlib.sha256(f"{tenant}\0{session}".encode()).hexdigest()[:24]
