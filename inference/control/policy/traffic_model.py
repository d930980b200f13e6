"""What answers of telemetry teach of a pool. Pure. A row that cannot be teaches nothing; the others do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from inference.control.profile import SLOT_S, WEEK_S, ArrivalProfile
from stream_fabric.learned import REQUESTS_MIN, TRIES_MIN, Jump, Learned, Lengths, Route, Speed

ArrivalRow = tuple[float, float, float, float]
"""Unix time of a slot; requests, prompt tokens that had to be computed, output tokens that came in it."""
LengthsRow = tuple[
    str, str, str, float, float | None, Sequence[float | None], float | None, Sequence[float | None]
]  # fmt: skip
"""Model, dialect, tier; requests; mean and percentiles of prompts, and of answers."""
SpeedRow = tuple[float, float | None, float | None, float, float]
"""Tries; how many decoded at once, tokens a second of them all; prompt tokens computed, and their microseconds."""

JUMP_HORIZONS_S = (60.0, 120.0, 300.0, 600.0, 1200.0)
_RARELY = 0.99
_SIGMAS = 4.0
"""Standard deviations that chance seldom makes of the largest of many."""


class Snapshot(Learned, frozen=True):
    """All that a controller has learned of a pool."""

    arrivals: ArrivalProfile | None = None


def routes(rows: Iterable[LengthsRow]) -> tuple[Route, ...]:
    """The most asked first."""
    found = []
    for model, dialect, tier, requests, prompt_mean, prompt_q, output_mean, output_q in rows:
        if not requests >= REQUESTS_MIN:
            continue
        prompt, output = _lengths(prompt_q, prompt_mean), _lengths(output_q, output_mean)
        if prompt is None or output is None:
            continue
        try:
            found.append(Route(model, dialect, tier, requests, prompt, output))
        except ValueError:
            continue
    return tuple(sorted(found, key=lambda route: -route.requests))


def _lengths(percentiles: Sequence[float | None], mean: float | None) -> Lengths | None:
    known = [value for value in (*percentiles, mean) if value is not None]
    if len(known) != len(msgspec.structs.fields(Lengths)):
        return None
    try:
        return Lengths(*known)
    except ValueError:
        return None


def speeds(rows: Iterable[SpeedRow]) -> tuple[tuple[Speed, ...], float]:
    """By batch, rising; and prompt tokens a second, 0: unknown."""
    found: dict[float, Speed] = {}
    computed = took_us = 0.0
    for tries, batch, tokens_per_s, uncached_tokens, prefill_us in rows:
        if not tries >= TRIES_MIN or batch is None or tokens_per_s is None:
            continue
        try:
            found[batch] = Speed(batch, tokens_per_s)
        except ValueError:
            continue
        computed, took_us = computed + uncached_tokens, took_us + prefill_us
    per_s = computed / took_us * 1e6 if took_us > 0 else 0.0
    return tuple(found[batch] for batch in sorted(found)), per_s if 0 < per_s < 1e7 else 0.0


def jumps(rows: Sequence[ArrivalRow], now_s: float) -> tuple[Jump, ...]:
    """From every slot of the last week to the most that came within each horizon: what but one in a hundred stays
    below, where it is more than chance makes; in tokens as requests usually have. Of slots before the first row nothing
    is known."""
    last = int(now_s // SLOT_S) - 1
    counts = {int(row[0] // SLOT_S): row[1:] for row in rows}
    first = max(min(counts, default=last), last - WEEK_S // SLOT_S)
    requests = [counts[slot][0] if slot in counts else 0.0 for slot in range(first, last + 1)]
    prompt, output = (sum(row[k] for row in rows) / max(sum(row[1] for row in rows), 1.0) for k in (2, 3))
    found = []
    for within_s in JUMP_HORIZONS_S:
        rises = sorted(_rises(requests, max(math.ceil(within_s / SLOT_S), 1)))
        if rises:
            rare = rises[math.ceil(_RARELY * len(rises)) - 1] / SLOT_S
            found.append(Jump(within_s, *(round(rare * each, 4) for each in (1.0, prompt, output))))
    return tuple(found)


def _rises(counts: Sequence[float], ahead: int) -> list[float]:
    """From each to the largest of so many after it; 0: by no more than chance makes."""
    rises: list[float] = []
    window: deque[int] = deque()  # of those after it, each larger than all between
    for index in range(len(counts) - 1, -1, -1):
        while window and window[0] > index + ahead:
            window.popleft()
        if window and index + ahead < len(counts):
            most, own = counts[window[0]], counts[index]
            rises.append(most - own if most - own > _SIGMAS * math.sqrt(most + own) else 0.0)
        while window and counts[window[-1]] <= counts[index]:
            window.pop()
        window.append(index)
    return rises
