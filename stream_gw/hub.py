"""The gateway's streams: what is published to it goes to the local readers, and whoever lacks frames reads the log.

The data path is ``Hub.receive`` → ``LocalStream.receive`` → ``Outlet.write``: one pass in the loop turn of the
subscriber's read, no task switch and no JSON.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from stream_fabric.cursor import Cursor, Epoch
from stream_fabric.errors import (
    FabricUnavailable,
    NotFound,
    StreamGwError,
    StreamLost,
    TooMany,
)
from stream_fabric.events import ReadEnd
from stream_fabric.frames import End, ErrorInfo, Status, coalesce_from, decode, is_end
from stream_fabric.ids import GatewayId, StreamId, TenantId
from stream_fabric.limits import (
    ORPHAN_GRACE_S,
    STREAMS_PER_GATEWAY_MAX,
    SUBSCRIBERS_PER_STREAM_MAX,
    WATCHDOG_S,
)
from stream_fabric.log import RECORD, UNIT, Head, Page
from stream_fabric.reader import Gap, Need, Reader, Reset, Run, Step, check_cursor
from stream_fabric.redis.reaper import LOST
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.subscriber import Subscriber
from stream_gw.directory import Directory
from stream_gw.outlet import Outlet
from stream_gw.trace import ReaderTrace, monotonic_us, tokens_of

log = logging.getLogger(__name__)

_LIVE = Need.LIVE  # an enum's member costs a look-up each time
_BRACE, _QUOTE = ord("{"), ord('"')
_EMPTY_PAGE_S = 0.05
_SETTLE_S = 10.0
_HEADS_MAX = 500


class Subscription:
    """One outlet following one stream. ``exact``: a chunk a frame even when it has fallen behind."""

    __slots__ = (
        "catching_up", "exact", "local", "outlet", "reader", "tokens", "told_epoch", "trace", "watched_seq",
    )  # fmt: skip

    def __init__(
        self, local: LocalStream, outlet: Outlet, reader: Reader, trace: ReaderTrace | None, *, exact: bool
    ) -> None:
        self.local = local
        self.outlet = outlet
        self.reader = reader
        self.exact = exact
        self.catching_up = False
        self.watched_seq = -1
        self.told_epoch = local.epoch_n
        self.trace = trace
        self.tokens = 0
        """Output tokens that were written."""

    @property
    def head(self) -> int:
        return self.local.head

    def resume(self) -> None:
        """The outlet has drained."""
        if self.trace is not None:
            self.trace.receive_drained()
        if self.reader.need is Need.DRAIN:
            self.exact = False
            self.reader.resume()
            self.local.hub.catch_up(self)

    def pause(self) -> None:
        """The outlet takes no more."""
        self.reader.pause()
        if self.trace is not None:
            self.trace.receive_stall()

    def close(self, why: ReadEnd = "left") -> None:
        """The outlet has gone, or is done."""
        self.tell(why)
        self.reader.close()
        self.local.remove(self)

    def tell(self, ended: ReadEnd, end: End | None = None, error: StreamGwError | None = None) -> None:
        """It is over for this reader: its trace is told, once."""
        trace, self.trace = self.trace, None
        if trace is not None:
            reader = self.reader
            trace.finish(ended, end=end, error=error, epoch=reader.epoch, last_seq=reader.seq, tokens=self.tokens)


class LocalStream:
    """A stream that somebody reads here."""

    __slots__ = (
        "epoch",
        "epoch_n",
        "head",
        "heard_ns",
        "hub",
        "id",
        "missing_since",
        "partition",
        "status",
        "subs",
        "tenant",
    )

    def __init__(self, hub: Hub, stream: StreamId, tenant: TenantId, epoch: Epoch) -> None:
        self.hub = hub
        self.id = stream
        self.tenant = tenant
        self.epoch = str(epoch).encode()
        self.epoch_n = epoch.n
        self.partition = hub.log.partition(stream)
        self.head = 0
        self.heard_ns = 0
        """When the last frames came, on the monotonic clock."""
        self.status: Status = "live"
        self.subs: list[Subscription] = []
        self.missing_since: float | None = None

    def receive(self, epoch: bytes, first: int, last: int, frames: bytes) -> None:
        """One published part."""
        if epoch != self.epoch:
            parsed = Epoch.parse(epoch.decode())
            if parsed.n < self.epoch_n:
                return
            rival = parsed.n == self.epoch_n
            self._rise(epoch, parsed.n)
            if rival:  # a takeover that a failover had lost: only the log knows what of it still holds
                self.recheck()
        self.head = last
        self.heard_ns = self.hub.heard_ns
        n, subs = self.epoch_n, self.subs
        for sub in subs if len(subs) == 1 else tuple(subs):
            reader = sub.reader
            if reader.need is _LIVE and first == reader.seq + 1 and reader.epoch == n:
                # The common case, without the machine's general steps: the next frames, no terminal among them
                lines = [frames] if first == last else frames.split(b"\n")
                if lines[-1][0] != _BRACE:
                    reader.seq = last
                    outlet = sub.outlet
                    outlet.write(n, first, lines)
                    if not sub.tokens and sub.trace is not None:
                        sub.trace.first = self.heard_ns // 1000
                    sub.tokens += 1 if first == last and frames[1] == _QUOTE else tokens_of(lines)
                    if outlet.full:
                        sub.pause()
                    continue
            if sub.trace is not None and reader.need is not _LIVE and is_end(frames[frames.rfind(b"\n") + 1 :]):
                sub.trace.arrived = self.heard_ns // 1000  # it is behind, and gets it later
            self.deliver(sub, reader.receive_live(n, first, last, frames))
            if reader.need is Need.PAGE:
                self.hub.catch_up(sub)

    def receive_page(self, page: Page, reader: Reader) -> None:
        """What a page of the log tells of the stream, read for a reader."""
        if page.epoch.n > self.epoch_n:
            self._rise(str(page.epoch).encode(), page.epoch.n)
        elif page.epoch.n < reader.epoch:  # a failover has lost a takeover: what was, goes on
            self.epoch, self.epoch_n = str(page.epoch).encode(), page.epoch.n
            self.recheck()
        self.status = page.status
        self.head = max(self.head, page.head) if page.epoch.n == self.epoch_n else page.head

    def _rise(self, epoch: bytes, n: int) -> None:
        """Another producer has taken over."""
        self.epoch, self.epoch_n = epoch, n
        for sub in self.subs:
            if sub.trace is not None and self.heard_ns:
                sub.trace.broke = self.heard_ns // 1000

    def recheck(self) -> None:
        """Have every reader compare itself with the log."""
        for sub in self.subs:
            sub.reader.recheck()
            self.hub.catch_up(sub)

    def deliver(self, sub: Subscription, steps: list[Step]) -> None:
        """Write what the reader let through, and end what ended."""
        outlet = sub.outlet
        runs = [step for step in steps if isinstance(step, Run)]
        self._count(sub, runs)
        if not sub.exact and len(runs) > 1 and len(runs) == len(steps) and runs[0].epoch == runs[-1].epoch:
            # Behind: adjacent deltas joined, so a page is a few native chunks, each with its last frame's cursor
            lines = [line for run in runs for line in run.lines]
            steps = [Run(runs[0].epoch, seq, [line]) for seq, line in coalesce_from(runs[0].first, lines)]
        for step in steps:
            match step:
                case Run(epoch, first, lines):
                    if epoch != sub.told_epoch:
                        sub.told_epoch = epoch
                        outlet.rise(self.epoch.decode() if epoch == self.epoch_n else str(epoch), first - 1)
                    outlet.write(epoch, first, lines)
                case Gap():
                    if not outlet.gap(step):
                        self.fail(sub, StreamLost(f"frames {step.start} to {step.stop} of the stream are lost"))
                        return
                case Reset():
                    if not outlet.reset(step):
                        self.fail(sub, StreamLost(f"the stream was lost after {step.epoch}-{step.to}"))
                        return
        if sub.reader.need is Need.NOTHING:
            if any(isinstance(step, Gap) for step in steps):
                self.fail(sub, StreamLost("the end of the stream is lost"))
                return
            if runs:
                end = decode(runs[-1].lines[-1])
                assert isinstance(end, End)
                self.status = end.status
                sub.tell(end.status, end)
            outlet.end(self.status)
            self.remove(sub)
        elif outlet.full:
            sub.pause()

    def _count(self, sub: Subscription, runs: list[Run]) -> None:
        """Take note of what is about to be written."""
        trace = sub.trace
        for run in runs:
            before = sub.tokens
            sub.tokens += tokens_of(run.lines)
            if trace is not None:
                if not before and sub.tokens:
                    trace.first = monotonic_us()
                for line in run.lines:
                    if line[0] == _BRACE:
                        trace.receive_control(line, monotonic_us())

    def fail(self, sub: Subscription, error: StreamGwError) -> None:
        sub.tell("failed", error=error)
        sub.reader.close()
        self.remove(sub)
        sub.outlet.fail(error, sub.reader.cursor)

    def remove(self, sub: Subscription) -> None:
        if sub in self.subs:
            self.subs.remove(sub)
            if not self.subs:
                self.hub.drop(self)


class Hub:
    """All local streams. Its tasks live in ``tasks``."""

    def __init__(
        self, gateway: GatewayId, streams: RedisStreamLog, directory: Directory, tasks: asyncio.TaskGroup
    ) -> None:
        self.gateway = gateway
        self.log = streams
        self._directory = directory
        self._tasks = tasks
        self.local: dict[bytes, LocalStream] = {}
        self.heard_ns = 0
        """When the last message came, on the monotonic clock."""
        self.subscriber: Subscriber | None = None
        """Brings ``receive`` its messages; set once the process is wired."""
        self.on_return: Callable[[], None] = lambda: None
        """Told when the fabric has been away and is back."""
        self._declining: set[bytes] = set()
        self._subscribed = False
        self._settled_at = 0.0
        self._shaken_until = 0.0

    # --- the data path -------------------------------------------------------------------------------------

    def receive(self, payload: bytes) -> None:
        """A published message: the parts of many streams."""
        local = self.local
        self.heard_ns = time.monotonic_ns()
        for part in payload.split(RECORD):
            stream, epoch, first, last, frames = part.split(UNIT, 4)
            found = local.get(stream)
            if found is None:
                self._decline(stream)
                continue
            try:
                found.receive(epoch, int(first), int(last), frames)
            except Exception:  # a fault in one stream must not cost the others theirs
                log.exception("stream %s cannot be delivered", found.id)
                self._give_up(found)

    def _decline(self, stream: bytes) -> None:
        """What nobody here reads was published to us: were we left among its watchers, as by an outage when its last
        reader left, nobody would cancel it."""
        if stream not in self._declining:
            self._declining.add(stream)
            self.spawn(self._undo_watch(stream))

    async def _undo_watch(self, stream: bytes) -> None:
        try:
            await self._unwatch(stream)
        finally:
            self._declining.discard(stream)

    def _give_up(self, local: LocalStream) -> None:
        for sub in tuple(local.subs):
            local.fail(sub, StreamGwError("the gateway could not deliver this stream; read it again from the cursor"))

    # --- readers come and go -------------------------------------------------------------------------------

    def expect(self, stream: StreamId, tenant: TenantId, epoch: Epoch) -> LocalStream:
        """A stream that is about to be created with this gateway as its first watcher."""
        local = self.local.get(stream.encode())
        if local is None:  # else another caller with its key has come here first
            self._check_room()
            local = self.local[stream.encode()] = LocalStream(self, stream, tenant, epoch)
        return local

    def _check_room(self) -> None:
        if len(self.local) >= STREAMS_PER_GATEWAY_MAX:
            raise TooMany(
                f"this gateway follows {STREAMS_PER_GATEWAY_MAX} streams, its most; ask another", retry_after_s=1
            )

    def follow_new(self, local: LocalStream, outlet: Outlet, trace: ReaderTrace | None = None) -> Subscription:
        """Read a stream that has no frames yet: nothing to replay."""
        reader = Reader(Cursor(local.epoch_n, 0), Epoch.parse(local.epoch.decode()).nonce)
        reader.need = Need.LIVE
        sub = Subscription(local, outlet, reader, trace, exact=True)
        local.subs.append(sub)
        if outlet.full:
            sub.pause()
        return sub

    async def look(self, stream: StreamId, tenant: TenantId, after: Cursor) -> Page:
        """One page of a stream, without following it. Raises NotFound."""
        page = await self.log.watch(stream, tenant, None, after)
        if page is None:
            raise NotFound(f"no stream {stream}; it never was, is another tenant's, or its retention has passed")
        return page

    def follow(
        self,
        stream: StreamId,
        page: Page,
        after: Cursor,
        outlet: Outlet,
        trace: ReaderTrace | None = None,
        *,
        exact: bool,
    ) -> Subscription:
        """Read a stream that ``look`` found, from the cursor on.

        Raises CursorInvalid, CursorGone or TooMany.
        """
        check_cursor(after, page.epoch, page.head, page.bases)
        local = self.local.get(stream.encode())
        if local is None:
            self._check_room()
            local = LocalStream(self, stream, page.tenant, page.epoch)
            local.head, local.status = page.head, page.status
            self.local[stream.encode()] = local
        elif len(local.subs) >= SUBSCRIBERS_PER_STREAM_MAX:
            raise TooMany(
                f"{SUBSCRIBERS_PER_STREAM_MAX} readers follow this stream here, the most one may have", retry_after_s=1
            )
        sub = Subscription(local, outlet, Reader(after), trace, exact=exact)
        local.subs.append(sub)
        if outlet.full:
            sub.pause()
        else:
            self.catch_up(sub)
        return sub

    def drop(self, local: LocalStream) -> None:
        """The last local reader has gone."""
        if self.local.get(local.id.encode()) is local:
            del self.local[local.id.encode()]
            if local.status == "live":
                self.spawn(self._unwatch(local.id.encode()))

    async def _unwatch(self, stream: bytes) -> None:
        if stream not in self.local:  # nobody came back meanwhile
            await self.log.unwatch(StreamId(stream.decode()), self.gateway)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run beside the caller; an outage of the fabric is logged, anything else ends the process."""
        self._tasks.create_task(_logged(work))

    # --- replay --------------------------------------------------------------------------------------------

    def catch_up(self, sub: Subscription) -> None:
        """Read the log for a reader that lacks frames, unless it is being done."""
        if sub.reader.need is Need.PAGE and not sub.catching_up:
            sub.catching_up = True
            self._tasks.create_task(self._catch_up(sub))

    async def _catch_up(self, sub: Subscription) -> None:
        local = sub.local
        loop = asyncio.get_running_loop()
        missing_since: float | None = None
        try:
            while sub.reader.need is Need.PAGE:
                before = sub.reader.cursor
                try:
                    page = await self.log.watch(local.id, None, self.gateway, before)
                except FabricUnavailable as error:
                    # The watchdog's clock, not this one, decides how long the fabric may be away
                    log.warning("stream %s cannot be read: %s", local.id, error)
                    continue
                if sub.reader.need is not Need.PAGE:
                    return
                if page is None:
                    missing_since = missing_since or loop.time()
                    if loop.time() - missing_since > ORPHAN_GRACE_S:
                        local.fail(sub, StreamLost("the fabric lost the stream and its producer is gone; ask again"))
                        return
                else:
                    missing_since = None
                    local.receive_page(page, sub.reader)
                    local.deliver(sub, sub.reader.receive_page(page))
                if sub.reader.need is Need.PAGE and sub.reader.cursor == before:
                    await asyncio.sleep(_EMPTY_PAGE_S)
        except Exception:  # as in receive: a fault in one stream must not cost the others theirs
            log.exception("stream %s cannot be delivered", local.id)
            self._give_up(local)
        finally:
            sub.catching_up = False

    # --- what pub/sub may have lost ------------------------------------------------------------------------

    def unsettle(self) -> None:
        """The fabric has just come, or come back: producers may still be making again what it lost."""
        self._settled_at = asyncio.get_running_loop().time() + _SETTLE_S

    @property
    def unsettled(self) -> bool:
        """Whether the fabric is new here, or has been away a moment ago: streams may still be on their way back."""
        return self.shaken or asyncio.get_running_loop().time() < self._settled_at

    @property
    def shaken(self) -> bool:
        """Whether the fabric is or has been away a moment ago: logs may be behind what was shown."""
        away = self.subscriber is not None and not self.subscriber.healthy
        return away or asyncio.get_running_loop().time() < self._shaken_until

    def resubscribed(self, channels: list[str]) -> None:
        """Publishes to these channels may have been missed: watch every stream of their partitions again."""
        if self._subscribed:
            self._shaken_until = asyncio.get_running_loop().time() + _SETTLE_S
            self.on_return()
        self._subscribed = True
        partitions = {int(name[name.index("{p") + 2 : name.index("}")]) for name in channels}
        for local in self.local.values():
            if local.partition in partitions:
                local.recheck()

    async def watchdog(self) -> None:
        """Compare every local stream with its log, so that no lost message, tail or terminal stays lost."""
        while True:
            await asyncio.sleep(WATCHDOG_S)
            by_partition: dict[int, list[LocalStream]] = {}
            for local in self.local.values():
                by_partition.setdefault(local.partition, []).append(local)
            for partition, streams in by_partition.items():
                for start in range(0, len(streams), _HEADS_MAX):
                    some = streams[start : start + _HEADS_MAX]
                    try:
                        heads = await self.log.heads(partition, [local.id for local in some], self.gateway)
                    except FabricUnavailable as error:
                        log.warning("the streams' heads cannot be read: %s", error)
                        continue
                    for local, head in zip(some, heads, strict=True):
                        try:
                            await self._compare(local, head)
                        except FabricUnavailable as error:
                            log.warning("who makes the streams cannot be read: %s", error)
                            break

    async def _compare(self, local: LocalStream, head: Head | None) -> None:
        now = asyncio.get_running_loop().time()
        stuck = [sub for sub in local.subs if sub.reader.need is Need.LIVE and sub.watched_seq == sub.reader.seq]
        for sub in local.subs:
            sub.watched_seq = sub.reader.seq
        if head is None:
            local.missing_since = local.missing_since or now
            if now - local.missing_since > ORPHAN_GRACE_S:
                for sub in tuple(local.subs):
                    local.fail(sub, StreamLost("the fabric lost the stream and its producer is gone; ask again"))
            return
        unwatched = head.status == "live" and not head.watched_by_me
        for sub in stuck:
            if unwatched or head.last != sub.reader.seq or head.epoch.n != sub.reader.epoch:
                sub.reader.recheck()
                self.catch_up(sub)
        if unwatched and not stuck:
            local.recheck()
        # A stream that its producer does not know: the request or the producer was lost without a trace
        orphan = bool(stuck) and head.status == "live" and not await self._directory.produces(head.replica, local.id)
        if not orphan:
            local.missing_since = None
            return
        local.missing_since = local.missing_since or now
        if now - local.missing_since > ORPHAN_GRACE_S:
            await self._fence(local, head)

    async def _fence(self, local: LocalStream, head: Head) -> None:
        try:
            await self.log.fence(local.id, head.replica, secrets.token_hex(4), ErrorInfo.of(LOST))
        except FabricUnavailable as error:
            log.warning("stream %s cannot be ended: %s", local.id, error)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except FabricUnavailable as error:
        log.warning("left undone: %s", error)
