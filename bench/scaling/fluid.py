"""Fluid bounds of what a policy could serve: replicas are always full and never wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inference.engines.sim.settings import SimSettings
from inference.simulate.engine import work_s
from inference.simulate.traces import Request

_WINDOW_S = 10.0


class Fluid(NamedTuple):
    """Shares of requests that are served."""

    random: float
    """With refusals drawn at random."""
    omniscient: float
    """With the cheapest requests served first."""


def fluid_bound(
    requests: Sequence[Request], settings: SimSettings, replicas: int, from_s: float, until_s: float
) -> Fluid:
    """Share of ``requests`` that can be served when ``replicas`` exist from ``from_s`` to ``until_s``, and enough of
    them at all other times. Work of a window of 10 s may be done anywhere in it; prompts and answers cost what full
    batches cost.
    """
    inside = [request for request in requests if from_s <= request.at_s < until_s]
    kept = best = float(len(requests) - len(inside))
    for works in _windows(inside, settings).values():
        room_s = replicas * _WINDOW_S
        kept += len(works) * min(room_s / sum(works), 1.0)
        for work in sorted(works):
            room_s -= work
            if room_s < 0:
                break
            best += 1
    return Fluid(kept / len(requests), best / len(requests))


def seen_s(requests: Sequence[Request], settings: SimSettings, step_s: float) -> float:
    """Return the end of the first window of 10 s from ``step_s`` on that brings more work than each window before.

    Until then the level of the traffic is one that the fleet has seen without a step. Infinite: there is none.
    """
    works = {window: sum(each) for window, each in _windows(requests, settings).items()}
    first = int(step_s // _WINDOW_S)
    most = max((work for window, work in works.items() if window < first), default=0.0)
    above = (window for window, work in works.items() if window >= first and work > most)
    return (min(above, default=float("inf")) + 1) * _WINDOW_S


def _windows(requests: Sequence[Request], settings: SimSettings) -> dict[int, list[float]]:
    """Work of each request in seconds of a replica, by window."""
    windows: dict[int, list[float]] = {}
    for request in requests:
        work = work_s(settings, request.prompt_tokens, request.output_tokens)
        windows.setdefault(int(request.at_s // _WINDOW_S), []).append(work)
    return windows
