"""What a gateway does for a caller, whatever the shell: create, follow, cancel, input, list."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from stream_fabric.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.errors import (
    BadRequest,
    Draining,
    FabricUnavailable,
    IdempotencyMismatch,
    NotFound,
    StreamFailed,
    StreamGwError,
    StreamLost,
)
from stream_fabric.frames import STARTED_PREFIX, ErrorInfo, Note, decode, is_end
from stream_fabric.ids import GatewayId, StreamId, TenantId, UserId, created_ms, is_stream_id, new_stream_id
from stream_fabric.limits import IDEMPOTENCY_KEY_CHARS_MAX, ORPHAN_GRACE_S, RECONNECT_S_MAX
from stream_fabric.log import CancelReply, CreateCode, Page
from stream_fabric.placement import TIERS, Placed, Refused
from stream_fabric.plans import route
from stream_fabric.ports import EngineRequest
from stream_fabric.prefix import block_hashes
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.pool import RedisPools, Work
from stream_fabric.redis.rescue import explain, wait_s
from stream_fabric.redis.streams import RedisStreamLog
from stream_gw.auth import Authenticator, Principal, Scope
from stream_gw.content import Contents
from stream_gw.dialects import encoder_for
from stream_gw.dialects.accumulate import snapshot
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.requests import CreateRequest, fingerprint, parse_create
from stream_gw.directory import Directory
from stream_gw.hub import Hub, Subscription
from stream_gw.lines import Lines
from stream_gw.outlet import Outlet
from stream_gw.placing import place, refusal
from stream_gw.settings import GatewaySettings
from stream_gw.trace import ReaderTrace, Tracer, monotonic_us
from stream_gw.ws import Channel, Create, Mode, Sub

_NO_LIMIT = 1 << 31
_LISTED_EARLY_MS = 60_000
_CANCELS_KEPT = 10_000
_CANCELS_KEPT_S = 10.0
_READY_ASK_S = 1.0
"""Within what a balancer's check waits for."""
_NO_ENTRIES = Cursor(1 << 40, 0)
"""A position after everything: a page without entries."""

OutletMaker = Callable[[StreamId, StreamFacts, tuple[bytes, ...]], Outlet]
"""Makes a stream's outlet once its id and facts are known; last, the frames that its encoder must have observed."""


class StreamMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a stream's meta holds for gateways."""

    facts: StreamFacts
    user: str | None = None


_meta_encoder = msgspec.json.Encoder()
_meta_decoder = msgspec.json.Decoder(StreamMeta)


class PastTheEnd(Exception):
    """The stream has ended and the cursor is at its end: nothing is left to send."""


@dataclass(frozen=True)
class NewStream:
    """A stream that this caller's request created, or attached to."""

    id: StreamId
    epoch: str
    facts: StreamFacts
    subscription: Subscription
    attached: bool


class Gateway:
    """One gateway process's services. Shells call it; it knows neither SSE nor HTTP."""

    def __init__(
        self,
        name: GatewayId,
        settings: GatewaySettings,
        authenticator: Authenticator,
        hub: Hub,
        streams: RedisStreamLog,
        pools: RedisPools,
        index: RedisIndex,
        directory: Directory,
        tracer: Tracer,
        contents: Contents | None = None,
    ) -> None:
        """``contents``: takes prompts, of tenants whose plan says so."""
        self.name = name
        self.tracer = tracer
        self._contents = contents
        self.settings = settings
        self._authenticator = authenticator
        self.hub = hub
        self._streams = streams
        self._pools = pools
        self._index = index
        self.directory = directory
        self.draining = False
        self._away_since: float | None = None
        """When Redis was first found to be away, of late."""
        self.lines = Lines(pools, directory, lambda: monotonic_us() + tracer.clock.offset_us)
        self._cancelled: deque[tuple[float, TenantId, StreamId]] = deque(maxlen=_CANCELS_KEPT)
        hub.on_return = self._cancel_again

    def authenticate(self, credential: str | None) -> Principal:
        return self._authenticator.authenticate(credential, time.time())

    @property
    def pools(self) -> RedisPools:
        return self._pools

    @property
    def authenticator(self) -> Authenticator:
        return self._authenticator

    # --- create --------------------------------------------------------------------------------------------

    async def create(
        self,
        who: Principal,
        request: CreateRequest,
        *,
        key: str | None,
        kept: bool,
        after: Cursor | None,
        trace: ReaderTrace,
        make_outlet: OutletMaker,
    ) -> NewStream:
        """Make a stream, place it on a replica and follow it; or attach to the one that the key is bound to.

        ``kept``: the longer grace after the last reader left. ``after``: where an attaching caller continues.
        """
        trace.tenant = who.tenant
        try:
            return await self._create(who, request, key, after, trace, make_outlet, kept=kept)
        except StreamGwError as error:
            if trace.role == "refused" and not trace.is_over:  # its subscription may have told it
                trace.finish("refused", error=error)
            raise

    async def _create(
        self,
        who: Principal,
        request: CreateRequest,
        key: str | None,
        after: Cursor | None,
        trace: ReaderTrace,
        make_outlet: OutletMaker,
        *,
        kept: bool,
    ) -> NewStream:
        if self.draining:
            raise Draining("this gateway is going away; ask again", retry_after_s=1)
        who.require("create")
        who.require_model(request.model)
        user = self._user(who, request.user)
        pool = await self.directory.pool_of(request.model)
        now_ms = time.time_ns() // 1_000_000
        stream = claimed = new_stream_id(now_ms, os.urandom(10))
        if key is not None:
            if not 0 < len(key) <= IDEMPOTENCY_KEY_CHARS_MAX:
                raise BadRequest(f"an Idempotency-Key has 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters", param="key")
            if who.user is not None:  # who sees only a user's streams shares no key with another user
                key = f"{who.user}\0{key}"
            print_ = f"{fingerprint(request.body)}:{int(request.stream)}"
            bound, held = await self._index.claim(who.tenant, key, stream, print_)
            if held != print_:
                raise IdempotencyMismatch("this Idempotency-Key was used with another body; take a new key")
            if bound != stream:
                attached = await self._attach(who, bound, after or BEGINNING, trace, make_outlet)
                if attached is not None:
                    return attached
                stream = bound  # whoever claimed the key died before it created the stream: take its place
        facts = StreamFacts.of(stream, now_ms // 1000, request)
        trace.facts, trace.user, trace.pool, trace.tier = facts, user, pool, request.tier
        trace.prices = self._authenticator.prices(who.tenant, request.model)
        meta = _meta_encoder.encode(StreamMeta(facts, user))
        epoch = Epoch(1, secrets.token_hex(4))
        work = self._work(who, request, stream, epoch, meta, pool, trace, kept=kept or key is not None)
        outlet = make_outlet(stream, facts, ())  # it may refuse the dialect, so before anything is kept
        if stream != claimed:
            # Others may have waited for the same key: the first to create its stream places it, the rest follow
            code = await self._streams.create(stream, epoch, who.tenant, meta, self.name, request.model)
            if code is CreateCode.TAKEN:
                return await self._follow(who, stream, after or BEGINNING, trace, make_outlet, exact=True)
        local = self.hub.expect(stream, who.tenant, epoch)
        subscription = self.hub.follow_new(local, outlet, trace)
        if self._contents is not None:
            self._contents.receive_prompt(who.tenant, stream, request.body)
        try:
            await self._create_and_place(who, work, pool, subscription, trace, user, now_ms, key)
        except BaseException as error:
            if isinstance(error, StreamGwError):
                subscription.tell("refused", error=error)
            subscription.close()
            raise
        trace.role = "created"
        return NewStream(stream, str(epoch), facts, subscription, attached=False)

    def _work(
        self,
        who: Principal,
        request: CreateRequest,
        stream: StreamId,
        epoch: Epoch,
        meta: bytes,
        pool: str,
        trace: ReaderTrace,
        *,
        kept: bool,
    ) -> Work:
        trace.session = _session_key(who.tenant, request.session_id)
        alike = route(request.model, f"openai.{request.kind}", TIERS[request.tier])
        usual = self.directory.estimates(pool, alike)
        limit = _NO_LIMIT if request.max_tokens is None else request.max_tokens
        deadline_s = request.deadline_s
        return Work(
            EngineRequest(
                stream,
                request.kind,
                request.model,
                request.body,
                0 if deadline_s is None else int((time.time() + deadline_s) * 1000),
                trace.traceparent(stream),
            ),
            str(epoch),
            who.tenant,
            meta,
            self._grace_s(request, kept=kept),
            tier=request.tier,
            session=trace.session,
            prompt_tokens=max(1, int(request.prompt_bytes / usual.bytes_per_token)),
            # What it may make is often far more than anybody makes
            output_tokens=max(1, int(min(limit, usual.output_tokens))) * request.n,
            output_limit=min(limit * request.n, _NO_LIMIT),
            prefix=array("I", block_hashes(request.model.encode(), request.prompt)).tobytes(),
            prices=trace.prices,
        )

    async def _create_and_place(
        self,
        who: Principal,
        work: Work,
        pool: str,
        subscription: Subscription,
        trace: ReaderTrace,
        user: str | None,
        now_ms: int,
        key: str | None,
    ) -> None:
        stream = work.request.stream
        hashes = array("I", work.prefix)
        candidates = self.directory.candidates(pool, work.request.model, hashes)
        trace.placing = monotonic_us()
        # Their slots differ, so they travel side by side. A half-done pair heals: an agent drops a request whose
        # stream does not exist, and a stream that no replica claims is ended by the watchdog.
        calls: list[Awaitable[Any]] = [
            self._streams.create(stream, work.parsed_epoch(), who.tenant, work.facts, self.name, work.request.model),
            place(
                self._pools,
                self.directory,
                work,
                pool,
                candidates,
                hashes,
                wait_s(work, self._wait_s_max(pool)),
                random.random(),
            ),
        ]
        if user is not None:
            calls.append(self._index.add_live(who.tenant, UserId(user), stream, now_ms))
        try:
            created, (placed, shift), *_ = await asyncio.gather(*calls)
        except FabricUnavailable as lost:
            self.hub.spawn(self._withdraw(stream, lost))
            if key is not None:
                self.hub.spawn(self._index.release(who.tenant, key, stream))
            raise
        if created is CreateCode.CANCELLED:
            raise StreamFailed("the stream was cancelled before it began")
        if isinstance(placed, Refused):
            trace.surge = ("", placed.backlog_s)
            error = refusal(work, placed)
            self.hub.spawn(self._withdraw(stream, error))
            if key is not None:  # or who asks again later would be told the same for as long as the key is kept
                await self._index.release(who.tenant, key, stream)
            raise error
        trace.receive_placed(placed, shift)
        self.hub.spawn(self._streams.put_placement(stream, explain(work, placed, shift)))
        if isinstance(placed, Placed):
            self.directory.sent(placed.replica, hashes)
        else:
            self.lines.add(pool, subscription)

    def _wait_s_max(self, pool: str) -> float:
        warming = self.directory.warming(pool)
        return max(self.settings.queue_wait_s, warming.patience_s if warming else 0.0)

    async def _withdraw(self, stream: StreamId, error: StreamGwError) -> None:
        await self._streams.fence(stream, None, secrets.token_hex(4), ErrorInfo.of(error))

    async def _attach(
        self, who: Principal, stream: StreamId, after: Cursor, trace: ReaderTrace, make_outlet: OutletMaker
    ) -> NewStream | None:
        """Follow the stream that a key is bound to; None when nobody has created it within a moment."""
        deadline = asyncio.get_running_loop().time() + RECONNECT_S_MAX
        while True:
            try:
                return await self._follow(who, stream, after, trace, make_outlet, exact=True)
            except NotFound:
                if asyncio.get_running_loop().time() > deadline:
                    return None
                await asyncio.sleep(0.05)

    def _user(self, who: Principal, asked: str | None) -> str | None:
        if who.user is None:
            return asked
        if asked is not None and asked != who.user:
            raise BadRequest(f"this token is of user {who.user!r}", param="user")
        return who.user

    def _grace_s(self, request: CreateRequest, *, kept: bool) -> float | None:
        """How long the stream runs on after its last reader left; None: to its end."""
        if request.on_disconnect_s is not msgspec.UNSET:
            return request.on_disconnect_s
        if request.background:
            return None
        kept = kept or request.session_id is not None
        return self.settings.kept_grace_s if kept else self.settings.plain_grace_s

    # --- follow --------------------------------------------------------------------------------------------

    async def look(self, who: Principal, stream: str, scope: Scope = "read") -> tuple[Page, StreamMeta]:
        """The head of a stream that the caller may touch. Raises NotFound, also for another's.

        A stream that the fabric lost whole is waited for: its producer makes it again.
        """
        who.require(scope)
        deadline = asyncio.get_running_loop().time() + ORPHAN_GRACE_S
        while True:
            try:
                return await self._look(who, stream)
            except NotFound:
                if not self.hub.unsettled or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _look(self, who: Principal, stream: str) -> tuple[Page, StreamMeta]:
        page = await self.hub.look(_stream_id(stream), who.tenant, _NO_ENTRIES)
        meta = _meta_decoder.decode(page.facts)
        if not who.may_see(meta.user):
            raise _not_found(stream)
        return page, meta

    async def follow(
        self, who: Principal, stream: str, after: Cursor, trace: ReaderTrace, make_outlet: OutletMaker, *, exact: bool
    ) -> NewStream:
        """Replay a stream after the cursor and follow it.

        Raises NotFound, CursorInvalid, CursorGone, and PastTheEnd when there is nothing after the cursor.
        """
        trace.tenant, trace.role = who.tenant, "resumed"
        return await self._follow(who, stream, after, trace, make_outlet, exact=exact)

    async def _follow(
        self, who: Principal, stream: str, after: Cursor, trace: ReaderTrace, make_outlet: OutletMaker, *, exact: bool
    ) -> NewStream:
        page, meta = await self.look(who, stream)
        page = await self._await_head(page, StreamId(stream), who, after)
        if page.status != "live" and after >= (page.epoch.n, page.head):
            raise PastTheEnd
        outlet = make_outlet(StreamId(stream), meta.facts, _structure(page.structure, after.seq))
        self._followed(trace, page, meta, after)
        if trace.role == "refused":
            trace.role = "attached"
        subscription = self.hub.follow(StreamId(stream), page, after, outlet, trace, exact=exact)
        return NewStream(StreamId(stream), str(page.epoch), meta.facts, subscription, attached=True)

    def _followed(self, trace: ReaderTrace, page: Page, meta: StreamMeta, after: Cursor) -> None:
        trace.facts, trace.user, trace.first_seq = meta.facts, meta.user, after.seq + 1
        trace.placed = monotonic_us()
        trace.gap_us = page.alone_ms * 1000

    async def _await_head(self, page: Page, stream: StreamId, who: Principal, after: Cursor) -> Page:
        """A live stream behind the caller's cursor has lost its tail in a failover; its producer sends it again."""
        deadline = asyncio.get_running_loop().time() + RECONNECT_S_MAX
        while (
            self.hub.shaken
            and page.status == "live"
            and after.epoch == page.epoch.n
            and after.seq > page.head
            and asyncio.get_running_loop().time() < deadline
        ):
            await asyncio.sleep(0.05)
            page = await self.hub.look(stream, who.tenant, _NO_ENTRIES)
        return page

    async def placement(self, who: Principal, stream: str) -> dict[str, Any]:
        """Why a stream is where it is: each placement's candidates, scores and reason, and its producers."""
        page, _ = await self.look(who, stream)
        producers: list[dict[str, Any]] = []
        seq = 0
        async for page in self._pages(who, StreamId(stream)):
            for entry in page.entries:
                for seq, line in enumerate(entry.frames.split(b"\n"), entry.first):
                    if line.startswith(STARTED_PREFIX):
                        note = decode(line)
                        assert isinstance(note, Note)
                        told = {} if note.body is None else msgspec.json.decode(note.body)
                        producers.append({**told, "epoch": entry.epoch, "from": f"{entry.epoch}-{seq}"})
        placements = await self._streams.placements(StreamId(stream))
        return {
            "id": stream,
            "placements": [msgspec.Raw(record) for record in placements],
            "producers": producers,
            "head": str(Cursor(page.epoch.n, seq)),
        }

    async def read_all(self, who: Principal, stream: StreamId) -> tuple[Page, Cursor, list[bytes]]:
        """Everything but the terminal: the first page, the last frame's position and the frames."""
        lines: list[bytes] = []
        at = BEGINNING
        first: Page | None = None
        async for page in self._pages(who, stream):
            first = first or page
            for entry in page.entries:
                some = entry.frames.split(b"\n")
                if is_end(some[-1]):
                    some.pop()
                lines += some
                if some:
                    at = Cursor(entry.epoch, len(lines))
        assert first is not None
        return first, at, lines

    async def _pages(self, who: Principal, stream: StreamId, after: Cursor = BEGINNING) -> AsyncIterator[Page]:
        while True:
            page = await self.hub.look(stream, who.tenant, after)
            yield page
            if not page.entries:
                return
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)

    # --- cancel, input, list -------------------------------------------------------------------------------

    async def cancel(self, who: Principal, stream: str) -> CancelReply:
        """Cancel from any gateway. Raises NotFound for another tenant's."""
        who.require("cancel")
        name = _stream_id(stream)
        if who.user is not None:
            await self.look(who, stream, "cancel")
        reply = await self._streams.cancel(name, who.tenant)
        if reply.result == "none":
            raise _not_found(stream)
        self._cancelled.append((asyncio.get_running_loop().time(), who.tenant, name))
        return reply

    def _cancel_again(self) -> None:
        """A failover may have lost cancels that were acknowledged a moment before: they are said again."""
        since = asyncio.get_running_loop().time() - _CANCELS_KEPT_S
        for at, tenant, stream in self._cancelled:
            if at > since:
                self.hub.spawn(self._cancel_once_more(tenant, stream))

    async def _cancel_once_more(self, tenant: TenantId, stream: StreamId) -> None:
        await self._streams.cancel(stream, tenant)

    async def input(self, who: Principal, stream: str, input_id: str, item: msgspec.Raw) -> str:
        """Hand the stream's producer an item, durably and once."""
        if not 0 < len(input_id) <= IDEMPOTENCY_KEY_CHARS_MAX:
            raise BadRequest(f"an input's id has 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters", param="id")
        while True:
            await self.look(who, stream, "input")
            result = await self._streams.input(StreamId(stream), who.tenant, input_id, item)
            if result is not None:  # None: lost since it was looked at
                return result

    async def running(self, who: Principal, user: str) -> list[dict[str, Any]]:
        """The tenant's running streams of a user, newest first."""
        who.require("read")
        if not who.may_see(user):
            raise NotFound("this token is of another user")
        ended, found = [], []
        oldest_ms = time.time_ns() // 1_000_000 - _LISTED_EARLY_MS
        for stream in await self._index.live(who.tenant, UserId(user)):
            try:
                page, meta = await self._look(who, stream)
            except NotFound:
                if created_ms(stream) < oldest_ms:  # else it may be on its way: it is listed before it is created
                    ended.append(stream)
                continue
            if page.status == "live":
                found.append(describe(stream, page, meta))
            else:
                ended.append(stream)
        await self._index.remove_live(who.tenant, UserId(user), ended)
        return found

    async def ready(self) -> tuple[bool, str]:
        """Whether this gateway should get new traffic, and a word on it.

        A Redis that is away for as long as a failover takes is no reason: every gateway would leave its balancer at
        once, where streams that run go on and who comes is told when to come again.
        """
        if self.draining:
            return False, "draining"
        try:
            async with asyncio.timeout(_READY_ASK_S):
                await self._pools.pools(_READY_ASK_S / 2)
        except (FabricUnavailable, TimeoutError) as error:
            why = error.message if isinstance(error, FabricUnavailable) else "Redis does not answer"
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
            away_s = now - self._away_since
            return away_s < self.settings.ready_without_redis_s, f"for {away_s:.0f} s: {why}"
        self._away_since = None
        return True, "ready"

    # --- the socket's commands -----------------------------------------------------------------------------

    async def ws_create(
        self, who: Principal, message: Create, channel: Channel, trace: ReaderTrace
    ) -> Subscription | None:
        kind: Literal["chat", "completions"] = "completions" if message.dialect == "openai.completions" else "chat"
        request = parse_create(bytes(message.body), kind)
        # A socket's readers leave with it, so its streams get the longer grace
        make = _channel_maker(channel, message.dialect, 0)
        channel.tells_queue = message.queued
        new = await self.create(who, request, key=message.key, kept=True, after=None, trace=trace, make_outlet=make)
        head = new.subscription.local.head
        channel.open(new.epoch, head, new.subscription.local.status)
        return new.subscription

    async def ws_subscribe(
        self, who: Principal, message: Sub, channel: Channel, trace: ReaderTrace
    ) -> Subscription | None:
        after = Cursor.parse(message.after)
        mode: Mode = message.mode
        # Who has something already takes the rest, not the whole again. A snapshot is one piece, however large, so a
        # full socket gets none
        if mode != "snapshot" or after.seq or channel.full:
            make = _channel_maker(channel, message.dialect, after.seq)
            try:
                new = await self.follow(who, message.stream, after, trace, make, exact=mode == "tokens")
            except PastTheEnd:
                await self._tell_end(who, StreamId(message.stream), channel)
                return None
            channel.open(new.epoch, new.subscription.local.head, new.subscription.local.status)
            return new.subscription
        found, meta = await self.look(who, message.stream)
        stream = StreamId(message.stream)
        # The terminal is left to the ordinary path, so that it arrives as an end
        page, at, lines = await self.read_all(who, stream)
        channel.carry(message.stream, prepared(message.dialect, meta.facts, tuple(lines)), after.seq)
        channel.snapshot(at.seq, snapshot(meta.facts, lines))
        page = await self.hub.look(stream, who.tenant, _NO_ENTRIES)
        trace.tenant, trace.role = who.tenant, "resumed"
        self._followed(trace, found, meta, at)
        subscription = self.hub.follow(stream, page, at, channel, trace, exact=False)
        channel.open(str(page.epoch), page.head, page.status)
        return subscription

    async def _tell_end(self, who: Principal, stream: StreamId, channel: Channel) -> None:
        """The reader has everything: repeat only how it ended."""
        head = (await self.hub.look(stream, who.tenant, _NO_ENTRIES)).head
        async for page in self._pages(who, stream, Cursor(1, head - 1)):
            if not page.entries:
                raise StreamLost("the end of the stream is lost")
            channel.stream, channel.seq = stream, page.head
            channel.open(str(page.epoch), page.head, page.status)
            channel.end_frame = page.entries[-1].frames.split(b"\n")[-1]
            channel.end(page.status)
            return

    async def ws_cancel(self, who: Principal, stream: str) -> dict[str, Any]:
        return cancel_json(await self.cancel(who, stream))

    async def ws_input(self, who: Principal, stream: str, input_id: str, item: msgspec.Raw) -> str:
        return await self.input(who, stream, input_id, item)


def prepared(dialect: str, facts: StreamFacts, structure: tuple[bytes, ...]) -> Encoder:
    """An encoder that continues after the frames of ``structure``."""
    encoder = encoder_for(dialect, facts)
    for line in structure:
        encoder.observe(line)
    return encoder


def _session_key(tenant: TenantId, session: str | None) -> str:
    if session is None:
        return ""
    return hashlib.sha256(f"{tenant}\0{session}".encode()).hexdigest()[:24]


def _stream_id(text: str) -> StreamId:
    """Raises NotFound: what is no id names no stream."""
    if not is_stream_id(text):
        raise NotFound(f"no stream {text[:64]!r}; an id is resp_ and 32 hex digits")
    return StreamId(text)


def _not_found(stream: str) -> NotFound:
    return NotFound(f"no stream {stream}; it never was, is another's, or its retention has passed")


def _channel_maker(channel: Channel, dialect: str, seq: int) -> OutletMaker:
    def make(stream: StreamId, facts: StreamFacts, structure: tuple[bytes, ...]) -> Outlet:
        channel.carry(stream, prepared(dialect, facts, structure), seq)
        return channel

    return make


def _structure(structure: bytes, seq: int) -> tuple[bytes, ...]:
    """Of a page's structure, the frames up to ``seq``."""
    numbered = (line.partition(b" ") for line in structure.splitlines())
    return tuple(frame for number, _, frame in numbered if int(number) <= seq)


def cancel_json(reply: CancelReply) -> dict[str, Any]:
    return {"result": reply.result, "at": None if reply.at is None else str(reply.at), "status": reply.status or None}


def describe(stream: StreamId, page: Page, meta: StreamMeta) -> dict[str, Any]:
    return {
        "id": stream,
        "object": "stream",
        "epoch": str(page.epoch),
        "head": page.head,
        "status": page.status,
        "model": meta.facts.model,
        "created": meta.facts.created,
        "user": meta.user,
    }
