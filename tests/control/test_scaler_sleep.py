"""Which warm replicas fall asleep and which are woken: the decision alone, on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from inference.control.policy.pool_scaler import GAP_S
from inference.control.policy.scale_policy import ScalePolicy
from stream_fabric.stream.ids import ReplicaId
from tests.control.scaled_pool import POLICY, World, changes

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
