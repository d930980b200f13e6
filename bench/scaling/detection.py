"""How soon a step is seen in the requests that arrive, and how often a usual burst is taken for one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.scaling.scenes import COLD_START_S, STEP_TIMES
from inference.control.policy.arrivals import Arrivals
from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate.elastic import Step, stepped
from inference.simulate.traces import Request
from stream_fabric.pool.records import DemandTotals

ROOM = 1 / ScalePolicy().utilisation_aimed
"""Rate that the planned replicas have room for, as a multiple of the highest two-minute mean of the last ten."""
_LEVEL_S, _MEMORY_S = 120, 600
_FOR_S = 60.0


class Detection(NamedTuple):
    """Result for one trace. Times are in seconds from the first second of a step."""

    at_once_s: list[float]
    """By step: the time until more replicas are wanted, if requests rise to five times within a second. Each copy of a
    request comes a second after the one before, so the rate is whole after four more."""
    ramp_s: list[float]
    """The same if they rise to five times within 30 s."""
    false_per_day: float
    """Wishes without a step that nothing followed (``_false_wishes``)."""


def detection(requests: Sequence[Request], seed: int, steps: int = 40) -> Detection:
    """Begin a step at many moments of the traffic, one at a time, and watch the traffic without any."""
    until_s = requests[-1].at_s
    moments = [_MEMORY_S + (until_s - _MEMORY_S - _FOR_S) * number / steps for number in range(steps)]
    at_once, ramp = (
        [_seen_after_s(stepped(requests, Step(STEP_TIMES, at_s, _FOR_S, ramp), seed), at_s) for at_s in moments]
        for ramp in (1.0, 30.0)
    )
    return Detection(at_once, ramp, _false_wishes(requests) * 86_400 / (until_s - _MEMORY_S))


def quantiles(times_s: Sequence[float]) -> str:
    """Median and 90th percentile."""
    return f"{statistics.median(times_s):.0f} / {statistics.quantiles(times_s, n=10)[-1]:.0f} s"


class _Look(NamedTuple):
    at_s: int
    per_s: float
    """Rate that the controller plans for."""
    level_per_s: float
    """Highest two-minute mean of the last ten minutes."""
    mean_per_s: float
    """Two-minute mean."""


def _looks(requests: Sequence[Request], until_s: float) -> list[_Look]:
    """Look at the arrivals each second, as the controller does. Times count from the first request."""
    arrivals, totals, seen = Arrivals(), DemandTotals(0, 0, 0), 0
    counts: list[int] = []
    looks: list[_Look] = []
    means: list[float] = []
    for at_s in range(int(until_s)):
        while seen < len(requests) and requests[seen].at_s <= at_s:
            one = requests[seen]
            totals = DemandTotals(
                totals.requests + 1, totals.prompt_tokens + one.prompt_tokens, totals.output_tokens + one.output_tokens
            )
            seen += 1
        counts.append(seen)
        arrivals.receive(float(at_s), totals)
        means.append((seen - counts[max(at_s - _LEVEL_S, 0)]) / min(max(at_s, 1), _LEVEL_S))
        rates = arrivals.per_s()
        if at_s >= _MEMORY_S and rates is not None:
            looks.append(_Look(at_s, rates.requests, max(means[at_s - _MEMORY_S + _LEVEL_S :]), means[-1]))
    return looks


def _seen_after_s(requests: Sequence[Request], step_at_s: float) -> float:
    """Time from the step until more is wanted than there is room for; ``_FOR_S``: not within the step."""
    begin_s = int(step_at_s) - _MEMORY_S
    known = [replace(one, at_s=one.at_s - begin_s) for one in requests if begin_s <= one.at_s < step_at_s + _FOR_S]
    looks = _looks(known, _MEMORY_S + _FOR_S)
    room = ROOM * looks[0].level_per_s
    return next((look.at_s + begin_s - step_at_s for look in looks if look.per_s > room), _FOR_S)


def _false_wishes(requests: Sequence[Request]) -> int:
    """Count the moments at which more was wanted than there was room for, and than the two-minute mean reached until a
    replica could have come. What is wanted within two minutes of such a moment belongs to it."""
    looks = _looks(requests, requests[-1].at_s)
    until_s, found = 0.0, 0
    for number, look in enumerate(looks):
        room = ROOM * look.level_per_s
        if look.at_s >= until_s and look.per_s > room:
            until_s = look.at_s + _LEVEL_S
            found += max(one.mean_per_s for one in looks[number : number + int(COLD_START_S)]) < room
    return found
