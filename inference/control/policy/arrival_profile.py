"""Usual arrivals of a pool by minute of the week, learned from traces. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from stream_fabric.pool.records import DemandTotals

SLOT_S = 60
WEEK_S = 7 * 86_400
DAY_S = 86_400
SLOTS = WEEK_S // SLOT_S
_DAY_SLOTS = DAY_S // SLOT_S
WEEKS = 4
DAYS = 3
_NEIGHBOURS = 2
"""Slots before and after one that it is averaged with, unless it differs by more than random variation."""
_SIGMAS = 3.0
NO_DEMAND = DemandTotals(0.0, 0.0, 0.0)


class ArrivalProfile(msgspec.Struct, frozen=True):
    """Rates per second by minute of the week. Minute 0 is Thursday 00:00 UTC, as in Unix time."""

    learned_s: float
    """Unix time."""
    requests: Sequence[float]
    prompt_tokens: Sequence[float]
    output_tokens: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens"):
            rates = getattr(self, name)
            if len(rates) != SLOTS or not all(0 <= rate < 1e12 for rate in rates):
                raise ValueError(f"{name} must be {SLOTS} rates")

    def at(self, unix_s: float) -> DemandTotals:
        """Rate of each kind in the slot that holds this moment."""
        slot = int(unix_s // SLOT_S) % SLOTS
        return DemandTotals(self.requests[slot], self.prompt_tokens[slot], self.output_tokens[slot])

    def highest(self, from_s: float, until_s: float) -> DemandTotals:
        """Highest rate of each kind in the slots between two moments."""
        slots = range(int(from_s // SLOT_S), int(until_s // SLOT_S) + 1)
        rates = [self.at(slot * SLOT_S) for slot in slots]
        return DemandTotals(*(max(column) for column in zip(*rates, strict=True)))


def learn_profile(rows: Iterable[tuple[float, float, float, float]], now_s: float) -> ArrivalProfile:
    """Learn from one row per minute with arrivals: Unix time, requests, prompt tokens to compute, output tokens.

    A slot gets the mean of the same slots of the last four weeks, or of the last three days if that is more. So daily
    traffic is known after three days and weekly traffic after one week. Times before the first row do not count. One
    minute is a small sample: it is averaged with its neighbours unless it differs by more than random variation.
    """
    counts: dict[int, DemandTotals] = {}
    for at_s, requests, prompt_tokens, output_tokens in rows:
        counts[int(at_s // SLOT_S)] = DemandTotals(requests, prompt_tokens, output_tokens)
    first, now = min(counts, default=0), int(now_s // SLOT_S)
    slots: list[DemandTotals] = [NO_DEMAND] * SLOTS
    samples = [1] * SLOTS
    for back in range(SLOTS) if counts else ():
        slot = now - 1 - back  # the slots of the last week
        weekly = [slot - k * SLOTS for k in range(WEEKS) if slot - k * SLOTS >= first]
        # The same time of the last days before now
        latest = slot + (now - 1 - slot) // _DAY_SLOTS * _DAY_SLOTS
        daily = [latest - k * _DAY_SLOTS for k in range(DAYS) if latest - k * _DAY_SLOTS >= first]
        if len(daily) < DAYS:
            daily = []
        means = [(_mean([counts.get(one, NO_DEMAND) for one in some]), len(some)) for some in (weekly, daily) if some]
        if means:
            slots[slot % SLOTS], samples[slot % SLOTS] = max(means, key=lambda mean: mean[0].requests)
    smoothed = [_smoothed(slots, samples, slot) for slot in range(SLOTS)]
    columns = list(zip(*smoothed, strict=True))
    return ArrivalProfile(now_s, *(tuple(round(count / SLOT_S, 4) for count in column) for column in columns))


def _smoothed(slots: Sequence[DemandTotals], samples: Sequence[int], slot: int) -> DemandTotals:
    """Mean of a slot and its neighbours, or the slot itself if it differs by more than random variation."""
    own = slots[slot]
    around = _mean([slots[(slot + step) % SLOTS] for step in range(-_NEIGHBOURS, _NEIGHBOURS + 1)])
    differs = abs(own.requests - around.requests) > _SIGMAS * math.sqrt(around.requests / samples[slot])
    return own if differs else around


def _mean(some: Sequence[DemandTotals]) -> DemandTotals:
    return DemandTotals(*(sum(column) / len(some) for column in zip(*some, strict=True)))
