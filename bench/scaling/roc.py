"""Delay of a step's detection against false alarms: what several detectors reach on one trace, and what any can reach.

    python -m bench.scaling.roc

A step to five times the requests begins at 40 moments of each trace, within a second. The delay counts from its first
second to the first alarm. A false alarm is one on the traffic without a step that nothing followed
(``detection.false_per_day``). Detectors:

- ours: the rate that the controller plans for is above the room. Its threshold is in standard deviations.
- best window: the requests of one span are above a multiple of the two-minute mean. The span and the multiple with the
  least delay at its false alarms are chosen afterwards, on the trace itself. No detector can do that in operation.
- knows the trace: the Shiryaev-Roberts sum of likelihood ratios, nearly optimal. It knows how the bursts are made: the
  moments at which the rate changes, the distribution that it is drawn from, and that a step multiplies it by five. Only
  the rate itself and the moment of the step are unknown. Only for the trace that this program makes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from bench.harness import table
from bench.scaling.detection import FOR_S, LEVEL_S, MEMORY_S, counts_by_second, detection, false_per_day, step_moments
from bench.scaling.scenes import BURST_S, BURST_SHAPE, BURSTS_PER_S, STEP_TIMES, TRACES, scene
from inference.simulate.elastic import Step, stepped
from inference.simulate.traces import Request, traces_folder

SIGMAS = (1.0, 2.0, 3.0, 4.0)
_WINDOWS_S = (1, 2, 3, 5, 8, 12, 20)
_TIMES = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_THRESHOLDS = (3.0, 10.0, 20.0, 30.0, 50.0, 100.0, 300.0, 1e3, 1e4)
_CHANGE_S = 60
"""A step may have begun at most this long ago."""
_STEPS = 40
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


def informed_score(begin_s: int) -> Score:
    """Shiryaev-Roberts statistic of an observer who knows how the bursts are made. ``begin_s``: time of the trace at
    which the counts begin, which gives the moments at which the rate changes.

    The rate of 20 s is drawn from a gamma distribution, so all likelihoods of counts are in closed form.
    """
    shape, per_rate = BURST_SHAPE, BURST_SHAPE / BURSTS_PER_S
    log_times = math.log(STEP_TIMES)

    def log_ratio(before: int, before_s: int, after: int, after_s: int) -> float:
        """Log likelihood ratio of counts before and after a change within one rate's 20 s, against no change."""
        exponent = shape + before + after
        plain, changed = per_rate + before_s + after_s, per_rate + before_s + STEP_TIMES * after_s
        return after * log_times + exponent * math.log(plain / changed)

    def score(counts: Sequence[int]) -> list[float]:
        out = []
        for now in range(len(counts)):
            total, later = 0.0, 0.0
            after = after_s = 0
            for at in range(now, max(now - _CHANGE_S, -1), -1):  # the step begins with this second
                after, after_s = after + counts[at], after_s + 1
                slot = int((at + begin_s - 1) // BURST_S * BURST_S) + 1 - begin_s
                begin = max(slot, 0)
                ratio = log_ratio(sum(counts[begin:at]), at - begin, after, after_s)
                total += math.exp(min(later + ratio, 500.0))
                if at == slot:
                    later, after, after_s = later + ratio, 0, 0
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


def steps_of(requests: Sequence[Request], seed: int) -> list[Stepped]:
    """Begin a step at many moments of the traffic, one at a time."""
    out = []
    for at_s in step_moments(requests, _STEPS):
        begin_s = int(at_s) - LEVEL_S - _CHANGE_S
        near = [one for one in requests if begin_s - 1 <= one.at_s <= at_s + FOR_S]
        counts = counts_by_second(stepped(near, Step(STEP_TIMES, at_s, FOR_S, 1.0), seed), at_s + FOR_S)
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


def ours(requests: Sequence[Request], seed: int) -> list[Point]:
    points = []
    for sigmas in SIGMAS:
        found = detection(requests, seed, _STEPS, sigmas)
        p90_s = quantiles(found.at_once_s, n=10)[-1]
        points.append(Point(found.false_per_day, median(found.at_once_s), p90_s, f"{sigmas:g} sigmas"))
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


def informed(requests: Sequence[Request], steps: Sequence[Stepped]) -> list[Point]:
    return _points(requests, steps, informed_score, _THRESHOLDS, "sum above ")


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
    parser.add_argument("--traces", default=",".join(TRACES), help=f"of {', '.join(TRACES)}; separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="draws the steps' requests, and the bursts (default 0)")
    parser.add_argument("--folder", type=Path, help="folder of the traces (default: STREAM_GW_TRACES, or ../shared)")
    args = parser.parse_args(argv)
    for trace in args.traces.split(","):
        requests = scene(trace, traces_folder(args.folder), args.seed).plain
        steps = steps_of(requests, args.seed)
        detectors = {"ours": ours(requests, args.seed), "best window": windows(requests, steps)}
        if trace == "bursts":
            detectors["knows the trace"] = informed(requests, steps)
        print(f"\n{trace}: delay, median / p90, with at most so many false alarms a day")
        head = ("detector", *(f"{limit:g}" for limit in LIMITS))
        print(table(head, [(name, *(best(points, limit) for limit in LIMITS)) for name, points in detectors.items()]))
        for point in detectors["ours"]:
            print(
                f"ours, {point.threshold}: {point.median_s:.0f} / {point.p90_s:.0f} s, {point.false_per_day:.0f} a day"
            )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
