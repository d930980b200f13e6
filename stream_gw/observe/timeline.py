"""Splits a reader's wall time into phases, from the gateway's timestamps and the producer's timing. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from stream_fabric.events import Phases, Timing
from stream_gw.observe.steered import Steered


class Timestamps(NamedTuple):
    """Microseconds on the fabric's clock; 0: has not happened, or not on this gateway."""

    received: int
    """The request's first byte."""
    placing: int = 0
    """The request is parsed; its key, stored responses, limits, moderation, placement follow. A follower has none."""
    placed: int = 0
    """Placement, or the follower's look-up, has returned."""
    started: int = 0
    """The first ``started`` note of a producer has arrived."""
    first: int = 0
    """The first token has arrived from the fabric."""
    arrived: int = 0
    """The terminal has arrived from the fabric."""
    done: int = 0
    """The last byte was written, or the reader has left."""
    stalled_us: int = 0
    """Total time in which the reader's buffer was full."""
    stalled_after_us: int = 0
    """Part of ``stalled_us`` after the terminal had arrived."""
    broke: int = 0
    """The last frame of the latest producer that died, or whose stream yielded."""
    gap_us: int = 0
    """Time without any reader before this one, in microseconds."""
    paused_us: int = 0
    """Time between earlier producers' last frames and their successors' first, after the first token."""
    steered: Steered | None = None
    """Waits after inputs of the client; None: there were none."""
    continued: int = 0
    """The first frame of the producer that followed after ``broke``. ``broke`` 0: no frame came before it."""


_CLOCK_US_MAX = 1_000_000
"""Largest difference that is taken for an inaccuracy of the clocks."""
_STALLED = (
    "decode_us", "check_us", "steer_us", "fabric_us", "recovery_us", "pool_queue_us", "prefill_us", "engine_queue_us",
)  # fmt: skip
"""Phases that a stall of the reader may overlap, the likeliest first."""


def phases(at: Timestamps, timing: Timing | None, *, created: bool, queued: bool) -> tuple[int, Phases]:
    """Return (wall time, its phases), in microseconds. ``timing`` None: no producer ended the stream.

    Measured values are used as they are, never scaled. The residual is the rest; it shows how far the clocks and
    measurements of gateway and agent differ.
    """
    wall_us = at.done - at.received + at.gap_us
    end = at.arrived or at.done
    stalled_before_us = at.stalled_us - at.stalled_after_us
    if not created:
        parts = _followed(at, end)
    elif timing is not None:
        parts = _with_timing(at, _on_one_clock(at, timing, end), queued=queued)
    else:
        parts = _without_timing(at, end, queued=queued)
    # While the reader was stalled, it did not wait for tokens
    for name in _STALLED:
        overlap_us = min(parts.get(name, 0), stalled_before_us)
        parts[name] = parts.get(name, 0) - overlap_us
        stalled_before_us -= overlap_us
    parts["client_stall_us"] = at.stalled_us
    parts["resume_gap_us"] = at.gap_us
    return wall_us, Phases(**parts, residual_us=wall_us - sum(parts.values()))


def _on_one_clock(at: Timestamps, timing: Timing, end: int) -> Timing:
    """Return the timing; where its clock is another than the gateway's, with moments that the gateway knows.

    For some seconds after Redis' clock was set, processes differ about it. Else an hour would be a phase.
    """
    least, most = at.received - _CLOCK_US_MAX, end + _CLOCK_US_MAX
    if least <= timing.handed_us - timing.waited_us <= most and least <= timing.taken_us <= most:
        return timing
    handed_us = max(at.broke, at.placed) + timing.waited_us
    return msgspec.structs.replace(timing, handed_us=handed_us, taken_us=handed_us)


def _with_timing(at: Timestamps, timing: Timing, *, queued: bool) -> dict[str, int]:
    """Phases of a stream that the producer's timing describes."""
    queued_us = timing.handed_us - timing.waited_us
    computed_us = timing.queue_us + timing.prefill_us + timing.decode_us + timing.check_us + timing.steer_us
    finished = timing.taken_us + computed_us
    parts = {
        "gateway_us": at.placing - at.received,
        "pool_queue_us": timing.waited_us,
        "engine_queue_us": timing.queue_us,
        "prefill_us": timing.prefill_us,
        "fabric_us": max(timing.taken_us - timing.handed_us, 0) + max(at.arrived - finished, 0),
        "decode_us": timing.decode_us,
        "check_us": timing.check_us,
        "steer_us": timing.steer_us,
    }
    if at.broke:  # only this gateway knows how long the first producers worked
        began = min(at.first or at.broke, at.broke)
        started = max(min(at.started or at.placed, began), at.placed)
        early_us, late_us = (0, 0) if at.steered is None else (at.steered.broke_early_us, at.steered.broke_late_us)
        parts["admission_us"] = max(at.placed - at.placing, 0)
        parts["pool_queue_us" if queued else "fabric_us"] += started - at.placed
        parts["prefill_us"] += max(began - started - early_us, 0)
        parts["decode_us"] += max(at.broke - began - at.paused_us - late_us, 0)
        parts["steer_us"] += early_us + late_us
        parts["recovery_us"] = max(queued_us - at.broke, 0) + at.paused_us
    elif at.continued:  # the replica died before it began, so all time from the placement on is lost
        parts["admission_us"] = max(at.placed - at.placing, 0)
        lost = "pool_queue_us" if queued else "recovery_us"
        parts[lost] = parts.get(lost, 0) + max(queued_us - at.placed, 0)
    else:
        parts["admission_us"] = max(queued_us - at.placing, 0)
    return parts


def _without_timing(at: Timestamps, end: int, *, queued: bool) -> dict[str, int]:
    """Phases of a stream without the producer's timing: cancelled, fenced, or left by its reader."""
    if not at.placed:
        return {"gateway_us": (at.placing or at.done) - at.received, "admission_us": at.done - (at.placing or at.done)}
    started = at.started or end
    first = at.first or end
    way = "recovery_us" if at.continued and not at.broke else "fabric_us"
    waited = {"pool_queue_us" if queued else way: max(started - at.placed, 0)}
    early_us, late_us = (0, 0) if at.steered is None else (at.steered.early_us, at.steered.late_us)
    prefill_us = first - max(started, at.placed) - early_us
    decode_us = max(end - first, 0) - late_us
    parts = {
        "gateway_us": at.placing - at.received,
        "admission_us": at.placed - at.placing,
        "steer_us": early_us + late_us,
    }
    if at.broke and at.broke < end:
        lost_us = (at.continued or end) - at.broke
        parts["recovery_us"] = lost_us + at.paused_us
        if first <= at.broke:
            decode_us -= lost_us + at.paused_us
        else:
            prefill_us -= lost_us
    return parts | waited | {"prefill_us": max(prefill_us, 0), "decode_us": max(decode_us, 0)}


def _followed(at: Timestamps, end: int) -> dict[str, int]:
    """Phases of a follower: existing frames arrive at once, the others as they are produced."""
    placed = at.placed or at.done
    steer_us = 0 if at.steered is None else at.steered.early_us + at.steered.late_us
    return {
        "gateway_us": placed - at.received,
        "decode_us": max(end - placed - steer_us, 0),
        "steer_us": steer_us,
    }
