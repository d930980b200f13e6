"""Made traffic and a replica to serve it, slow enough that a little traffic needs a fleet."""

from __future__ import annotations

import math
import random
from datetime import datetime, timedelta
from pathlib import Path

from inference.simulate.hardware import Hardware, Profile, hardware
from inference.simulate.traces import Request

PROFILE = """
name = "slow on purpose"
gpus = 2
gpu_hour = 2.5
prefill_tokens_per_s = 2000
slots = 32
batch_tokens = 1024
kv_tokens = 200_000
decode_tokens_per_s = { 1 = 25, 32 = 576.5765 }
"""
"""A step takes 40 ms, and half a millisecond more for each further sequence."""


def slow(slots: int = 32, kv_tokens: int = 200_000, prefill_tokens_per_s: float = 2000.0) -> Hardware:
    rates = {"1": 25.0, str(slots): slots / (0.04 + (slots - 1) * 0.0005)} if slots > 1 else {"1": 25.0}
    return hardware(Profile(prefill_tokens_per_s, slots, rates, "slow", 2, 2.5, batch_tokens=1024, kv_tokens=kv_tokens))


def chats(seconds: float, per_s: float, seed: int = 0) -> tuple[Request, ...]:
    """They come by chance, at a rate that rises and falls by half."""
    rng, at_s, out = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(per_s * (1 + 0.5 * math.sin(at_s / 80)))) < seconds:
        prompt, output = rng.lognormvariate(6, 0.8), rng.lognormvariate(4.5, 0.8)
        out.append(Request(len(out), at_s, min(int(prompt), 6000), max(min(int(output), 900), 1), (), str(len(out))))
    return tuple(out)


def as_csv(requests: tuple[Request, ...], path: Path) -> Path:
    begin = datetime(2023, 11, 16, 18)
    rows = [f"{begin + timedelta(seconds=r.at_s)},{r.prompt_tokens},{r.output_tokens}" for r in requests]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    return path
