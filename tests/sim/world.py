"""A whole platform on virtual time: agents, a fabric that fails over, gateways that crash, clients that resume.

The pure machines (``Producer``, ``StreamState``, ``Reader``) are the real ones; what surrounds them is a model of the
shells. Everything random comes from one seed, so a seed is a schedule. ``World(seed).run()`` raises ``Violation``
that names the invariant.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from stream_fabric.cursor import Cursor, Epoch
from stream_fabric.errors import CursorGone, CursorInvalid
from stream_fabric.frames import End, ErrorInfo, Note, Usage, decode, encode, encode_text, is_end, is_text
from stream_fabric.ids import GatewayId, ReplicaId, StreamId, TenantId
from stream_fabric.limits import (
    ENDED_KEPT_S,
    FLUSH_BYTES_MAX,
    FLUSH_FRAMES_MAX,
    FLUSH_WINDOW_S,
    LEASE_RENEW_S,
    LEASE_TTL_S,
    ORPHAN_GRACE_S,
    REAP_EVERY_S,
    WATCHDOG_S,
)
from stream_fabric.log import Append, AppendCode, AppendReply, Head, Page, StreamState
from stream_fabric.producer import Producer
from stream_fabric.reader import Gap, Need, Reader, Reset, Run, Step, check_cursor

TENANT = TenantId("t")
LOST = ErrorInfo("replica_lost", "gone")
FAULTS_END_S, HORIZON_S = 4.0, 40.0
OUTBOX_MAX = 12
PAGE_ENTRIES = 4
GRACE_S = 2.0


class Violation(AssertionError):
    """An invariant was broken; the message begins with its number."""


def require(held: bool, what: str) -> None:
    if not held:
        raise Violation(what)


@dataclass
class Parts:
    """What the world is built of, and what runs in it: mutations plant bugs here."""

    reader: type[Reader] = Reader
    state: type[StreamState] = StreamState
    producer: type[Producer] = Producer
    watchdog: bool = True
    reaper: bool = True
    renews: bool = True
    resets_told: bool = True


class Clock:
    """Virtual time: a heap of events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, what, args))

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, what, args = heapq.heappop(self._events)
            what(*args)
            if self.now > FAULTS_END_S and done():
                return


# --- the fabric --------------------------------------------------------------------------------------------


@dataclass
class Data:
    """What one Redis holds; a replica holds an older copy."""

    streams: dict[StreamId, StreamState] = field(default_factory=dict)
    pending: set[StreamId] = field(default_factory=set)
    leases: dict[str, float] = field(default_factory=dict)
    flight: dict[str, set[StreamId]] = field(default_factory=dict)
    inbox: dict[str, list[StreamId]] = field(default_factory=dict)

    def copy(self) -> Data:
        streams = {}
        for name, s in self.streams.items():
            streams[name] = replace(s, watchers=list(s.watchers), bases=list(s.bases), entries=list(s.entries))
        return Data(
            streams,
            set(self.pending),
            dict(self.leases),
            {k: set(v) for k, v in self.flight.items()},
            {k: list(v) for k, v in self.inbox.items()},
        )


class Fabric:
    def __init__(self, world: World) -> None:
        self.w = world
        self.data = Data()
        self.kept = Data()
        self.generation = 0
        self.up = True
        self.losses = 0
        self.wipes = 0
        self.listening: dict[str, int] = {}
        """peer → generation its subscription was made in."""
        self.names: dict[tuple[StreamId, str, int], bytes] = {}
        self.cancels: dict[StreamId, int] = {}
        """Accepted and not lost since."""
        self.forked: set[StreamId] = set()
        """A failover lost a cancel, or a cancel came after one lost the tail: who heard the other side is told."""
        self.pending_ever: set[StreamId] = set()
        self.ended_at: dict[StreamId, float] = {}

    # Scripts. Each is one step.

    def create(self, stream: StreamId, epoch: Epoch, gateway: GatewayId | None) -> str:
        if stream in self.data.streams:
            return "exists"
        if stream in self.data.pending:
            return "cancelled"
        self.data.streams[stream] = self.w.parts.state(epoch, TENANT, b"", [gateway] if gateway else [])
        if gateway is None:
            self.data.streams[stream].unwatched = "L"
            self.data.streams[stream].unwatched_since_ms = self.w.now_ms
        return "created"

    def append(self, request: Append, replica: ReplicaId) -> AppendReply:
        state = self.data.streams.get(request.stream)
        if state is None:
            return AppendReply(AppendCode.NOSTREAM, 0)
        before, epoch, status = state.last, str(state.epoch), state.status
        reply = state.append(request, replica)
        if reply.code is AppendCode.OK:
            require(request.epoch == epoch, f"1: {request.epoch} appended to {epoch}")
            require(status == "live", f"5: an append to a {status} stream was accepted")
            require(request.first == before + 1, f"2: {request.first} appended after {before}")
            self._record(request.stream, request.epoch, request.first, request.frames)
            if request.status:
                self.ended_at[request.stream] = self.w.clock.now
            self._publish(request.stream, state, request.epoch, request.first, request.last, request.frames)
        return reply

    def _record(self, stream: StreamId, epoch: str, first: int, frames: bytes) -> None:
        for seq, line in enumerate(frames.split(b"\n"), first):
            held = self.names.setdefault((stream, epoch, seq), line)
            if held != line:
                # Only a cancel writes beside the producer: after a failover it may name what was lost again
                fork = self.losses and (is_end(held) or is_end(line) or stream in self.forked)
                require(bool(fork), f"2: {epoch}-{seq} was {held!r} and is {line!r}")
                self.forked.add(stream)
                self.names[stream, epoch, seq] = line

    def cancel(self, stream: StreamId, unwatched_ms: int | None = None) -> str:
        state = self.data.streams.get(stream)
        if state is None:
            if unwatched_ms is None:
                self.data.pending.add(stream)
                self.pending_ever.add(stream)
                return "pending"
            return "none"
        reply = state.cancel(self.w.now_ms, unwatched_ms)
        if reply.result == "accepted":
            assert reply.at is not None
            self.cancels[stream] = reply.at.seq
            self._finished(stream, state)
            if state.replica:
                self.w.doorbell(state.replica, "cancel", stream, str(state.epoch), reply.at.seq)
        return reply.result

    def fence(self, stream: StreamId, replica: ReplicaId | None) -> bool:
        state = self.data.streams.get(stream)
        if state is None:
            return False
        old = str(state.epoch)
        if not state.fence(replica, f"f{self.w.unique()}", LOST):
            return False
        self._finished(stream, state)
        if state.replica:
            self.w.doorbell(state.replica, "fence", stream, old, 0)
        return True

    def _finished(self, stream: StreamId, state: StreamState) -> None:
        entry = state.entries[-1]
        self.ended_at[stream] = self.w.clock.now
        self._record(stream, str(state.epoch), entry.first, entry.frames)
        self._publish(stream, state, str(state.epoch), entry.first, entry.last, entry.frames)

    def _publish(self, stream: StreamId, state: StreamState, epoch: str, first: int, last: int, frames: bytes) -> None:
        for gateway in list(state.watchers):
            if self.listening.get(gateway) == self.generation:
                self.w.publish(gateway, stream, int(epoch.partition(".")[0]), first, last, frames)
            else:
                state.unwatch(gateway, self.w.now_ms, vanished=True)

    def watch(self, stream: StreamId, gateway: GatewayId | None, after: Cursor) -> Page | None:
        state = self.data.streams.get(stream)
        if state is None:
            return None
        if gateway is not None:
            state.watch(gateway)
        return state.page(after, PAGE_ENTRIES)

    def unwatch(self, stream: StreamId, gateway: GatewayId) -> None:
        state = self.data.streams.get(stream)
        if state is not None:
            state.unwatch(gateway, self.w.now_ms)

    def head(self, stream: StreamId, gateway: GatewayId | None) -> Head | None:
        s = self.data.streams.get(stream)
        if s is None:
            return None
        ms = self.w.now_ms - s.unwatched_since_ms if s.unwatched else 0
        return Head(s.epoch, s.last, s.status, s.cancelled_at, s.unwatched, ms, gateway in s.watchers, s.replica)

    def place(self, stream: StreamId, replicas: list[str]) -> str | None:
        living = [r for r in replicas if self.data.leases.get(r, 0.0) > self.w.clock.now]
        for name in living:
            if stream in self.data.flight[name]:
                return name
        if not living:
            return None
        best = min(living, key=lambda r: len(self.data.flight[r]))
        self.data.flight[best].add(stream)
        self.data.inbox.setdefault(best, []).append(stream)
        return best

    def renew(self, replica: str, running: list[StreamId]) -> None:
        self.data.leases[replica] = self.w.clock.now + LEASE_TTL_S
        held = set(running) | set(self.data.inbox.get(replica, []))
        if self.w.parts.renews:
            self.data.flight[replica] = held
        else:
            self.data.flight.setdefault(replica, set()).update(held)

    def produces(self, stream: StreamId) -> bool:
        return any(
            stream in self.data.flight.get(r, ()) for r, expiry in self.data.leases.items() if expiry > self.w.clock.now
        )

    # Faults

    def replicate(self) -> None:
        if self.up:
            self.kept = self.data.copy()

    def fail_over(self, down_s: float) -> None:
        """The primary dies with what it did not replicate; after a while the replica serves."""
        if not self.up:
            return
        self.up = False
        self.generation += 1
        self.losses += 1
        old, self.data = self.data, self.kept.copy()
        for stream, state in self.data.streams.items():
            if old.streams[stream].last > state.last and stream in self.cancels:
                del self.cancels[stream]
                self.forked.add(stream)
            if state.status == "live":
                self.ended_at.pop(stream, None)
        for stream in old.streams.keys() - self.data.streams.keys():
            self.cancels.pop(stream, None)
            self.ended_at.pop(stream, None)
            self.forked.add(stream)
        self.w.note("failover")
        self.w.clock.at(down_s, self._serve)

    def wipe(self, down_s: float) -> None:
        """Everything is gone."""
        self.kept = Data()
        self.wipes += 1
        self.fail_over(down_s)

    def _serve(self) -> None:
        self.up = True


# --- agents ------------------------------------------------------------------------------------------------


class Running:
    """One stream on an agent."""

    def __init__(self, agent: Agent, stream: StreamId) -> None:
        self.agent = agent
        self.stream = stream
        self.producer = agent.w.parts.producer(stream, agent.w.epochs[stream])
        self.closed = False
        self.left = agent.w.lengths[stream]
        self.kept_until = 0.0
        self.attempt = 0


class Agent:
    def __init__(self, world: World, name: str) -> None:
        self.w = world
        self.name = ReplicaId(name)
        self.alive = True
        self.crashed_at = 0.0
        self.stalled_until = 0.0
        self.running: dict[StreamId, Running] = {}
        self.ended: dict[StreamId, Running] = {}
        self._dirty = False
        world.connect(name)
        world.fabric.data.flight[name] = set()
        self._renew()
        self._check()
        self._poll()

    def crash(self) -> None:
        self.alive = False
        self.crashed_at = self.w.clock.now
        self.w.fabric.listening.pop(self.name, None)
        self.w.note(f"{self.name} crashes")

    def stall(self) -> None:
        """Out of the fabric's reach, for longer than a lease maybe, and then back with what it was about to say."""
        self.stalled_until = self.w.clock.now + self.w.random.uniform(0.5, 8.0)
        self.w.note(f"{self.name} stalls until {self.stalled_until:.3f}")

    def _renew(self) -> None:
        if self.alive:
            running = list(self.running)

            def later(_: Any = None) -> None:
                self.w.clock.at(LEASE_RENEW_S, self._renew)

            self.w.call(self, lambda: self.w.fabric.renew(self.name, running), later, later)

    def _poll(self) -> None:
        """The inbox: what is handled is deleted afterwards."""
        if not self.alive:
            return

        def got(names: list[StreamId]) -> None:
            for name in names:
                self._start(name)
            if names:
                self.w.call(self, lambda: self._done(names))

        self.w.call(self, lambda: list(self.w.fabric.data.inbox.get(self.name, [])), got)
        self.w.clock.at(0.15, self._poll)

    def _done(self, names: list[StreamId]) -> None:
        inbox = self.w.fabric.data.inbox.get(self.name, [])
        self.w.fabric.data.inbox[self.name] = [name for name in inbox if name not in names]

    def _start(self, stream: StreamId) -> None:
        if stream in self.running or stream in self.ended:
            return
        run = self.running[stream] = Running(self, stream)
        run.producer.push(encode(Note("started")))
        self._soon()
        self.w.clock.at(self.w.random.expovariate(20), self._emit, run)

    def _emit(self, run: Running) -> None:
        """The engine: a frame now and then."""
        if not self.alive or run.closed:
            return
        if run.left == 0:
            run.closed = True
            usage = run.producer.usage
            run.producer.finish(End("completed", Usage(usage.prompt, output=run.producer.last - 1)))
        else:
            run.left -= 1
            if self.w.random.random() < 0.1:
                run.producer.usage = Usage(prompt=run.producer.last)
            run.producer.push(encode_text(0, f"{run.producer.last} "), 1)
            pace = self.w.random.choice((0.001, 0.02, 0.02, 0.1))
            self.w.clock.at(self.w.random.expovariate(1 / pace), self._emit, run)
        self._soon()

    def _soon(self) -> None:
        if not self._dirty:
            self._dirty = True
            self.w.clock.at(FLUSH_WINDOW_S, self._flush)

    def _flush(self) -> None:
        self._dirty = False
        if not self.alive:
            return
        for run in [*self.running.values(), *self.ended.values()]:
            request = run.producer.append_to_send(FLUSH_FRAMES_MAX, FLUSH_BYTES_MAX)
            if request is not None:
                self._append(run, request)

    def _append(self, run: Running, request: Append) -> None:
        def answered(reply: AppendReply) -> None:
            self._outcome(run, run.producer.receive_reply(reply))
            if run.producer.pending:
                self._soon()

        def lost() -> None:
            run.producer.receive_lost()
            self._soon()

        self.w.call(self, lambda: self.w.fabric.append(request, self.name), answered, lost)

    def _outcome(self, run: Running, outcome: str) -> None:
        if outcome == "ended":
            self._forget(run, keep=True)
        elif outcome == "stop":
            run.closed = True
            self._forget(run, keep=run.producer.ended)
        elif outcome == "create":
            self._create_again(run)

    def _create_again(self, run: Running) -> None:
        def created(code: str) -> None:
            if code == "cancelled":
                run.producer.stopped = True
                self._outcome(run, "stop")
            self._soon()

        epoch = self.w.epochs[run.stream]
        self.w.call(self, lambda: self.w.fabric.create(run.stream, epoch, None), created, self._soon)

    def _forget(self, run: Running, *, keep: bool) -> None:
        if self.running.pop(run.stream, None) is not None and keep:
            run.kept_until = self.w.clock.now + ENDED_KEPT_S
            self.ended[run.stream] = run

    def ring(self, what: str, stream: StreamId, epoch: str, at: int) -> None:
        run = self.running.get(stream)
        stalled = self.w.clock.now < self.stalled_until
        if not self.alive or stalled or run is None or run.producer.epoch != epoch:
            return
        if what == "cancel":
            run.producer.receive_cancel(at)
        else:
            run.producer.stopped = True
        self._outcome(run, "stop")

    def _check(self) -> None:
        if not self.alive:
            return
        for name in [name for name, run in self.ended.items() if run.kept_until < self.w.clock.now]:
            run = self.ended.pop(name)
            if not self.w.fabric.losses and not {"flaky", "stall"} & self.w.faults:
                held = run.producer.last - run.producer.acked
                require(not held, f"10: {self.name} never stops sending {name} again")
        for run in [*self.running.values(), *self.ended.values()]:
            self.w.call(
                self, lambda run=run: self.w.fabric.head(run.stream, None), lambda head, run=run: self._head(run, head)
            )
        self.w.clock.at(0.5, self._check)

    def _head(self, run: Running, head: Head | None) -> None:
        outcome = run.producer.receive_head(head)
        self._outcome(run, outcome)
        if run.producer.pending:
            self._soon()
        if head is None or head.status != "live" or not head.unwatched:
            return
        grace_ms = int((6.0 if head.unwatched == "V" else GRACE_S) * 1000)
        if head.unwatched_ms >= grace_ms:
            self.w.call(self, lambda: self.w.fabric.cancel(run.stream, grace_ms))


# --- gateways ----------------------------------------------------------------------------------------------


class Sub:
    """One reader on a gateway and the queue to its client."""

    def __init__(self, gateway: Gateway, client: Client, reader: Reader) -> None:
        self.gateway = gateway
        self.client = client
        self.reader = reader
        self.outbox: list[Step | str] = []
        self.catching = False
        self.watched_seq = -1
        self.missing_since: float | None = None
        self.gone = False

    @property
    def frames(self) -> int:
        return sum(len(item.lines) for item in self.outbox if isinstance(item, Run))

    def deliver(self, steps: list[Step]) -> None:
        if self.gone:
            return
        require(not (steps and self.reader.need is Need.DRAIN), "8: a paused reader let frames through")
        require(not (steps and self.frames >= OUTBOX_MAX), "8: a full outbox took more")
        self.outbox += steps
        if any(isinstance(step, Gap) for step in steps):
            self.end("gap")
        elif self.reader.need is Need.NOTHING:
            self.end("end" if steps else "past")
        elif self.frames >= OUTBOX_MAX:
            self.reader.pause()

    def end(self, why: str) -> None:
        self.outbox.append(why)
        self.reader.close()
        self.gateway.remove(self)

    def drain(self) -> None:
        """The socket takes what there is."""
        if self.gone:
            return
        items, self.outbox = self.outbox, []
        for item in items:
            self.client.receive(self, item)
            if self.gone:
                return
        if self.reader.need is Need.DRAIN:
            self.reader.resume()
            self.gateway.catch_up(self)


class Gateway:
    def __init__(self, world: World, number: int) -> None:
        self.w = world
        self.name = GatewayId(f"g{number}.{world.unique()}")
        self.alive = True
        self.subs: dict[StreamId, list[Sub]] = {}
        self.missing: dict[StreamId, float] = {}
        self._dead: dict[str, float] = {}
        world.connect(self.name)
        world.clock.at(WATCHDOG_S * world.random.random(), self._watchdog)
        world.clock.at(REAP_EVERY_S * world.random.random(), self._reap)

    def crash(self) -> None:
        self.alive = False
        self.w.note(f"{self.name} crashes")
        self.w.fabric.listening.pop(self.name, None)
        for subs in self.subs.values():
            for sub in subs:
                sub.gone = True
                sub.client.disconnected()
        self.subs.clear()
        for client in self.w.clients:
            if client.connecting is self:
                client.disconnected()

    def add(self, sub: Sub, stream: StreamId) -> None:
        self.subs.setdefault(stream, []).append(sub)

    def remove(self, sub: Sub) -> None:
        stream = sub.client.stream
        subs = self.subs.get(stream, [])
        if sub in subs:
            subs.remove(sub)
            if not subs:
                del self.subs[stream]
                if self.alive:
                    self.w.call(self, lambda: None if stream in self.subs else self.w.fabric.unwatch(stream, self.name))

    def receive(self, stream: StreamId, epoch: int, first: int, last: int, frames: bytes) -> None:
        if not self.alive:
            return
        for sub in tuple(self.subs.get(stream, ())):
            sub.deliver(sub.reader.receive_live(epoch, first, last, frames))
            self.catch_up(sub)

    def resubscribed(self) -> None:
        if not self.alive:
            return
        for subs in self.subs.values():
            for sub in subs:
                sub.reader.recheck()
                self.catch_up(sub)

    def catch_up(self, sub: Sub) -> None:
        if sub.reader.need is not Need.PAGE or sub.catching or sub.gone or not self.alive:
            return
        sub.catching = True
        stream, before = sub.client.stream, sub.reader.cursor

        def again(delay_s: float) -> None:
            sub.catching = False
            self.w.clock.at(delay_s, self.catch_up, sub)

        def answered(page: Page | None) -> None:
            if sub.gone or sub.reader.need is not Need.PAGE:
                sub.catching = False
                self.catch_up(sub)
                return
            if page is None:
                sub.missing_since = sub.missing_since or self.w.clock.now
                if self.w.clock.now - sub.missing_since > ORPHAN_GRACE_S:
                    sub.end("lost")
            else:
                sub.missing_since = None
                sub.deliver(sub.reader.receive_page(page))
            again(0.05 if sub.reader.cursor == before else 0.0)

        self.w.call(self, lambda: self.w.fabric.watch(stream, self.name, before), answered, lambda: again(0.05))

    def _watchdog(self) -> None:
        if not self.alive or not self.w.parts.watchdog:
            return
        for stream in list(self.subs):

            def look(stream: StreamId = stream) -> tuple[Head | None, bool]:
                return self.w.fabric.head(stream, self.name), self.w.fabric.produces(stream)

            self.w.call(self, look, lambda seen, stream=stream: self._compare(stream, *seen))
        self.w.clock.at(WATCHDOG_S, self._watchdog)

    def _compare(self, stream: StreamId, head: Head | None, produced: bool) -> None:
        subs = list(self.subs.get(stream, ()))
        stuck = [s for s in subs if s.reader.need is Need.LIVE and s.watched_seq == s.reader.seq]
        for sub in subs:
            sub.watched_seq = sub.reader.seq
        if head is None:
            since = self.missing.setdefault(stream, self.w.clock.now)
            if self.w.clock.now - since > ORPHAN_GRACE_S:
                for sub in subs:
                    sub.end("lost")
            return
        unwatched = head.status == "live" and not head.watched_by_me
        for sub in subs if unwatched and not stuck else stuck:
            if unwatched or head.last != sub.reader.seq or head.epoch.n > sub.reader.epoch:
                sub.reader.recheck()
                self.catch_up(sub)
        if not (stuck and head.status == "live" and not produced):
            self.missing.pop(stream, None)
            return
        since = self.missing.setdefault(stream, self.w.clock.now)
        if self.w.clock.now - since > ORPHAN_GRACE_S:
            self.w.call(self, lambda: self.w.fabric.fence(stream, head.replica))

    def _reap(self) -> None:
        if not self.alive or not self.w.parts.reaper:
            return

        def expired() -> dict[str, list[StreamId]]:
            data = self.w.fabric.data
            return {r: list(data.flight.get(r, ())) for r, t in data.leases.items() if t < self.w.clock.now}

        def retire(name: str) -> None:
            if self.w.fabric.data.leases.get(name, HORIZON_S) < self.w.clock.now:
                for part in (self.w.fabric.data.leases, self.w.fabric.data.flight, self.w.fabric.data.inbox):
                    part.pop(name, None)  # type: ignore[attr-defined]

        def answered(dead: dict[str, list[StreamId]]) -> None:
            self._dead = {name: self._dead.get(name, self.w.clock.now) for name in dead}
            for name, since in list(self._dead.items()):
                if self.w.clock.now - since < 0.9:
                    continue
                left = set(dead[name])

                def fenced(stream: StreamId, left: set[StreamId] = left, name: str = name) -> None:
                    left.discard(stream)
                    if not left:
                        self.w.call(self, lambda: retire(name))

                for stream in dead[name]:
                    self.w.call(
                        self,
                        lambda stream=stream, name=name: self.w.fabric.fence(stream, ReplicaId(name)),
                        lambda _, stream=stream, fenced=fenced: fenced(stream),
                    )
                if not left:
                    self.w.call(self, lambda name=name: retire(name))
                del self._dead[name]

        self.w.call(self, expired, answered, self._dead.clear)
        self.w.clock.at(REAP_EVERY_S * self.w.random.uniform(0.7, 1.0), self._reap)


# --- clients -----------------------------------------------------------------------------------------------


class Client:
    """Reads one stream to its end, wherever it has to reconnect. ``told``: what it heard went wrong."""

    def __init__(self, world: World, stream: StreamId, *, creator: bool, slow: bool) -> None:
        self.w = world
        self.stream = stream
        self.creator = creator
        self.slow = slow
        self.applied: list[bytes] = []
        self.epoch = 1
        self.told: list[str] = []
        self.done = ""
        self.left = False
        self.sub: Sub | None = None
        self.connecting: Gateway | None = None
        self.missing_since: float | None = None
        self._drain()

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.epoch, len(self.applied))

    def connect(self) -> None:
        if self.done or self.left:
            return
        gateway = self.w.any_gateway()
        if gateway is None:
            self.w.clock.at(0.3, self.connect)
            return
        after = self.cursor
        self.connecting = gateway

        def looked(page: Page | None, waited_s: float = 0.0) -> None:
            if self.connecting is not gateway or self.left:
                return
            if page is None:
                self.missing_since = self.missing_since or self.w.clock.now
                if self.w.clock.now - self.missing_since > ORPHAN_GRACE_S + 2:
                    self.finish("lost")
                else:
                    self.connecting = None
                    self.w.clock.at(0.3, self.connect)
                return
            self.missing_since = None
            if page.status == "live" and after.epoch == page.epoch.n and after.seq > page.head and waited_s < 1:
                self.w.clock.at(
                    0.05,
                    lambda: self.w.call(
                        gateway, look, lambda p: looked(p, waited_s + 0.05), lambda: self.disconnected()
                    ),
                )
                return
            try:
                check_cursor(after, page.epoch, page.head, page.bases)
            except (CursorGone, CursorInvalid) as error:
                self.finish(error.code)
                return
            self.connecting = None
            self.sub = Sub(gateway, self, self.w.parts.reader(after))
            gateway.add(self.sub, self.stream)
            gateway.catch_up(self.sub)

        def look() -> Page | None:
            return self.w.fabric.watch(self.stream, None, after)

        self.w.call(gateway, look, looked, self.disconnected)

    def attach_new(self, gateway: Gateway) -> None:
        """The creator reads from the moment before the stream exists."""
        reader = self.w.parts.reader(Cursor(1, 0))
        reader.need = Need.LIVE
        self.sub = Sub(gateway, self, reader)
        gateway.add(self.sub, self.stream)

    def disconnected(self) -> None:
        self.sub = self.connecting = None
        self.w.clock.at(self.w.random.uniform(0.1, 1.0), self.connect)

    def leave(self) -> None:
        """Closes its connection for good."""
        self.left = True
        if self.sub is not None:
            self.sub.gone = True
            self.sub.gateway.remove(self.sub)
            self.sub = None

    def _drain(self) -> None:
        if self.done or self.left:
            return
        if self.sub is not None:
            self.sub.drain()
        pause = self.w.random.uniform(0.5, 4.0) if self.slow and self.w.clock.now < FAULTS_END_S else 0.03
        self.w.clock.at(pause, self._drain)

    def receive(self, sub: Sub, item: Step | str) -> None:
        match item:
            case Run(epoch, first, lines):
                require(not self.done, "3: a frame after the terminal")
                require(first == len(self.applied) + 1, f"3: frame {first} written after {len(self.applied)}")
                self.applied += lines
                self.epoch = epoch
                if is_end(lines[-1]):
                    self.finish("end")
            case Reset(epoch, to):
                require(to <= len(self.applied), f"4: reset to {to} with {len(self.applied)} applied")
                self.told.append("reset")
                if self.w.parts.resets_told:
                    del self.applied[to:]
                    self.epoch = epoch
            case Gap():
                self.told.append("gap")
            case "end" | "past":
                if not self.done:
                    self.finish(item)
            case str():
                self.finish(item)

    def finish(self, why: str) -> None:
        self.done = why
        if why not in ("end", "past"):
            self.told.append(why)


# --- the world ---------------------------------------------------------------------------------------------


class World:
    def __init__(self, seed: int, parts: Parts | None = None, *, trace: bool = False) -> None:
        self.seed = seed
        self.parts = parts or Parts()
        self.random = random.Random(seed)
        self.clock = Clock()
        self.trace: list[str] | None = [] if trace else None
        self._unique = 0
        self._heard: dict[str, float] = {}
        self.epochs: dict[StreamId, Epoch] = {}
        self.lengths: dict[StreamId, int] = {}
        self.agents: list[Agent] = []
        self.gateways: list[Gateway | None] = []
        self.clients: list[Client] = []
        self.refused: set[StreamId] = set()
        r = self.random
        # Each schedule has some of the faults, so that strict claims are made about what the others must not disturb
        self.faults = {
            name
            for name in (
                "drop",
                "cut",
                "failover",
                "wipe",
                "gateway",
                "agent",
                "stall",
                "cancel",
                "slow",
                "leave",
                "flaky",
            )
            if r.random() < 0.35
        }
        self.fabric = Fabric(self)
        self.agents = [Agent(self, f"r{n}") for n in range(2)]
        self.gateways = [Gateway(self, n) for n in range(2)]
        for number in range(r.choice((1, 1, 2, 3))):
            self._plan_stream(StreamId(f"s{number}"))
        self._plan_faults()

    def note(self, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.clock.now:8.4f} {what}")

    def unique(self) -> int:
        self._unique += 1
        return self._unique

    @property
    def now_ms(self) -> int:
        return int(self.clock.now * 1000)

    def any_gateway(self) -> Gateway | None:
        alive = [g for g in self.gateways if g is not None and g.alive]
        return self.random.choice(alive) if alive else None

    # The network

    def call(
        self,
        caller: Agent | Gateway,
        work: Callable[[], Any],
        answered: Callable[[Any], None] = lambda _: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """A script call as the client makes it: sent again until its deadline, its fate unknown meanwhile."""
        deadline = self.clock.now + 5.0
        r, flaky = self.random, "flaky" in self.faults

        def send() -> None:
            generation = self.fabric.generation
            self.clock.at(r.uniform(0.0002, 0.004), arrive, generation)

        def arrive(generation: int) -> None:
            stalled = isinstance(caller, Agent) and self.clock.now < caller.stalled_until
            if stalled or not self.fabric.up or generation != self.fabric.generation or (flaky and self._unlucky()):
                retry()
                return
            result = work()
            if flaky and self._unlucky():
                retry()  # done, and nobody knows
            else:
                self.clock.at(r.uniform(0.0002, r.choice((0.004, 0.004, 0.03))), arrived, generation, result)

        def arrived(generation: int, result: Any) -> None:
            if generation != self.fabric.generation:
                retry()
            elif caller.alive:
                answered(result)

        def retry() -> None:
            if not caller.alive:
                return
            if self.clock.now > deadline:
                lost()
            else:
                self.clock.at(r.uniform(0.01, 0.1), send)

        send()

    def _unlucky(self) -> bool:
        return self.clock.now < FAULTS_END_S and self.random.random() < 0.1

    def connect(self, peer: str) -> None:
        """A peer's subscription."""
        self.fabric.listening[peer] = self.fabric.generation

    def publish(self, gateway: str, stream: StreamId, epoch: int, first: int, last: int, frames: bytes) -> None:
        found = next((g for g in self.gateways if g is not None and g.name == gateway), None)
        if found is None:
            return
        copies = 1
        if "drop" in self.faults and self.clock.now < FAULTS_END_S:
            copies = self.random.choice((0, 1, 1, 1, 2))
        for _ in range(copies):
            delay_s = self.random.uniform(0.0002, 0.004)
            if "drop" not in self.faults:  # one connection keeps the order
                delay_s = max(delay_s, self._heard.get(gateway, 0.0) - self.clock.now)
                self._heard[gateway] = self.clock.now + delay_s
            self.clock.at(delay_s, found.receive, stream, epoch, first, last, frames)

    def doorbell(self, replica: str, what: str, stream: StreamId, epoch: str, at: int) -> None:
        agent = next((a for a in self.agents if a.name == replica), None)
        if agent is not None and self.fabric.listening.get(replica) == self.fabric.generation:
            self.clock.at(self.random.uniform(0.0002, 0.004), agent.ring, what, stream, epoch, at)

    # Schedules

    def _plan_stream(self, stream: StreamId) -> None:
        r = self.random
        self.epochs[stream] = Epoch(1, f"e{stream}")
        self.lengths[stream] = r.choice((0, 1, 5, 20, 60, 60))
        creator = Client(self, stream, creator=True, slow="slow" in self.faults and r.random() < 0.5)
        self.clients.append(creator)
        self.clock.at(r.uniform(0.1, 1.0), self._create, creator)
        for _ in range(r.choice((0, 1, 2))):
            client = Client(self, stream, creator=False, slow="slow" in self.faults and r.random() < 0.5)
            self.clients.append(client)
            self.clock.at(r.uniform(0.3, 2.5), client.connect)
        if "cancel" in self.faults:
            for _ in range(r.choice((1, 1, 3))):
                self.clock.at(r.uniform(0.05, 2.0), self._cancel, stream)
        if "leave" in self.faults:
            for client in self.clients:
                if client.stream == stream and r.random() < 0.6:
                    self.clock.at(r.uniform(1.0, 3.0), client.leave)

    def _create(self, client: Client) -> None:
        gateway = self.any_gateway()
        stream = client.stream
        if gateway is None:
            self.clock.at(0.3, self._create, client)
            return
        client.attach_new(gateway)

        def withdraw() -> None:
            self.refused.add(stream)
            self.call(gateway, lambda: self.fabric.fence(stream, None))

        def placed(where: str | None) -> None:
            if where is None:
                withdraw()

        self.call(gateway, lambda: self.fabric.create(stream, self.epochs[stream], gateway.name), lost=withdraw)
        self.call(gateway, lambda: self.fabric.place(stream, [str(a.name) for a in self.agents]), placed, withdraw)

    def _cancel(self, stream: StreamId) -> None:
        gateway = self.any_gateway()
        if gateway is not None:
            self.call(
                gateway, lambda: self.fabric.cancel(stream), lambda result: self.note(f"cancel {stream}: {result}")
            )

    def _plan_faults(self) -> None:
        r, at = self.random, self.clock.at
        if "cut" in self.faults:
            for _ in range(3):
                at(r.uniform(0.2, FAULTS_END_S), self._cut)
        if "failover" in self.faults or "wipe" in self.faults:
            for _ in range(60):
                at(r.uniform(0.0, FAULTS_END_S), self.fabric.replicate)
        if "failover" in self.faults:
            for _ in range(r.choice((1, 1, 2))):
                at(r.uniform(0.3, FAULTS_END_S), self._fail, False)
        if "wipe" in self.faults:
            at(r.uniform(0.3, FAULTS_END_S), self._fail, True)
        if "gateway" in self.faults:
            for _ in range(r.choice((1, 2, 4))):
                at(r.uniform(0.2, FAULTS_END_S), self._crash_gateway, r.randrange(2))
        if "agent" in self.faults:
            at(r.uniform(0.2, FAULTS_END_S), r.choice(self.agents).crash)
        if "stall" in self.faults:
            at(r.uniform(0.2, 2.0), r.choice(self.agents).stall)

    def _fail(self, wipe: bool) -> None:
        down_s = self.random.uniform(0.05, 1.5)
        (self.fabric.wipe if wipe else self.fabric.fail_over)(down_s)
        for peer in self._peers():
            self.clock.at(down_s + self.random.uniform(0.0, 0.5), self._reconnect, peer)

    def _peers(self) -> list[Agent | Gateway]:
        return [p for p in [*self.agents, *self.gateways] if p is not None and p.alive]

    def _cut(self) -> None:
        """One peer's subscription is lost for a while."""
        peer = self.random.choice(self._peers())
        self.fabric.listening.pop(peer.name, None)
        self.note(f"{peer.name} is cut off")
        self.clock.at(self.random.uniform(0.01, 1.0), self._reconnect, peer)

    def _reconnect(self, peer: Agent | Gateway) -> None:
        if not peer.alive:
            return
        if not self.fabric.up:
            self.clock.at(0.1, self._reconnect, peer)
            return
        self.connect(peer.name)
        if isinstance(peer, Gateway):
            peer.resubscribed()

    def _crash_gateway(self, number: int) -> None:
        gateway = self.gateways[number]
        if gateway is not None and gateway.alive:
            gateway.crash()
            self.clock.at(self.random.uniform(0.1, 2.0), self._start_gateway, number)

    def _start_gateway(self, number: int) -> None:
        self.gateways[number] = Gateway(self, number)

    # The verdict

    def _settled(self) -> bool:
        return (
            all(client.done or client.left for client in self.clients)
            and all(state.status != "live" for state in self.fabric.data.streams.values())
            and not any(agent.running for agent in self.agents if agent.alive)
            and not any(
                run.producer.acked < run.producer.last for a in self.agents if a.alive for run in a.ended.values()
            )
            and not any(self.fabric.data.flight.get(a.name) for a in self.agents if a.alive)
        )

    def run(self) -> World:
        self.clock.run(HORIZON_S, self._settled)
        # A stream that nobody reads, and whose request or producer or end was lost, waits for its next reader
        for stream, state in self.fabric.data.streams.items():
            if state.status == "live" and (self.fabric.losses or state.last == 0 or {"flaky", "stall"} & self.faults):
                self.clients.append(Client(self, stream, creator=False, slow=False))
                self.clients[-1].connect()
                self.refused.add(stream)
        self.clock.run(HORIZON_S * 2, self._settled)
        self._check()
        return self

    def _check(self) -> None:
        for stream in self.epochs:
            state = self.fabric.data.streams.get(stream)
            if state is not None:
                self._check_stream(stream, state)
        for agent in self.agents:
            if agent.alive:
                require(not agent.running, f"6: {agent.name} still runs {list(agent.running)}")
                left = self.fabric.data.flight.get(agent.name)
                require(not left, f"7: slots of {agent.name} are held by {left}")
        for client in self.clients:
            self._check_client(client)

    def _check_stream(self, stream: StreamId, state: StreamState) -> None:
        f = self.fabric
        require(state.status != "live", f"6: {stream} has no terminal")
        expected, epoch = 1, 1
        for entry in state.entries:
            lines = entry.frames.split(b"\n")
            require(entry.first == expected and entry.last == expected + len(lines) - 1, f"2: {stream} is not dense")
            require(entry.epoch >= epoch, f"1: {stream} has an older epoch after a newer one")
            expected, epoch = entry.last + 1, entry.epoch
        require(epoch == state.epoch.n, f"1: {stream} ends in epoch {epoch}, its meta in {state.epoch}")
        lines = self.log(stream)
        require(sum(map(is_end, lines)) == 1 and is_end(lines[-1]), f"4: {stream} has not one terminal at its end")
        end = decode(lines[-1])
        assert isinstance(end, End)
        require(end.status == state.status, f"2: {stream} is {state.status} and ends {end.status}")
        tokens = sum(map(is_text, lines))
        if end.usage is not None:
            require(end.usage.output == tokens, f"5: {stream} shows {tokens} tokens and bills {end.usage.output}")
        if stream in f.cancels:
            at = f.cancels[stream]
            require((state.status, state.last) == ("cancelled", at + 1), f"5: {stream} was cancelled at {at}")
        if stream in f.pending_ever and not f.losses:
            require(stream not in f.cancels or state.status == "cancelled", f"5: {stream} outlived its cancel")
        if state.status == "completed":
            require(tokens == self.lengths[stream], f"4: {stream} ends clean with {tokens} of {self.lengths[stream]}")
            text = b"".join(line[2:-1] for line in lines if is_text(line))
            wanted = "".join(f"{n} " for n in range(1, tokens + 1)).encode()
            require(text == wanted, f"2: {stream} is {text!r}")
        crashed = [a for a in self.agents if not a.alive and a.name == state.replica]
        if crashed and state.status == "failed" and not f.losses and not {"flaky", "gateway"} & self.faults:
            took_s = f.ended_at[stream] - crashed[0].crashed_at
            require(took_s < 5.0, f"6: {stream} got its terminal {took_s:.1f} s after its producer died")

    def log(self, stream: StreamId) -> list[bytes]:
        return [line for e in self.fabric.data.streams[stream].entries for line in e.frames.split(b"\n")]

    def _check_client(self, client: Client) -> None:
        stream, f = client.stream, self.fabric
        if client.left:
            return
        require(bool(client.done), f"4: a client of {stream} hangs at {client.cursor}")
        no_loss = not f.losses
        if no_loss and client.told:
            # Only a stream that never came to be may be told of
            absent = stream not in f.data.streams
            require(absent, f"4: nothing was lost, yet a client of {stream} heard {client.told}")
        require(client.done != "past", f"4: {stream} ended without a terminal for a client at {client.cursor}")
        if client.done != "end":
            return
        if stream in f.data.streams and not (f.losses and self._moved_on(client)):
            require(client.applied == self.log(stream), f"4: a client of {stream} has other frames than the log")
        end = decode(client.applied[-1])
        assert isinstance(end, End)
        if end.status == "completed":
            require(sum(map(is_text, client.applied)) == self.lengths[stream], f"4: {stream} was cut short, clean")

    def _moved_on(self, client: Client) -> bool:
        """The client had its terminal before a failover took that away and the stream ended otherwise."""
        return client.applied[-1] != self.log(client.stream)[-1] or client.stream in self.fabric.forked
