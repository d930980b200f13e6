"""Replicas that were asked for and have not started, and how long started ones took. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.stream.ids import ReplicaId

_STARTED = ("ready", "warm", "sleeping")
_REMEMBERED_S = 86_400.0


class ColdStarts:
    """Measures one pool's cold starts from one look to the next."""

    def __init__(self, pending: Sequence[tuple[int, int]] = ()) -> None:
        """``pending``: missing replicas of the previous leader's plan, as ``pending()`` returned them."""
        self._pending = deque(at_us / 1e6 for at_us, count in pending for _ in range(count))
        """Unix time at which each missing replica was asked for, oldest first."""
        self._last_seen: dict[ReplicaId, float] | None = None
        """Started replicas. One whose lease expired for a moment has not started anew. None: before the first look."""

    def update(self, pods: int, infos: Sequence[ReplicaInfo], unix_s: float) -> list[float]:
        """Return the cold start of each replica that has started since the last look, in seconds.

        ``pods``: planned replicas in total. The first to start counts as the first that was asked for.
        """
        started = {info.replica for info in infos if info.state in _STARTED}
        missing = max(pods - len(started), 0)
        durations_s = []
        if self._last_seen is None:
            self._last_seen = {}
            while len(self._pending) > missing:  # they started while nobody led
                self._pending.popleft()
        else:
            for _ in started - self._last_seen.keys():
                if self._pending:
                    durations_s.append(unix_s - self._pending.popleft())
        self._last_seen |= dict.fromkeys(started, unix_s)
        if len(self._last_seen) > len(started):
            self._last_seen = {
                name: at_s for name, at_s in self._last_seen.items() if abs(unix_s - at_s) < _REMEMBERED_S
            }
        while len(self._pending) > missing:
            self._pending.pop()
        while len(self._pending) < missing:
            self._pending.append(unix_s)
        return durations_s

    def pending(self) -> tuple[tuple[int, int], ...]:
        """Missing replicas as (Unix time in microseconds, count), oldest first."""
        return tuple((int(at_s * 1e6), len(list(some))) for at_s, some in groupby(self._pending))
