"""Where a reader's time went: the moments that a gateway has seen and what the producer told, made to add up. Pure."""

from __future__ import annotations

from typing import NamedTuple

from stream_fabric.events import Phases, Timing


class Moments(NamedTuple):
    """Microseconds on the fabric's clock; 0: it has not happened, or not here."""

    received: int
    """The request's first byte."""
    placing: int = 0
    """It is understood and allowed, and asks for a replica; of a follower, for the stream."""
    placed: int = 0
    """The answer."""
    started: int = 0
    """A producer has said that it has the request."""
    first: int = 0
    """The first token came from the fabric."""
    arrived: int = 0
    """The terminal came from the fabric."""
    done: int = 0
    """The last byte was written, or the reader was gone."""
    stalled_us: int = 0
    """In all, the reader took nothing more."""
    stalled_after_us: int = 0
    """Of it, after the terminal had come."""
    broke: int = 0
    """The last frame of a producer that died; of several, the last's."""
    gap_us: int = 0
    """Nobody had read the stream for so long when this reader came."""


def phases(at: Moments, told: Timing | None, *, created: bool, queued: bool) -> tuple[int, Phases]:
    """(wall time, what it consisted of). ``told``: the last producer's own times, where the stream ended by it.

    What gateway and agent have measured is taken as measured. Nothing is stretched to fit: the residual is what is
    left, and tells how far their clocks and their ways of seeing are apart.
    """
    wall_us = at.done - at.received + at.gap_us
    end = at.arrived or at.done
    stalled_before_us = at.stalled_us - at.stalled_after_us
    if not created:
        parts = _followed(at, end)
    elif told is not None:
        parts = _told(at, told)
    else:
        parts = _seen(at, end, queued=queued)
    # What came about while the reader took nothing, it was not waited for
    for name in ("decode_us", "fabric_us"):
        overlap_us = min(parts.get(name, 0), stalled_before_us)
        parts[name] = parts.get(name, 0) - overlap_us
        stalled_before_us -= overlap_us
    parts["client_stall_us"] = at.stalled_us
    parts["resume_gap_us"] = at.gap_us
    return wall_us, Phases(**parts, residual_us=wall_us - sum(parts.values()))


def _told(at: Moments, told: Timing) -> dict[str, int]:
    asked = told.handed_us - told.waited_us
    finished = told.taken_us + told.queue_us + told.prefill_us + told.decode_us
    parts = {
        "gateway_us": at.placing - at.received,
        "pool_queue_us": told.waited_us,
        "engine_queue_us": told.queue_us,
        "prefill_us": told.prefill_us,
        "fabric_us": max(told.taken_us - told.handed_us, 0) + max(at.arrived - finished, 0),
        "decode_us": told.decode_us,
    }
    if at.broke:  # what the first producers had done is known from here only
        began = at.first or at.broke
        parts["admission_us"] = max(at.placed - at.placing, 0)
        parts["prefill_us"] += max(began - at.placed, 0)
        parts["decode_us"] += max(at.broke - began, 0)
        parts["recovery_us"] = max(asked - at.broke, 0)
    else:
        parts["admission_us"] = max(asked - at.placing, 0)
    return parts


def _seen(at: Moments, end: int, *, queued: bool) -> dict[str, int]:
    """A stream whose producer told nothing: cancelled, ended for it, or left."""
    if not at.placed:
        return {"gateway_us": (at.placing or at.done) - at.received, "admission_us": at.done - (at.placing or at.done)}
    started = at.started or end
    first = at.first or end
    waited = {"pool_queue_us" if queued else "fabric_us": max(started - at.placed, 0)}
    decode_us = max(end - first, 0)
    parts = {
        "gateway_us": at.placing - at.received,
        "admission_us": at.placed - at.placing,
        "prefill_us": max(first - max(started, at.placed), 0),
    }
    if at.broke and at.broke < end:
        lost_us = end - max(at.broke, first)
        parts["recovery_us"] = lost_us
        decode_us -= lost_us
    return parts | waited | {"decode_us": max(decode_us, 0)}


def _followed(at: Moments, end: int) -> dict[str, int]:
    """Somebody who came to a stream that was there: what there was came at once, the rest as it was made."""
    placed = at.placed or at.done
    return {
        "gateway_us": placed - at.received,
        "decode_us": max(end - placed, 0),
    }
