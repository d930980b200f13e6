"""What the gateway believes of the pools: refreshed each second, so that a request asks nobody.

Agents own the truth."""

from __future__ import annotations

import asyncio
import logging

from stream_fabric.errors import FabricUnavailable, ModelNotFound, NoReplica
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.redis.pool import RedisPools, ReplicaInfo

log = logging.getLogger(__name__)

_REFRESH_S = 1.0


class Directory:
    """Replicas by model."""

    def __init__(self, pools: RedisPools) -> None:
        self._pools = pools
        self._by_pool: dict[str, list[ReplicaInfo]] = {}
        self._seen_models: dict[str, str] = {}
        self._refreshed = asyncio.Lock()

    async def run(self) -> None:
        while True:
            try:
                await self.refresh()
            except FabricUnavailable as error:
                log.warning("the pools cannot be read: %s", error)
            await asyncio.sleep(_REFRESH_S)

    async def refresh(self) -> None:
        async with self._refreshed:
            self._by_pool = {pool: await self._pools.replicas(pool) for pool in await self._pools.pools()}
            for pool, replicas in self._by_pool.items():
                for replica in replicas:
                    for model in replica.models:
                        self._seen_models[model] = pool

    def models(self) -> dict[str, ReplicaInfo]:
        """Models that a live replica serves, each with one of its replicas."""
        return {model: r for replicas in self._by_pool.values() for r in replicas for model in r.models}

    async def candidates(self, model: str) -> tuple[str, list[ReplicaId]]:
        """The model's pool and its ready replicas. Raises ModelNotFound or NoReplica."""
        found = self._candidates(model)
        if found is None:  # it may have come up within the last second
            await self.refresh()
            found = self._candidates(model)
        if found is not None:
            return found
        if model in self._seen_models:
            raise NoReplica(f"no replica serves {model!r} at the moment", retry_after_s=2)
        known = ", ".join(sorted(self._seen_models)[:20]) or "none"
        raise ModelNotFound(f"no such model {model[:128]!r}; served here: {known}", param="model")

    def _candidates(self, model: str) -> tuple[str, list[ReplicaId]] | None:
        for pool, replicas in self._by_pool.items():
            ready = [r.replica for r in replicas if model in r.models and r.state == "ready"]
            if ready:
                return pool, ready
        return None

    async def produces(self, replica: ReplicaId | None, stream: StreamId) -> bool:
        """Whether the stream is on a live replica's own list. A stream that nobody claimed yet counts while any
        replica has it in its inbox."""
        for pool, replicas in self._by_pool.items():
            for info in replicas:
                if replica is not None and info.replica != replica:
                    continue
                if await self._pools.holds(pool, info.replica, stream):
                    return True
        return False
