"""A fleet whose size changes, on virtual time: replicas that are asked for come cold, and cost from then on until they
have left."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from inference.agent.engines.sim.settings import SimSettings
from inference.simulate.agents import ROOM_RATIO
from inference.simulate.traces import TRACE_BLOCK_TOKENS, Request
from inference.simulate.world import Everyone, Life, Run, World
from stream_fabric.ids import ReplicaId
from stream_fabric.limits import ATTEMPTS_MAX, CANDIDATES_MAX, LEASE_RENEW_S, QUEUE_WAIT_S_MAX, REAP_EVERY_S
from stream_fabric.placement import Placed, Queued, Refused, Seat
from stream_fabric.redis.reaper import SEEN_DEAD_S
from stream_fabric.surge import NO_SURGE, Marks, Surge

LOOK_EVERY_S = 1.0


@dataclass
class Replica:
    """One that was asked for."""

    asked_s: float
    up_s: float
    takes: bool = True
    """Requests, once it is up."""
    leaves: bool = False
    """It finishes what it has, and then is gone."""
    gone_s: float = -1.0
    dead: bool = False


class Sample(NamedTuple):
    """The fleet at one look."""

    at_s: float
    ready: int
    """They take requests."""
    resting: int
    """They finish what they have."""
    warm: int
    coming: int
    """They cost, and are not up yet."""
    waiting: int
    """Requests in the pool's queue."""
    running: int
    """Streams at replicas, of which ``slots`` of those that are ready can run at once."""
    slots: int


class Death(NamedTuple):
    at_s: float
    replica: ReplicaId
    streams: int
    """What it had."""


class Scaler(Protocol):
    def look(self, fleet: Elastic) -> None:
        """Once a second; acts by the fleet's ``ask``, ``rest``, ``promote`` and ``end``."""


class Elastic(World):
    """``cold_start_s``: from asking for a replica until it takes requests; the first ``replicas`` are up already."""

    def __init__(
        self,
        requests: Sequence[Request],
        replicas: int,
        scaler: Scaler,
        seed: int,
        settings: SimSettings,
        *,
        cold_start_s: float,
        room_ratio: float = ROOM_RATIO,
    ) -> None:
        self.replicas: list[Replica] = []
        super().__init__(requests, 0, Everyone(), seed, settings, room_ratio=room_ratio)
        self._scaler = scaler
        self._cold_start_s = cold_start_s
        self.settings = settings
        self.marks: Marks | None = None
        """Of whoever plans the pool, as gateways hear of them."""
        self.counts: list[tuple[float, int, int]] = []
        """Each second: when, how many take requests, and how many there are in all."""
        self.samples: list[Sample] = []
        self.deaths: list[Death] = []
        for _ in range(replicas):
            self._add(0.0)

    # --- what a scaler may do and see ------------------------------------------------------------------------

    def there(self) -> list[int]:
        """Those that cost and are not about to leave."""
        return [i for i, replica in enumerate(self.replicas) if replica.gone_s < 0 and not replica.leaves]

    def is_up(self, index: int) -> bool:
        return self.replicas[index].up_s <= self.now_s

    def ask(self, count: int) -> None:
        for _ in range(count):
            self._add(self.now_s + self._cold_start_s)

    def rest(self, index: int) -> None:
        self.replicas[index].takes = False
        self._report(index, [], renews=True)

    def promote(self, index: int) -> None:
        self.replicas[index].takes = True
        self._report(index, [], renews=True)

    def end(self, index: int) -> None:
        """It leaves as soon as it has nothing to do; one that is not up yet at once."""
        replica = self.replicas[index]
        replica.takes, replica.leaves = False, True
        if not self.is_up(index):
            replica.gone_s = self.now_s
            return
        self._report(index, [], renews=True)
        self._leave_if_idle(index)

    def kill_at(self, at_s: float) -> None:
        """The busiest replica dies then. Its process starts again, and takes requests a cold start later; its streams
        go on elsewhere."""
        self._at(at_s, self._kill)

    def gpu_s(self) -> float:
        """Of all replicas, from when they were asked for."""
        end_s = self.outcome.end_s or self.now_s
        return sum((r.gone_s if r.gone_s >= 0 else end_s) - r.asked_s for r in self.replicas)

    # --- the world -------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        up = self._alive()
        if not up:
            return
        index = max(up, key=lambda i: len(self.agents[i].running))  # of equals the first
        replica, name = self.replicas[index], self._names[index]
        for stream, request in self.agents[index].running.items():
            self._say(self._by_stream[stream], self.agents[index].engine.said(request, self.now_s))
        self.deaths.append(Death(self.now_s, name, len(self.pool.flights.get(name, ()))))
        again, replica.dead, replica.gone_s = not replica.leaves, True, self.now_s
        # Gateways go on placing there for as long as its lease lasts
        seen_dead_s = self.pool.seats[name].expires_ms / 1000 + SEEN_DEAD_S + REAP_EVERY_S
        self._at(seen_dead_s, partial(self._rescue, index))
        if again:
            self.ask(1)

    def _say(self, life: Life, tokens: int) -> None:
        """What a dead replica had said of an answer stands in the stream's log; the rest is asked for behind it."""
        left = life.left
        if tokens:
            life.left = replace(
                left,
                prompt_tokens=left.prompt_tokens + tokens,
                output_tokens=left.output_tokens - tokens,
                ids=left.ids[: left.prompt_tokens // TRACE_BLOCK_TOKENS],  # the last one may not be whole
            )
        life.died_s = self.now_s

    def _rescue(self, index: int) -> None:
        """As ``stream_fabric.redis.rescue``: another replica takes the stream over, or it ends."""
        name = self._names[index]
        others = sorted(self._alive(), key=lambda i: self.pool.seats[self._names[i]].load_ms)[:CANDIDATES_MAX]
        for stream in list(self.pool.flights.get(name, ())):
            life = self._by_stream[stream]
            if life.attempt >= ATTEMPTS_MAX or not others:
                self._close(life, "lost")
                continue
            life.attempt += 1
            ask = self._ask(life, QUEUE_WAIT_S_MAX)
            names = [self._names[i] for i in others]
            match self.pool.place(ask, names, [0] * len(names), self.now_s * 1000, instead=name):
                case Placed():
                    life.fate = "placed"
                case Queued():
                    life.fate, life.waited = "queued", True
                case Refused():
                    self._close(life, "lost")
        self.replicas[index].takes = False
        self.pool.retire(name)
        self._ring()

    def run(self) -> Run:
        self._at(0.0, self._look)
        return super().run()

    def _look(self) -> None:
        self._scaler.look(self)
        there = self.there()
        takes = sum(self.is_up(i) and self.replicas[i].takes for i in there)
        self.counts.append((self.now_s, takes, sum(replica.gone_s < 0 for replica in self.replicas)))
        self.samples.append(self._sample())
        self._at(self.now_s + LOOK_EVERY_S, self._look)

    def _sample(self) -> Sample:
        ready = resting = warm = coming = running = 0
        for index, replica in enumerate(self.replicas):
            if replica.gone_s >= 0:
                continue
            runs = len(self.agents[index].running)
            running += runs
            if not self.is_up(index):
                coming += 1
            elif replica.takes:
                ready += 1
            elif runs:
                resting += 1
            else:
                warm += 1
        waiting = sum(map(len, self.pool.tiers))
        return Sample(self.now_s, ready, resting, warm, coming, waiting, running, ready * self.settings.max_num_seqs)

    def _add(self, up_s: float) -> None:
        index = self.add_replica()
        self.replicas.append(Replica(self.now_s, up_s))
        if up_s > self.now_s:
            self._at(up_s, partial(self._up, index))

    def _up(self, index: int) -> None:
        if self.replicas[index].gone_s < 0:
            self._report(index, [], renews=True)
            self._at(self.now_s + LEASE_RENEW_S, partial(self._renew, index))

    def _surge(self, tier: int, candidates: int) -> Surge:
        return NO_SURGE if self.marks is None else Surge(self.marks.shed_s[tier], replicas=candidates)

    def _takes(self, index: int) -> bool:
        replica = self.replicas[index]
        return replica.takes and replica.up_s <= self.now_s and (replica.gone_s < 0 or replica.dead)

    def _wait_s(self) -> float:
        """Who waits for the first replica of all may wait twice as long as one takes to start."""
        return QUEUE_WAIT_S_MAX if self._alive() else max(QUEUE_WAIT_S_MAX, 2 * self._cold_start_s)

    def _alive(self) -> list[int]:
        return [i for i, r in enumerate(self.replicas) if r.gone_s < 0 and self._names[i] in self.pool.seats]

    def _read(self, index: int) -> None:
        if not self.replicas[index].dead:
            super()._read(index)

    def _wake(self, index: int) -> None:
        if not self.replicas[index].dead:
            super()._wake(index)

    def _renew(self, index: int) -> None:
        if self.replicas[index].gone_s >= 0:
            return
        super()._renew(index)
        self._leave_if_idle(index)

    def _seat(self, index: int) -> Seat:
        seat = super()._seat(index)
        return seat._replace(ready=self.replicas[index].takes)

    def _leave_if_idle(self, index: int) -> None:
        name = self._names[index]
        if self.replicas[index].leaves and not self.agents[index].running and not self.pool.flights.get(name):
            self.replicas[index].gone_s = self.now_s
            self.pool.retire(name)


class Step(msgspec.Struct, frozen=True):
    """So many times the requests, from then on for so long, growing and falling over ``ramp_s``."""

    times: float
    at_s: float
    for_s: float
    ramp_s: float = 30.0


def stepped(requests: Sequence[Request], step: Step, seed: int) -> tuple[Request, ...]:
    """Requests of the step come again, on average ``times`` - 1 times, a second or so later."""
    rng = random.Random(f"step {seed}")
    out = list(requests)
    for request in requests:
        into_s, left_s = request.at_s - step.at_s, step.at_s + step.for_s - request.at_s
        if into_s < 0 or left_s < 0:
            continue
        more = (step.times - 1) * min(1.0, into_s / step.ramp_s, left_s / step.ramp_s)
        for copy in range(int(more) + (rng.random() < more % 1)):
            at_s = request.at_s + rng.expovariate(1.0)
            out.append(replace(request, at_s=at_s, session=f"{request.session}+{copy}"))
    out.sort(key=lambda request: request.at_s)
    return tuple(replace(request, number=number) for number, request in enumerate(out))
