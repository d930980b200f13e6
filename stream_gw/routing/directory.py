"""The gateway's view of the pools, read once a second, so that placing a request costs no look-up.

Agents own the truth; the directory holds hints. It reads a replica's prefix summary again when the replica announces a
new version, and only for pools that this gateway has used within the last minute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from stream_fabric.errors import FabricError, FabricUnavailable, ModelNotFound, NoReplica
from stream_fabric.limits import CANDIDATES_MAX, HOSTS_ASKED_MAX, PREFIX_BLOCK_BYTES
from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, OverloadTerms, overflow_in_backlog_s
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.prefix import PrefixView
from stream_fabric.pool.records import Candidate, ReplicaInfo
from stream_fabric.ports import Loaded, Pools
from stream_fabric.stream.ids import ReplicaId, StreamId

log = logging.getLogger(__name__)

_REFRESH_S = 1.0
_UNKNOWN_MODEL_S = 1.0
"""Minimum time between two refreshes that requests for unknown models cause."""
_IN_USE_S = 60.0
_CONCURRENT_READS_MAX = 16
_LOADED_MAX = 10_000
_NOTHING_LOADED = Loaded()

_Item = TypeVar("_Item")
_Value = TypeVar("_Value")


class Served(NamedTuple):
    """A model that requests can name, with its home pool."""

    pool: str
    simulated: bool


class Estimates(NamedTuple):
    """Expected size of a pool's requests and responses."""

    bytes_per_token: float
    output_tokens: float


_DEFAULT_ESTIMATES = Estimates(4.0, 256.0)


class _Capacity(NamedTuple):
    """Capacity of a pool's ready replicas, in sequences."""

    models: frozenset[str]
    running: int
    slots: int


class Directory:
    """Replicas and plans of all pools, as they were at the last refresh."""

    def __init__(self, pools: Pools, read_plans: Callable[[], Awaitable[Mapping[str, PoolPlan]]]) -> None:
        """``read_plans`` returns the plans of the declared pools."""
        self._pools = pools
        self._read_plans = read_plans
        self._plans: Mapping[str, PoolPlan] = {}
        self._by_pool: dict[str, list[ReplicaInfo]] = {}
        self._pool_by_replica: dict[ReplicaId, str] = {}
        self._homes: dict[str, str] = {}
        """Home pool of each model that a live replica serves."""
        self._seen_models: dict[str, str] = {}
        self._views: dict[ReplicaId, PrefixView] = {}
        self._capacities: dict[str, _Capacity] = {}
        self._used_at: dict[str, float] = {}
        self._loaded: dict[ReplicaId, Loaded] = {}
        """Kept for replicas that have left too: traces of their requests are still to come."""
        self._refreshing = asyncio.Lock()
        self._unknown_model_refresh_at = float("-inf")
        self._unknown_model_error = ""

    async def run(self) -> None:
        while True:
            try:
                await self.refresh()
            except FabricError as error:
                log.warning("directory refresh failed, retrying: error=%s", error)
            await asyncio.sleep(_REFRESH_S)

    async def refresh(self) -> None:
        """Read all pools. Requests for known models never wait for it."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        names = await self._pools.pools()
        by_pool = dict(zip(names, await _concurrently(self._pools.replicas, names), strict=True))
        self._plans = await self._read_plans()
        self._by_pool = by_pool
        self._pool_by_replica = {}
        for pool, replicas in self._by_pool.items():
            for replica in replicas:
                self._pool_by_replica[replica.replica] = pool
                self._note_loaded(replica)
                for model in replica.models:
                    self._seen_models[model] = pool
        self._homes = self._find_homes()
        self._capacities = {pool: _capacity(replicas) for pool, replicas in self._by_pool.items()}
        await self._refresh_views(self._pools_in_use())
        kept = {info.replica for pool in self._pools_in_use() for info in self._by_pool[pool]}
        self._views = {replica: view for replica, view in self._views.items() if replica in kept}

    def _pools_in_use(self) -> list[str]:
        since = asyncio.get_running_loop().time() - _IN_USE_S
        return [pool for pool in self._by_pool if self._used_at.get(pool, float("-inf")) >= since]

    def _find_homes(self) -> dict[str, str]:
        """Return the home pool of each model: the first pool that is declared for the model, else the first that serves
        it."""
        homes: dict[str, str] = {}
        declared: set[str] = set()
        for pool, replicas in self._by_pool.items():
            plan = self._plans.get(pool)
            for model in {model for info in replicas for model in info.models}:
                is_declared = plan is not None and model in plan.models
                if model not in homes or (is_declared and model not in declared):
                    homes[model] = pool
                if is_declared:
                    declared.add(model)
        return homes

    async def _refresh_views(self, pools: Iterable[str]) -> None:
        """Read the prefix summaries that have changed since the last read."""

        async def renew_view(info: ReplicaInfo) -> None:
            summary = await self._pools.prefix(info.pool, info.replica)
            self._views.setdefault(info.replica, PrefixView()).renew(summary, info.prefix_version)

        outdated: list[ReplicaInfo] = []
        for info in (info for pool in pools for info in self._by_pool.get(pool, ())):
            view = self._views.setdefault(info.replica, PrefixView())
            if view.version != info.prefix_version:
                outdated.append(info)
        await _concurrently(renew_view, outdated)

    def _note_loaded(self, info: ReplicaInfo) -> None:
        """Remember what a replica has loaded, also for traces after it has left."""
        if not (info.adapters or info.artifact) or info.replica in self._loaded:
            return
        self._loaded[info.replica] = Loaded(info.adapters, info.artifact)
        if len(self._loaded) > _LOADED_MAX:
            del self._loaded[next(iter(self._loaded))]

    def loaded(self, replica: ReplicaId | Literal[""]) -> Loaded:
        """Return the adapters and artifact that a replica has loaded, as far as it reports them."""
        return self._loaded.get(replica, _NOTHING_LOADED) if replica else _NOTHING_LOADED

    @property
    def by_pool(self) -> Mapping[str, Sequence[ReplicaInfo]]:
        """Live replicas of every pool at the last refresh."""
        return self._by_pool

    @property
    def plans(self) -> Mapping[str, PoolPlan]:
        """Plans of the declared pools at the last refresh."""
        return self._plans

    def models(self) -> dict[str, Served]:
        """Models that a live replica serves, and models of declared pools without a replica."""
        declared = {model: Served(pool, False) for pool, plan in self._plans.items() for model in plan.models}
        return declared | {
            model: Served(pool, info.simulated)
            for pool, infos in self._by_pool.items() for info in infos for model in info.models
            if self._homes.get(model) == pool
        }  # fmt: skip

    async def pool_of(self, model: str) -> str:
        """Return the home pool of a model. Raises ModelNotFound, NoReplica or, when the pools cannot be read,
        FabricUnavailable."""
        pool = self._pool_of(model)
        if pool is None:  # its first replica may have joined after the last refresh
            await self._refresh_for_unknown_model()
            pool = self._pool_of(model)
        if pool is not None:
            await self._note_use(pool)
            return pool
        if model in self._seen_models:
            raise NoReplica(f"no replica serves model {model!r} now; retry after 2 s", retry_after_s=2)
        known = ", ".join(sorted(self._seen_models)[:20]) or "none"
        raise ModelNotFound(f"no such model {model[:128]!r}; models served here: {known}", param="model")

    def _pool_of(self, model: str) -> str | None:
        live = self._homes.get(model)
        return live or next((pool for pool, plan in self._plans.items() if model in plan.models), None)

    async def _refresh_for_unknown_model(self) -> None:
        """Refresh at most once a second: concurrent callers share one refresh, and its failure.

        Anybody can ask for models that do not exist, so the cost for the fleet must not depend on how many do.
        """
        now = asyncio.get_running_loop().time
        async with self._refreshing:
            if now() - self._unknown_model_refresh_at < _UNKNOWN_MODEL_S:
                self._raise_unknown_model_error()
                return
            try:
                await self._refresh()
                self._unknown_model_error = ""
            except FabricError as error:
                self._unknown_model_error = error.message
            self._unknown_model_refresh_at = now()  # not when cancelled: then the next caller refreshes
            self._raise_unknown_model_error()

    def _raise_unknown_model_error(self) -> None:
        if self._unknown_model_error:
            raise FabricUnavailable(self._unknown_model_error)

    async def _note_use(self, pool: str) -> None:
        """Mark the pool as in use; read its prefix summaries if it was not in use."""
        now = asyncio.get_running_loop().time()
        last = self._used_at.get(pool, float("-inf"))
        self._used_at[pool] = now
        if now - last >= _IN_USE_S:
            await self._refresh_views([pool])

    def _replicas(self, pool: str) -> list[ReplicaInfo]:
        """Return the live replicas; empty for a declared pool without any.

        Raises NoReplica when the last replica of an undeclared pool has left after ``pool_of``.
        """
        replicas = self._by_pool.get(pool) or []
        if not replicas and pool not in self._plans:
            raise NoReplica(f"pool {pool!r} has no replica now; retry after 2 s", retry_after_s=2)
        return replicas

    def warming(self, pool: str) -> PoolPlan | None:
        """Return the plan of a declared pool without a ready replica, whose requests wait for a cold start; else
        None."""
        ready = any(info.state == "ready" for info in self._by_pool.get(pool) or ())
        return None if ready else self._plans.get(pool)

    def wake_s(self, pool: str) -> float:
        """Return the wake time in seconds of the pool's fastest sleeping or waking replica; 0: one is warm, or none
        sleeps."""
        infos = self._by_pool.get(pool) or ()
        if any(info.state == "warm" for info in infos):
            return 0.0
        return min((info.wake_s for info in infos if info.state == "sleeping" or info.load.asleep), default=0.0)

    def estimates(self, pool: str, route: str = "") -> Estimates:
        """Return a request's expected figures. An unknown ``route`` (see ``plan.route_key``) gets the pool's means.

        Raises NoReplica.
        """
        replicas = self._replicas(pool)
        plan = self._plans.get(pool)
        known = plan.outputs.get(route) if plan is not None else None
        count = len(replicas)
        if not count:
            usual = plan.typical_replica if plan is not None else None
            bytes_per_token, output = (usual.bytes_per_token, usual.output_tokens) if usual else _DEFAULT_ESTIMATES
        else:
            bytes_per_token = sum(r.bytes_per_token for r in replicas) / count
            output = sum(r.output_tokens_mean for r in replicas) / count
        return Estimates(bytes_per_token, output if known is None else known)

    def candidates(self, pool: str, model: str, hashes: Sequence[int]) -> list[Candidate]:
        """Return the pool's replicas of the model, each with its estimated cached prefix of the prompt.

        For a large pool return only the replicas with the longest prefix and the least loaded ones. Raises NoReplica.
        """
        found: list[tuple[Candidate, float]] = []
        for info in self._replicas(pool):
            if model not in info.models:
                continue
            view = self._views.get(info.replica)
            blocks = view.match(hashes) if view is not None and hashes else 0
            matched = int(blocks * PREFIX_BLOCK_BYTES / info.bytes_per_token)
            found.append((Candidate(info.replica, matched), info.prefill_ms + info.decode_ms))
        if len(found) > CANDIDATES_MAX:
            found.sort(key=lambda item: (-item[0].matched_tokens, item[1]))
            best, rest = found[: CANDIDATES_MAX // 2], found[CANDIDATES_MAX // 2 :]
            found = best + sorted(rest, key=lambda item: item[1])[: CANDIDATES_MAX // 2]
        return [candidate for candidate, _ in found]

    def overload_terms(self, pool: str, model: str, tier: int, candidates: Sequence[Candidate]) -> OverloadTerms:
        """Return how the pool treats a request of this tier under overload."""
        plan = self._plans.get(pool)
        marks = plan.overload_marks if plan is not None else None
        if marks is None:
            return NO_OVERLOAD_TERMS
        count = len(candidates)
        if count >= CANDIDATES_MAX:
            count = sum(model in info.models and info.state == "ready" for info in self._by_pool.get(pool) or ())
        reject_s = marks.reject_s[tier] if tier < len(marks.reject_s) else 0.0
        return OverloadTerms(reject_s, marks.overflow_s if marks.adjacent else 0.0, replicas=count)

    def overflow_pools(self, pool: str, model: str) -> list[str]:
        """Return the adjacent pools that serve the model and seem to have capacity; the placement itself decides."""
        plan = self._plans.get(pool)
        marks = plan.overload_marks if plan is not None else None
        found: list[str] = []
        for other in marks.adjacent if marks is not None else ():
            capacity = self._capacities.get(other)
            if capacity is None or model not in capacity.models or marks is None:
                continue
            if capacity.running < marks.overflow_utilisation_max * capacity.slots:
                found.append(other)
        return found[:HOSTS_ASKED_MAX]

    def overflow_terms(self, home: str, host: str) -> OverloadTerms:
        """Return how pool ``host`` treats a request that overflows from ``home``.

        Raises NoReplica when ``home`` is not declared any more.
        """
        plan, other = self._plans.get(home), self._plans.get(host)
        if plan is None or plan.overload_marks is None:
            raise NoReplica(f"pool {home!r} has no adjacent pool now; retry after 2 s", retry_after_s=2)
        return OverloadTerms(
            overflow_in_backlog_s(plan.overload_marks, other.overload_marks if other is not None else None),
            overflow_in_max=plan.overload_marks.overflow_utilisation_max,
        )

    def sent(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        """Record that a request with this prompt went to the replica, which will have cached its prefix."""
        view = self._views.get(replica)
        if view is not None and hashes:
            view.sent(hashes)

    async def produces(self, replica: ReplicaId | None, stream: StreamId) -> bool:
        """Return whether a live replica has the stream in flight or in its inbox, or a queue has the stream.

        ``replica``: the stream's last known producer, whose pool is asked first. None: no producer has begun.
        """
        home = self._pool_by_replica.get(replica) if replica is not None else None
        if home is not None and await self._has_stream(home, stream):
            return True
        others = [pool for pool in self._by_pool if pool != home]
        return any(await _concurrently(lambda pool: self._has_stream(pool, stream), others))

    async def _has_stream(self, pool: str, stream: StreamId) -> bool:
        """Return whether a live replica of the pool, or its queue, has the stream."""
        holder = await self._pools.holder(pool, stream)
        return holder == "queue" or any(info.replica == holder for info in self._by_pool.get(pool, ()))


def _capacity(replicas: Sequence[ReplicaInfo]) -> _Capacity:
    ready = [info for info in replicas if info.state == "ready"]
    models = frozenset(model for info in ready for model in info.models)
    running = sum(info.load.running + info.load.waiting for info in ready)
    return _Capacity(models, running, sum(max(info.load.slots, 1) for info in ready))


async def _concurrently(read: Callable[[_Item], Coroutine[Any, Any, _Value]], items: Iterable[_Item]) -> list[_Value]:
    """Read every item, a limited number at once. Raises the first error."""
    limit = asyncio.Semaphore(_CONCURRENT_READS_MAX)

    async def limited(item: _Item) -> _Value:
        async with limit:
            return await read(item)

    return await asyncio.gather(*map(limited, items))
