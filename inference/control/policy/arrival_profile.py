"""What usually arrives at a pool at this hour of the week, learned from the traces. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from stream_fabric.redis.pool import Arrived

SLOT_S = 60
WEEK_S = 7 * 86_400
DAY_S = 86_400
SLOTS = WEEK_S // SLOT_S
_DAY_SLOTS = DAY_S // SLOT_S
WEEKS = 4
DAYS = 3
_AROUND = 2
"""Slots before and after one that tell of it too, unless it differs from them by more than chance makes."""
_SIGMAS = 3.0
NOTHING = Arrived(0.0, 0.0, 0.0)


class ArrivalProfile(msgspec.Struct, frozen=True):
    """Rates a second by minute of the week, counted from a Thursday's midnight UTC, as Unix time is."""

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

    def at(self, unix_s: float) -> Arrived:
        slot = int(unix_s // SLOT_S) % SLOTS
        return Arrived(self.requests[slot], self.prompt_tokens[slot], self.output_tokens[slot])

    def most(self, from_s: float, until_s: float) -> Arrived:
        """Each at its largest of the slots from one moment to another."""
        slots = range(int(from_s // SLOT_S), int(until_s // SLOT_S) + 1)
        each = [self.at(slot * SLOT_S) for slot in slots]
        return Arrived(*(max(column) for column in zip(*each, strict=True)))


def learned(rows: Iterable[tuple[float, float, float, float]], now_s: float) -> ArrivalProfile:
    """``rows``: of each minute in which anything came, its Unix time, and how many requests, prompt tokens that
    had to be computed and output tokens.

    Of a slot: the mean of the same one of the last four weeks, or that of the last three days if it is more: what
    comes every day is known after three, what comes on Mondays after a week. Times before the first row do not count.
    A minute is a small sample: it is taken for what it says itself only where that is more than chance.
    """
    counts: dict[int, Arrived] = {}
    for at_s, requests, prompt_tokens, output_tokens in rows:
        counts[int(at_s // SLOT_S)] = Arrived(requests, prompt_tokens, output_tokens)
    first, now = min(counts, default=0), int(now_s // SLOT_S)
    slots: list[Arrived] = [NOTHING] * SLOTS
    times = [1] * SLOTS
    for back in range(SLOTS) if counts else ():
        slot = now - 1 - back  # the slots of the last week, each the youngest of its kind
        weekly = [slot - k * SLOTS for k in range(WEEKS) if slot - k * SLOTS >= first]
        # The last days, seen from now, and not from the day it is about
        youngest = slot + (now - 1 - slot) // _DAY_SLOTS * _DAY_SLOTS
        daily = [youngest - k * _DAY_SLOTS for k in range(DAYS) if youngest - k * _DAY_SLOTS >= first]
        if len(daily) < DAYS:
            daily = []
        means = [(_mean([counts.get(one, NOTHING) for one in some]), len(some)) for some in (weekly, daily) if some]
        if means:
            slots[slot % SLOTS], times[slot % SLOTS] = max(means, key=lambda mean: mean[0].requests)
    told = [_told(slots, times, slot) for slot in range(SLOTS)]
    columns = list(zip(*told, strict=True))
    return ArrivalProfile(now_s, *(tuple(round(count / SLOT_S, 4) for count in column) for column in columns))


def _told(slots: Sequence[Arrived], times: Sequence[int], slot: int) -> Arrived:
    own = slots[slot]
    around = _mean([slots[(slot + step) % SLOTS] for step in range(-_AROUND, _AROUND + 1)])
    differs = abs(own.requests - around.requests) > _SIGMAS * math.sqrt(around.requests / times[slot])
    return own if differs else around


def _mean(some: Sequence[Arrived]) -> Arrived:
    return Arrived(*(sum(column) / len(some) for column in zip(*some, strict=True)))
