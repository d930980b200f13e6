"""What the gateway believes of the pools: refreshed each second, so that a request asks nobody.

Agents own the truth; here are hints. What each replica holds of prompts is read again when its agent says that it has
changed, for pools that this gateway has used of late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from stream_fabric.errors import FabricUnavailable, ModelNotFound, NoReplica
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import CANDIDATES_MAX, HOSTS_ASKED_MAX, PREFIX_BLOCK_BYTES
from stream_fabric.plans import PoolPlan
from stream_fabric.ports import Loaded
from stream_fabric.prefix import PrefixView
from stream_fabric.redis.pool import Candidate, RedisPools, ReplicaInfo
from stream_fabric.surge import NO_SURGE, Surge, guest_backlog_s

log = logging.getLogger(__name__)

_REFRESH_S = 1.0
_USED_S = 60.0
_LOADED_MAX = 10_000
_NOTHING = Loaded()


class Served(NamedTuple):
    """A model that can be asked for."""

    pool: str
    simulated: bool


class Estimates(NamedTuple):
    """What requests of a pool are usually like."""

    bytes_per_token: float
    output_tokens: float


_UNKNOWN = Estimates(4.0, 256.0)


class _Room(NamedTuple):
    """A pool's ready replicas."""

    models: frozenset[str]
    running: int
    slots: int


class Directory:
    """Replicas by model."""

    def __init__(self, pools: RedisPools, plans: Callable[[], Awaitable[Mapping[str, PoolPlan]]]) -> None:
        """``plans``: reads those of the declared pools."""
        self._pools = pools
        self._read_plans = plans
        self._plans: Mapping[str, PoolPlan] = {}
        self._by_pool: dict[str, list[ReplicaInfo]] = {}
        self._homes: dict[str, str] = {}
        """Of each model that a live replica serves, the pool whose requests they are."""
        self._seen_models: dict[str, str] = {}
        self._views: dict[ReplicaId, PrefixView] = {}
        self._rooms: dict[str, _Room] = {}
        self._used_at: dict[str, float] = {}
        self._loaded: dict[ReplicaId, Loaded] = {}
        """Of those that tell something; also of some that are gone, whose requests are still to be told of."""
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
            self._plans = await self._read_plans()
            for pool, replicas in self._by_pool.items():
                for replica in replicas:
                    self._note_loaded(replica)
                    for model in replica.models:
                        self._seen_models[model] = pool
            self._homes = self._found_homes()
            self._rooms = {pool: _room(replicas) for pool, replicas in self._by_pool.items()}
            await self._refresh_views()

    def _found_homes(self) -> dict[str, str]:
        """Of several pools that serve a model, the first that is declared for it, or the first."""
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

    async def _refresh_views(self) -> None:
        since = asyncio.get_running_loop().time() - _USED_S
        views: dict[ReplicaId, PrefixView] = {}
        for pool, replicas in self._by_pool.items():
            if self._used_at.get(pool, -_USED_S) < since:
                continue
            for info in replicas:
                view = self._views.get(info.replica) or PrefixView()
                if view.version != info.prefix_version:
                    view.renew(await self._pools.prefix(pool, info.replica), info.prefix_version)
                views[info.replica] = view
        self._views = views

    def _note_loaded(self, info: ReplicaInfo) -> None:
        if not (info.adapters or info.artifact) or info.replica in self._loaded:
            return
        self._loaded[info.replica] = Loaded(info.adapters, info.artifact)
        if len(self._loaded) > _LOADED_MAX:
            del self._loaded[next(iter(self._loaded))]

    def loaded(self, replica: ReplicaId | Literal[""]) -> Loaded:
        """What a replica has loaded, as far as it tells."""
        return self._loaded.get(replica, _NOTHING) if replica else _NOTHING

    @property
    def by_pool(self) -> Mapping[str, Sequence[ReplicaInfo]]:
        """Every pool's live replicas, as they were read last."""
        return self._by_pool

    @property
    def plans(self) -> Mapping[str, PoolPlan]:
        """Of the declared pools, as they were read last."""
        return self._plans

    def models(self) -> dict[str, Served]:
        """Models that a live replica serves, and those of pools that are declared and have none at the moment."""
        declared = {model: Served(pool, False) for pool, plan in self._plans.items() for model in plan.models}
        return declared | {
            model: Served(pool, r.simulated)
            for pool, rs in self._by_pool.items() for r in rs for model in r.models
            if self._homes.get(model) == pool
        }  # fmt: skip

    async def pool_of(self, model: str) -> str:
        """The pool that serves a model. Raises ModelNotFound or NoReplica."""
        pool = self._pool_of(model)
        if pool is None:  # it may have come up within the last second
            await self.refresh()
            pool = self._pool_of(model)
        if pool is not None:
            now = asyncio.get_running_loop().time()
            if now - self._used_at.get(pool, -_USED_S) >= _USED_S:
                self._used_at[pool] = now
                await self._refresh_views_now()
            self._used_at[pool] = now
            return pool
        if model in self._seen_models:
            raise NoReplica(f"no replica serves {model!r} at the moment", retry_after_s=2)
        known = ", ".join(sorted(self._seen_models)[:20]) or "none"
        raise ModelNotFound(f"no such model {model[:128]!r}; served here: {known}", param="model")

    async def _refresh_views_now(self) -> None:
        async with self._refreshed:
            await self._refresh_views()

    def _pool_of(self, model: str) -> str | None:
        live = self._homes.get(model)
        return live or next((pool for pool, plan in self._plans.items() if model in plan.models), None)

    def _replicas(self, pool: str) -> list[ReplicaInfo]:
        """Empty where one is to come. Raises NoReplica: since the pool was found its last replica may have gone."""
        replicas = self._by_pool.get(pool) or []
        if not replicas and pool not in self._plans:
            raise NoReplica(f"no replica is left in pool {pool!r}", retry_after_s=2)
        return replicas

    def warming(self, pool: str) -> PoolPlan | None:
        """The plan of a declared pool of which no replica takes requests yet: who asks waits for a cold start."""
        ready = any(info.state == "ready" for info in self._by_pool.get(pool) or ())
        return None if ready else self._plans.get(pool)

    def wake_s(self, pool: str) -> float:
        """In which the pool's quickest sleeping or waking replica takes requests; 0: one is awake, or none sleeps."""
        infos = self._by_pool.get(pool) or ()
        if any(info.state == "warm" for info in infos):
            return 0.0
        return min((info.wake_s for info in infos if info.state == "sleeping" or info.load.asleep), default=0.0)

    def estimates(self, pool: str, route: str = "") -> Estimates:
        """``route``: as ``plans.route`` names it; of one that is not known all the pool's answers tell. Raises
        NoReplica."""
        replicas = self._replicas(pool)
        plan = self._plans.get(pool)
        known = plan.outputs.get(route) if plan is not None else None
        count = len(replicas)
        if not count:
            usual = plan.usual if plan is not None else None
            bytes_per_token, output = (usual.bytes_per_token, usual.output_tokens) if usual else _UNKNOWN
        else:
            bytes_per_token = sum(r.bytes_per_token for r in replicas) / count
            output = sum(r.output_tokens_mean for r in replicas) / count
        return Estimates(bytes_per_token, output if known is None else known)

    def candidates(self, pool: str, model: str, hashes: Sequence[int]) -> list[Candidate]:
        """The pool's replicas of the model, with what each is believed to hold of the prompt. Of a large pool, those
        that hold most and then those with least to do. Raises NoReplica."""
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

    def surge(self, pool: str, model: str, tier: int, candidates: Sequence[Candidate]) -> Surge:
        """What a pool is to do with a request of the tier when too much is asked of it."""
        plan = self._plans.get(pool)
        marks = plan.surge if plan is not None else None
        if marks is None:
            return NO_SURGE
        count = len(candidates)
        if count >= CANDIDATES_MAX:
            count = sum(model in info.models and info.state == "ready" for info in self._by_pool.get(pool) or ())
        shed_s = marks.shed_s[tier] if tier < len(marks.shed_s) else 0.0
        return Surge(shed_s, marks.shift_s if marks.adjacent else 0.0, replicas=count)

    def hosts(self, pool: str, model: str) -> list[str]:
        """The pool's adjacent ones that serve the model and are believed to have room; they themselves know."""
        plan = self._plans.get(pool)
        marks = plan.surge if plan is not None else None
        found: list[str] = []
        for other in marks.adjacent if marks is not None else ():
            room = self._rooms.get(other)
            if room is None or model not in room.models or marks is None:
                continue
            if room.running < marks.shift_utilisation_max * room.slots:
                found.append(other)
        return found[:HOSTS_ASKED_MAX]

    def guest(self, home: str, host: str) -> Surge:
        """What the host is to do with a request of the home's. Raises NoReplica: it is declared no more."""
        plan, other = self._plans.get(home), self._plans.get(host)
        if plan is None or plan.surge is None:
            raise NoReplica(f"pool {home!r} has no adjacent ones any more", retry_after_s=2)
        return Surge(
            guest_backlog_s(plan.surge, other.surge if other is not None else None),
            guest_max=plan.surge.shift_utilisation_max,
        )

    def sent(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        """A request with this prompt went to the replica."""
        view = self._views.get(replica)
        if view is not None and hashes:
            view.sent(hashes)

    async def produces(self, replica: ReplicaId | None, stream: StreamId) -> bool:
        """Whether a live replica has the stream, or it waits in a queue. A stream that nobody has claimed yet counts
        while any replica has it in its inbox."""
        for pool, replicas in self._by_pool.items():
            where = await self._pools.where(pool, stream)
            if where == "queue" or any(info.replica == where for info in replicas):
                return True
        return False


def _room(replicas: Sequence[ReplicaInfo]) -> _Room:
    ready = [info for info in replicas if info.state == "ready"]
    models = frozenset(model for info in ready for model in info.models)
    running = sum(info.load.running + info.load.waiting for info in ready)
    return _Room(models, running, sum(max(info.load.slots, 1) for info in ready))
