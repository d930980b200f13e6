"""Thousands of seeded schedules of the whole platform on virtual time.

``STREAM_GW_SIM_SEED=<n>`` replays one schedule with its faults printed; ``STREAM_GW_SIM_SEEDS=<count>`` runs more.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from stream_fabric.ids import ReplicaId
from stream_fabric.log import Append, AppendCode, AppendReply, StreamState
from stream_fabric.producer import Outcome, Producer
from stream_fabric.reader import Need, Reader, Step
from tests.sim.world import Parts, Violation, World

SEEDS = int(os.environ.get("STREAM_GW_SIM_SEEDS", "3000"))
BATCHES = 10


def seeds(batch: int) -> range:
    one = os.environ.get("STREAM_GW_SIM_SEED")
    if one is not None:
        return range(int(one), int(one) + 1) if batch == 0 else range(0)
    return range(batch, SEEDS, BATCHES)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_invariants_1_to_8_and_10_hold_in_every_schedule(batch: int) -> None:
    for seed in seeds(batch):
        trace = "STREAM_GW_SIM_SEED" in os.environ
        world = World(seed, trace=trace)
        try:
            world.run()
        except Exception as error:
            print("\n".join([f"faults: {sorted(world.faults)}", *(world.trace or [])]))
            raise AssertionError(f"STREAM_GW_SIM_SEED={seed} replays it: {error!r}") from error
        if trace:
            print("\n".join([f"faults: {sorted(world.faults)}", *(world.trace or [])]))


def test_a_seed_is_a_schedule() -> None:
    for seed in (3, 44, 555):
        one, two = World(seed, trace=True).run(), World(seed, trace=True).run()
        assert one.trace == two.trace
        assert one.clock.now == two.clock.now
        assert [c.applied for c in one.clients] == [c.applied for c in two.clients]


def test_schedules_reach_what_they_are_for() -> None:
    """Streams end in every way, clients resume, tails are lost and written again: no claim is empty."""
    seen: Counter[str] = Counter()
    for seed in range(400):
        world = World(seed).run()
        seen.update(f"fault {name}" for name in world.faults)
        seen.update(f"stream {state.status}" for state in world.fabric.data.streams.values())
        seen.update("client told" for client in world.clients if client.told)
        seen.update(f"client {client.done}" for client in world.clients)
        seen.update("cancelled before its stream" for _ in world.fabric.pending_ever)
        seen.update("cancelled before a token" for at in world.fabric.cancels.values() if at == 0)
        seen.update("whole after a failover" for c in world.clients if world.fabric.losses and c.done == "end")
    wanted = [f"fault {n}" for n in ("drop", "cut", "failover", "wipe", "gateway", "agent", "cancel", "slow", "flaky")]
    wanted += ["stream completed", "stream cancelled", "stream failed", "client end", "client told"]
    wanted += ["cancelled before its stream", "cancelled before a token", "whole after a failover"]
    assert not [name for name in wanted if seen[name] < 3], seen


# --- planted bugs: the simulation catches each ------------------------------------------------------------


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


class AnyEpochState(StreamState):
    """Takes appends of a producer that was fenced."""

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        if self.status == "failed" and request.epoch != str(self.epoch):
            self.status = "live"
            return super().append(request._replace(epoch=str(self.epoch)), replica)
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


MUTATIONS: dict[str, tuple[Parts, str]] = {
    "a reader that accepts seq > cursor + 1": (Parts(reader=LeapingReader), "3:"),
    "a reader that repeats": (Parts(reader=RepeatingReader), "3:"),
    "a reader that never looks again": (Parts(reader=ForgetfulReader), "4:"),
    "a reader that does not stop when full": (Parts(reader=HoldingReader), "8:"),
    "a reader that ends early": (Parts(reader=EndlessReader), "4:"),
    "a log that accepts a stale epoch": (Parts(state=AnyEpochState), "1:"),
    "a cancel that lets one more append through": (Parts(state=LateCancelState), "5:"),
    "a log with holes": (Parts(state=HoledState), "2:"),
    "a producer that rewrites": (Parts(producer=RewritingProducer), "2:"),
    "a producer that bills what came later": (Parts(producer=DriftingUsageProducer), ""),
    "a producer that gives up on a lost tail": (Parts(producer=StubbornProducer), ""),
    "a producer that a late reply wakes": (Parts(producer=WokenProducer), "10:"),
    "no watchdog": (Parts(watchdog=False), "4:"),
    "no reaper": (Parts(reaper=False), "6:"),
    "a lease renewal that only adds": (Parts(renews=False), "7:"),
    "a reset that the client does not apply": (Parts(resets_told=False), ""),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_caught(name: str) -> None:
    parts, invariant = MUTATIONS[name]
    for seed in range(3000):
        try:
            World(seed, parts).run()
        except Violation as violation:
            if str(violation).startswith(invariant):
                return
        except (AssertionError, IndexError):
            if not invariant:
                return
    raise AssertionError(f"{name} went unseen")
