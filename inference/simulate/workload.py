"""Workload of a fleet, from rates and lengths or from recorded traffic, with the arithmetic. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from inference.engines.sim.settings import SimSettings
from inference.simulate.engine import work_s
from inference.simulate.traces import Request


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts or of answers, in tokens."""

    mean: float
    square: float
    """Mean of the squares: long answers hold memory for longer than short ones."""
    text: str
    """Description for the arithmetic."""


@dataclass(frozen=True)
class Workload:
    peak_per_s: float
    """Requests per second at the peak, for which the fleet is sized."""
    mean_per_s: float
    prompt_tokens: float
    output_tokens: float
    held_tokens: float
    """Mean KV tokens that a running sequence holds."""
    cached_share: float
    """Share of prompt tokens found in a replica's cache."""
    steps: tuple[str, ...]


def parse_lengths(text: str) -> Lengths:
    """Parse a mean, as ``800``, or quantiles, as ``p50=600,p95=3000``. Raises ValueError.

    With quantiles a lognormal distribution is assumed, which fits chats by and large.
    """
    if "=" not in text:
        mean = _parse_number(text)
        return Lengths(mean, mean**2, f"{mean:,.0f} tokens on average")
    points = []
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        share = _parse_number(name[1:]) / 100 if name[:1] == "p" else math.nan
        if not 0 < share < 1:
            raise ValueError(f"{part!r} is no quantile; write p50=600,p95=3000")
        points.append((NormalDist().inv_cdf(share), math.log(_parse_number(value))))
    if len({z for z, _ in points}) < 2:
        raise ValueError("two quantiles at least, as p50=600,p95=3000; or a mean")
    mean_z = sum(z for z, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    sigma = sum((z - mean_z) * (y - mean_y) for z, y in points) / sum((z - mean_z) ** 2 for z, _ in points)
    if sigma < 0:
        raise ValueError("higher quantiles are of greater lengths")
    mu = mean_y - sigma * mean_z
    try:
        mean, square = math.exp(mu + sigma**2 / 2), math.exp(2 * mu + 2 * sigma**2)
    except OverflowError:
        raise ValueError(f"{text} spread too far for a lognormal; write p50=600,p95=3000") from None
    return Lengths(
        mean,
        square,
        f"{text} as a lognormal: exp({mu:.3f} + {sigma:.3f}^2 / 2) = {mean:,.0f} tokens on average",
    )


def _parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise ValueError(f"{text!r} is no number above 0")
    return value


def from_rates(per_s: float, prompt: Lengths, output: Lengths, peak_to_mean: float, cached_share: float) -> Workload:
    """Return the workload of ``per_s`` requests per second on average."""
    held = prompt.mean + output.square / output.mean / 2
    peak = per_s * peak_to_mean
    return Workload(
        peak,
        per_s,
        prompt.mean,
        output.mean,
        held,
        cached_share,
        (
            f"{per_s:g} requests/s on average x {peak_to_mean:g} at the peak = {peak:,.2f} requests/s",
            f"prompts: {prompt.text}",
            f"answers: {output.text}",
            _held_line(held, "half of its answer on average, long ones counted for as long as they run"),
        ),
    )


def from_trace(
    name: str, requests: Sequence[Request], settings: SimSettings, window_s: float, cached_share: float
) -> Workload:
    """Return the workload of a trace: its peak is the window with most work, which also gives the lengths.

    Raises ValueError if the trace is shorter than a window.
    """
    span_s = requests[-1].at_s - requests[0].at_s
    if span_s < window_s:
        raise ValueError(
            f"{name} lasts {span_s:g} s, less than one window of {window_s:g} s; give a longer trace or a shorter "
            "--window-s"
        )
    windows: dict[int, list[Request]] = {}
    for request in requests:
        windows.setdefault(int((request.at_s - requests[0].at_s) // window_s), []).append(request)
    work = {
        number: sum(work_s(settings, round(r.prompt_tokens * (1 - cached_share)), r.output_tokens) for r in some)
        for number, some in windows.items()
    }
    busiest = max(work, key=lambda number: (work[number], -number))
    some = windows[busiest]
    peak, mean = len(some) / window_s, len(requests) / span_s
    prompt = sum(r.prompt_tokens for r in some) / len(some)
    output = sum(r.output_tokens for r in some) / len(some)
    held = sum(r.output_tokens * (r.prompt_tokens + r.output_tokens / 2) for r in some) / len(some) / output
    ratio = work[busiest] / window_s / (sum(work.values()) / span_s)
    return Workload(
        peak,
        mean,
        prompt,
        output,
        held,
        cached_share,
        (
            f"{name}: {len(requests):,} requests in {span_s / 3600:.2f} h = {mean:,.2f} requests/s on average",
            f"the {window_s:g} s with most work begin at {busiest * window_s:,.0f} s: {len(some):,} requests = "
            f"{peak:,.2f} requests/s, {ratio:.2f} x the mean work, with {prompt:,.0f} prompt and {output:,.0f} output "
            "tokens each",
            _held_line(held, "what came so far of its answer, long ones counted for as long as they run"),
        ),
    )


def _held_line(tokens: float, what: str) -> str:
    """Line of arithmetic about the KV tokens of a running sequence."""
    return f"a running sequence holds the KV of its prompt and {what}: {tokens:,.0f} tokens"
