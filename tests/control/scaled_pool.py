"""A pool on virtual time that does what its scaler decides, for tests of the decision alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from inference.control.policy.figures import Figures
from inference.control.policy.fleet_view import Observation
from inference.control.policy.pool_scaler import PoolScaler
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import DemandTotals, EngineLoad, ReplicaInfo, TierQueue
from stream_fabric.pool.replica_load import TTFT_BUCKETS_S
from stream_fabric.stream.ids import ReplicaId

SLOTS = 10
OUTPUT = 100
STREAM_S = 10.0
POLICY = ScalePolicy(
    replicas_min=1, replicas_max=20, warm_share=0.0, low_s=60, zero_s=60, cold_start_s=60,
    utilisation_aimed=0.6, spare_sigmas=0.0,
)  # fmt: skip
SLOW = tuple([0] * (len(TTFT_BUCKETS_S) - 1) + [100])
"""First tokens after half a minute."""


@dataclass
class Pod:
    name: ReplicaId
    up_at: float
    wants: ReplicaState = "ready"
    running: int = 0
    blocks: int = 0
    revision: str = ""
    ttft: tuple[int, ...] = ()
    asleep: int = 0
    sleepless: str = ""
    wake_s: float = 0.0
    awake_at: float = math.inf

    def info(self, now: float) -> ReplicaInfo:
        state: ReplicaState = self.wants if now >= self.up_at else "starting"
        if self.asleep and state != "starting" and now >= self.awake_at:
            self.asleep, self.awake_at = 0, math.inf
        elif self.asleep and state == "ready":
            state = "warming"
        return ReplicaInfo(
            self.name,
            "p",
            "sim",
            ("m",),
            state,
            EngineLoad(min(self.running, SLOTS), max(self.running - SLOTS, 0), SLOTS, asleep=self.asleep),
            room=SLOTS,
            prefill_per_s=10_000.0,
            decode_per_s=SLOTS * OUTPUT / STREAM_S,
            output_tokens_mean=OUTPUT,
            prefix_blocks=self.blocks,
            revision=self.revision,
            ttft_counts=self.ttft,
            sleepless=self.sleepless,
            wake_s=self.wake_s,
        )


@dataclass
class World:
    """A pool under ``rate(t)`` requests a second, each of which holds a slot for ten seconds. Looked at each
    second; its pods follow ``plan.pods`` as a Deployment's do: new ones at once but cold, of too many the victims."""

    rate: Callable[[float], float]
    policy: ScalePolicy = POLICY
    pods: list[Pod] = field(default_factory=list)
    boots: bool = True
    ends: bool = True
    held: bool = False
    now: float = 1000.0
    started: float = 1000.0
    requests: float = 0.0
    queue: float = 0.0
    wakes_s: float = 3.0
    promoted: list[ReplicaId] = field(default_factory=list)
    plans: list[tuple[float, PoolPlan]] = field(default_factory=list)
    figures: Figures | None = None

    def __post_init__(self) -> None:
        self.scaler = PoolScaler(self.policy)
        self.ends_at: list[tuple[float, Pod]] = []

    def boot(self, count: int, *, cold_s: float = 0.0, wants: ReplicaState = "ready") -> World:
        for _ in range(count):
            self.pods.append(Pod(ReplicaId(f"r{len(self.plans):05}-{len(self.pods):03}"), self.now + cold_s, wants))
        return self

    def seen(self, marked: frozenset[ReplicaId]) -> Observation:
        waiting = int(self.queue)
        return Observation(
            [pod.info(self.now) for pod in self.pods],
            [TierQueue(waiting, 1.0, 100 * waiting, OUTPUT * waiting), TierQueue(0, 0, 0, 0), TierQueue(0, 0, 0, 0)],
            DemandTotals(int(self.requests), int(self.requests) * 100, int(self.requests) * OUTPUT),
            self.held,
            self.now,
            marked,
        )

    def step(self) -> PoolPlan:
        self.now += 1.0
        for at, pod in [end for end in self.ends_at if end[0] <= self.now]:
            self.ends_at.remove((at, pod))
            pod.running -= 1
        arriving = self.rate(self.now - self.started)
        self.requests += arriving
        self.queue += arriving
        taking = [p for p in self.pods if p.info(self.now).state == "ready"]
        while self.queue >= 1 and taking and (least := min(taking, key=lambda p: p.running)).running < SLOTS:
            self.queue -= 1
            least.running += 1
            self.ends_at.append((self.now + STREAM_S, least))
        marked = frozenset(self.scaler.plan.victims if self.scaler.plan else ())
        plan, moves, self.figures = self.scaler.decide(self.seen(marked), self.now)
        for pod in self.pods:
            if pod.name in moves.promote:
                if pod.name not in self.promoted:
                    self.promoted.append(pod.name)
                if pod.asleep and pod.wants != "ready":
                    pod.awake_at = self.now + self.wakes_s
                pod.wants = "ready"
            if pod.name in moves.rest:
                pod.wants = "warm"
            if pod.name in moves.sleep:
                assert pod.wants == "warm" and not pod.running
                pod.wants, pod.asleep, pod.blocks = "sleeping", self.policy.sleep_level, 0
        if self.boots and len(self.pods) < plan.pods:
            self.boot(plan.pods - len(self.pods), cold_s=self.policy.cold_start_s)
        if self.ends and len(self.pods) > plan.pods:
            surplus = len(self.pods) - plan.pods
            gone = [pod for pod in self.pods if pod.name in plan.victims][:surplus]
            assert len(gone) == surplus
            assert not any(pod.running for pod in gone), "a replica that runs something is ended"
            self.pods = [pod for pod in self.pods if pod not in gone]
        self.plans.append((self.now, plan))
        return plan

    def run(self, seconds: float) -> PoolPlan:
        for _ in range(int(seconds)):
            plan = self.step()
        return plan


def changes(world: World) -> list[tuple[int, int, int]]:
    """(ready, warm, pods) as they followed one another."""
    seen = [(plan.ready, plan.warm, plan.pods) for _, plan in world.plans]
    return [seen[0], *(new for old, new in pairwise(seen) if new != old)]
