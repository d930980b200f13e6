"""Models that replicas have loaded, and look-ups of models that no pool is known to serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from stream_fabric.errors import FabricError
from stream_fabric.pool.records import Loaded, ReplicaInfo
from stream_fabric.stream.ids import ReplicaId

_UNKNOWN_MODEL_S = 1.0
"""Minimum time between two refreshes that requests for unknown models cause."""
_LOADED_MAX = 10_000
_NOTHING_LOADED = Loaded()


class LoadedModels:
    """Adapters and artifacts of replicas, also of some that have left: traces of their requests are still to come."""

    def __init__(self) -> None:
        self._by_replica: dict[ReplicaId, Loaded] = {}

    def note(self, changed: Sequence[ReplicaInfo]) -> None:
        for info in changed:
            if (info.adapters or info.artifact) and info.replica not in self._by_replica:
                self._by_replica[info.replica] = Loaded(info.adapters, info.artifact)
                if len(self._by_replica) > _LOADED_MAX:
                    del self._by_replica[next(iter(self._by_replica))]

    def find(self, replica: ReplicaId) -> Loaded:
        return self._by_replica.get(replica, _NOTHING_LOADED)


class UnknownModels:
    """Refreshes for unknown models, at most once a second: concurrent callers share one refresh, and its failure.

    Anybody can ask for models that do not exist, so the cost for the fleet must not depend on how many do.
    """

    def __init__(self) -> None:
        self._at = float("-inf")
        self._error = ""

    async def look(self, refreshing: asyncio.Lock, refresh: Callable[[], Awaitable[None]]) -> str:
        """Refresh, unless somebody just did. Returns why a pool was not read; empty: all were."""
        now = asyncio.get_running_loop().time
        async with refreshing:
            if now() - self._at >= _UNKNOWN_MODEL_S:
                try:
                    await refresh()
                    self._error = ""
                except FabricError as error:
                    self._error = error.message
                self._at = now()  # not when cancelled: then the next caller refreshes
            return self._error
