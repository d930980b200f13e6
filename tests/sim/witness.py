"""Sees every script run, and holds what the platform promises against it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.frames import is_end
from stream_fabric.stream.ids import ReplicaId, StreamId
from stream_fabric.stream.log import Append, AppendCode, AppendReply, CancelReply, StreamState, Takeover

if TYPE_CHECKING:
    from tests.sim.fabric import Shard
    from tests.sim.loop import Process
    from tests.sim.world import World


_REFUSED = (AppendCode.FENCED, AppendCode.CANCELLED, AppendCode.CLOSED)
REFUSED_MAX = 20
"""A producer stops at the first refusal that it hears of."""


class Violation(AssertionError):
    """An invariant was broken; the message begins with its number."""


def require(held: bool, what: str) -> None:
    if not held:
        raise Violation(what)


def _task() -> int:
    """The one that runs. The loop keeps them all, so each is another number; kept here, they would outlive its end."""
    return id(asyncio.current_task())


class Seen:
    """The streams of one script, before it ran."""

    def __init__(self, witness: Witness, shard: Shard, streams: Sequence[StreamId]) -> None:
        self._witness = witness
        self._before: dict[StreamId, tuple[int, str, str, int, ReplicaId | None]] = {}
        for name in streams:
            state = shard.log.streams.get(name)
            if state is not None:
                self._before[name] = (
                    state.last, str(state.epoch), state.status, len(state.entries), state.replica
                )  # fmt: skip

    def appended(self, batch: Sequence[Append], replies: Sequence[AppendReply], replica: ReplicaId) -> None:
        witness = self._witness
        for item, reply in zip(batch, replies, strict=True):
            if reply.code is AppendCode.OK:
                _, epoch, _, _, _ = self._before[item.stream]
                require(item.epoch == epoch, f"1: {item.epoch} appended to {epoch}")
                writer = witness.writers.setdefault((item.stream, epoch), replica)
                if writer != replica and item.stream in witness.unclaimed:
                    witness.forked.add(item.stream)
                    writer = witness.writers[item.stream, epoch] = replica
                witness.unclaimed.discard(item.stream)
                require(writer == replica, f"1: {writer} and {replica} append to {item.stream} in epoch {epoch}")
            elif reply.code is AppendCode.NOSTREAM:
                witness.missed.add(item.stream)
            elif reply.code in _REFUSED:
                times = witness.refused.get((item.stream, item.epoch, replica), 0) + 1
                witness.refused[item.stream, item.epoch, replica] = times
                require(times < REFUSED_MAX, f"10: {replica} appends to {item.stream} again and again: {reply}")
            elif reply.code is AppendCode.DUPLICATE and item.stream not in witness.forked:
                for seq, line in enumerate(item.frames.split(b"\n"), item.first):
                    held = witness.names.get((item.stream, item.epoch, seq))
                    require(held == line, f"2: {item.stream} has {held!r} at {seq}, and its producer {line!r}")

    def cancelled(self, stream: StreamId, reply: CancelReply) -> None:
        if reply.result == "accepted":
            assert reply.at is not None
            self._witness.cancels[stream] = reply.at.seq

    def taken_over(self, stream: StreamId, lost: Epoch, taken: Takeover) -> None:
        _, epoch, _, _, _ = self._before[stream]
        if str(taken.epoch) != epoch:  # else it had risen already
            require(epoch == str(lost), f"1: {stream} is in epoch {epoch} and was taken from {lost}")
            self._witness.takeovers.setdefault(stream, []).append(self._witness.w.loop.now)
            self._witness.w.taken_over(stream)

    def fenced(
        self,
        stream: StreamId,
        replica: ReplicaId | None,
        epoch: Epoch | None,
        listed: Sequence[ReplicaId],
        *,
        withdraws: bool,
    ) -> None:
        _, before, status, _, had = self._before[stream]
        if status != "live":  # a repeat of a call whose reply was lost; ``check`` sees that it appends nothing
            return
        require(None in (had, replica) or had == replica, f"1: {stream} is {had}'s and was ended for {replica}")
        later = epoch is not None and before != str(epoch) and Epoch.parse(before).n >= epoch.n
        require(not later, f"1: {stream} is in epoch {before} and was ended for {epoch}")
        if withdraws:
            self._witness.withdrawn.add(stream)
        if not any(other != replica for other in listed):
            self._witness.alone.add(stream)
        asker = self._witness.unheard.get(stream)
        if asker is not None and not asker.alive:
            self._witness.unplaced.add(stream)

    def check(self, shard: Shard) -> None:
        for stream, (last, _, status, count, _) in self._before.items():
            state = shard.log.streams[stream]
            if len(state.entries) == count and state.status == status:
                continue
            require(status == "live", f"5: an append to a {status} stream was accepted")
            for entry in state.entries[count:]:
                require(entry.first == last + 1, f"2: {entry.first} appended after {last}")
                self._witness.record(stream, str(state.epoch), entry.first, entry.frames)
                last = entry.last
            if state.status != "live":
                self._witness.ended_at[stream] = self._witness.w.loop.now
                self._witness.settle(shard, stream, state)


class Witness:
    def __init__(self, world: World) -> None:
        self.w = world
        self.names: dict[tuple[StreamId, str, int], bytes] = {}
        self.writers: dict[tuple[StreamId, str], ReplicaId] = {}
        self.refused: dict[tuple[StreamId, str, ReplicaId], int] = {}
        self.cancels: dict[StreamId, int] = {}
        """Accepted and not lost since."""
        self.forked: set[StreamId] = set()
        """A failover lost a cancel or a takeover, or a cancel came after one lost the tail: who heard the other side is
        told."""
        self.unclaimed: set[StreamId] = set()
        """Begun, and then a failover lost that: if its pool lost as much, another replica may begin it as well."""
        self.ended_at: dict[StreamId, float] = {}
        self.lost_at = -1.0
        """When Redis last lost something."""
        self.alone: set[StreamId] = set()
        """Fenced by who had found no other replica."""
        self.withdrawn: set[StreamId] = set()
        """Fenced by the gateway that could not create them: what was made of them counts nowhere."""
        self.listed: dict[Process | int, list[ReplicaId]] = {}
        """Which replicas each process was told last, and each of its tasks."""
        self.takeovers: dict[StreamId, list[float]] = {}
        self.unheard: dict[StreamId, Process] = {}
        """The process that asks a pool to place a new stream, until a pool has received it or the process gives up."""
        self.missed: set[StreamId] = set()
        """A replica had their request, and found no stream."""
        self.unplaced: set[StreamId] = set()
        """Fenced, and no pool had ever heard of them: who asked for their place died first. Or their replica died, and
        a rescuer found no stream: the ``create`` of a gateway that stood still came after it."""

    @contextmanager
    def watching(self, shard: Shard, streams: Sequence[StreamId]) -> Iterator[Seen]:
        seen = Seen(self, shard, streams)
        yield seen
        seen.check(shard)

    def lists(self, process: Process, replicas: list[ReplicaId]) -> None:
        self.listed[process] = self.listed[_task()] = replicas

    def listed_by(self, process: Process) -> list[ReplicaId]:
        """On what the task that asks now goes: what another of its process hears meanwhile does not change its mind."""
        return self.listed.get(_task(), self.listed.get(process, []))

    def record(self, stream: StreamId, epoch: str, first: int, frames: bytes) -> None:
        for seq, line in enumerate(frames.split(b"\n"), first):
            held = self.names.setdefault((stream, epoch, seq), line)
            if held != line:
                # Only a cancel writes beside the producer: after a failover it may name what was lost again
                fork = self.w.fabric.losses and (is_end(held) or is_end(line) or stream in self.forked)
                require(bool(fork), f"2: {epoch}-{seq} was {held!r} and is {line!r}")
                self.forked.add(stream)
                self.names[stream, epoch, seq] = line

    def settle(self, shard: Shard, stream: StreamId, state: StreamState) -> None:
        """The script that writes a terminal counts the usage to the tenant."""
        shard.settled.setdefault(stream, []).append(state.usage)

    def saw_loss(self, before: Mapping[StreamId, StreamState], after: Mapping[StreamId, StreamState]) -> None:
        self.lost_at = self.w.loop.now
        for stream, state in before.items():
            left = after.get(stream)
            if left is None:
                self.cancels.pop(stream, None)
                self.forked.add(stream)
                self.unclaimed.add(stream)
                self.ended_at.pop(stream, None)
                continue
            if left.last < state.last and self.cancels.pop(stream, None) is not None:
                self.forked.add(stream)
            if left.epoch != state.epoch:
                self.forked.add(stream)
            if left.replica is None and (state.replica is not None or left.epoch != state.epoch):
                self.unclaimed.add(stream)
            if left.status == "live":
                self.ended_at.pop(stream, None)
                self.withdrawn.discard(stream)
