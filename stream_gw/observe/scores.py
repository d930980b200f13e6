"""Scores of a placement's candidates, as a trace holds them until it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from stream_fabric.events import SCORES_MAX, CandidateScore
from stream_fabric.pool.placement import Scored
from stream_fabric.stream.ids import ReplicaId


def encoded_scores(candidates: Sequence[Scored], taken: ReplicaId | Literal[""]) -> bytes:
    """Encode the chosen replica's score, then the best of the others."""

    def rank(c: Scored) -> tuple[bool, bool, float]:
        return c.replica != taken, c.score_ms < 0, c.score_ms

    best = sorted(candidates, key=rank)[:SCORES_MAX]
    return msgspec.msgpack.encode(
        [
            CandidateScore(c.replica, round(c.score_ms), c.matched_tokens, c.in_flight, round(c.load_ms), c.barred)
            for c in best
        ]
    )
