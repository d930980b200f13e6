"""Times at which requests begin. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Stage(NamedTuple):
    """A part of a run with one load. Exactly one of ``rate`` (requests/s) and ``concurrency`` is above 0.

    The load grows linearly from the stage before for ``ramp_s``, then holds for ``hold_s``. Only requests that begin
    while it holds count.
    """

    rate: float
    concurrency: int
    ramp_s: float
    hold_s: float

    @property
    def name(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate else f"{self.concurrency} at once"

    @property
    def length_s(self) -> float:
        return self.ramp_s + self.hold_s


def stages_of(rates: Sequence[float], concurrencies: Sequence[int], ramp_s: float, hold_s: float) -> list[Stage]:
    return [Stage(rate, 0, ramp_s, hold_s) for rate in rates] + [Stage(0, n, ramp_s, hold_s) for n in concurrencies]


def poisson(stage: Stage, rate_before: float, rng: random.Random) -> Iterator[float]:
    """Yield the arrivals of a stage, in seconds from its start: a Poisson process whose rate follows the ramp.

    Candidates come at the highest rate; each is kept with the probability that the present rate has to it (thinning).
    """
    most = max(rate_before, stage.rate)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(most)
        if at_s >= stage.length_s:
            return
        share = min(at_s / stage.ramp_s, 1.0) if stage.ramp_s else 1.0
        if rng.random() * most < rate_before + (stage.rate - rate_before) * share:
            yield at_s


def allowed_at_once(stage: Stage, before: int, at_s: float) -> int:
    """Requests that may run at once at this time of a stage, at least 1."""
    share = min(at_s / stage.ramp_s, 1.0) if stage.ramp_s else 1.0
    return max(round(before + (stage.concurrency - before) * share), 1)
