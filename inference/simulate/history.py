"""Arrival profile learned from other days like the simulated one. Pure: randomness is seeded by the day's number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from inference.control.policy.arrival_profile import DAY_S, SLOT_S, WEEK_S, ArrivalProfile, learn_profile
from inference.simulate.elastic import Step, stepped
from inference.simulate.traces import Request

DAYS_KNOWN = 3
TODAY_S = 10.0 * WEEK_S
"""Unix time at which the simulated traffic begins."""


def resample_day(requests: Sequence[Request], seed: int) -> list[Request]:
    """Return another day's requests: on average the same traffic in each minute, with random differences."""
    rng, end_s = random.Random(f"day {seed}"), requests[-1].at_s
    out = []
    for request in requests:
        for _ in range(rng.choices((0, 1, 2, 3), (0.37, 0.37, 0.18, 0.08))[0]):
            out.append(replace(request, at_s=min(max(request.at_s + rng.uniform(-60, 60), 0.0), end_s)))
    out.sort(key=lambda request: request.at_s)
    return out


def history(requests: Sequence[Request], step: Step | None) -> ArrivalProfile:
    """Learn a profile from days, or weeks for longer traffic, that resemble the simulated one, step included."""
    apart_s = DAY_S if requests[-1].at_s <= DAY_S else WEEK_S
    rows: dict[int, tuple[float, float, float]] = {}
    for day in range(1, DAYS_KNOWN + 1):
        known: Sequence[Request] = resample_day(requests, day)
        for request in stepped(known, step, day) if step else known:
            at_s = int((TODAY_S - day * apart_s + request.at_s) // SLOT_S) * SLOT_S
            count, prompt, output = rows.get(at_s, (0.0, 0.0, 0.0))
            rows[at_s] = (count + 1, prompt + request.prompt_tokens, output + request.output_tokens)
    return learn_profile([(at_s, *sums) for at_s, sums in rows.items()], TODAY_S)
