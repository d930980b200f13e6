"""Builds a pool's traffic model from the answers of telemetry. Pure.

A row with impossible values is skipped; the other rows count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from inference.control.policy.arrival_profile import SLOT_S, WEEK_S, ArrivalProfile, learn_profile
from stream_fabric.pool.traffic_model import (
    JUMP_SHARES,
    REQUESTS_MIN,
    TRIES_MIN,
    Jump,
    Lengths,
    Route,
    Speed,
    TrafficModel,
)
from stream_fabric.process.stats import percentile

ArrivalRow = tuple[float, float, float, float]
"""Unix time of a slot; requests, prompt tokens to compute and output tokens in it."""
LengthsRow = tuple[
    str, str, str, float, float | None, Sequence[float | None], float | None, Sequence[float | None]
]  # fmt: skip
"""Model, dialect, tier; requests; mean and percentiles of prompts, then of answers."""
SpeedRow = tuple[float, float | None, float | None, float, float]
"""Attempts; concurrent sequences, their tokens per second in total; prompt tokens computed, microseconds for it."""

JUMP_HORIZONS_S = (60.0, 120.0, 300.0, 600.0, 1200.0)
_SIGMAS = 5.0
"""Standard deviations that the largest of many samples seldom exceeds by chance."""
_PER_S_MAX = 1e7


class PoolTrafficModel(TrafficModel, frozen=True):
    """A pool's traffic model with its arrivals, which only controllers read."""

    arrivals: ArrivalProfile | None = None


def update_model(
    known: PoolTrafficModel,
    arrivals: Sequence[ArrivalRow],
    lengths: Sequence[LengthsRow],
    attempts: Sequence[SpeedRow],
    now_s: float,
) -> PoolTrafficModel:
    """Return the model after new answers of telemetry; a part without valid rows stays as before.

    Raises ValueError for impossible arrivals.
    """
    speeds, prefill_per_s = learn_speeds(attempts)
    return msgspec.structs.replace(
        known,
        learned_s=now_s,
        arrivals=learn_profile(arrivals, now_s),
        jumps=learn_jumps(arrivals, now_s),
        routes=learn_routes(lengths) or known.routes,
        speeds=speeds or known.speeds,
        prefill_per_s=prefill_per_s or known.prefill_per_s,
    )


def learn_routes(rows: Iterable[LengthsRow]) -> tuple[Route, ...]:
    """Return the routes with their lengths, the route with most requests first."""
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


def learn_speeds(rows: Iterable[SpeedRow]) -> tuple[tuple[Speed, ...], float]:
    """Return decode speeds by rising batch size, and prefill speed in prompt tokens per second (0: unknown)."""
    found: dict[float, Speed] = {}
    computed = prefill_us = 0.0
    for attempts, batch, tokens_per_s, uncached_tokens, row_prefill_us in rows:
        if not attempts >= TRIES_MIN or batch is None or tokens_per_s is None:
            continue
        try:
            found[batch] = Speed(batch, tokens_per_s)
        except ValueError:
            continue
        computed, prefill_us = computed + uncached_tokens, prefill_us + row_prefill_us
    per_s = computed / prefill_us * 1e6 if prefill_us > 0 else 0.0
    return tuple(found[batch] for batch in sorted(found)), per_s if 0 < per_s < _PER_S_MAX else 0.0


def learn_jumps(rows: Sequence[ArrivalRow], now_s: float) -> tuple[Jump, ...]:
    """Return the distribution of the increase in arrivals within each horizon, from every slot of the last week.

    An increase within random variation counts as 0. Slots before the first row are unknown and left out.
    """
    last = int(now_s // SLOT_S) - 1
    counts = {int(row[0] // SLOT_S): row[1:] for row in rows}
    first = max(min(counts, default=last), last - WEEK_S // SLOT_S)
    requests = [counts[slot][0] if slot in counts else 0.0 for slot in range(first, last + 1)]
    prompt, output = (sum(row[k] for row in rows) / max(sum(row[1] for row in rows), 1.0) for k in (2, 3))
    found = []
    for within_s in JUMP_HORIZONS_S:
        rises = sorted(_rises(requests, max(math.ceil(within_s / SLOT_S), 1)))
        if rises:
            per_s = (round(percentile(rises, share) / SLOT_S, 4) for share in JUMP_SHARES)
            found.append(Jump(within_s, tuple(per_s), round(prompt, 4), round(output, 4)))
    return tuple(found)


def _rises(counts: Sequence[float], ahead: int) -> list[float]:
    """Increase from each count to the largest of the next ``ahead`` ones; 0: within random variation."""
    rises: list[float] = []
    window: deque[int] = deque()  # later indices in order, each count larger than all between
    for index in range(len(counts) - 1, -1, -1):
        while window and window[0] > index + ahead:
            window.popleft()
        if window and index + ahead < len(counts):
            largest, own = counts[window[0]], counts[index]
            rises.append(largest - own if largest - own > _SIGMAS * math.sqrt(largest + own) else 0.0)
        while window and counts[window[-1]] <= counts[index]:
            window.pop()
        window.append(index)
    return rises
