"""What the plan of a pool becomes: the decision alone, on virtual time, against a fleet that does what it is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from inference.control.scaling import GAP_S, Arrivals, Figures, Moves, PoolScaler, ScalePolicy, Seen
from stream_fabric.ids import ReplicaId
from stream_fabric.metrics import TTFT_BUCKETS_S
from stream_fabric.placement import ReplicaState
from stream_fabric.plans import PoolPlan
from stream_fabric.ports import EngineLoad
from stream_fabric.redis.pool import Arrived, Line, ReplicaInfo

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
    second; its pods follow ``plan.pods`` as a Deployment's do: new ones at once but cold, of too many the victim."""

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

    def seen(self, marked: ReplicaId | None) -> Seen:
        waiting = int(self.queue)
        return Seen(
            [pod.info(self.now) for pod in self.pods],
            [Line(waiting, 1.0, 100 * waiting, OUTPUT * waiting), Line(0, 0, 0, 0), Line(0, 0, 0, 0)],
            Arrived(int(self.requests), int(self.requests) * 100, int(self.requests) * OUTPUT),
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
        marked = self.scaler.plan.victim if self.scaler.plan else None
        plan, moves, self.figures = self.scaler.look(self.seen(marked), self.now)
        for pod in self.pods:
            if pod.name in moves.promote:
                if pod.name not in self.promoted:
                    self.promoted.append(pod.name)
                if pod.asleep and pod.wants != "ready":
                    pod.awake_at = self.now + self.wakes_s
                pod.wants = "ready"
            if pod.name == moves.rest:
                pod.wants = "warm"
            if pod.name in moves.sleep:
                assert pod.wants == "warm" and not pod.running
                pod.wants, pod.asleep, pod.blocks = "sleeping", self.policy.sleep_level, 0
        if self.boots and len(self.pods) < plan.pods:
            self.boot(plan.pods - len(self.pods), cold_s=self.policy.cold_start_s)
        if self.ends and len(self.pods) > plan.pods:
            (gone,) = [pod for pod in self.pods if pod.name == plan.victim]
            assert not gone.running, "a replica that runs something is ended"
            self.pods.remove(gone)
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


# --- up ------------------------------------------------------------------------------------------------------


def test_a_steady_load_is_left_alone() -> None:
    world = World(lambda t: 2.2).boot(4)  # 22 of 40 slots
    world.run(600)
    assert changes(world) == [(4, 0, 4)]


def test_chance_is_given_room_and_the_less_the_more_arrives() -> None:
    """By arithmetic: four standard deviations of the streams that run at a time, of which the square root is one."""
    policy = ScalePolicy(replicas_max=1000, warm_share=0.0)
    needs = {}
    for rate in (1.0, 4.0, 16.0, 64.0, 256.0):
        world = World(lambda t, rate=rate: rate, policy).boot(int(3 * rate))
        world.run(60)
        assert world.figures is not None
        needs[rate] = world.figures.needed
        work, streams = rate * STREAM_S / SLOTS, rate * STREAM_S
        decode = work * (1 / policy.utilisation_aimed + min(policy.spare_sigmas / math.sqrt(streams), 1.0))
        prefill = 0.01 * rate * (1 / policy.utilisation_aimed + min(policy.spare_sigmas / math.sqrt(rate), 1.0))
        assert needs[rate] == math.ceil(decode + prefill), "what arrives is a steady figure here"
    filled = [rate * STREAM_S / SLOTS / need for rate, need in needs.items()]
    assert filled == sorted(filled) and filled[0] < 0.5 and filled[-1] > 0.7


def test_five_times_the_load_is_asked_for_at_once_and_not_much_more() -> None:
    world = World(lambda t: 1.0 if t < 300 else 5.0).boot(2)
    world.run(300)
    before = world.plans[-1][1].ready
    world.run(45)
    asked = world.plans[-1][1]
    needed = 5.0 * STREAM_S / SLOTS / POLICY.utilisation_aimed
    assert before == 2 and asked.ready >= needed
    world.run(600)
    most = max(plan.ready for _, plan in world.plans)
    assert most <= math.ceil(POLICY.growth_max * needed) + 2, "a step is no growth without end"
    assert world.queue < 1 and world.figures is not None and world.figures.utilisation < POLICY.utilisation_max


def test_what_grows_is_met_before_it_is_there() -> None:
    """Ten minutes from 10 to 90 requests a second, and a replica takes a minute to come: once the slope is known nobody
    waits."""
    policy = msgspec.structs.replace(POLICY, replicas_max=200)
    world = World(lambda t: 10.0 if t < 300 else min(10.0 + (t - 300) * 80 / 600, 90.0), policy).boot(15)
    world.run(480)
    worst = 0.0
    for _ in range(520):
        world.step()
        worst = max(worst, world.queue)
    assert worst < 2, "nothing but fractions"
    assert world.figures is not None and world.figures.utilisation > 0.5, "and not by having twice of all"


def test_slow_first_tokens_for_a_minute_ask_for_a_tenth_more_once() -> None:
    world = World(lambda t: 11.0).boot(20)
    world.scaler.policy = world.policy = msgspec.structs.replace(POLICY, replicas_max=100)
    world.run(20)
    for pod in world.pods:
        pod.ttft = SLOW
    world.run(59)
    assert world.plans[-1][1].ready == 20
    world.run(5)
    plan = world.plans[-1][1]
    assert plan.ready == 22 and "p99 TTFT" in plan.reason and plan.figures["ttft_p99_s"] > 30
    world.run(50)
    assert world.plans[-1][1].ready == 22, "those are on their way"


def test_slow_prompts_do_not_make_an_idle_pool_grow() -> None:
    world = World(lambda t: 0.2).boot(2)
    for pod in world.pods:
        pod.ttft = SLOW
    world.run(300)
    assert max(plan.ready for _, plan in world.plans) == 2


def test_who_is_told_to_have_no_more_has_no_more() -> None:
    world = World(lambda t: 50.0, msgspec.structs.replace(POLICY, replicas_max=7, warm_share=0.2)).boot(2)
    world.run(300)
    plan = world.plans[-1][1]
    assert (plan.ready, plan.warm, plan.pods) == (7, 0, 7)


def test_nobody_there_and_somebody_waits() -> None:
    world = World(lambda t: 0.5 if t > 100 else 0.0, msgspec.structs.replace(POLICY, replicas_min=0))
    world.run(100)
    assert world.plans[-1][1].pods == 0
    world.run(4)
    assert world.plans[-1][1].pods == 1, "asked for within seconds"
    world.run(120)
    assert world.queue < 1 and len(world.pods) <= 3


# --- down ----------------------------------------------------------------------------------------------------


def test_down_by_one_that_has_rested_and_only_after_its_time() -> None:
    world = World(lambda t: 0.5).boot(4)
    world.run(int(POLICY.low_s) - 2)
    assert changes(world) == [(4, 0, 4)]
    world.run(400)
    assert [c[2] for c in changes(world) if c[2]][-1] == 1 or world.plans[-1][1].pods == 1
    pods = [plan.pods for _, plan in world.plans]
    assert all(old - new in (0, 1) for old, new in pairwise(pods))
    for (_, old), (_, new) in pairwise(world.plans):
        assert new.ready == old.ready or old.pods == old.ready, "the one before is gone"


def test_the_one_with_the_fewest_streams_and_the_smallest_cache_rests() -> None:
    world = World(lambda t: 0.0).boot(3)
    for pod, (running, blocks) in zip(world.pods, [(0, 50), (0, 20), (1, 10)], strict=True):
        pod.running, pod.blocks = running, blocks
    world.policy = POLICY
    second = world.pods[1].name
    world.run(POLICY.low_s + 20)
    rested = next(plan.resting for _, plan in world.plans if plan.resting)
    assert rested == second


def test_a_long_stream_keeps_its_replica() -> None:
    world = World(lambda t: 0.0).boot(2)
    for pod in world.pods:
        pod.running = 1  # and it never ends
    world.run(600)
    plan = world.plans[-1][1]
    assert plan.ready == 1 and plan.resting is not None and plan.pods == 2
    world.pods[[pod.name for pod in world.pods].index(plan.resting)].running = 0
    world.run(10)
    assert world.plans[-1][1].pods == 1


def test_load_that_comes_back_takes_the_rested_one_at_once() -> None:
    world = World(lambda t: 0.3 if t < 90 else 3.0).boot(3)
    world.pods[0].running = world.pods[1].running = world.pods[2].running = 1
    world.ends = False
    world.run(85)
    assert any(pod.wants == "warm" for pod in world.pods)
    world.run(30)
    assert [pod.wants for pod in world.pods[:3]] == ["ready"] * 3
    assert world.plans[-1][1].victim is None


@pytest.mark.parametrize("why", ["held", "rollout", "draining", "coming", "gap"])
def test_nothing_is_taken_away_while(why: str) -> None:
    world = World(lambda t: 0.2).boot(4)
    world.ends = world.boots = False
    for _ in range(400):
        match why:
            case "held":
                world.held = True
            case "rollout":
                world.pods[0].revision = "new"
            case "draining":
                world.pods[0].wants = "draining"
            case "coming":
                world.pods[0].up_at = world.now + 100
            case "gap":
                world.now += GAP_S
        world.step()
    there = 4 - (why == "draining")
    assert {(plan.ready, plan.resting, plan.victim) for _, plan in world.plans} == {(there, None, None)}
    assert min(plan.pods for _, plan in world.plans) >= there


def test_a_rollout_ends_with_as_many_as_it_began_with() -> None:
    """It starts one more before it ends one, and whoever starts replicas takes the number that is wanted: one more
    wanted for each that is started would never end."""
    world = World(lambda t: 2.0).boot(4)
    world.ends = world.boots = False
    world.run(30)
    old = list(world.pods)
    while old:
        wanted = world.plans[-1][1].pods
        while len(world.pods) < wanted + 1:
            world.boot(1, cold_s=5.0)
            world.pods[-1].revision = "new"
        world.run(8)
        while old and len(world.pods) > world.plans[-1][1].pods:
            gone = old.pop()
            gone.wants = "draining"
            world.run(3)
            world.pods.remove(gone)
    world.run(30)
    assert {plan.pods for _, plan in world.plans} == {4} and len(world.pods) == 4


def test_a_fleet_that_vanishes_is_not_a_fleet_that_is_not_needed() -> None:
    world = World(lambda t: 3.0).boot(8)
    world.run(100)
    there, world.pods, world.boots = world.pods, [], False
    world.run(1000)
    plan = world.plans[-1][1]
    assert plan.ready >= 8 and plan.pods >= 8
    world.pods = there
    world.run(30)
    assert world.plans[-1][1].resting is None


def test_replicas_that_never_come_are_planned_without_in_the_end() -> None:
    world = World(lambda t: 4.0 if t < 100 else 0.1, msgspec.structs.replace(POLICY, cold_start_s=30)).boot(3)
    world.boots = world.ends = False
    world.run(100)
    assert world.plans[-1][1].pods > 3
    world.ends = True
    world.run(600)
    assert world.plans[-1][1].pods <= 2


def test_the_last_one_goes_only_after_its_own_time_without_a_request() -> None:
    world = World(lambda t: 0.0, msgspec.structs.replace(POLICY, replicas_min=0, zero_s=300)).boot(1)
    world.run(299)
    assert world.plans[-1][1].pods == 1
    world.run(30)
    assert world.plans[-1][1].pods == 0 and not world.pods


# --- warm ----------------------------------------------------------------------------------------------------


def test_a_warm_pool_is_filled_promoted_from_and_filled_again() -> None:
    policy = msgspec.structs.replace(POLICY, warm_min=2)
    world = World(lambda t: 1.0 if t < 300 else 4.0, policy).boot(2)
    world.run(200)
    assert sum(pod.wants == "warm" for pod in world.pods) == 2 and world.plans[-1][1].pods == 4
    world.run(100)
    jumped = world.now
    while sum(pod.wants == "ready" for pod in world.pods if pod.up_at <= world.now) < 4:
        world.step()
    assert world.now - jumped < 20, "long before a cold start is over"
    world.run(400)
    assert sum(pod.wants == "warm" for pod in world.pods) == 2


# --- arrivals ------------------------------------------------------------------------------------------------


def test_rates_are_of_the_last_half_minute_and_survive_a_loss() -> None:
    arrivals = Arrivals()
    for second in range(100):
        arrivals.receive(float(second), Arrived(second * 4, second * 40, second * 400))
    assert arrivals.per_s() == Arrived(4, 40, 400)
    assert arrivals.growth(300, 3) == 1.0
    arrivals.receive(100.0, Arrived(1, 10, 100))
    assert arrivals.per_s() is None, "one sample tells no rate"
    for second in range(101, 111):
        arrivals.receive(float(second), Arrived(2 * second, 20 * second, 200 * second))
    assert arrivals.per_s() == Arrived(21.9, 219, 2190)


def test_chance_is_no_growth() -> None:
    arrivals = Arrivals()
    counts = [3, 5, 4, 2, 6, 4, 3, 5]  # around 4 in each half minute
    total = 0
    for block, count in enumerate(counts):
        for second in range(30):
            total += count if second == 15 else 0
            arrivals.receive(block * 30.0 + second, Arrived(total, total, total))
            assert arrivals.growth(300, 3) == 1.0


# --- asleep --------------------------------------------------------------------------------------------------

SLEEPY = msgspec.structs.replace(POLICY, warm_min=3, sleep_level=1, sleep_after_s=100)


def asleep(world: World) -> list[ReplicaId]:
    return [pod.name for pod in world.pods if pod.asleep]


def test_warm_replicas_sleep_after_their_time_but_for_one() -> None:
    world = World(lambda t: 0.5, SLEEPY).boot(1).boot(3, wants="warm")
    for blocks, pod in enumerate(reversed(world.pods[1:]), 1):
        pod.blocks = blocks
    world.run(100)
    assert not asleep(world)
    world.run(2)
    assert asleep(world) == [pod.name for pod in world.pods[2:]], "the one with most to lose is awake"
    world.run(600)
    assert len(asleep(world)) == 2 and changes(world) == [(1, 3, 4)], "they count as warm"


@pytest.mark.parametrize(
    "so",
    [
        lambda world: msgspec.structs.replace(world.policy, sleep_level=0),
        lambda world: msgspec.structs.replace(world.policy, awake_min=3),
        lambda world: setattr(world, "held", True),
        lambda world: [setattr(pod, "sleepless", "it cannot") for pod in world.pods],
    ],
    ids=["level 0", "enough stay awake", "held", "they cannot"],
)
def test_they_stay_awake(so: Callable[[World], object]) -> None:
    world = World(lambda t: 0.5, SLEEPY).boot(1).boot(3, wants="warm")
    if isinstance(policy := so(world), ScalePolicy):
        world.scaler.policy = world.policy = policy
    world.run(300)
    assert not asleep(world)


def test_a_gap_in_looking_is_no_time_of_rest() -> None:
    world = World(lambda t: 0.0, SLEEPY).boot(1).boot(3, wants="warm")
    world.run(90)
    world.now += GAP_S + 1
    world.run(90)
    assert not asleep(world)
    world.run(15)
    assert asleep(world)


def test_the_awake_one_is_promoted_first_then_as_many_as_are_short_and_who_wakes_is_waited_for() -> None:
    world = World(lambda t: 0.5 if t < 200 else 1.1, SLEEPY).boot(1).boot(3, wants="warm")
    world.run(200)
    (awake,) = [pod.name for pod in world.pods if pod.wants == "warm"]
    slept = asleep(world)
    while world.plans[-1][1].ready == 1:
        world.step()
    assert world.promoted == [awake]
    world.rate = lambda t: 1.7
    while world.plans[-1][1].ready == 2:
        world.step()
    world.run(8)
    plan = world.plans[-1][1]
    assert plan.ready == 3
    assert len(world.promoted) == 2 and world.promoted[1] in slept, "one is short, and one wakes"


def test_who_does_not_wake_in_time_is_not_waited_for() -> None:
    world = World(lambda t: 0.5 if t < 200 else 1.1, msgspec.structs.replace(SLEEPY, awake_min=0)).boot(1)
    world.boot(3, wants="warm")
    world.wakes_s = math.inf
    world.run(200)
    while not world.promoted:
        world.step()
    world.run(9)
    assert len(world.promoted) == 1
    world.run(5)
    assert len(world.promoted) == 2


def test_each_time_it_wakes_it_is_waited_for() -> None:
    world = World(lambda t: 1.1 if 200 < t < 400 or t > 1200 else 0.5, msgspec.structs.replace(SLEEPY, awake_min=0))
    world.wakes_s = 8.0
    world.boot(1).boot(3, wants="warm")
    for until in (400, 800):
        while len(asleep(world)) < 3:
            world.step()
        world.promoted.clear()
        while not world.promoted:
            world.step()
        world.run(30)
        assert len(world.promoted) == 1, until


def test_the_quickest_to_wake_is_woken() -> None:
    world = World(lambda t: 0.5 if t < 200 else 1.1, msgspec.structs.replace(SLEEPY, awake_min=0)).boot(1)
    world.boot(3, wants="warm")
    for pod, wake_s in zip(world.pods[1:], (30.0, 0.5, 4.0), strict=True):
        pod.wake_s = wake_s
    world.run(200)
    assert len(asleep(world)) == 3
    while not world.promoted:
        world.step()
    assert world.promoted == [world.pods[2].name]


# --- whatever is seen ----------------------------------------------------------------------------------------

_STATES: list[ReplicaState] = ["starting", "warming", "warm", "ready", "ready", "ready", "draining", "sleeping"]
_INFOS = st.lists(
    st.builds(
        lambda k, state, running, revision: (k, state, running, revision),
        st.integers(0, 7),
        st.sampled_from(_STATES),
        st.sampled_from([0, 0, 0, 3, 10, 14]),
        st.sampled_from(["", "", "", "b"]),
    ),
    max_size=8,
    unique_by=lambda pod: pod[0],
)
_LOOKS = st.lists(
    st.tuples(
        st.one_of(st.none(), _INFOS),  # None: as at the last look
        st.sampled_from([1.0, 1.0, 1.0, 3.0, 60.0, -5.0]),
        st.sampled_from([0, 0, 1, 30]),
        st.integers(0, 20),
        st.booleans(),
        st.booleans(),
    ),
    min_size=2,
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(_LOOKS, st.integers(0, 2), st.integers(0, 2))
def test_whatever_is_seen_nothing_is_taken_by_mistake(
    looks: list[tuple[list[tuple[int, ReplicaState, int, str]] | None, float, int, int, bool, bool]],
    least: int,
    warm: int,
) -> None:
    policy = msgspec.structs.replace(
        POLICY, replicas_min=least, replicas_max=9, warm_min=warm, low_s=2, zero_s=2, cold_start_s=3,
        sleep_level=1, sleep_after_s=2,
    )  # fmt: skip
    scaler = PoolScaler(policy)
    now, total = 0.0, 0
    infos: list[ReplicaInfo] = []
    before: PoolPlan | None = None
    for pods, passed_s, waiting, arrived, held, marks in looks:
        if pods is not None:
            infos = [
                Pod(
                    ReplicaId(f"r{k}"),
                    0.0,
                    state,
                    running,
                    k,
                    revision,
                    asleep=int(state == "sleeping" or (state == "warming" and k % 2 > 0)),
                ).info(1.0)
                for k, state, running, revision in pods
            ]
        now, total = now + passed_s, total + arrived
        marked = before.victim if before and marks else None
        lines = [Line(waiting, 1.0, 100 * waiting, OUTPUT * waiting), Line(0, 0, 0, 0), Line(0, 0, 0, 0)]
        plan, moves, figures = scaler.look(Seen(infos, lines, Arrived(total, total, total), held, now, marked), now)
        by_name = {info.replica: info for info in infos}
        _check(plan, moves, figures, by_name, policy)
        assert not (held and moves.sleep)
        event(f"sleeps {len(moves.sleep)}")
        if before is not None:
            _check_step(before, plan, by_name, held, marked)
            event(f"ready {(plan.ready > before.ready) - (plan.ready < before.ready):+}")
            event(f"pods {(plan.pods > before.pods) - (plan.pods < before.pods):+}")
        before = plan


def _check(
    plan: PoolPlan, moves: Moves, figures: Figures, by_name: dict[ReplicaId, ReplicaInfo], policy: ScalePolicy
) -> None:
    assert policy.replicas_min <= plan.ready <= policy.replicas_max
    assert plan.warm >= 0 and plan.ready + plan.warm <= max(policy.replicas_max, plan.pods)
    assert plan.pods >= plan.ready + plan.warm
    assert moves.rest is None or moves.rest == plan.resting, "written before it is said"
    assert not moves.promote or moves.rest is None
    assert plan.resting not in moves.promote and plan.victim not in moves.promote
    assert plan.victim is None or by_name[plan.victim].load.running == 0
    sleeping = [by_name[name] for name in moves.sleep]
    assert all(info.state == "warm" and not info.load.running for info in sleeping)
    assert not sleeping or not {plan.resting, plan.victim, *moves.promote} & {*moves.sleep}
    assert sum(info.state == "warm" for info in by_name.values()) - len(sleeping) >= policy.awake_min or not sleeping


def _check_step(
    old: PoolPlan, new: PoolPlan, by_name: dict[ReplicaId, ReplicaInfo], held: bool, marked: ReplicaId | None
) -> None:
    states = [info.state for info in by_name.values()]
    present = sum(state != "draining" for state in states)
    disturbed = held or "draining" in states or len({info.revision for info in by_name.values()}) > 1
    if new.ready < old.ready:
        assert not disturbed
        if states.count("ready") < old.ready:
            assert "none more came" in new.reason and 0 < states.count("ready") <= new.ready
        else:
            assert new.ready == old.ready - 1
    if new.resting is not None and new.resting != old.resting:
        assert not disturbed and by_name[new.resting].state == "ready"
        assert states.count("ready") > new.ready
        assert old.resting is None or old.resting not in by_name or by_name[old.resting].load.running == 0
    if new.victim is not None and new.victim != old.victim:
        assert not disturbed and by_name[new.victim].state in ("warm", "sleeping")
    if new.pods < old.pods:
        assert not disturbed
        if present >= old.pods:
            assert new.pods == old.pods - 1 and old.victim == marked == new.victim
        else:
            assert new.pods >= present, "what is there stays"
