"""Traffic that policies are compared on, the replica that serves it, and the objective."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

from inference.engines.sim.settings import SimSettings
from inference.simulate.elastic import Step, stepped
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, Request, load
from inference.simulate.world import RequestLife

SETTINGS = SimSettings(
    itl_ms=40.0,
    batch_slope_us=500.0,
    ttft_ms=0.0,
    prefill_tokens_per_s=2000.0,
    max_num_seqs=32,
    max_num_batched_tokens=1024,
    block_size=ENGINE_BLOCK_TOKENS,
    num_blocks=200_000 // ENGINE_BLOCK_TOKENS,
)
"""Slow on purpose: a trace of five requests per second needs a fleet."""
COLD_START_S = 300.0
SLO_TTFT_S, SLO_TTFT_S_PER_TOKEN, SLO_ITL_S = 2.0, 1e-3, 0.12
LIMITED = msgspec.structs.replace(SETTINGS, itl_objective_ms=SLO_ITL_S * 1000)
"""The same replica with an agent of ours that knows the objective, and limits the engine's steps."""
STEP_TIMES = 5.0
TRACES = {
    "azure": "Azure's conversation trace of 2023 as recorded",
    "bursts": "made by this program: short answers to long prompts, in bursts",
    "mooncake": "Mooncake's conversation trace as recorded, held back: no setting was chosen by it",
}
BURST_S = 20.0
BURST_SHAPE = 1.5
BURSTS_PER_S, BURSTS_FOR_S = 2.6, 3420.0
"""Requests a second and seconds of the trace that is made, as a code-completion trace of Azure has them."""


@dataclass(frozen=True)
class Scene:
    """Traffic with a step that nobody has announced."""

    trace: str
    seed: int
    plain: tuple[Request, ...]
    """The traffic without the step."""
    requests: tuple[Request, ...]
    step: Step


@cache
def scene(trace: str, folder: Path, seed: int, *, half_batch: bool = False) -> Scene:
    """Make a scene; the seed draws the step's requests. ``half_batch``: every second request is of tier batch, the
    others are interactive."""
    plain = load("mooncake" if trace == "mooncake" else "azure", folder).requests
    if trace == "bursts":
        plain = bursts(plain, seed)
    whole_s = plain[-1].at_s
    step = Step(STEP_TIMES, whole_s / 2, whole_s / 4)
    requests = stepped(plain, step, seed)
    if half_batch:
        rng = random.Random(f"tiers {seed}")
        requests = tuple(replace(request, tier=rng.choice((0, 2))) for request in requests)
    return Scene(trace, seed, plain, requests, step)


def bursts(like: Sequence[Request], seed: int) -> tuple[Request, ...]:
    """Make short answers to long prompts that arrive in bursts: the rate of each 20 s is drawn from a gamma
    distribution. Lengths are those of ``like`` in another order, prompts 1.8 times as long, answers an eighth."""
    rng = random.Random(f"bursts {seed}")
    out: list[Request] = []
    begin_s = 0.0
    while begin_s < BURSTS_FOR_S:
        per_s = BURSTS_PER_S * rng.gammavariate(BURST_SHAPE, 1 / BURST_SHAPE)
        at_s = begin_s + rng.expovariate(per_s)
        while at_s < begin_s + BURST_S:
            one = rng.choice(like)
            prompt, output = round(one.prompt_tokens * 1.8), max(one.output_tokens // 8, 1)
            out.append(Request(len(out), at_s, prompt, output, (), f"s{len(out)}"))
            at_s += rng.expovariate(per_s)
        begin_s += BURST_S
    return tuple(out)


def within_slo(life: RequestLife) -> bool:
    """Whether a request was served within its objective."""
    allowed_s = SLO_TTFT_S + life.request.prompt_tokens * SLO_TTFT_S_PER_TOKEN
    return life.fate == "done" and life.ttft_s <= allowed_s and life.mean_itl_s <= SLO_ITL_S
