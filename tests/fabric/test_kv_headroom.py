"""Placement by room in the KV cache saves preemptions: a pool's law before a simulated replica that is never idle."""

from __future__ import annotations

import random

import pytest

from inference.engines.sim.model import Replica
from inference.engines.sim.settings import SimSettings
from stream_fabric.pool.placement import Placed, PlacementRequest, ReplicaSlot
from stream_fabric.pool.state import PoolState
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId

REPLICA = ReplicaId("r")
SLOTS, ROOM = 64, 80
REPORT_S = 0.25
"""Interval of reports; what placement adds in between is estimated."""


class Served:
    """Tokens per second, preemptions, and the longest pause between two tokens of a stream, in seconds."""

    def __init__(self, prompt: int, output: int, kv_tokens: int, *, tells_kv: bool) -> None:
        rng, requests = random.Random(1), 600
        settings = SimSettings(batch_slope_us=200, max_num_seqs=SLOTS, num_blocks=kv_tokens // 16, ttft_ms=0)
        replica: Replica[StreamId] = Replica(settings)
        law = PoolState(queue_max=requests)
        prompts: dict[StreamId, int] = {}
        made: dict[StreamId, int] = {}
        last_s: dict[StreamId, float] = {}
        now_s, reported_s, tokens, left = 0.0, -REPORT_S, 0, requests
        self.longest_s = 0.0
        waiting: PlacementRequest | None = None
        ended: list[StreamId] = []
        while left:
            if ended or now_s - reported_s >= REPORT_S:
                pending = sum(prompts[s] for s in made if not made[s])
                decode = sum(max(output - tokens_made, output // 10) for tokens_made in made.values())
                kv_free = replica.blocks.free * settings.block_size if tells_kv else -1.0
                slot = ReplicaSlot(1e15, True, SLOTS, ROOM, 0, pending / 20, decode / 2, 20_000, 2000, kv_free)
                law.inboxes[REPLICA] = []
                law.report(REPLICA, slot, ("m",), ended, dict.fromkeys(made, ""), now_s * 1000)
                reported_s, ended = now_s, []
            while len(prompts) < requests or waiting is not None:
                if waiting is None:
                    stream = StreamId(f"s{len(prompts)}")
                    prompts[stream] = max(16, int(rng.expovariate(1 / prompt)))
                    waiting = PlacementRequest(
                        stream, TenantId("t"), 1, "m", "", prompts[stream], output, 1e15, rng.random()
                    )
                placed = law.place(waiting, [REPLICA], [0], now_s * 1000)
                if not isinstance(placed, Placed):
                    law.remove_queued(waiting.stream)
                    break
                made[waiting.stream] = 0
                replica.add(waiting.stream, waiting.prompt_tokens, (), max(4, int(rng.expovariate(1 / output))))
                waiting = None
            step = replica.step()
            now_s += step.duration_s
            for stream in step.tokens:
                tokens += 1
                made[stream] += 1
                self.longest_s = max(self.longest_s, now_s - last_s.get(stream, now_s))
                last_s[stream] = now_s
            for stream in step.finished:
                del made[stream]
                left -= 1
            ended += step.finished
        self.preemptions = replica.preemptions
        self.per_s = tokens / now_s


@pytest.mark.parametrize(
    ("prompt", "output", "kv_tokens"),
    [(200, 800, 32_000), (300, 300, 16_000), (1000, 250, 32_000)],
    ids=["long-answers", "short", "long-prompts"],
)
def test_streams_are_preempted_seldom_and_the_batch_stays_large(prompt: int, output: int, kv_tokens: int) -> None:
    """Room and slots alone let a replica take more streams than its KV cache holds."""
    blind, seeing = (Served(prompt, output, kv_tokens, tells_kv=tells) for tells in (False, True))
    print(
        f"\nprompt {prompt}, output {output}: preemptions {blind.preemptions} -> {seeing.preemptions}, longest pause "
        f"{blind.longest_s:.1f} -> {seeing.longest_s:.1f} s, tokens/s {blind.per_s:.0f} -> {seeing.per_s:.0f}"
    )
    assert blind.preemptions > 50
    assert seeing.preemptions < blind.preemptions / 2
    assert seeing.longest_s < blind.longest_s
    assert seeing.per_s > 0.93 * blind.per_s
