"""A fleet whose size changes, on virtual time. A replica starts cold, and costs from the request for it on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from inference.engines.sim.settings import SimSettings
from inference.simulate.engine import Clock
from inference.simulate.traces import TRACE_BLOCK_TOKENS, Request
from inference.simulate.world import AllReplicas, RequestLife, Run, World
from stream_fabric.limits import (
    ATTEMPTS_MAX,
    CANDIDATES_MAX,
    LEASE_RENEW_S,
    QUEUE_WAIT_S_MAX,
    REAP_EVERY_S,
    YIELD_WAIT_S_MAX,
)
from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, PROMOTION_S, SPAN, OverloadMarks, OverloadTerms, relief
from stream_fabric.pool.placement import BATCH_TIER, Placed, Queued, Refused, ReplicaSlot
from stream_fabric.recovery.lease_reaper import SEEN_DEAD_S
from stream_fabric.stream.ids import ReplicaId, StreamId

LOOK_EVERY_S = 1.0
CUT_S = 0.02
"""Time from the cut of a stream until it is in the queue: the log takes its last frame, and a new epoch begins."""


@dataclass
class Replica:
    """A replica that the scaler requested."""

    asked_s: float
    up_s: float
    takes: bool = True
    """It takes requests, once it is up."""
    leaves: bool = False
    """It finishes its streams and then leaves."""
    gone_s: float = -1.0
    dead: bool = False


class Sample(NamedTuple):
    """State of the fleet at one look of the scaler."""

    at_s: float
    ready: int
    """Replicas that take requests."""
    resting: int
    """Replicas that only finish their streams."""
    warm: int
    coming: int
    """Replicas that cost and are not up yet."""
    waiting: int
    """Requests in the pool's queue."""
    running: int
    """Streams at replicas."""
    slots: int
    """Slots of the ready replicas."""


class Death(NamedTuple):
    at_s: float
    replica: ReplicaId
    streams: int
    """Streams that it had."""


class Scaler(Protocol):
    """Decides the number of replicas of a simulated fleet."""

    def scale(self, fleet: Elastic) -> None:
        """Decide, once a second, by the fleet's ``request_replicas``, ``rest``, ``promote`` and ``end``."""


class Elastic(World):
    """A fleet that a ``Scaler`` sizes. ``cold_start_s``: time from the request for a replica until it takes requests.

    The first ``replicas`` are up at the start.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        replicas: int,
        scaler: Scaler,
        seed: int,
        settings: SimSettings,
        *,
        cold_start_s: float,
        clock: Clock | None = None,
    ) -> None:
        self.replicas: list[Replica] = []
        super().__init__(requests, 0, AllReplicas(), seed, settings, clock=clock)
        self._scaler = scaler
        self._cold_start_s = cold_start_s
        self.settings = settings
        self.marks: OverloadMarks | None = None
        """Overload marks of the pool's plan, as gateways know them."""
        self.counts: list[tuple[float, int, int]] = []
        """Per second: time, replicas that take requests, replicas in total."""
        self.samples: list[Sample] = []
        self.deaths: list[Death] = []
        for _ in range(replicas):
            self._add(0.0)

    # --- for scalers ------------------------------------------------------------------------

    def present(self) -> list[int]:
        """Indices of replicas that cost and are not leaving."""
        return [i for i, replica in enumerate(self.replicas) if replica.gone_s < 0 and not replica.leaves]

    def is_up(self, index: int) -> bool:
        """Whether the replica's cold start is over."""
        return self.replicas[index].up_s <= self.now_s

    def request_replicas(self, count: int) -> None:
        """Add ``count`` replicas, which take requests a cold start later."""
        for _ in range(count):
            self._add(self.now_s + self._cold_start_s)

    def rest(self, index: int) -> None:
        """Let a replica take no more requests; it finishes its streams and stays."""
        self.replicas[index].takes = False
        self._report(index, [], renews=True)

    def promote(self, index: int) -> None:
        """Let a resting or warm replica take requests again."""
        self.replicas[index].takes = True
        self._report(index, [], renews=True)

    def end(self, index: int) -> None:
        """Let a replica leave as soon as it is idle; one that is not up yet leaves at once."""
        replica = self.replicas[index]
        replica.takes, replica.leaves = False, True
        if not self.is_up(index):
            replica.gone_s = self.now_s
            return
        self._report(index, [], renews=True)
        self._leave_if_idle(index)

    def kill_at(self, at_s: float) -> None:
        """Schedule the death of the replica with most streams.

        Its process starts again and takes requests a cold start later. Its streams continue elsewhere.
        """
        self._clock.schedule(at_s, self._kill_and_restart)

    def gpu_s(self) -> float:
        """Sum of all replicas' seconds, each from the request for the replica until it left."""
        end_s = self.outcome.end_s or self.now_s
        return sum((r.gone_s if r.gone_s >= 0 else end_s) - r.asked_s for r in self.replicas)

    # --- events -------------------------------------------------------------------------------------------

    def _kill_and_restart(self) -> None:
        killed = self._kill_busiest()
        if killed is not None and not killed.leaves:
            self.request_replicas(1)

    def _kill_busiest(self) -> Replica | None:
        """Let the replica with most streams die. Returns it; None: there is none."""
        up = self._alive_replicas()
        if not up:
            return None
        index = max(up, key=lambda i: len(self.agents[i].running))  # the first of several
        replica, name = self.replicas[index], self._names[index]
        agent = self.agents[index]
        for stream, request in agent.running.items():
            if stream not in agent.yielded:
                self._keep_output(self._by_stream[stream], agent.engine.tokens_streamed(request, self.now_s))
            self._by_stream[stream].died_s = self.now_s
        self.deaths.append(Death(self.now_s, name, len(self.pool.flights.get(name, ()))))
        replica.dead, replica.gone_s = True, self.now_s
        # Gateways place requests there until its lease ends
        seen_dead_s = self.pool.replicas[name].expires_ms / 1000 + SEEN_DEAD_S + REAP_EVERY_S
        self._clock.schedule(seen_dead_s, partial(self._fail_over, index))
        return replica

    def _keep_output(self, life: RequestLife, tokens: int) -> None:
        """Continue an answer behind the part that its replica has written to the stream's log."""
        left = life.left
        if tokens:
            life.left = replace(
                left,
                prompt_tokens=left.prompt_tokens + tokens,
                output_tokens=left.output_tokens - tokens,
                ids=left.ids[: left.prompt_tokens // TRACE_BLOCK_TOKENS],  # the last block may be incomplete
                said=left.said + tokens,
            )

    def _fail_over(self, index: int) -> None:
        """Recover a dead replica's streams as ``stream_fabric.recovery.failover`` does: takeover, or the end."""
        name = self._names[index]
        others = self._takeover_candidates()
        for stream in list(self.pool.flights.get(name, ())):
            life = self._by_stream[stream]
            if life.attempt >= ATTEMPTS_MAX or not self._recover(life, others, name):
                self._close_request(life, "lost")
        self.replicas[index].takes = False
        self.pool.retire(name)
        self._ring_doorbells()

    def _takeover_candidates(self) -> list[ReplicaId]:
        names = [self._names[i] for i in self._alive_replicas()]
        return sorted(names, key=lambda name: self.pool.replicas[name].load_ms)[:CANDIDATES_MAX]

    def _recover(self, life: RequestLife, others: Sequence[ReplicaId], instead: ReplicaId) -> bool:
        """Continue a stream of a dead replica at one of ``others``, or in the queue. False: it is lost."""
        if not others:
            return False
        life.attempt += 1
        return self._take_over(life, others, instead)

    def _take_over(
        self,
        life: RequestLife,
        others: Sequence[ReplicaId],
        instead: ReplicaId,
        terms: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> bool:
        """Place a stream that has begun, as ``stream_fabric.recovery.failover`` does. False: the pool refuses it."""
        ask = self._placement_request(life, YIELD_WAIT_S_MAX if life.request.tier == BATCH_TIER else QUEUE_WAIT_S_MAX)
        match self.pool.place(ask, others, [0] * len(others), self.now_s * 1000, instead=instead, terms=terms):
            case Placed():
                life.fate = "placed"
            case Queued():
                life.fate, life.waited = "queued", True
            case Refused():
                return False
        return True

    def take_back(self, life: RequestLife, instead: ReplicaId) -> bool:
        """Continue a batch stream that the batch host's replica ``instead`` has lost. False: the pool refuses it."""
        life.went_home = self._take_over(life, self._takeover_candidates(), instead)
        self._ring_doorbells()
        return life.went_home

    def run(self) -> Run:
        self._clock.schedule(0.0, self._run_scaler)
        return super().run()

    def _run_scaler(self) -> None:
        """Let the scaler decide, and record the fleet, every second."""
        self._scaler.scale(self)
        there = self.present()
        takes = sum(self.is_up(i) and self.replicas[i].takes for i in there)
        self.counts.append((self.now_s, takes, sum(replica.gone_s < 0 for replica in self.replicas)))
        self.samples.append(self._sample())
        self._clock.schedule(self.now_s + LOOK_EVERY_S, self._run_scaler)

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
        waiting = sum(map(len, self.pool.queue.tiers))
        return Sample(self.now_s, ready, resting, warm, coming, waiting, running, ready * self.settings.max_num_seqs)

    def _add(self, up_s: float) -> None:
        """Add a replica that takes requests from ``up_s`` on."""
        index = self.add_replica()
        self.replicas.append(Replica(self.now_s, up_s))
        if up_s > self.now_s:
            self._clock.schedule(up_s, partial(self._join_pool, index))

    def _join_pool(self, index: int) -> None:
        """Begin the replica's reports to its pool, unless it has left meanwhile."""
        if self.replicas[index].gone_s < 0:
            self._report(index, [], renews=True)
            self._clock.schedule(self.now_s + LEASE_RENEW_S, partial(self._renew, index))

    def _overload_terms(self, tier: int, candidates: int) -> OverloadTerms:
        marks = self.marks
        if marks is None:
            return NO_OVERLOAD_TERMS
        horizon_s = SPAN * marks.reject_s[tier]
        return OverloadTerms(
            marks.reject_s[tier],
            replicas=candidates,
            duty_max=marks.duty_max[tier] if marks.duty_max else 0.0,
            relief=relief([PROMOTION_S] * self._warm_count(), horizon_s) if horizon_s > PROMOTION_S else 0.0,
            batch_yields=marks.batch_yields,
        )

    def _warm_count(self) -> int:
        """Replicas that could take requests, and are not to leave."""
        return sum(not (self.replicas[i].takes or self.replicas[i].leaves) for i in self._alive_replicas())

    def _takes_requests(self, index: int) -> bool:
        """Whether gateways believe that the replica takes requests; they do not notice its death at once."""
        replica = self.replicas[index]
        return replica.takes and replica.up_s <= self.now_s and (replica.gone_s < 0 or replica.dead)

    def _wait_s(self) -> float:
        """Longest wait in the queue; two cold starts while the pool has no replica."""
        return QUEUE_WAIT_S_MAX if self._alive_replicas() else max(QUEUE_WAIT_S_MAX, 2 * self._cold_start_s)

    def _alive_replicas(self) -> list[int]:
        """Indices of replicas that have not left or died and have a lease."""
        return [i for i, r in enumerate(self.replicas) if r.gone_s < 0 and self._names[i] in self.pool.replicas]

    def _read_inbox(self, index: int) -> None:
        if not self.replicas[index].dead:
            super()._read_inbox(index)

    def _wake(self, index: int) -> None:
        if not self.replicas[index].dead:
            super()._wake(index)

    def _renew(self, index: int) -> None:
        if self.replicas[index].gone_s >= 0:
            return
        super()._renew(index)
        self._leave_if_idle(index)

    def _report(self, index: int, ended: Sequence[StreamId], *, renews: bool = False) -> None:
        if self.replicas[index].dead:
            return
        super()._report(index, ended, renews=renews)
        waiting = self.pool.yield_to(self.now_s * 1000)
        if waiting is not None:
            self._cut_batch(index, waiting)

    def _cut_batch(self, index: int, waiting: int) -> None:
        """Cut batch streams for ``waiting`` requests of higher tiers, as an agent does at the reply to its report."""
        agent = self.agents[index]
        for stream in agent.streams_to_cut(waiting, self.now_s):
            life = self._by_stream[stream]
            self._keep_output(life, agent.cut(stream, self.now_s))
            life.yields += 1
            self._clock.schedule(self.now_s + CUT_S, partial(self._requeue, index, stream))

    def _requeue(self, index: int, stream: StreamId) -> None:
        """Put a stream that was cut back into the queue, as ``stream_fabric.recovery.failover`` does."""
        if self.replicas[index].dead:  # its streams are recovered
            return
        life, name = self._by_stream[stream], self._names[index]
        ask = self._placement_request(life, YIELD_WAIT_S_MAX)
        answer = self.pool.place(ask, [name], [ask.prompt_tokens], self.now_s * 1000, instead=name)
        self.agents[index].forget_cut(stream)
        life.fate = "placed" if isinstance(answer, Placed) else "queued"
        self._report(index, [])

    def _slot(self, index: int) -> ReplicaSlot:
        slot = super()._slot(index)
        return slot._replace(ready=self.replicas[index].takes)

    def _leave_if_idle(self, index: int) -> None:
        name = self._names[index]
        if self.replicas[index].leaves and not self.agents[index].running and not self.pool.flights.get(name):
            self.replicas[index].gone_s = self.now_s
            self.pool.retire(name)


class Step(msgspec.Struct, frozen=True):
    """A rise of traffic to ``times`` the requests, from ``at_s`` on for ``for_s`` seconds."""

    times: float
    at_s: float
    for_s: float
    ramp_s: float = 30.0
    """Time in which the rise grows and falls."""


def stepped(requests: Sequence[Request], step: Step, seed: int) -> tuple[Request, ...]:
    """Return the requests with those of the step repeated: on average ``times`` - 1 copies, about 1 s later each."""
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
