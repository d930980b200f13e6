"""Traffic that policies are compared on, the replica that serves it, and the objective."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
OTHER_BURSTS = {
    "short": "as the bursts, of 12 s and less even, 2 requests a second",
    "long": "as the bursts, of 40 s and more even, 3.2 requests a second",
    "wild": "as the bursts, of 30 s and least even, 5 requests a second",
}
"""Traces to try the policies on that no setting was chosen by."""
BURSTS_FOR_S = 3420.0


class Bursts(NamedTuple):
    """Law of made bursts: every ``seconds`` the rate is drawn anew, from a gamma distribution."""

    seconds: float
    shape: float
    per_s: float
    """Mean requests a second."""


BURSTS = Bursts(20.0, 1.5, 2.6)
"""Requests a second as a code-completion trace of Azure has them."""
_BURSTS = {
    "bursts": BURSTS,
    "short": Bursts(12.0, 1.0, 2.0),
    "long": Bursts(40.0, 2.0, 3.2),
    "wild": Bursts(30.0, 0.8, 5.0),
}


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
    if trace in _BURSTS:
        plain = bursts(plain, _BURSTS[trace], seed)
    whole_s = plain[-1].at_s
    step = Step(STEP_TIMES, whole_s / 2, whole_s / 4)
    requests = stepped(plain, step, seed)
    if half_batch:
        rng = random.Random(f"tiers {seed}")
        requests = tuple(replace(request, tier=rng.choice((0, 2))) for request in requests)
    return Scene(trace, seed, plain, requests, step)


def bursts(like: Sequence[Request], made: Bursts, seed: int) -> tuple[Request, ...]:
    """Make short answers to long prompts that arrive in bursts. Lengths are those of ``like`` in another order, prompts
    1.8 times as long, answers an eighth."""
    rng = random.Random(f"bursts {seed}")
    out: list[Request] = []
    begin_s = 0.0
    while begin_s < BURSTS_FOR_S:
        per_s = made.per_s * rng.gammavariate(made.shape, 1 / made.shape)
        at_s = begin_s + rng.expovariate(per_s)
        while at_s < begin_s + made.seconds:
            one = rng.choice(like)
            prompt, output = round(one.prompt_tokens * 1.8), max(one.output_tokens // 8, 1)
            out.append(Request(len(out), at_s, prompt, output, (), f"s{len(out)}"))
            at_s += rng.expovariate(per_s)
        begin_s += made.seconds
    return tuple(out)


def within_slo(life: RequestLife) -> bool:
    """Whether a request was served within its objective."""
    allowed_s = SLO_TTFT_S + life.request.prompt_tokens * SLO_TTFT_S_PER_TOKEN
    return life.fate == "done" and life.ttft_s <= allowed_s and life.mean_itl_s <= SLO_ITL_S
