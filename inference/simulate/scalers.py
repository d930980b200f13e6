"""Who decides how many replicas there are: our controller's own code, and what others do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from inference.agent.engines.sim.settings import SimSettings
from inference.agent.meter import FirstTokens
from inference.control.profile import ArrivalProfile
from inference.control.scaling import PoolScaler, ScalePolicy, Seen
from inference.simulate.elastic import Elastic
from inference.simulate.engine import work_s
from inference.simulate.traces import Request
from inference.simulate.world import MODEL
from stream_fabric.ids import ReplicaId
from stream_fabric.placement import ReplicaState
from stream_fabric.ports import EngineLoad
from stream_fabric.redis.pool import Arrived, Line, ReplicaInfo

HPA_EVERY_S = 15.0
HPA_DOWN_S = 300.0
"""Kubernetes' defaults: how often it looks, and for how long the largest wish of the past holds."""


class Fixed:
    def look(self, fleet: Elastic) -> None:
        pass


class Ours:
    """``inference.control.scaling`` as the leading controller calls it."""

    def __init__(self, policy: ScalePolicy, profile: ArrivalProfile | None = None, begin_unix_s: float = 0.0) -> None:
        self._scaler = PoolScaler(policy)
        self._begin_unix_s = begin_unix_s
        self._scaler.profile = profile
        self._first_tokens: dict[int, FirstTokens] = {}
        self.reasons: list[tuple[float, str]] = []

    def look(self, fleet: Elastic) -> None:
        victim = self._scaler.plan.victim if self._scaler.plan else None
        plan, moves, _ = self._scaler.look(self._seen(fleet, victim), fleet.now_s)
        fleet.marks = plan.surge
        if not self.reasons or plan.reason != self.reasons[-1][1]:
            self.reasons.append((fleet.now_s, plan.reason))
        index = {fleet.agents[i].name: i for i in fleet.there()}
        for name in moves.promote:
            fleet.promote(index[name])
        if moves.rest is not None and fleet.replicas[index[moves.rest]].takes:
            fleet.rest(index[moves.rest])
        there = fleet.there()
        if len(there) < plan.pods:
            fleet.ask(plan.pods - len(there))
        elif len(there) > plan.pods:
            cold = [i for i in there if not fleet.is_up(i)]
            if plan.victim is not None and plan.victim in index:
                fleet.end(index[plan.victim])
            elif cold:
                fleet.end(cold[-1])

    def _seen(self, fleet: Elastic, victim: ReplicaId | None) -> Seen:
        self._count_first_tokens(fleet)
        infos = [self._info(fleet, i) for i in fleet.there() if fleet.is_up(i)]
        lines = []
        for tier in fleet.pool.tiers:
            asks = [waiting.ask for waiting in tier.values()]
            lines.append(Line(len(asks), 0.0, sum(a.prompt_tokens for a in asks), sum(a.output_tokens for a in asks)))
        return Seen(
            infos, lines, Arrived(*fleet.pool.arrived), at_unix_s=self._begin_unix_s + fleet.now_s, marked=victim
        )

    def _count_first_tokens(self, fleet: Elastic) -> None:
        for life in fleet.first_tokens:
            meter = self._first_tokens.setdefault(life.replica, FirstTokens())
            meter.receive(life.first_s - life.request.at_s, life.first_s)
        fleet.first_tokens.clear()

    def _info(self, fleet: Elastic, index: int) -> ReplicaInfo:
        agent, replica = fleet.agents[index], fleet.replicas[index]
        seat = agent.seat(fleet.now_s)
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
            EngineLoad(min(running, slots), max(running - slots, 0), slots),
            room=seat.room,
            prefill_ms=seat.prefill_ms,
            decode_ms=seat.decode_ms,
            prefill_per_s=seat.prefill_per_s,
            decode_per_s=seat.decode_per_s,
            prefix_blocks=len(agent.ledger),
            ttft_counts=meter.counts(fleet.now_s) if meter else (),
        )


class Hpa(ABC):
    """A HorizontalPodAutoscaler with its defaults: at once up by as much as it wants, at most double or four in 15 s;
    down to the most that it wanted within five minutes. ``wish`` says how many."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._next_s = 0.0
        self._wishes: deque[tuple[float, int]] = deque()

    def look(self, fleet: Elastic) -> None:
        if fleet.now_s < self._next_s:
            return
        self._next_s = fleet.now_s + HPA_EVERY_S
        there = fleet.there()
        if not self._wishes:  # an autoscaler that begins takes what is there for its first wish
            self._wishes.append((fleet.now_s, len(there)))
            return
        wish = min(max(self.wish(fleet, there), self._least), self._most)
        self._wishes.append((fleet.now_s, wish))
        while self._wishes[0][0] < fleet.now_s - HPA_DOWN_S:
            self._wishes.popleft()
        count = len(there)
        if wish > count:
            fleet.ask(min(wish, max(2 * count, count + 4)) - count)
        for _ in range(count - max(wish for _, wish in self._wishes)):
            # Whichever: it knows nothing of what they do; those that are not up yet go first
            cold = [i for i in fleet.there() if not fleet.is_up(i)]
            fleet.end(cold[-1] if cold else fleet.there()[-1])

    @abstractmethod
    def wish(self, fleet: Elastic, there: Sequence[int]) -> int: ...


class GpuUtilisation(Hpa):
    """80 % of the GPU's time, as its driver tells it: any step is busy time, however little it does."""

    TARGET = 0.8

    def __init__(self, least: int, most: int) -> None:
        super().__init__(least, most)
        self._busy_s: dict[int, float] = {}

    def wish(self, fleet: Elastic, there: Sequence[int]) -> int:
        used = 0.0
        for index in there:
            engine = fleet.agents[index].engine
            used += min((engine.busy_s - self._busy_s.get(index, 0.0)) / HPA_EVERY_S, 1.0)
            self._busy_s[index] = engine.busy_s
        wish = used / self.TARGET
        # Within a tenth of the target nothing is done
        return len(there) if abs(wish / max(len(there), 1) - 1) <= 0.1 else math.ceil(wish)


class Waiting(Hpa):
    """KEDA on requests that wait, five a replica, as vLLM's production stack ships it."""

    THRESHOLD = 5

    def wish(self, fleet: Elastic, there: Sequence[int]) -> int:
        waiting = sum(map(len, fleet.pool.tiers))
        waiting += sum(max(len(fleet.agents[i].running) - fleet.settings.max_num_seqs, 0) for i in there)
        wish = waiting / self.THRESHOLD
        return len(there) if abs(wish / max(len(there), 1) - 1) <= 0.1 else math.ceil(wish)


class Oracle:
    """Knows every request before it comes: has at each moment as many replicas as the work of the coming seconds fills
    to ``filled``, asked for a cold start earlier."""

    WINDOW_S = 30.0

    def __init__(self, requests: Sequence[Request], settings: SimSettings, filled: float, cold_start_s: float) -> None:
        self._cold_start_s = cold_start_s
        work: dict[int, float] = {}
        for request in requests:
            slot = int(request.at_s // self.WINDOW_S)
            work[slot] = work.get(slot, 0.0) + work_s(settings, request.prompt_tokens, request.output_tokens)
        last = max(work) + 1
        self._needs = [max(1, math.ceil(work.get(slot, 0.0) / self.WINDOW_S / filled)) for slot in range(last + 1)]

    def at(self, at_s: float) -> int:
        """How many there are to be: enough for the window that it is, and for the next."""
        slot = int(max(at_s, 0.0) // self.WINDOW_S)
        return max(self._needs[min(s, len(self._needs) - 1)] for s in (slot, slot + 1))

    def look(self, fleet: Elastic) -> None:
        there = fleet.there()
        soon = max(self.at(fleet.now_s + ahead_s) for ahead_s in (0.0, self._cold_start_s))
        if self.at(fleet.now_s + self._cold_start_s) > len(there):
            fleet.ask(self.at(fleet.now_s + self._cold_start_s) - len(there))
        # To let one go and ask for it again costs a cold start: who is needed within one stays
        steps = int(self._cold_start_s // self.WINDOW_S) + 1
        needed = max([soon, *(self.at(fleet.now_s + k * self.WINDOW_S) for k in range(steps))])
        for _ in range(len(there) - needed):
            # Who has yet to come, as after a death, goes before who serves
            fleet.end(min(fleet.there(), key=lambda i: (fleet.is_up(i), len(fleet.agents[i].running))))
