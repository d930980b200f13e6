"""Scalers: our controller's own code, and those it is compared with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from inference.control.policy.arrival_profile import ArrivalProfile
from inference.control.policy.fleet_view import Observation
from inference.control.policy.pool_scaler import PoolScaler
from inference.control.policy.replica_choice import Moves
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.policy.traffic_model import PoolTrafficModel
from inference.engines.sim.settings import SimSettings
from inference.simulate.elastic import Elastic, Scaler
from inference.simulate.engine import work_s
from inference.simulate.traces import Request
from inference.simulate.world import MODEL
from stream_fabric.pool.placement import BATCH_TIER, ReplicaState
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import DemandTotals, EngineLoad, ReplicaInfo, TierQueue
from stream_fabric.pool.replica_load import TtftHistogram
from stream_fabric.stream.ids import ReplicaId

HPA_EVERY_S = 15.0
HPA_DOWN_S = 300.0
"""Kubernetes' defaults: interval of decisions, and stabilization window for scaling down."""


class Fixed:
    """Keeps the number of replicas constant."""

    def scale(self, fleet: Elastic) -> None:
        pass


class ControllerScaler:
    """Runs the controller's ``PoolScaler`` as the leading controller does."""

    def __init__(self, policy: ScalePolicy, profile: ArrivalProfile | None = None, begin_unix_s: float = 0.0) -> None:
        self._scaler = PoolScaler(policy)
        self._begin_unix_s = begin_unix_s
        if profile is not None:
            self._scaler.learn(PoolTrafficModel(arrivals=profile))
        self._first_tokens: dict[int, TtftHistogram] = {}
        self.reasons: list[tuple[float, str]] = []

    def decide(self, fleet: Elastic) -> tuple[PoolPlan, Moves]:
        """Decide without acting, but for the overload marks, which gateways know from now on."""
        marked = frozenset(self._scaler.plan.victims if self._scaler.plan else ())
        plan, moves, _ = self._scaler.decide(self._observe(fleet, marked), fleet.now_s)
        fleet.marks = plan.overload_marks
        return plan, moves

    def scale(self, fleet: Elastic) -> None:
        plan, moves = self.decide(fleet)
        if not self.reasons or plan.reason != self.reasons[-1][1]:
            self.reasons.append((fleet.now_s, plan.reason))
        index = {fleet.agents[i].name: i for i in fleet.present()}
        for name in moves.promote:
            fleet.promote(index[name])
        for name in moves.rest:
            if fleet.replicas[index[name]].takes:
                fleet.rest(index[name])
        there = fleet.present()
        if len(there) < plan.pods:
            fleet.request_replicas(plan.pods - len(there))
        elif len(there) > plan.pods:
            victims = [index[name] for name in plan.victims if name in index]
            cold = [i for i in there if not fleet.is_up(i)]
            for gone in victims[: len(there) - plan.pods] or cold[-1:]:
                fleet.end(gone)

    def _observe(self, fleet: Elastic, marked: frozenset[ReplicaId]) -> Observation:
        """Return what a leading controller would read of this fleet."""
        self._count_first_tokens(fleet)
        infos = [self._replica_info(fleet, i) for i in fleet.present() if fleet.is_up(i)]
        queues = []
        for tier in fleet.pool.queue.tiers:
            asks = [waiting.request for waiting in tier.values()]
            queues.append(
                TierQueue(len(asks), 0.0, sum(a.prompt_tokens for a in asks), sum(a.output_tokens for a in asks))
            )
        return Observation(
            infos,
            queues,
            DemandTotals(*fleet.pool.demand.arrived),
            at_unix_s=self._begin_unix_s + fleet.now_s,
            marked=marked,
        )

    def _count_first_tokens(self, fleet: Elastic) -> None:
        for life in fleet.first_tokens:
            meter = self._first_tokens.setdefault(life.replica, TtftHistogram())
            meter.receive(life.first_s - life.request.at_s, life.first_s)
        fleet.first_tokens.clear()

    def _replica_info(self, fleet: Elastic, index: int) -> ReplicaInfo:
        agent, replica = fleet.agents[index], fleet.replicas[index]
        slot = agent.slot(fleet.now_s)
        state: ReplicaState = "ready" if replica.takes else "warm"
        running = len(agent.running)
        slots = fleet.settings.max_num_seqs
        meter = self._first_tokens.get(index)
        return ReplicaInfo(
            agent.name,
            "pool",
            "sim",
            (MODEL,),
            state,
            EngineLoad(
                min(running, slots),
                max(running - slots, 0),
                slots,
                itl_objective_ms=fleet.settings.itl_objective_ms,
            ),
            room=slot.room,
            prefill_ms=slot.prefill_ms,
            decode_ms=slot.decode_ms,
            prefill_per_s=slot.prefill_per_s,
            decode_per_s=slot.decode_per_s,
            prefix_blocks=len(agent.ledger),
            ttft_counts=meter.counts(fleet.now_s) if meter else (),
        )


class WithAdmission:
    """Another scaler's counts with our admission: our controller decides the overload marks and nothing else."""

    def __init__(self, scaler: Scaler, policy: ScalePolicy) -> None:
        self._scaler = scaler
        self._ours = ControllerScaler(policy)

    def scale(self, fleet: Elastic) -> None:
        self._ours.decide(fleet)
        self._scaler.scale(fleet)


class Hpa(ABC):
    """A Kubernetes HorizontalPodAutoscaler with its defaults.

    Up at once, at most to twice as many or by four in 15 s. Down to the largest count that it wanted in five minutes.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._next_s = 0.0
        self._recommendations: deque[tuple[float, int]] = deque()

    def scale(self, fleet: Elastic) -> None:
        if fleet.now_s < self._next_s:
            return
        self._next_s = fleet.now_s + HPA_EVERY_S
        there = fleet.present()
        if not self._recommendations:  # an autoscaler takes the existing replicas as its first recommendation
            self._recommendations.append((fleet.now_s, len(there)))
            return
        wanted = min(max(self.recommend(fleet, there), self._least), self._most)
        self._recommendations.append((fleet.now_s, wanted))
        while self._recommendations[0][0] < fleet.now_s - HPA_DOWN_S:
            self._recommendations.popleft()
        count = len(there)
        if wanted > count:
            fleet.request_replicas(min(wanted, max(2 * count, count + 4)) - count)
        for _ in range(count - max(wanted for _, wanted in self._recommendations)):
            # Any replica: it does not know their load; those that are not up yet go first
            cold = [i for i in fleet.present() if not fleet.is_up(i)]
            fleet.end(cold[-1] if cold else fleet.present()[-1])

    @abstractmethod
    def recommend(self, fleet: Elastic, there: Sequence[int]) -> int:
        """Return the wanted number of replicas. ``there``: indices of the present ones."""


class GpuUtilisation(Hpa):
    """Targets 80 % GPU utilisation as the driver reports it: any step counts as busy, however little it does."""

    TARGET = 0.8

    def __init__(self, least: int, most: int) -> None:
        super().__init__(least, most)
        self._busy_s: dict[int, float] = {}

    def recommend(self, fleet: Elastic, there: Sequence[int]) -> int:
        used = 0.0
        for index in there:
            engine = fleet.agents[index].engine
            used += min((engine.busy_s - self._busy_s.get(index, 0.0)) / HPA_EVERY_S, 1.0)
            self._busy_s[index] = engine.busy_s
        wanted = used / self.TARGET
        # No change within 10 % of the target
        return len(there) if abs(wanted / max(len(there), 1) - 1) <= 0.1 else math.ceil(wanted)


class Waiting(Hpa):
    """KEDA on waiting requests with a threshold of five per replica, as in vLLM's production stack."""

    THRESHOLD = 5

    def recommend(self, fleet: Elastic, there: Sequence[int]) -> int:
        waiting = sum(map(len, fleet.pool.queue.tiers))
        waiting += sum(max(len(fleet.agents[i].running) - fleet.settings.max_num_seqs, 0) for i in there)
        wanted = waiting / self.THRESHOLD
        return len(there) if abs(wanted / max(len(there), 1) - 1) <= 0.1 else math.ceil(wanted)


class Concurrency:
    """Knative's pod autoscaler with its defaults, as AIBrix has it too: requests in flight by replica.

    The mean of a minute sets the count; while the mean of six seconds asks for twice what is ready (panic), that one
    does, and nothing leaves for a minute.
    """

    TARGET = 0.7
    """Share of a replica's slots that are to be in use."""
    EVERY_S, STABLE_S, PANIC_S, PANIC_AT = 2.0, 60.0, 6.0, 2.0

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._next_s = 0.0
        self._seen: deque[tuple[float, int]] = deque()
        self._panic_until_s = -1.0
        self._panic_most = 0

    def scale(self, fleet: Elastic) -> None:
        waiting = sum(map(len, fleet.pool.queue.tiers))
        self._seen.append((fleet.now_s, waiting + sum(len(fleet.agents[i].running) for i in fleet.present())))
        while self._seen[0][0] <= fleet.now_s - self.STABLE_S:
            self._seen.popleft()
        if fleet.now_s < self._next_s:
            return
        self._next_s = fleet.now_s + self.EVERY_S
        there = fleet.present()
        ready = max(sum(fleet.is_up(i) for i in there), 1)
        stable, panic = self._wanted(fleet, self.STABLE_S), self._wanted(fleet, self.PANIC_S)
        if panic >= self.PANIC_AT * ready:
            self._panic_until_s = fleet.now_s + self.STABLE_S
        if fleet.now_s < self._panic_until_s:
            self._panic_most = max(self._panic_most, panic, stable)
            wanted = max(self._panic_most, len(there))
        else:
            self._panic_most = 0
            wanted = stable
        wanted = min(max(wanted, self._least), self._most)
        fleet.request_replicas(max(wanted - len(there), 0))
        for _ in range(len(there) - wanted):
            cold = [i for i in fleet.present() if not fleet.is_up(i)]
            fleet.end(cold[-1] if cold else fleet.present()[-1])

    def _wanted(self, fleet: Elastic, span_s: float) -> int:
        counts = [count for at_s, count in self._seen if at_s > fleet.now_s - span_s]
        return math.ceil(sum(counts) / len(counts) / (self.TARGET * fleet.settings.max_num_seqs))


class Oracle:
    """Knows every request in advance, and asks for replicas a cold start before they are needed.

    ``filled``: utilisation to which the work of the next seconds fills a replica. ``hosts_at``: replicas of the batch
    host at a time. Batch work that fills them no further needs no replica here.
    """

    WINDOW_S = 30.0

    def __init__(
        self,
        requests: Sequence[Request],
        settings: SimSettings,
        filled: float,
        cold_start_s: float,
        hosts_at: Callable[[float], int] = lambda at_s: 0,
    ) -> None:
        self._cold_start_s = cold_start_s
        work: dict[int, float] = {}
        batch: dict[int, float] = {}
        for request in requests:
            slot = int(request.at_s // self.WINDOW_S)
            needed_s = work_s(settings, request.prompt_tokens, request.output_tokens)
            work[slot] = work.get(slot, 0.0) + needed_s
            batch[slot] = batch.get(slot, 0.0) + needed_s * (request.tier == BATCH_TIER)
        filled_s = self.WINDOW_S * filled
        for slot, batch_s in batch.items():
            hosts = min(map(hosts_at, (slot * self.WINDOW_S, (slot + 1) * self.WINDOW_S)))
            work[slot] -= min(batch_s, hosts * filled_s)
        last = max(work) + 1
        self._needs = [max(1, math.ceil(work.get(slot, 0.0) / filled_s)) for slot in range(last + 1)]

    @property
    def most(self) -> int:
        """Replicas needed in the busiest window."""
        return max(self._needs)

    def needed_at(self, at_s: float) -> int:
        """Replicas needed at that time, for its window of 30 s and the next one."""
        slot = int(max(at_s, 0.0) // self.WINDOW_S)
        return max(self._needs[min(s, len(self._needs) - 1)] for s in (slot, slot + 1))

    def scale(self, fleet: Elastic) -> None:
        there = fleet.present()
        soon = max(self.needed_at(fleet.now_s + ahead_s) for ahead_s in (0.0, self._cold_start_s))
        if self.needed_at(fleet.now_s + self._cold_start_s) > len(there):
            fleet.request_replicas(self.needed_at(fleet.now_s + self._cold_start_s) - len(there))
        # A replica that leaves costs a cold start to get back: those needed within one stay
        steps = int(self._cold_start_s // self.WINDOW_S) + 1
        needed = max([soon, *(self.needed_at(fleet.now_s + k * self.WINDOW_S) for k in range(steps))])
        for _ in range(len(there) - needed):
            # A replica that is not up yet, as after a death, goes before one that serves
            fleet.end(min(fleet.present(), key=lambda i: (fleet.is_up(i), len(fleet.agents[i].running))))
