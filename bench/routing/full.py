"""A fleet whose slots are all taken: requests wait in the pool's queue, and replicas take them from there.

Small batches and no line at the engines, as where KV memory is short. The queue's way, whose prompt the replica holds
within tenants' shares, beside taking whoever is first.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bench.routing import report
from bench.routing.scene import Scene
from inference.simulate.engine import SETTINGS
from inference.simulate.world import AllReplicas, World

REPLICAS = 8
REQUESTS_MOST = 3000
SEQUENCES = 16
UTILISATION = 0.9
HIT_GAIN_LEAST = 1.5


@dataclass(frozen=True)
class Compared:
    blind: report.Figures
    ours: report.Figures


def compare(where: Scene, seed: int) -> Compared:
    settings = msgspec.structs.replace(SETTINGS, max_num_seqs=SEQUENCES)
    runs = [
        World(
            where.trace.requests,
            where.replicas,
            AllReplicas(),
            seed,
            settings,
            blind_queue=blind,
        ).run()
        for blind in (True, False)
    ]
    blind, ours = (report.figures(name, run) for name, run in zip(("in turn", "by prompt"), runs, strict=True))
    return Compared(blind, ours)


def targets(where: Scene, found: Compared) -> list[report.Target]:
    name = f"{where.trace.name}, {where.replicas} full replicas"
    gain = found.ours.hit_rate / found.blind.hit_rate
    return [
        report.Target(
            f"{name}: hits {gain:.2f} times those of a queue taken in turn, at least {HIT_GAIN_LEAST:g}",
            gain >= HIT_GAIN_LEAST,
        ),
        report.Target(
            f"{name}: p99 TTFT {found.ours.ttft_p99_s:.3f} s, below {found.blind.ttft_p99_s:.3f} s",
            found.ours.ttft_p99_s < found.blind.ttft_p99_s,
        ),
    ]
