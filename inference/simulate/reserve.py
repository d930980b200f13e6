"""The risk and the price of a warm reserve, from the jumps of recorded traffic. Pure.

The estimate is fluid: requests have the mean lengths of the trace, and a replica takes its full rate. One cold start
ago the pool asked for the replicas that its arrivals needed then, filled as planned, and it keeps them for
``low_s``. What it keeps longer for its usual peaks is not counted. What arrives beyond the replicas and beyond the warm
ones is late, or it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inference.control.policy.arrival_profile import SLOT_S
from inference.control.policy.scale_policy import ScalePolicy
from inference.control.policy.traffic_model import learn_jumps
from inference.simulate.capacity import HOURS_A_MONTH, Answer
from inference.simulate.hardware import Hardware
from inference.simulate.traces import Request
from stream_fabric.pool.traffic_model import JUMP_SHARES, TrafficModel


@dataclass(frozen=True)
class Reserve:
    """One row of the curve: what a number of warm replicas covers, and what it costs."""

    jump_share: float
    """Share of the time in which arrivals rise, within a cold start, by no more than the reserve covers."""
    rise_per_s: float
    """Rise in requests per second."""
    warm: int
    gpus: int
    beyond_share: float
    """Share of all requests that arrive beyond ready and warm replicas."""
    dollars_per_month: float


def reserve_curve(
    requests: Sequence[Request], answer: Answer, hardware: Hardware, cold_start_s: float, policy: ScalePolicy
) -> tuple[Reserve, ...]:
    """Return a row for each distinct number of warm replicas that a known ``jump_share`` asks for, rising.

    Empty if the trace is not longer than a cold start.
    """
    slots = int(requests[-1].at_s // SLOT_S) + 1
    rows = [[number * float(SLOT_S), 0.0, 0.0, 0.0] for number in range(slots)]
    for request in requests:
        row = rows[int(request.at_s // SLOT_S)]
        row[1] += 1
        row[2] += request.prompt_tokens
        row[3] += request.output_tokens
    counts = [row[1] for row in rows]
    ahead = math.ceil(cold_start_s / SLOT_S)
    known = TrafficModel(jumps=learn_jumps([(a, b, c, d) for a, b, c, d in rows], slots * float(SLOT_S)))
    jump = known.jump(cold_start_s)
    if jump is None or slots <= ahead:
        return ()
    mean_per_s = sum(counts) / slots / SLOT_S
    serving = max(mean_per_s / answer.aimed_per_s, 1.0)
    most_per_s = answer.replica_per_s * policy.utilisation_max
    curve: list[Reserve] = []
    for share in JUMP_SHARES:
        warm = max(math.ceil((mean_per_s + jump.rise(share)) / most_per_s - serving - 1e-9), 0)
        gpus = warm * hardware.gpus
        beyond = _beyond_share(counts, answer, ahead, math.ceil(policy.low_s / SLOT_S), warm)
        row_ = Reserve(share, jump.rise(share), warm, gpus, beyond, gpus * hardware.gpu_hour * HOURS_A_MONTH)
        if curve and curve[-1].warm == warm:
            curve.pop()
        curve.append(row_)
    return tuple(curve)


def _beyond_share(counts: Sequence[float], answer: Answer, ahead: int, kept: int, warm: int) -> float:
    """Share of the requests, from one cold start (``ahead`` slots) on, that arrive beyond ready and warm replicas."""
    beyond = 0.0
    for slot in range(ahead, len(counts)):
        asked = max(counts[max(slot - ahead - kept, 0) : slot - ahead + 1]) / SLOT_S
        ready = max(math.ceil(asked / answer.aimed_per_s - 1e-9), 1)
        beyond += max(counts[slot] - (ready + warm) * answer.replica_per_s * SLOT_S, 0.0)
    return beyond / (sum(counts[ahead:]) or 1.0)
