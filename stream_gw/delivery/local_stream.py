"""One stream with readers on this gateway, and its readers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from stream_fabric.errors import StreamGwError, StreamLost, StreamReset
from stream_fabric.events import ReadEnd
from stream_fabric.native import split_message
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.frames import End, Status, coalesce_from, decode, is_end, tokens_of
from stream_fabric.stream.ids import StreamId, TenantId, partition_of
from stream_fabric.stream.log import Page
from stream_fabric.stream.reader import Gap, Need, Reader, Reset, Run, Step
from stream_gw.delivery.outlet import HeldOutlet, Outlet
from stream_gw.observe.trace import ReaderTrace

if TYPE_CHECKING:
    from stream_gw.delivery.hub import Hub

log = logging.getLogger(__name__)


_BRACE: Final = 0x7B
_QUOTE: Final = 0x22


class Subscription:
    """One outlet that follows one stream. ``exact``: never join frames into one chunk, even when behind."""

    __slots__ = (
        "announced_epoch", "catching_up", "exact", "local", "outlet", "reader", "tokens", "trace", "watched_seq",
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
        """The reader's seq when the watchdog last looked."""
        self.announced_epoch = local.epoch_n
        self.trace = trace
        self.tokens = 0
        """Output tokens written."""

    @property
    def head(self) -> int:
        """Last seq of the stream that this gateway has heard of."""
        return self.local.head

    def attach(self, outlet: Outlet) -> Subscription:
        """Replace a new stream's ``HeldOutlet`` by the transport's outlet, which gets all held calls."""
        held, self.outlet = self.outlet, outlet
        assert isinstance(held, HeldOutlet), "a stream is subscribed once"
        if not held.pass_on(outlet):
            self.local.fail(self, StreamLost("frames of the stream are lost; request it again"))
        elif outlet.full:
            self.pause()
        elif held.full:
            self.resume()
        return self

    def resume(self) -> None:
        """Continue the delivery, because the outlet has drained."""
        if self.trace is not None:
            self.trace.receive_drained()
        if self.reader.need is Need.DRAIN:
            self.exact = False
            self.reader.resume()
            self.local.hub.catch_up(self)

    def pause(self) -> None:
        """Stop the delivery, because the outlet is full."""
        self.reader.pause()
        # Until the first token of a new stream its reader waits for that, although a full WebSocket takes nothing
        if self.trace is not None and (self.tokens or self.trace.role != "created"):
            self.trace.receive_stall()

    def close(self, why: ReadEnd = "left") -> None:
        """End the subscription, because the outlet has gone or is done."""
        self.finish_trace(why)
        self.reader.close()
        self.local.remove(self)

    def finish_trace(self, ended: ReadEnd, end: End | None = None, error: StreamGwError | None = None) -> None:
        """Finish this reader's trace, once."""
        trace, self.trace = self.trace, None
        if trace is not None:
            reader = self.reader
            trace.finish(ended, end=end, error=error, epoch=reader.epoch, last_seq=reader.seq, tokens=self.tokens)


class Missing(NamedTuple):
    """``s``: seconds for which a stream's log or producer was missing, up to the answer ``at``, on the loop's clock."""

    s: float
    at: float


class LocalStream:
    """A stream with readers on this gateway."""

    __slots__ = (
        "epoch", "epoch_n", "head", "heard_us", "hub", "id", "missing", "partition", "status", "subs", "tenant",
        "was_read",
    )  # fmt: skip

    def __init__(self, hub: Hub, stream: StreamId, tenant: TenantId, epoch: Epoch) -> None:
        self.hub = hub
        self.id = stream
        self.tenant = tenant
        self.epoch = str(epoch).encode()
        self.epoch_n = epoch.n
        self.partition = partition_of(stream, hub.log.partitions)
        self.head = 0
        self.heard_us = 0
        """When the last frames came, on the monotonic clock."""
        self.status: Status = "live"
        self.subs: list[Subscription] = []
        self.was_read = False
        """A reader here got everything to the end."""
        self.missing: Missing | None = None
        """For how long the watchdog has found neither log nor producer; None: it found them."""

    def receive(self, epoch: bytes, first: int, last: int, frames: bytes) -> None:
        """Deliver one published part to every reader."""
        if epoch != self.epoch:
            parsed = Epoch.parse(epoch.decode())
            if parsed.n < self.epoch_n:
                return
            rival = parsed.n == self.epoch_n
            self._raise_epoch(epoch, parsed.n)
            if rival:  # a failover lost a takeover: only the log knows which frames of the epoch still hold
                self.recheck()
        self.head = last
        self.heard_us = self.hub.heard_us
        n, subs = self.epoch_n, self.subs
        for sub in subs if len(subs) == 1 else tuple(subs):
            try:
                reader = sub.reader
                lines = reader.take_live(n, first, last, frames)
                if lines is not None:
                    outlet = sub.outlet
                    outlet.write(n, first, lines)
                    if not sub.tokens and sub.trace is not None:
                        sub.trace.first = self.heard_us
                    sub.tokens += 1 if first == last and frames[1] == _QUOTE else tokens_of(lines)
                    if outlet.full:
                        sub.pause()
                    continue
                if sub.trace is not None and reader.need is not Need.LIVE:
                    ends = is_end(frames[frames.rfind(b"\n") + 1 :])
                    if ends:
                        sub.trace.arrived = self.heard_us  # this reader is behind, and gets the terminal later
                    if reader.need is Need.DRAIN and (ends or frames[0] != _BRACE):
                        sub.trace.receive_stall()
                self.deliver(sub, reader.receive_live(n, first, last, frames))
                if reader.need is Need.PAGE:
                    self.hub.catch_up(sub)
            except Exception:  # one reader's encoder must not cost the other readers their stream
                log.exception("delivery to a reader failed: stream=%s", self.id)
                self.fail(sub, encoding_failed())

    def receive_page(self, page: Page, reader: Reader) -> None:
        """Take the epoch, status and head from a page of the log that was read for ``reader``."""
        if page.epoch.n > self.epoch_n:
            self._raise_epoch(str(page.epoch).encode(), page.epoch.n)
        elif page.epoch.n < reader.epoch:  # a failover lost a takeover: the epoch before goes on
            self.epoch, self.epoch_n = str(page.epoch).encode(), page.epoch.n
            self.recheck()
        self.status = page.status
        self.head = max(self.head, page.head) if page.epoch.n == self.epoch_n else page.head

    def _raise_epoch(self, epoch: bytes, n: int) -> None:
        """Set a newer epoch, because another producer has taken the stream over."""
        self.epoch, self.epoch_n = epoch, n
        for sub in self.subs:
            if sub.trace is not None and self.heard_us:
                sub.trace.receive_break(self.heard_us)

    def recheck(self) -> None:
        """Have every reader compare its position with the log."""
        for sub in self.subs:
            sub.reader.recheck()
            self.hub.catch_up(sub)

    def deliver(self, sub: Subscription, steps: list[Step]) -> None:
        """Write the reader's steps to its outlet, and end the subscription after the terminal."""
        outlet = sub.outlet
        runs = [step for step in steps if isinstance(step, Run)]
        self._count_tokens(sub, runs)
        if not sub.exact and len(runs) > 1 and len(runs) == len(steps) and runs[0].epoch == runs[-1].epoch:
            # Behind: join adjacent deltas, so that a page is a few chunks, each with its last frame's cursor
            lines = [line for run in runs for line in run.lines]
            steps = [Run(runs[0].epoch, seq, [line]) for seq, line in coalesce_from(runs[0].first, lines)]
        for step in steps:
            match step:
                case Run(epoch, first, lines):
                    if epoch != sub.announced_epoch:
                        sub.announced_epoch = epoch
                        if sub.trace is not None:
                            sub.trace.receive_continuation()
                        outlet.epoch_changed(self.epoch.decode() if epoch == self.epoch_n else str(epoch), first - 1)
                    outlet.write(epoch, first, lines)
                case Gap():
                    if not outlet.gap(step):
                        self.fail(sub, StreamLost(f"frames {step.start} to {step.stop} of the stream are lost"))
                        return
                case Reset():
                    if not outlet.reset(step):
                        self.fail(sub, StreamReset(f"the stream was lost after {step.epoch}-{step.to}"))
                        return
        if sub.reader.need is Need.NOTHING:
            if any(isinstance(step, Gap) for step in steps):
                self.fail(sub, StreamLost("the end of the stream is lost"))
                return
            if runs:
                end = decode(runs[-1].lines[-1])
                assert isinstance(end, End)
                self.status = end.status
                sub.finish_trace(end.status, end)
            self.was_read = True
            outlet.end(self.status)
            self.remove(sub)
        elif outlet.full:
            sub.pause()

    def _count_tokens(self, sub: Subscription, runs: list[Run]) -> None:
        """Count the tokens of frames about to be written, and pass their control frames to the reader's trace."""
        trace, now_us = sub.trace, self.hub.clock.monotonic_us
        for run in runs:
            before = sub.tokens
            sub.tokens += tokens_of(run.lines)
            if trace is not None:
                if not before and sub.tokens:
                    trace.first = now_us()
                for line in run.lines:
                    if line[0] == _BRACE:
                        trace.receive_control(line, now_us())

    def fail(self, sub: Subscription, error: StreamGwError) -> None:
        """End one reader's subscription with an error."""
        sub.finish_trace("failed", error=error)
        sub.reader.close()
        self.remove(sub)
        sub.outlet.fail(error, sub.reader.cursor)

    def remove(self, sub: Subscription) -> None:
        """Remove a subscription; after the last one, the hub drops the stream."""
        if sub in self.subs:
            self.subs.remove(sub)
            if not self.subs:
                self.hub.drop(self)


def deliver_message(local: dict[bytes, LocalStream], payload: bytes) -> list[bytes]:
    """Deliver a published message, the parts of many streams; return the streams that have no reader here."""
    strangers: list[bytes] = []
    for stream, epoch, first, last, frames in split_message(payload):
        found = local.get(stream)
        if found is None:
            strangers.append(stream)
        else:
            found.receive(epoch, first, last, frames)
    return strangers


def encoding_failed() -> StreamGwError:
    """Make the error of a reader whose frames could not be encoded."""
    return StreamGwError("the gateway could not encode this stream for its reader; resume it after the cursor")
