"""Delay of a step's detection against false alarms: what several detectors reach on one trace, and what any can reach.

    python -m bench.scaling.roc [--ramp-s 30]

A step to five times the requests begins at 40 moments of each trace, within a second or within ``--ramp-s``. The delay
counts from its first second to the first alarm. A false alarm is one on the traffic without a step, if nothing followed
(``detection.false_per_day``). Detectors:

- ours: the rate that the controller plans for is above the room. Its threshold is in standard deviations.
- best window: the requests of one span are above a multiple of the two-minute mean. The span and the multiple with the
  least delay at its false alarms are chosen afterwards, on the trace itself. No detector can do that in operation.
- knows the step: the Shiryaev-Roberts sum of likelihood ratios for independent requests. It knows how a step rises, and
  only its moment is unknown. It takes the mean of the two minutes before a moment as the rate there.
- knows the trace: the same sum, but it also knows how the bursts are made: the moments at which the rate changes, and
  the distribution that it is drawn from. Nearly optimal. Only for the bursts.

The trace ``even`` has azure's requests at random moments: independent, at a constant rate. No real traffic is steadier,
and "knows the step" is nearly optimal there. ``even10`` has ten times as many.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from bench.harness import table
from bench.scaling.detection import FOR_S, LEVEL_S, MEMORY_S, counts_by_second, detection, false_per_day, step_moments
from bench.scaling.scenes import BURSTS, STEP_TIMES, TRACES, scene
from inference.simulate.elastic import Step, stepped
from inference.simulate.traces import Request, traces_folder

SIGMAS = (1.0, 2.0, 3.0, 4.0)
_WINDOWS_S = (1, 2, 3, 5, 8, 12, 20)
_TIMES = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_THRESHOLDS = (3.0, 10.0, 20.0, 30.0, 50.0, 100.0, 300.0, 1e3, 1e4)
_CHANGE_S = 60
"""A step may have begun at most this long ago."""
_STEPS = 40
EVEN = {"even": 1, "even10": 10}
"""Made traces, with multiples of azure's requests."""
LIMITS = (1000.0, 400.0, 300.0, 150.0, 50.0, 0.0)
"""False alarms a day at most."""

Score = Callable[[Sequence[int]], list[float]]
"""Statistic of a detector at each second, from the counts by second. An alarm is a value above its threshold."""


class Point(NamedTuple):
    """One threshold of one detector."""

    false_per_day: float
    median_s: float
    p90_s: float
    threshold: str


def window_score(span_s: int) -> Score:
    """Rate of the last ``span_s`` seconds as a multiple of the two-minute mean."""

    def score(counts: Sequence[int]) -> list[float]:
        sums = [0]
        for count in counts:
            sums.append(sums[-1] + count)
        out = []
        for end in range(1, len(sums)):
            level = max(sums[end] - sums[max(end - LEVEL_S, 0)], 1) / min(end, LEVEL_S)
            out.append((sums[end] - sums[max(end - span_s, 0)]) / span_s / level)
        return out

    return score


def rise(ramp_s: float) -> list[float]:
    """Multiple of the requests in each of a step's seconds, if they rise within ``ramp_s``; 1 s: all at once."""
    return [
        1 + (STEP_TIMES - 1) * min((second + 0.5) / ramp_s, 1.0) if ramp_s > 1 else STEP_TIMES
        for second in range(_CHANGE_S)
    ]


def step_score(times: Sequence[float]) -> Score:
    """Shiryaev-Roberts statistic of an observer who knows how a step rises. ``times``: its ``rise``."""
    logs, sums = [math.log(value) for value in times], [0.0, *accumulate(times)]

    def score(counts: Sequence[int]) -> list[float]:
        totals, out = [0, *accumulate(counts)], []
        for now in range(len(counts)):
            total = 0.0
            for at in range(now, max(now - _CHANGE_S, -1), -1):  # the step begins with this second
                known_s = min(at, LEVEL_S)
                rate = max(totals[at] - totals[at - known_s], 1) / max(known_s, 1)
                gain = sum(count * log for count, log in zip(counts[at : now + 1], logs, strict=False))
                after_s = now + 1 - at
                total += math.exp(min(gain - rate * (sums[after_s] - after_s), 500.0))
            out.append(total)
        return out

    return score


def trace_score(times: Sequence[float], begin_s: int) -> Score:
    """Shiryaev-Roberts statistic of an observer who also knows how the bursts are made. ``begin_s``: time of the trace
    at which the counts begin, which gives the moments at which the rate changes.

    The rate of 20 s is drawn from a gamma distribution, so all likelihoods of counts are in closed form.
    """
    length, shape, per_rate = int(BURSTS.seconds), BURSTS.shape, BURSTS.shape / BURSTS.per_s
    logs, sums = [math.log(value) for value in times], [0.0, *accumulate(times)]

    def score(counts: Sequence[int]) -> list[float]:
        totals, out = [0, *accumulate(counts)], []

        def log_ratio(begin: int, at: int, end: int, step: int) -> float:
            """Log likelihood ratio of one rate's counts from ``begin`` to ``end``, of which those from ``at`` on belong
            to a step that began at ``step``, against no step."""
            plain = per_rate + end - begin
            changed = per_rate + at - begin + sums[end - step] - sums[at - step]
            gain = sum(counts[k] * logs[k - step] for k in range(at, end))
            return gain + (shape + totals[end] - totals[begin]) * math.log(plain / changed)

        for now in range(len(counts)):
            total = 0.0
            for step in range(now, max(now - _CHANGE_S, -1), -1):  # the step begins with this second
                ratio, at = 0.0, step
                while at <= now:
                    slot = (at + begin_s - 1) // length * length + 1 - begin_s
                    end = min(slot + length, now + 1)
                    ratio += log_ratio(max(slot, 0), at, end, step)
                    at = end
                total += math.exp(min(ratio, 500.0))
            out.append(total)
        return out

    return score


def _delays_s(counts: Sequence[tuple[float, int, list[float]]], threshold: float) -> list[float]:
    out = []
    for at_s, begin_s, scores in counts:
        seen = (begin_s + k - at_s for k, value in enumerate(scores) if value > threshold and begin_s + k >= at_s)
        out.append(next(seen, FOR_S))
    return out


class Stepped(NamedTuple):
    """Counts by second around one step."""

    at_s: float
    begin_s: int
    """Time of the first count."""
    counts: list[int]


def steps_of(requests: Sequence[Request], seed: int, ramp_s: float) -> list[Stepped]:
    """Begin a step at many moments of the traffic, one at a time."""
    out = []
    for at_s in step_moments(requests, _STEPS):
        begin_s = int(at_s) - LEVEL_S - _CHANGE_S
        near = [one for one in requests if begin_s - 1 <= one.at_s <= at_s + FOR_S]
        counts = counts_by_second(stepped(near, Step(STEP_TIMES, at_s, FOR_S, ramp_s), seed), at_s + FOR_S)
        out.append(Stepped(at_s, begin_s, counts[begin_s:]))
    return out


def _points(
    requests: Sequence[Request],
    steps: Sequence[Stepped],
    score_at: Callable[[int], Score],
    thresholds: Sequence[float],
    name: str,
) -> list[Point]:
    """Measure a detector at each threshold."""
    plain = score_at(0)(counts_by_second(requests, requests[-1].at_s))
    scored = [(step.at_s, step.begin_s, score_at(step.begin_s)(step.counts)) for step in steps]
    points = []
    for threshold in thresholds:
        alarms = [at_s for at_s, value in enumerate(plain) if value > threshold and at_s >= MEMORY_S]
        delays = _delays_s(scored, threshold)
        points.append(
            Point(false_per_day(requests, alarms), median(delays), quantiles(delays, n=10)[-1], f"{name}{threshold:g}")
        )
    return points


def ours(requests: Sequence[Request], seed: int, ramp_s: float) -> list[Point]:
    points = []
    for sigmas in SIGMAS:
        found = detection(requests, seed, _STEPS, sigmas, ramps_s=(ramp_s,))
        delays_s = found.delays_s[ramp_s]
        p90_s = quantiles(delays_s, n=10)[-1]
        points.append(Point(found.false_per_day, median(delays_s), p90_s, f"{sigmas:g} sigmas"))
    return points


def windows(requests: Sequence[Request], steps: Sequence[Stepped]) -> list[Point]:
    points: list[Point] = []
    for span_s in _WINDOWS_S:
        score = window_score(span_s)
        points += _points(requests, steps, partial(_at_any_time, score), _TIMES, f"{span_s} s above ")
    return points


def _at_any_time(score: Score, _: int) -> Score:
    """A score that does not depend on the time of its first count."""
    return score


def even(requests: Sequence[Request], seed: int, times: int) -> list[Request]:
    """Each of the requests so many times, at random moments."""
    chance, until_s = random.Random(seed), requests[-1].at_s
    moments = sorted(chance.uniform(0.0, until_s) for _ in range(len(requests) * times))
    return [replace(requests[k % len(requests)], at_s=at_s) for k, at_s in enumerate(moments)]


def best(points: Sequence[Point], false_most: float) -> str:
    """Least p90 delay with at most so many false alarms a day, as ``median / p90``."""
    kept = [point for point in points if point.false_per_day <= false_most]
    if not kept:
        return "-"
    point = min(kept, key=lambda point: (point.p90_s, point.median_s))
    return f"{point.median_s:.0f} / {point.p90_s:.0f} s ({point.threshold})"


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.scaling.roc", description=__doc__, formatter_class=raw)
    names = (*TRACES, *EVEN)
    parser.add_argument("--traces", default=",".join(names), help=f"of {', '.join(names)}; separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="draws the steps' requests, and the bursts (default 0)")
    parser.add_argument("--ramp-s", type=float, default=1.0, help="requests rise within so many seconds (default 1)")
    parser.add_argument("--folder", type=Path, help="folder of the traces (default: STREAM_GW_TRACES, or ../shared)")
    args = parser.parse_args(argv)
    for trace in args.traces.split(","):
        requests = scene("azure" if trace in EVEN else trace, traces_folder(args.folder), args.seed).plain
        if trace in EVEN:
            requests = even(requests, args.seed, EVEN[trace])
        report(trace, requests, args.seed, args.ramp_s)
    return 0


def report(trace: str, requests: Sequence[Request], seed: int, ramp_s: float) -> None:
    steps, times = steps_of(requests, seed, ramp_s), rise(ramp_s)
    informed = partial(_at_any_time, step_score(times))
    detectors = {
        "ours": ours(requests, seed, ramp_s),
        "best window": windows(requests, steps),
        "knows the step": _points(requests, steps, informed, _THRESHOLDS, "sum above "),
    }
    if trace == "bursts":
        detectors["knows the trace"] = _points(requests, steps, partial(trace_score, times), _THRESHOLDS, "sum above ")
    print(f"\n{trace}, within {ramp_s:g} s: delay, median / p90, with at most so many false alarms a day")
    head = ("detector", *(f"{limit:g}" for limit in LIMITS))
    print(table(head, [(name, *(best(points, limit) for limit in LIMITS)) for name, points in detectors.items()]))
    for point in detectors["ours"]:
        print(f"ours, {point.threshold}: {point.median_s:.0f} / {point.p90_s:.0f} s, {point.false_per_day:.0f} a day")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
