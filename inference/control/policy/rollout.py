"""When a rollout of a pool begins and ends, from its replicas' revisions. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stream_fabric.pool.records import ReplicaInfo


class RolloutChange(NamedTuple):
    """A pool began to run several revisions, or runs one again."""

    state: str
    """``begin`` or ``end``."""
    reason: str
    revisions: int
    replicas: int


class RolloutWatch:
    """Detects rollouts of one pool. The first look reports nothing: a new leader cannot tell new from known."""

    def __init__(self) -> None:
        self._is_active: bool | None = None
        self._changes: list[RolloutChange] = []

    def take_changes(self) -> list[RolloutChange]:
        """Changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def update(self, infos: Sequence[ReplicaInfo]) -> None:
        """Compare the replicas' revisions with the last look. A pool without replicas changes nothing."""
        counts = Counter(info.revision for info in infos)
        if not counts:
            return
        is_active, was_active = len(counts) > 1, self._is_active
        self._is_active = is_active
        if was_active is not None and is_active != was_active:
            self._changes.append(_change(counts, is_active))


def _change(counts: Counter[str], is_active: bool) -> RolloutChange:
    named = ", ".join(f"{count} of revision {revision or '(none)'}" for revision, count in sorted(counts.items()))
    reason = f"several revisions run: {named}" if is_active else f"one revision runs: {named}"
    return RolloutChange("begin" if is_active else "end", reason, len(counts), counts.total())
