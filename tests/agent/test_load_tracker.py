"""The speeds that a replica measures from its own streams, and what it says of its pending work."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.running import RunningStream
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.events import NoEvents
from stream_fabric.pool.replica_load import PrefillSpeed
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import ReplicaId, StreamId
from tests.agent.test_lease import stream
from tests.support.events import SetClock
from tests.support.virtual import on_virtual_time

PROMPT = 1000
AT_FIRST_PER_S = PrefillSpeed().per_s


@dataclass
class Tracked:
    """A tracker whose streams live as the test says."""

    slots: int
    running: dict[StreamId, RunningStream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        events = ReplicaEvents(FleetEventReporter(NoEvents(), SetClock(), "agent"), "p", ReplicaId("r"), 0.3)
        self.load = LoadTracker(SimEngine(SimSettings(max_num_seqs=self.slots)), self.running, events)

    def start(self, name: str, prompt: int = PROMPT) -> RunningStream:
        new = stream(name, prompt_tokens=prompt)
        new.started_at = asyncio.get_running_loop().time()
        new.producer.usage = Usage(prompt, 0, 0)
        self.running[new.name] = new
        self.load.receive_start(new)
        return new

    def end(self, gone: RunningStream) -> None:
        del self.running[gone.name]
        self.load.receive_end(gone, whole=True)

    @property
    def per_s(self) -> float:
        return self.load.meter.prefill.per_s


@on_virtual_time
async def test_images_do_not_change_the_bytes_of_a_token() -> None:
    tracked = Tracked(slots=1)
    running = tracked.start("s")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}}
    for content, expected in ([picture], pytest.approx(4.0)), ("A" * 9000, pytest.approx(5.0, abs=0.1)):
        body = msgspec.Raw(msgspec.json.encode({"messages": [{"role": "user", "content": content}]}))
        running.work = msgspec.structs.replace(
            running.work, request=msgspec.structs.replace(running.work.request, body=body)
        )
        tracked.load.receive_prompt(running, PROMPT, 0)
        assert tracked.load.meter.bytes_per_token == expected


@on_virtual_time
async def test_a_wait_for_a_slot_is_no_time_of_a_prompt() -> None:
    """Prompts of 0.1 s that wait 5 s for the only slot. Each alone is too short a sample, so the speed stays."""
    tracked = Tracked(slots=1)
    running = tracked.start("s0")
    await asyncio.sleep(0.1)
    tracked.load.receive_first_token(running)
    for number in range(1, 60):
        following = tracked.start(f"s{number}")
        await asyncio.sleep(5)
        assert tracked.load.pending_prefill_s() == pytest.approx(PROMPT / tracked.per_s), "it is not begun"
        tracked.end(running)
        await asyncio.sleep(0.05)
        assert tracked.load.pending_prefill_s() == pytest.approx(PROMPT / tracked.per_s - 0.05)
        await asyncio.sleep(0.05)
        tracked.load.receive_first_token(following)
        running = following
    assert tracked.per_s == AT_FIRST_PER_S


@on_virtual_time
async def test_prompts_beside_free_slots_are_measured_in_a_row() -> None:
    """Sixteen prompts at once, of which the engine computes one each 0.5 s: 2,000 tokens/s."""
    tracked = Tracked(slots=32)
    for batch in range(20):
        waiting = [tracked.start(f"s{batch}-{number}") for number in range(16)]
        for each in waiting:
            await asyncio.sleep(0.5)
            tracked.load.receive_first_token(each)
        for each in waiting:
            tracked.end(each)
    assert tracked.per_s == pytest.approx(2000, rel=0.05)


@on_virtual_time
async def test_prompts_that_slots_let_in_one_by_one_are_measured_without_their_waits() -> None:
    """Four slots of four seconds, twelve prompts at once, of 0.75 s each: 4,000 tokens/s, and not half of it."""
    tracked = Tracked(slots=4)
    async with asyncio.TaskGroup() as tasks:
        slot, computes = asyncio.Semaphore(4), asyncio.Lock()

        async def live(each: RunningStream) -> None:
            async with slot:
                async with computes:
                    await asyncio.sleep(0.75)
                    tracked.load.receive_first_token(each)
                await asyncio.sleep(4)
                tracked.end(each)

        for batch in range(20):
            for number in range(12):
                tasks.create_task(live(tracked.start(f"s{batch}-{number}", 3 * PROMPT)))
            await asyncio.sleep(30)
    assert tracked.per_s == pytest.approx(4000, rel=0.1)


@on_virtual_time
async def test_a_wait_for_room_in_the_kv_cache_is_no_time_of_a_prompt() -> None:
    """Prompts of 1 s. The cache takes three, which decode for 30 s, so that all others wait for 10 s in a free slot."""
    tracked, prompt, number = Tracked(slots=32), 10_000, 0
    settings = SimSettings(max_num_seqs=32, num_blocks=33_000 // 16, prefill_tokens_per_s=prompt, itl_ms=30, ttft_ms=0)
    engine = tracked.load.engine = SimEngine(settings)
    prefills_s: list[float] = []
    for _ in range(20_000):
        while len(engine.replica.waiting) < 3:
            number += 1
            assert engine.replica.add((StreamId(f"s{number}"), 0), prompt, (), 900)
            tracked.start(f"s{number}", prompt)
        prefills_s += await step_of(engine, tracked)
        tracked.load.tick()
        assert len(engine.replica.running) <= 3
        pending_s = tracked.load.pending_prefill_s()
        assert pending_s > 2 * prompt / tracked.per_s, "those that wait are not begun"
    assert number > 50 and sum(prefills_s[10:]) / len(prefills_s[10:]) < 2, "an attempt's prefill has no wait either"
    assert tracked.per_s >= AT_FIRST_PER_S
    while not engine.replica.idle:
        await step_of(engine, tracked)
    for number in range(60):  # there is room again
        assert engine.replica.add((StreamId(f"t{number}"), 0), prompt, (), 2)
        tracked.start(f"t{number}", prompt)
        while not engine.replica.idle:
            await step_of(engine, tracked)
            tracked.load.tick()
    assert tracked.per_s == pytest.approx(prompt, rel=0.1)


async def step_of(engine: SimEngine, tracked: Tracked) -> list[float]:
    """Take one step of the engine. Returns how long each prompt that got its first token is taken to be computed."""
    step = engine.replica.step()
    await asyncio.sleep(step.duration_s)
    firsts = [tracked.running[name] for (name, _), _ in step.first]
    for first in firsts:
        tracked.load.receive_first_token(first)
    for name, _ in step.finished:
        tracked.end(tracked.running[name])
    return [first.timing.prefill_s for first in firsts]


@on_virtual_time
async def test_prompts_that_are_computed_beside_one_that_waits_for_the_cache_are_measured() -> None:
    """The engine computes one prompt in pieces, and the next one has to wait for room: that is no standstill."""
    tracked = Tracked(slots=32)
    settings = SimSettings(num_blocks=15_000 // 16, prefill_tokens_per_s=2000, ttft_ms=0)
    engine = tracked.load.engine = SimEngine(settings)
    for number in range(60):
        for name in (f"a{number}", f"b{number}"):
            assert engine.replica.add((StreamId(name), 0), 10_000, (), 2)
            tracked.start(name, 10_000)
        while not engine.replica.idle:
            await step_of(engine, tracked)
            tracked.load.tick()
    assert tracked.per_s == pytest.approx(2000, rel=0.1)


@on_virtual_time
async def test_a_wait_for_a_slot_is_still_a_wait() -> None:
    tracked = Tracked(slots=1)
    first = tracked.start("s0")
    tracked.load.receive_first_token(first)
    second = tracked.start("s1")
    await asyncio.sleep(30)
    assert tracked.load.standstill_s() == pytest.approx(30, rel=0.01)
    tracked.end(first)
    await asyncio.sleep(0.1)
    tracked.load.receive_first_token(second)
    tracked.load.tick()
    assert tracked.load.meter.queue_p99_ms == pytest.approx(30_000, rel=0.01)
