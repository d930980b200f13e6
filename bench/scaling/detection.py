"""How soon a step is seen in the requests that arrive, and how often a usual burst is taken for one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from bench.scaling.scenes import COLD_START_S, STEP_TIMES
from inference.control.policy.arrivals import SIGMAS, Arrivals
from inference.control.policy.scale_policy import ScalePolicy
from inference.simulate.elastic import Step, stepped
from inference.simulate.traces import Request
from stream_fabric.pool.records import DemandTotals

ROOM = 1 / ScalePolicy().utilisation_aimed
"""Rate that the planned replicas have room for, as a multiple of the highest two-minute mean of the last ten."""
LEVEL_S, MEMORY_S = 120, 600
"""Spans in seconds of the level's mean, and of its highest value."""
FOR_S = 60.0
"""Duration of a step."""
RAMPS_S = (1.0, 30.0)
"""Seconds in which requests rise to five times: suddenly, and as in the benchmark's scene."""


class Detection(NamedTuple):
    """Result for one trace. Times are in seconds from the first second of a step."""

    delays_s: dict[float, list[float]]
    """By the seconds in which requests rise to five times: for each step the time until more replicas are wanted. Each
    copy of a request comes a second after the one before, so a rate that rises within a second is whole after four
    more."""
    false_per_day: float
    """Wishes without a step that nothing followed (``false_per_day``)."""


def step_moments(requests: Sequence[Request], steps: int) -> list[float]:
    """Moments at which a step begins, spread over the traffic."""
    until_s = requests[-1].at_s
    return [MEMORY_S + (until_s - MEMORY_S - FOR_S) * number / steps for number in range(steps)]


def detection(
    requests: Sequence[Request],
    seed: int,
    steps: int = 40,
    sigmas: float = SIGMAS,
    ramps_s: Sequence[float] = RAMPS_S,
) -> Detection:
    """Begin a step at many moments of the traffic, one at a time, and watch the traffic without any."""
    delays_s = {
        ramp_s: [
            _seen_after_s(stepped(requests, Step(STEP_TIMES, at_s, FOR_S, ramp_s), seed), at_s, sigmas)
            for at_s in step_moments(requests, steps)
        ]
        for ramp_s in ramps_s
    }
    looks = _looks(requests, requests[-1].at_s, sigmas)
    alarms = [look.at_s for look in looks if look.per_s > ROOM * look.level_per_s]
    return Detection(delays_s, false_per_day(requests, alarms))


def quantiles(times_s: Sequence[float]) -> str:
    """Median and 90th percentile."""
    return f"{statistics.median(times_s):.0f} / {statistics.quantiles(times_s, n=10)[-1]:.0f} s"


class _Look(NamedTuple):
    at_s: int
    per_s: float
    """Rate that the controller plans for."""
    level_per_s: float
    """Highest two-minute mean of the last ten minutes."""


def _looks(requests: Sequence[Request], until_s: float, sigmas: float) -> list[_Look]:
    """Look at the arrivals each second, as the controller does. Times count from the first request."""
    arrivals, totals, seen = Arrivals(sigmas), DemandTotals(0, 0, 0), 0
    means = level_means(requests, until_s)
    looks: list[_Look] = []
    for at_s in range(int(until_s)):
        while seen < len(requests) and requests[seen].at_s <= at_s:
            one = requests[seen]
            totals = DemandTotals(
                totals.requests + 1, totals.prompt_tokens + one.prompt_tokens, totals.output_tokens + one.output_tokens
            )
            seen += 1
        arrivals.receive(float(at_s), totals)
        if at_s >= MEMORY_S and (rates := arrivals.per_s()) is not None:
            looks.append(_Look(at_s, rates.requests, max(means[at_s - MEMORY_S + LEVEL_S : at_s + 1])))
    return looks


def counts_by_second(requests: Sequence[Request], until_s: float) -> list[int]:
    """Number of requests that arrived in the second before each whole second."""
    counts = [0] * int(until_s)
    for request in requests:
        if (at_s := math.ceil(request.at_s)) < len(counts):
            counts[at_s] += 1
    return counts


def level_means(requests: Sequence[Request], until_s: float) -> list[float]:
    """Two-minute mean at each whole second."""
    sums = [0, *accumulate(counts_by_second(requests, until_s))]
    return [
        (sums[at_s + 1] - sums[max(at_s - LEVEL_S, 0) + 1]) / min(max(at_s, 1), LEVEL_S) for at_s in range(int(until_s))
    ]


def _seen_after_s(requests: Sequence[Request], step_at_s: float, sigmas: float) -> float:
    """Time from the step until more is wanted than there is room for; ``FOR_S``: not within the step."""
    begin_s = int(step_at_s) - MEMORY_S
    known = [replace(one, at_s=one.at_s - begin_s) for one in requests if begin_s <= one.at_s < step_at_s + FOR_S]
    looks = _looks(known, MEMORY_S + FOR_S, sigmas)
    room = ROOM * looks[0].level_per_s
    return next((look.at_s + begin_s - step_at_s for look in looks if look.per_s > room), FOR_S)


def false_per_day(requests: Sequence[Request], alarms: Sequence[int]) -> float:
    """Alarms a day that nothing followed: the two-minute mean stayed in the room that there was, until a replica could
    have come. Alarms within two minutes of such a moment belong to it. ``alarms``: seconds."""
    means = level_means(requests, requests[-1].at_s)
    until_s, found = 0.0, 0
    for at_s in alarms:
        if at_s < max(until_s, MEMORY_S):
            continue
        until_s = at_s + LEVEL_S
        room = ROOM * max(means[at_s - MEMORY_S + LEVEL_S : at_s + 1])
        found += max(means[at_s : at_s + int(COLD_START_S)]) < room
    return found * 86_400 / (requests[-1].at_s - MEMORY_S)
