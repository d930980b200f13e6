"""Which replicas a pool has been promised that are not there yet, and how long those took that came. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from stream_fabric.ids import ReplicaId
from stream_fabric.redis.pool import ReplicaInfo

_UP = ("ready", "warm", "sleeping")
_KNOWN_S = 86_400.0


class Starts:
    """Told at each look. ``asked``: as the plan tells that another controller has written."""

    def __init__(self, asked: Sequence[tuple[int, int]] = ()) -> None:
        self._asked = deque(at_us / 1e6 for at_us, count in asked for _ in range(count))
        self._known: dict[ReplicaId, float] | None = None
        """When each was last up: one whose lease lapsed for a moment has not started anew."""

    def look(self, pods: int, infos: Sequence[ReplicaInfo], unix_s: float) -> list[float]:
        """``pods``: replicas wanted in all. Of those that are up for the first time, seconds since they were asked for;
        who came first is taken for who was asked for first."""
        up = {info.replica for info in infos if info.state in _UP}
        lacking = max(pods - len(up), 0)
        took = []
        if self._known is None:
            self._known = {}
            while len(self._asked) > lacking:  # they came while nobody looked
                self._asked.popleft()
        else:
            for _ in up - self._known.keys():
                if self._asked:
                    took.append(unix_s - self._asked.popleft())
        self._known |= dict.fromkeys(up, unix_s)
        if len(self._known) > len(up):
            self._known = {name: at for name, at in self._known.items() if abs(unix_s - at) < _KNOWN_S}
        while len(self._asked) > lacking:
            self._asked.pop()
        while len(self._asked) < lacking:
            self._asked.append(unix_s)
        return took

    def asked(self) -> tuple[tuple[int, int], ...]:
        """When, in microseconds since 1970, and how many; the oldest first."""
        return tuple((int(at_s * 1e6), len(list(some))) for at_s, some in groupby(self._asked))
