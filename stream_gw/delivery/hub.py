"""The streams that readers follow on this gateway: published frames go to them, and readers that lack frames read the
log.

The data path is ``Hub.receive`` → ``deliver_message`` → ``LocalStream.receive`` → ``Outlet.write``: one pass in the
loop turn of the subscription's read, without a task switch and without JSON.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from stream_fabric.errors import FabricError, NotFound, StreamGwError, StreamLost, TooMany
from stream_fabric.limits import (
    ORPHAN_GRACE_S,
    STREAMS_PER_GATEWAY_MAX,
    SUBSCRIBERS_PER_STREAM_MAX,
    TENANT_PAGES_READ_MAX,
)
from stream_fabric.ports import Clock, StreamLog, Subscribe
from stream_fabric.process.slots import Slots
from stream_fabric.stream.cursor import END, Cursor, Epoch
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId
from stream_fabric.stream.log import Page
from stream_fabric.stream.reader import Need, Reader
from stream_gw.delivery.local_stream import LocalStream, Subscription, deliver_message, encoding_failed
from stream_gw.delivery.outlet import HeldOutlet, Outlet
from stream_gw.observe.trace import ReaderTrace

log = logging.getLogger(__name__)

_EMPTY_PAGE_S = 0.05
_SETTLE_S = 10.0


class Hub:
    """All streams with readers on this gateway. Its background work runs in ``tasks``."""

    def __init__(
        self, gateway: GatewayId, streams: StreamLog, clock: Clock, subscribe: Subscribe, tasks: asyncio.TaskGroup
    ) -> None:
        self.gateway = gateway
        self.log = streams
        self.clock = clock
        self._monotonic_us = clock.monotonic_us
        self._tasks = tasks
        self.local: dict[bytes, LocalStream] = {}
        self.heard_us = 0
        """When the last message came, on the monotonic clock."""
        self.on_return: Callable[[], None] = lambda: None
        """Called when the fabric is back after it was away."""
        self.on_read: Callable[[StreamId, TenantId], Coroutine[Any, Any, None] | None] = lambda stream, tenant: None
        """Called when the last reader here has left a stream that was read to its end. A new reader waits for the work
        that it returns."""
        self._replays: WeakValueDictionary[TenantId, Slots] = WeakValueDictionary()
        """Turns of a tenant's readers at the log: without them its replays take all of the loop."""
        self._declining: set[bytes] = set()
        self._deletions: dict[StreamId, asyncio.Task[None]] = {}
        """Running work of ``on_read``."""
        self._subscribed: set[int] = set()
        """Partitions whose channels have been subscribed at least once."""
        self._recreation_ends_at = 0.0
        self._recently_away_until = 0.0
        self.subscription = subscribe(gateway, self.receive, self.resubscribed)

    # --- the data path -------------------------------------------------------------------------------------

    def receive(self, payload: bytes) -> None:
        """Deliver a published message: the parts of many streams."""
        self.heard_us = self._monotonic_us()
        for stream in deliver_message(self.local, payload):
            self._decline(stream)

    def _decline(self, stream: bytes) -> None:
        """Stop watching a stream without readers here, as after an outage that lost the unwatch.

        No agent would cancel the stream for lack of readers while this gateway stayed a watcher.
        """
        if stream not in self._declining:
            self._declining.add(stream)
            self.spawn(self._undo_watch(stream))

    async def _undo_watch(self, stream: bytes) -> None:
        try:
            await self._unwatch(stream)
        finally:
            self._declining.discard(stream)

    # --- readers come and go -------------------------------------------------------------------------------

    def expect(
        self, stream: StreamId, tenant: TenantId, epoch: Epoch, trace: ReaderTrace | None = None
    ) -> Subscription:
        """Subscribe to a stream that is about to be created with this gateway as its first watcher.

        ``Subscription.attach`` sets the reader's outlet once the stream exists. Raises TooMany.
        """
        local = self.local.get(stream.encode())
        if local is None:  # else another request with the same idempotency key came first
            self.check_capacity(stream)
            local = self.local[stream.encode()] = LocalStream(self, stream, tenant, epoch)
        reader = Reader(Cursor(local.epoch_n, 0), Epoch.parse(local.epoch.decode()).nonce)
        reader.need = Need.LIVE
        sub = Subscription(local, HeldOutlet(), reader, trace, exact=True)
        local.subs.append(sub)
        return sub

    def check_capacity(self, stream: StreamId) -> None:
        """Check that this gateway may have the stream. Raises TooMany."""
        if len(self.local) >= STREAMS_PER_GATEWAY_MAX and stream.encode() not in self.local:
            raise TooMany(
                f"this gateway is at its limit of {STREAMS_PER_GATEWAY_MAX} streams; retry, another gateway may "
                "have capacity",
                retry_after_s=1,
            )

    async def read_page(self, stream: StreamId, tenant: TenantId, after: Cursor) -> Page:
        """Read one page of a stream, without following the stream. Raises NotFound."""
        if (deletion := self._deletions.get(stream)) is not None:  # else a new reader would lose the rest half-way
            await asyncio.wait([deletion])
        page = await self.log.watch(stream, tenant, None, after)
        if page is None:
            raise no_stream(stream)
        return page

    def follow(
        self,
        stream: StreamId,
        page: Page,
        after: Cursor,
        trace: ReaderTrace | None,
        outlet: Outlet,
        *,
        exact: bool,
    ) -> Subscription:
        """Deliver a stream to the outlet from the cursor on; ``page`` is one of its pages. Raises TooMany."""
        local = self.local.get(stream.encode())
        if local is None:
            self.check_capacity(stream)
            local = LocalStream(self, stream, page.tenant, page.epoch)
            local.head, local.status = page.head, page.status
            self.local[stream.encode()] = local
        elif len(local.subs) >= SUBSCRIBERS_PER_STREAM_MAX:
            raise TooMany(
                f"stream {stream} is at its limit of {SUBSCRIBERS_PER_STREAM_MAX} readers on this gateway; retry, "
                "another gateway may have room",
                retry_after_s=1,
            )
        sub = Subscription(local, outlet, Reader(after), trace, exact=exact)
        local.subs.append(sub)
        if outlet.full:
            sub.pause()
        else:
            self.catch_up(sub)
        return sub

    def streams_of(self, tenant: TenantId, user: str) -> list[StreamId]:
        """Return the streams of a user that have readers here."""
        return [
            local.id
            for local in self.local.values()
            if local.tenant == tenant and any(sub.trace is not None and sub.trace.user == user for sub in local.subs)
        ]

    def drop(self, local: LocalStream) -> None:
        """Remove a stream whose last reader here has left, and stop watching it."""
        if self.local.get(local.id.encode()) is local:
            del self.local[local.id.encode()]
            if local.was_read:
                if (deletion := self.on_read(local.id, local.tenant)) is not None:
                    self._deletions[local.id] = task = self.spawn(deletion)
                    task.add_done_callback(lambda done: self._deletions.pop(local.id, None))
            elif local.status == "live":
                self.spawn(self._unwatch(local.id.encode()))

    def abandon(self, local: LocalStream, error: StreamGwError) -> None:
        """End all readers of a stream whose log cannot be reached; its watch is undone at its next publish."""
        if self.local.get(local.id.encode()) is local:  # else its readers have left, and another one has come
            del self.local[local.id.encode()]
        for sub in tuple(local.subs):
            local.fail(sub, error)

    async def _unwatch(self, stream: bytes) -> None:
        """Stop watching a stream in the fabric, unless a reader has come meanwhile."""
        if stream not in self.local:  # else a reader has come meanwhile
            await self.log.unwatch(StreamId(stream.decode()), self.gateway)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the coroutine in a background task. A FabricError is logged; any other exception ends the process."""
        return self._tasks.create_task(_log_fabric_error(work))

    # --- replay --------------------------------------------------------------------------------------------

    def catch_up(self, sub: Subscription) -> None:
        """Start reading the log for a reader that lacks frames, unless that runs already."""
        if sub.reader.need is Need.PAGE and not sub.catching_up:
            sub.catching_up = True
            self._tasks.create_task(self._catch_up(sub))

    async def _catch_up(self, sub: Subscription) -> None:
        """Read pages of the log until the reader lacks no frames."""
        local = sub.local
        loop = asyncio.get_running_loop()
        turns = self._replays.setdefault(local.tenant, Slots(TENANT_PAGES_READ_MAX))
        missing_since: float | None = None
        replays = deleted = False
        try:
            while sub.reader.need is Need.PAGE:
                before = sub.reader.cursor
                try:
                    read = partial(self.log.watch, local.id, None, self.gateway, before)
                    # The first page is the only one of most readers: after an outage all of a tenant's streams read one
                    page = await (turns.read(read) if replays else read())
                    replays = True
                    if page is None and deleted:  # and its producer has not made it again between the two reads
                        local.fail(sub, content_deleted(local.id))
                        return
                    deleted = page is None and await self._is_deleted(local.id)
                except FabricError as error:
                    # The watchdog decides how long the fabric may be away, and then closes the reader
                    log.warning("stream not read, retrying: stream=%s error=%s", local.id, error)
                    await asyncio.sleep(_EMPTY_PAGE_S)  # the command may have failed at once
                    continue
                if sub.reader.need is not Need.PAGE:
                    return
                if page is None:
                    missing_since = missing_since or loop.time()
                    if loop.time() - missing_since > ORPHAN_GRACE_S:
                        local.fail(sub, stream_gone())
                        return
                else:
                    missing_since = None
                    local.receive_page(page, sub.reader)
                    local.deliver(sub, sub.reader.receive_page(page))
                if sub.reader.need is Need.PAGE and sub.reader.cursor == before:
                    await asyncio.sleep(_EMPTY_PAGE_S)
        except Exception:  # as in LocalStream.receive: it costs this reader its stream, and no other
            log.exception("delivery to a reader failed: stream=%s", local.id)
            local.fail(sub, encoding_failed())
        finally:
            sub.catching_up = False

    async def _is_deleted(self, stream: StreamId) -> bool:
        """Whether a stream has ended that has no content for readers. Its record outlives the content for a while."""
        page = await self.log.watch(stream, None, None, END)
        return page is not None and page.status != "live"

    # --- the fabric's state --------------------------------------------------------------------------------

    def await_recreation(self) -> None:
        """Expect, for a few seconds, that producers recreate streams which the fabric has lost."""
        self._recreation_ends_at = asyncio.get_running_loop().time() + _SETTLE_S

    @property
    def awaits_recreation(self) -> bool:
        """Whether producers may still be recreating lost streams: the fabric is new, or was away a moment ago."""
        return self.recently_away or asyncio.get_running_loop().time() < self._recreation_ends_at

    @property
    def recently_away(self) -> bool:
        """Whether the fabric is away or was a moment ago: logs may be behind what readers were shown."""
        return not self.subscription.healthy or asyncio.get_running_loop().time() < self._recently_away_until

    def resubscribed(self, channels: list[str]) -> None:
        """Recheck every stream of these channels' partitions, because publishes may have been missed."""
        partitions = {int(name[name.index("{p") + 2 : name.index("}")]) for name in channels}
        if not self._subscribed.isdisjoint(partitions):  # at the start each server's channels come by themselves
            self._recently_away_until = asyncio.get_running_loop().time() + _SETTLE_S
            self.on_return()
        self._subscribed |= partitions
        for local in self.local.values():
            if local.partition in partitions:
                local.recheck()


def no_stream(stream: str) -> NotFound:
    """Make the error of a stream that does not exist or is not the caller's: the same, so that neither is told."""
    return NotFound(f"no stream {stream}: it never existed, belongs to another caller, or its retention has passed")


def content_deleted(stream: str) -> NotFound:
    """Make the error of a reader that lacks frames which were deleted."""
    return NotFound(
        f"the content of stream {stream} was deleted before it was read to the end: by its tenant, or because its plan "
        "keeps none"
    )


def stream_gone() -> StreamLost:
    """Make the error of a stream that is neither in the log nor with a producer."""
    return StreamLost("the fabric lost the stream and its producer is gone; send the request again")


async def _log_fabric_error(work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine; log a FabricError instead of raising it."""
    try:
        await work
    except FabricError as error:
        log.warning("background task failed, not retried: %s", error)
