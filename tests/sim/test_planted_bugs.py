"""Bugs planted in production code or in the law: the simulation catches each within so many schedules.

Some take a rare meeting of faults: their schedules have those faults, beside what the seed draws.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import pytest

import inference.agent.continuation
import inference.agent.running
import inference.agent.steering.takeover
import stream_fabric.recovery.settlements
import stream_gw.delivery.hub
import stream_gw.streams.create
import tests.sim.hosts
import tests.support.memory_log
from inference.agent.continuation import ContinuingSink, Part, PriorOutput
from inference.agent.handover import Handover
from inference.agent.lease import Lease
from inference.agent.moderation.held_output import Call, HeldOutput
from inference.agent.moderation.moderated_sink import ModeratedSink
from inference.agent.requests import Requests
from inference.agent.running import RunningStream
from inference.agent.sleep_controller import SleepController
from inference.agent.structured.checked_sink import RepairedSink
from stream_fabric.accounts.account import Settlement
from stream_fabric.errors import StreamGwError
from stream_fabric.pool.placement import Placed
from stream_fabric.pool.records import Arrival, Candidate, EngineRequest, Work
from stream_fabric.ports import FrameSink
from stream_fabric.recovery.failover import Failover, wait_s
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.frames import Frame, Open, Usage
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId
from stream_fabric.stream.log import Append, AppendCode, AppendReply, StreamState, Takeover
from stream_fabric.stream.producer import Outcome, Producer
from stream_fabric.stream.reader import Need, Reader, Step
from stream_gw.delivery.watchdog import Watchdog
from stream_gw.routing import place_request
from tests.sim.client import Client
from tests.sim.fakes import Planted
from tests.sim.memory_pools import Law
from tests.sim.ports import StreamDoor
from tests.sim.witness import Violation
from tests.sim.world import World

pytestmark = pytest.mark.sim

SEEDS = int(os.environ.get("STREAM_GW_SIM_PLANTED_SEEDS", "1500"))


class Bug(NamedTuple):
    planted: Planted
    invariant: str = ""
    """The number that the violation begins with; empty: it breaks several, and which one first is chance."""
    faults: Sequence[str] = ()


async def nothing(self: Any) -> None:
    pass


# --- readers -----------------------------------------------------------------------------------------------


class LeapingReader(Reader):
    """Writes whatever is above its cursor."""

    __slots__ = ()

    def receive_live(self, epoch: int, first: int, last: int, frames: bytes) -> list[Step]:
        if self.need is Need.LIVE and first > self.seq + 1:
            self.seq = first - 1
        return super().receive_live(epoch, first, last, frames)


class RepeatingReader(Reader):
    """Writes what it has written."""

    __slots__ = ()

    def receive_live(self, epoch: int, first: int, last: int, frames: bytes) -> list[Step]:
        if self.need is Need.LIVE and first <= self.seq:
            self.seq = first - 1
        return super().receive_live(epoch, first, last, frames)


class ForgetfulReader(Reader):
    """Forgets, while it reads the log, what it heard meanwhile, and never looks again."""

    __slots__ = ()

    def recheck(self) -> None:
        pass


class HoldingReader(Reader):
    """Goes on when its connection is full."""

    __slots__ = ()

    def pause(self) -> None:
        pass


class EndlessReader(Reader):
    """Ends a stream clean when the connection to the log says it has caught up."""

    __slots__ = ()

    def receive_page(self, page: Any) -> list[Step]:
        steps = super().receive_page(page)
        if self.need is Need.LIVE and self.seq > 2:
            self.need = Need.NOTHING
        return steps


class LoyalReader(Reader):
    """Knows one epoch only: what comes in another is not for it."""

    __slots__ = ()

    def receive_live(self, epoch: int, first: int, last: int, frames: bytes) -> list[Step]:
        return super().receive_live(epoch, first, last, frames) if epoch == self.epoch else []

    def recheck(self) -> None:
        pass


class BaselessReader(Reader):
    """Takes the new epoch's frames behind whatever it has."""

    __slots__ = ()

    def receive_page(self, page: Any) -> list[Step]:
        return super().receive_page(page._replace(bases=()))


class StartingOverReader(Reader):
    """Takes a new epoch for a new stream."""

    __slots__ = ()

    def receive_page(self, page: Any) -> list[Step]:
        if page.epoch.n > self.epoch and self.seq:
            return [*self._again(page.epoch.n), *super().receive_page(page)]
        return super().receive_page(page)

    def _again(self, epoch: int) -> list[Step]:
        self.epoch, self.seq = epoch, 0
        return []


# --- the log -----------------------------------------------------------------------------------------------


class AnyEpochState(StreamState):
    """Takes appends of a producer that was fenced."""

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        if self.status == "live" and request.epoch != str(self.epoch) and request.first == self.last + 1:
            return super().append(request._replace(epoch=str(self.epoch)), self.replica or replica)
        return super().append(request, replica)


class LateCancelState(StreamState):
    """Lets one more append through after a cancel was accepted."""

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        if self.status == "cancelled" and request.first == self.cancelled_at + 1 and not request.status:
            end = self.entries.pop()
            self.entries.append(end._replace(first=request.first, last=request.last, frames=request.frames))
            self.last = request.last + 1
            self.entries.append(end._replace(first=self.last, last=self.last))
            return AppendReply(AppendCode.OK, request.last)
        return super().append(request, replica)


class HoledState(StreamState):
    """Takes appends that leave a hole."""

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        if self.status == "live" and request.first > self.last + 1 and request.epoch == str(self.epoch):
            self.last = request.first - 1
        return super().append(request, replica)


class SharedEpochState(StreamState):
    """Takes appends of any replica that knows the epoch."""

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        return super().append(request, self.replica or replica)


class SameEpochState(StreamState):
    """A takeover that does not raise the epoch."""

    def takeover(self, lost: Epoch, nonce: str) -> Takeover | None:
        if self.status != "live" or self.epoch != lost:
            return None
        self.replica = None
        return Takeover(self.epoch, self.last)


class UnnotedBaseState(StreamState):
    """A takeover that does not say where the new epoch begins."""

    def takeover(self, lost: Epoch, nonce: str) -> Takeover | None:
        taken = super().takeover(lost, nonce)
        self.bases.clear()
        return taken


class AnyEpochLostState(StreamState):
    """A takeover and a fence that do not look whose the stream is by now."""

    def takeover(self, lost: Epoch, nonce: str) -> Takeover | None:
        return super().takeover(self.epoch, nonce)

    def fence(self, replica: ReplicaId | None, nonce: str, error: Any, *_: Any, withdraws: bool = False) -> bool:
        return super().fence(None, nonce, error, withdraws=withdraws)


class LiveWatchState(StreamState):
    """Knows those who read while it runs alone."""

    def watch(self, gateway: GatewayId) -> None:
        if self.status == "live":
            super().watch(gateway)


class RevivingState(StreamState):
    """A takeover of a stream that was cancelled."""

    def takeover(self, lost: Epoch, nonce: str) -> Takeover | None:
        if self.status == "cancelled":
            self.status = "live"
        return super().takeover(lost, nonce)


class SettlingDoor(StreamDoor):
    """Settles at the takeover, and again at the end."""

    async def takeover(self, stream: StreamId, lost: Epoch, nonce: str) -> Takeover | None:
        taken = await super().takeover(stream, lost, nonce)
        shard = self._shard(stream)
        if taken is not None and stream in shard.log.streams:
            self._w.witness.settle(shard, stream, shard.log.streams[stream])
        return taken


# --- accounts ----------------------------------------------------------------------------------------------


def settle_output_only(stream: StreamId, usage: Usage) -> Settlement:
    """The prompt costs nothing."""
    return Settlement(stream, usage.output, 1, 0, usage.output)


# --- producers ---------------------------------------------------------------------------------------------


class RewritingProducer(Producer):
    """Does not keep its bytes: what it sends again is spelled otherwise."""

    __slots__ = ("_times",)

    def append_to_send(self, frames_max: int, bytes_max: int) -> Append | None:
        request = super().append_to_send(frames_max, bytes_max)
        self._times = getattr(self, "_times", 0) + 1
        if request is not None and not request.status:
            return request._replace(frames=request.frames.replace(b' "', b' %d"' % self._times))
        return request


class DriftingUsageProducer(Producer):
    """Bills a cancel with what was reported since."""

    __slots__ = ()

    def usage_at(self, seq: int) -> Any:
        return self.usage


class StubbornProducer(Producer):
    """Gives up where the log says it ends elsewhere."""

    __slots__ = ()

    def receive_reply(self, reply: AppendReply) -> Outcome:
        if reply.code is AppendCode.GAP:
            self.stopped = True
            return "stop"
        return super().receive_reply(reply)


class WokenProducer(Producer):
    """Takes a late reply for news after it has heard of its cancel."""

    __slots__ = ()

    def receive_reply(self, reply: AppendReply) -> Outcome:
        if self.ended and reply.code is AppendCode.OK:
            self.acked = min(reply.seq, self.last)
            return ""
        return super().receive_reply(reply)


class OwnCountProducer(Producer):
    """Counts its frames from 1, whatever the log has."""

    __slots__ = ()

    def __init__(self, stream: StreamId, epoch: Epoch, base: int = 0) -> None:
        super().__init__(stream, epoch)


class OwnUsageProducer(Producer):
    """Bills its own tokens only."""

    __slots__ = ()

    def receive_prior_usage(self, usage: Usage) -> None:
        pass


class UnfencedProducer(Producer):
    """Told that the epoch is another's, sends again."""

    __slots__ = ()

    def receive_reply(self, reply: AppendReply) -> Outcome:
        if reply.code is AppendCode.FENCED:
            self.in_flight = False
            return ""
        return super().receive_reply(reply)

    def receive_head(self, head: Any) -> Outcome:
        return "" if head is not None and str(head.epoch) != self.epoch else super().receive_head(head)


# --- pools, rescues and agents -----------------------------------------------------------------------------


def add_only(
    self: Law, replica: ReplicaId, seat: Any, models: Any, ended: Any, running: Any, now_ms: float, *more: Any
) -> Any:
    """A renewal that only adds."""
    kept = dict(self.flights.get(replica, {}))
    taken = super(Law, self).report(replica, seat, models, (), running, now_ms, *more)
    self.flights[replica].update({stream: flight for stream, flight in kept.items() if stream not in (running or ())})
    return taken


async def drop_first(
    self: Any, pool: str, replica: ReplicaId, stream: StreamId, error: StreamGwError, **more: Any
) -> None:
    """Takes the stream off the dead replica's list before it is on another's."""
    work = await self._pools.work(pool, stream)
    others = [Candidate(i.replica, 0) for i in await self._pools.replicas(pool) if i.replica != replica]
    if work is None or work.attempt >= 3 or not others:
        await self.end(pool, replica, stream, error)
        return
    taken = await self._streams.takeover(stream, work.parsed_epoch(), secrets.token_hex(4))
    await self._pools.remove_in_flight(pool, replica, [stream])
    if taken is not None:
        again = msgspec.structs.replace(work, epoch=str(taken.epoch), base=taken.base, attempt=work.attempt + 1)
        await self._pools.place(pool, again, others, wait_s=wait_s(work, self._clock.now_us()), jitter=0.5)


_place = Failover.rescue


async def place_without_instead(self: Any, *args: Any, **asked: Any) -> None:
    """Does not say whom the stream is taken from."""
    outer = self._pools

    class Pools:
        def __getattr__(self, name: str) -> Any:
            return getattr(outer, name)

        async def place(self, *args: Any, instead: Any = None, **more: Any) -> Any:
            return await outer.place(*args, **more)

    self._pools = Pools()
    try:
        await _place(self, *args, **asked)
    finally:
        self._pools = outer


class UncountedRescue(Failover):
    """Does not count the attempts."""

    async def rescue(self, *args: Any, **more: Any) -> None:
        outer = self._pools

        class Pools:
            def __getattr__(self, name: str) -> Any:
                return getattr(outer, name)

            async def place(self, pool: str, work: Work, *args: Any, **more: Any) -> Any:
                return await outer.place(pool, msgspec.structs.replace(work, attempt=1), *args, **more)

        self._pools = Pools()  # type: ignore[assignment]
        try:
            await _place(self, *args, **more)
        finally:
            self._pools = outer


_read_before = Handover.read_earlier_frames


async def lines_but_the_last(self: Handover, stream: RunningStream) -> list[bytes]:
    return (await _read_before(self, stream))[:-1]


def forget_at_once(self: Handover, stream: RunningStream) -> None:
    """Takes a fenced stream off its list before it is on another's."""
    stream.closed = True
    if self._streams.is_running(stream):
        self._engine.abort(stream.name)
    if stream.work.base and not stream.producer.ended:
        self._tasks.create_task(self.fence(stream))
    self._streams.remove(stream, keep=stream.producer.ended)


_start = Requests._start


def start_once(self: Requests, arrival: Arrival) -> None:
    """Takes a stream that comes back in a newer epoch for the one it has or had."""
    if self._streams.get(arrival.stream) is None:
        _start(self, arrival)


_continued = inference.agent.continuation.continuing_requests


def ask_for_all(request: EngineRequest, before: PriorOutput) -> list[Part]:
    """Asks for as many tokens as the first producer had to make."""
    choices = tuple(msgspec.structs.replace(choice, tokens=0) for choice in before.choices)
    return _continued(request, msgspec.structs.replace(before, choices=choices))


class ReopeningSink(ContinuingSink):
    """Opens the block that is open."""

    def frame(self, frame: Frame) -> None:
        if isinstance(frame, Open):
            self._sink.frame(frame)
        else:
            super().frame(frame)


async def place_nothing(*args: Any, **more: Any) -> place_request.Outcome:
    """Says that a request has its place, and asks for none."""
    return place_request.Outcome(Placed(ReplicaId("r"), "only", ()), "pool")


async def free_as_far_as_it_knows(self: Lease) -> bool:
    return not self._running


def submit_in_its_sleep(
    self: Requests,
    stream: RunningStream,
    request: EngineRequest,
    sink: FrameSink,
    before: PriorOutput | None = None,
    rest: Sequence[Part] = (),
) -> None:
    self._engine.submit(rest[0].request if rest else request, sink)


def keep_what_was_reset(self: Client, reading: Any, epoch: int, to: int) -> None:
    self.told.append("reset")


def release_all(self: HeldOutput) -> Iterator[Call]:
    """Lets text go on that is not checked."""
    while self._calls:
        yield self._calls.popleft()[0]


def count_own_reply(self: RepairedSink, reply: Any) -> Usage:
    """Forgets the replies that were dropped."""
    return cast(Usage, reply.usage or Usage(0, 0, 0, reply.tokens))


def say_what_is_cut(self: Any) -> None:
    """Goes on with an answer that an input has cut."""


async def accept_any(self: RepairedSink, reply: Any, text: str) -> None:
    """Takes the first reply, whatever its check says."""
    self._release(
        reply,
        await self._checker.check(self._schema, text, self._stream.work.tenant),
        ("completed", None, self._total(reply)),
    )


HUB, RUNNING, LOG, TAKEOVER = (
    stream_gw.delivery.hub,
    inference.agent.running,
    tests.support.memory_log,
    inference.agent.steering.takeover,
)
PLANTED: dict[str, Bug] = {
    "a reader that accepts seq > cursor + 1": Bug([(HUB, "Reader", LeapingReader)], "3:"),
    "a reader that repeats": Bug([(HUB, "Reader", RepeatingReader)], "3:"),
    "a reader that never looks again": Bug([(HUB, "Reader", ForgetfulReader)], "4:"),
    "a reader that does not stop when full": Bug([(HUB, "Reader", HoldingReader)], "8:"),
    "a reader that ends early": Bug([(HUB, "Reader", EndlessReader)], "4:"),
    "a reader that knows one epoch": Bug([(HUB, "Reader", LoyalReader)], "4:"),
    "a reader that does not accept the base": Bug(
        [(HUB, "Reader", BaselessReader)], "4:", faults=["failover", "agent"]
    ),
    "a reader that starts over at a new epoch": Bug([(HUB, "Reader", StartingOverReader)]),
    "a log that accepts a stale epoch": Bug([(LOG, "StreamState", AnyEpochState)], "1:", faults=["frozen agent"]),
    "a cancel that lets one more append through": Bug([(LOG, "StreamState", LateCancelState)], "5:"),
    "a log with holes": Bug([(LOG, "StreamState", HoledState)], "2:"),
    "a log that two replicas of an epoch append to": Bug([(LOG, "StreamState", SharedEpochState)], faults=["failover"]),
    "a takeover that raises no epoch": Bug([(LOG, "StreamState", SameEpochState)]),
    "a takeover that notes no base": Bug([(LOG, "StreamState", UnnotedBaseState)], "4:", faults=["failover", "agent"]),
    "a takeover that ignores the epoch": Bug(
        [(LOG, "StreamState", AnyEpochLostState)], faults=["halfway", "frozen agent"]
    ),
    "a takeover of what was cancelled": Bug([(LOG, "StreamState", RevivingState)], "5:", faults=["agent", "cancel"]),
    "a deletion under who reads after the end": Bug(
        [(LOG, "StreamState", LiveWatchState)], "4:", faults=["zero", "slow"]
    ),
    "a takeover that settles": Bug([(tests.sim.hosts, "StreamDoor", SettlingDoor)], "5:"),
    "a settlement without the prompt": Bug(
        [(stream_fabric.recovery.settlements, "settlement_of", settle_output_only)], "5:", faults=["budget"]
    ),
    "a producer that rewrites": Bug([(RUNNING, "Producer", RewritingProducer)], "2:"),
    "a producer that bills what came later": Bug([(RUNNING, "Producer", DriftingUsageProducer)]),
    "a producer that gives up on a lost tail": Bug(
        [(RUNNING, "Producer", StubbornProducer)], faults=["failover", "gateway"]
    ),
    "a producer that a late reply wakes": Bug([(RUNNING, "Producer", WokenProducer)]),
    "a producer that continues from its own count": Bug([(RUNNING, "Producer", OwnCountProducer)]),
    "a producer that bills its own part": Bug([(RUNNING, "Producer", OwnUsageProducer)], "5:"),
    "a producer that no fence stops": Bug([(RUNNING, "Producer", UnfencedProducer)], faults=["frozen agent"]),
    "no watchdog": Bug([(Watchdog, "run", nothing)], "4:"),
    "a gateway that places nothing": Bug(
        [(stream_gw.streams.create, "place", place_nothing)], faults=["flaky", "gateway"]
    ),
    "no reaper": Bug([(LeaseReaper, "run", nothing)]),
    "a lease renewal that only adds": Bug([(Law, "report", add_only)], "7:"),
    "a rescue that drops before it places": Bug([(Failover, "rescue", drop_first)], "6:", faults=["halfway", "agent"]),
    "a rescue that moves nothing": Bug([(Failover, "rescue", place_without_instead)]),
    "a rescue that counts no attempts": Bug([(Failover, "rescue", UncountedRescue.rescue)], "6:"),
    "a continuation that has not read all": Bug([(Handover, "read_earlier_frames", lines_but_the_last)], "2:"),
    "a continuation that asks for all": Bug([(TAKEOVER, "continuing_requests", ask_for_all)]),
    "a continuation that opens again": Bug([(TAKEOVER, "ContinuingSink", ReopeningSink)], "2:"),
    "an agent that forgets what is taken from it": Bug(
        [(Handover, "release", forget_at_once)], "6:", faults=["halfway", "frozen agent"]
    ),
    "an agent that falls asleep over what is on its way": Bug(
        [(Lease, "has_no_requests", free_as_far_as_it_knows), (Requests, "_submit", submit_in_its_sleep)],
        faults=["sleep"],
    ),
    "an agent that does not wake": Bug([(SleepController, "_wake", nothing)], "6:", faults=["sleep"]),
    "an agent that takes no stream twice": Bug([(Requests, "_start", start_once)], faults=["frozen agent", "queue"]),
    "moderation that lets go what is not checked": Bug(
        [(HeldOutput, "released", release_all)], "moderation:", faults=["moderation"]
    ),
    "a repair that bills its own reply": Bug([(RepairedSink, "_total", count_own_reply)], "checks:", faults=["checks"]),
    "a repair that does not come": Bug([(RepairedSink, "_check", accept_any)], "checks:", faults=["checks"]),
    "a repair of what an input has cut": Bug(
        [(RepairedSink, "drop", say_what_is_cut)], "6:", faults=["checks", "input"]
    ),
    "moderation of what an input has cut": Bug(
        [(ModeratedSink, "drop", say_what_is_cut)], "2:", faults=["moderation", "input"]
    ),
    "a reset that the client does not apply": Bug(
        [(Client, "_reset", keep_what_was_reset)], faults=["failover", "agent"]
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    bug = PLANTED[name]
    for seed in range(SEEDS):
        try:
            World(seed, bug.planted, faults=bug.faults).run()
        except Violation as violation:
            if str(violation).startswith(bug.invariant):
                return
        except (AssertionError, IndexError):
            if not bug.invariant:
                return
    raise AssertionError(f"{name} went unseen in {SEEDS} schedules")
