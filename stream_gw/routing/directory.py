"""The gateway's view of the pools, so that placing a request costs no look-up.

Agents own the truth; the directory holds hints. Of a pool that this gateway has used within the last minute it reads
each second what changed, leases and cached prefixes. Of other pools it reads the leases every five seconds.

Names: a large pool is divided into cells (``stream_fabric/pool/cells.py``), which are read and placed on like pools.
Methods take the name of a cell, which for an undivided pool is the pool's; those that say so take a pool's.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple

from stream_fabric.errors import FabricError, FabricUnavailable, ModelNotFound, NoReplica
from stream_fabric.limits import CANDIDATES_MAX, HOSTS_ASKED_MAX
from stream_fabric.pool.cells import choose_cell, pool_of
from stream_fabric.pool.overload import (
    NO_OVERLOAD_TERMS,
    SPAN,
    OverloadMarks,
    OverloadTerms,
    overflow_in_backlog_s,
)
from stream_fabric.pool.placement import BATCH_TIER
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.queue import Lane
from stream_fabric.pool.records import Candidate, Loaded, ReplicaInfo
from stream_fabric.ports import Pools
from stream_fabric.stream.ids import ReplicaId, StreamId, started_s
from stream_gw.routing.holders import Holder, OnQueued, holder_of, ignore
from stream_gw.routing.homes import Homes
from stream_gw.routing.models import LoadedModels, UnknownModels
from stream_gw.routing.pool_reader import KeptRead, PoolReader, PoolReads
from stream_gw.routing.pool_view import DEFAULT_ESTIMATES, Estimates, PoolView, has_capacity, largest_context
from stream_gw.routing.regions import pinned_home

log = logging.getLogger(__name__)

_REFRESH_S = 1.0
_TURN_STEP = CANDIDATES_MAX // 2 - 1
"""Replicas by which the window of candidates moves with each request: less than it takes, and no divisor of it."""
_NAMED_MAX = 20
"""Models that an error names."""
_NO_MARKS = OverloadMarks(())


class Served(NamedTuple):
    """A model that requests can name, with its home pool."""

    pool: str
    simulated: bool
    max_model_len: int = 0
    """As ``Directory.context`` returns it."""
    since_s: int = 0
    """Unix time at which the oldest of its replicas started; 0: it has none."""


class Directory:
    """Replicas and plans of all pools, as they were at the last refresh."""

    def __init__(self, pools: Pools, read_plans: Callable[[], Awaitable[Mapping[str, PoolPlan]]]) -> None:
        """``read_plans`` returns the plans of the declared pools."""
        self._pools = pools
        self._names = KeptRead[Sequence[str]]("the list of pools", pools.pools, ())
        self._planned = KeptRead[Mapping[str, PoolPlan]]("plans of pools", read_plans, {})
        self._by_name: dict[str, PoolReader] = {}
        self._by_pool: dict[str, Sequence[ReplicaInfo]] = {}
        self._pool_by_replica: dict[ReplicaId, str] = {}
        self._cells: dict[str, list[str]] = {}
        """Cells of each pool."""
        self.homes = Homes((), {})
        self.seen_models: dict[str, str] = {}  # the last pool that served each
        self._turn = 0
        self._loaded = LoadedModels()
        self._reads = PoolReads(self._loaded.note)
        self._refreshing = asyncio.Lock()
        self._unknown_models = UnknownModels()

    async def run(self) -> None:
        told = ""
        try:
            while True:
                try:
                    await self.refresh()
                    told = ""
                except FabricError as error:
                    if str(error) != told:  # once, not each second of an outage
                        log.warning("directory refresh failed, retrying: error=%s", error)
                    told = str(error)
                await asyncio.sleep(_REFRESH_S)
        finally:
            for read in (self._names, self._planned, self._reads):
                read.close()

    async def refresh(self) -> None:
        """Read all pools; what is away keeps its last value. Known models never wait for it. Raises FabricError."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        now = asyncio.get_running_loop().time()
        await asyncio.gather(self._names.renew(), self._planned.renew())
        known = self._by_name
        self._by_name = {name: known.get(name) or PoolReader(name, self._pools) for name in self._names.value}
        pools = self._by_name.values()
        await self._reads.read([pool for pool in pools if pool.is_due(now)])
        self._by_pool = {pool.name: pool.view.replicas for pool in pools}
        self._pool_by_replica = {info.replica: pool.name for pool in pools for info in pool.view.replicas}
        self._cells = {}
        for name, reader in self._by_name.items():
            self._cells.setdefault(pool_of(name), []).append(name)
            self.seen_models |= dict.fromkeys(reader.view.models, pool_of(name))
        self.homes = Homes(((name, pool.view.models) for name, pool in self._by_name.items()), self.plans)
        for error in (self._names.error, self._planned.error, *(pool.error for pool in pools)):
            if error is not None:
                raise error

    def loaded(self, replica: ReplicaId | Literal[""]) -> Loaded:
        """Return the adapters and artifact that a replica has loaded, as far as it reports them."""
        return self._loaded.find(replica) if replica else Loaded()

    @property
    def by_pool(self) -> Mapping[str, Sequence[ReplicaInfo]]:
        """Live replicas of every pool at the last refresh."""
        return self._by_pool

    @property
    def plans(self) -> Mapping[str, PoolPlan]:
        """Plans of the declared pools at the last refresh."""
        return self._planned.value

    def models(self) -> dict[str, Served]:
        """Models that a live replica serves, and models of declared pools without a replica."""
        replicas = [(started_s(info.replica), cell, info) for cell, infos in self._by_pool.items() for info in infos]
        return {model: Served(pool, False) for model, pool in self.homes.declared.items()} | {
            model: Served(pool, info.simulated, self.context(pool, model), since_s)
            for since_s, cell, info in sorted(replicas, reverse=True, key=itemgetter(0)) for model in info.models
            if self.homes.live.get(model) == (pool := pool_of(cell))
        }  # fmt: skip

    def context(self, pool: str, model: str, regions: Lane = ()) -> int:
        """Return the largest maximum context of the pool's ready replicas of the model, in tokens; 0: unknown."""
        told = [self._view(cell).context(model, regions) for cell in self.cells(pool)]
        return largest_context([context for context in told if context is not None])

    async def pool_of(self, model: str, allowed: Set[str] | None = None, regions: Lane = ()) -> str:
        """Return the home pool of a model for requests that are bound to ``regions``; empty: to none.

        ``allowed``: models that the caller may use; None: all. Raises ModelNotFound, NoReplica, RegionUnavailable or,
        when the pools cannot be read, FabricUnavailable.
        """
        if allowed is not None and model not in allowed:  # no look-up: its time must not tell whether the model exists
            raise self.model_not_found(model, allowed)
        pool = self.homes.find(model)
        if pool is None:  # its first replica may have joined after the last refresh
            unread = await self._unknown_models.look(self._refreshing, self._refresh)
            pool = self.homes.find(model)
            if pool is None and unread:  # the model may be of a pool that was not read
                raise FabricUnavailable(unread)
        if pool is not None:
            if regions:
                pool = pinned_home(self, model, pool, regions)
            await self._note_use(pool)
            return pool
        if model in self.seen_models:
            raise NoReplica(f"no replica serves model {model!r} now; retry after 2 s", retry_after_s=2)
        raise self.model_not_found(model, allowed)

    def model_not_found(self, model: str, allowed: Set[str] | None) -> ModelNotFound:
        """Make the error of a model that does not exist or is not allowed; it names only allowed models."""
        names = (name for name in sorted(self.seen_models) if allowed is None or name in allowed)
        known = ", ".join(islice(names, _NAMED_MAX)) or "none"
        return ModelNotFound(f"no such model {model[:128]!r}; models that you may use: {known}", param="model")

    async def _note_use(self, pool: str) -> None:
        """Mark the cells of the pool and its batch hosts as used; read those that were not, with their caches."""
        now = asyncio.get_running_loop().time()
        unused: list[PoolReader] = []
        pools = (pool, *self._marks(pool).batch_pools)
        for reader in (self._by_name[cell] for name in pools for cell in self.cells(name) if cell in self._by_name):
            if not reader.is_used(now):
                unused.append(reader)
            reader.used_at = now
        if unused:
            await self._reads.read(unused)  # the placement itself fails where Redis is away
            self._by_pool |= {reader.name: reader.view.replicas for reader in unused}

    def cells(self, pool: str) -> Sequence[str]:
        """Return the cells of a pool."""
        return self._cells.get(pool) or (pool,)

    def serves(self, cell: str, model: str, regions: Lane) -> bool:
        """True if a live replica of the cell serves the model in one of the regions."""
        return bool(self._view(cell).serving(model, regions))

    def choose_cell(self, pool: str, model: str, session: str, hashes: Sequence[int], regions: Lane = ()) -> str:
        """Return the cell of the pool for a request; of an undivided pool its own name."""
        cells = self.cells(pool)
        if len(cells) == 1:
            return cells[0]
        views = [(cell, self._view(cell)) for cell in cells if self.serves(cell, model, regions)]
        if not views:
            return cells[0]
        if session:
            key = session.encode()
        elif hashes:
            key = hashes[0].to_bytes(4, "big")
        else:
            self._turn += _TURN_STEP
            key = self._turn.to_bytes(8, "big")
        return choose_cell([view.cell_load(cell, hashes) for cell, view in views], key)

    def other_cell(self, cell: str, model: str, hashes: Sequence[int], regions: Lane = ()) -> str | None:
        """Return a cell of the same pool that has room for a request which ``cell`` had to queue; None: there is none.

        Until the next refresh ``cell`` counts as full.
        """
        full = self._view(cell)
        full.streams = max(full.streams, full.slots)
        other = self.choose_cell(pool_of(cell), model, "", hashes, regions)
        return other if other != cell and not self._view(other).is_full else None

    def _plan(self, cell: str) -> PoolPlan | None:
        return self.plans.get(pool_of(cell))

    def _view(self, pool: str) -> PoolView:
        """Return the view of a pool, which is empty for a pool without replicas."""
        return self._by_name[pool].view if pool in self._by_name else PoolView()

    def _replicas(self, cell: str) -> Sequence[ReplicaInfo]:
        """Return the live replicas; empty for a declared pool without any.

        Raises NoReplica when the last replica of an undeclared pool has left after ``pool_of``.
        """
        replicas = self._by_pool.get(cell) or ()
        if not replicas and pool_of(cell) not in self.plans:
            raise NoReplica(f"pool {cell!r} has no replica now; retry after 2 s", retry_after_s=2)
        return replicas

    def warming(self, cell: str) -> PoolPlan | None:
        """Return the plan of a declared pool without a ready replica: requests wait for a cold start; else None."""
        ready = any(info.state == "ready" for info in self._by_pool.get(cell) or ())
        return None if ready else self._plan(cell)

    def wake_s(self, cell: str) -> float:
        """Return the seconds that the fastest sleeping or waking replica needs; 0: one is warm, or none sleeps."""
        infos = self._by_pool.get(cell) or ()
        if any(info.state == "warm" for info in infos):
            return 0.0
        return min((info.wake_s for info in infos if info.state == "sleeping" or info.load.asleep), default=0.0)

    def estimates(self, cell: str, route: str = "") -> Estimates:
        """Return a request's expected figures. An unknown ``route`` (see ``plan.route_key``) gets the pool's means.

        Raises NoReplica.
        """
        plan = self._plan(cell)
        known = plan.outputs.get(route) if plan is not None else None
        if self._replicas(cell):
            found = self._view(cell).estimates
        else:
            usual = plan.typical_replica if plan is not None else None
            found = Estimates(usual.bytes_per_token, usual.output_tokens) if usual else DEFAULT_ESTIMATES
        return found if known is None else found._replace(output_tokens=known)

    def candidates(self, cell: str, model: str, hashes: Sequence[int], regions: Lane = ()) -> list[Candidate]:
        """Return the pool's replicas of the model in these regions, each with its estimated cached prefix.

        For a large pool return only the replicas with the longest prefix and the least loaded ones. Raises NoReplica.
        """
        self._replicas(cell)
        self._turn += _TURN_STEP
        return self._view(cell).candidates(model, hashes, self._turn, regions)

    def overload_terms(
        self, cell: str, model: str, tier: int, candidates: Sequence[Candidate], regions: Lane = ()
    ) -> OverloadTerms:
        """Return how the pool treats a request of this tier under overload."""
        plan = self._plan(cell)
        if plan is None or plan.overload_marks is None:
            return NO_OVERLOAD_TERMS
        marks = plan.overload_marks
        count = len(candidates)
        if count >= CANDIDATES_MAX:
            count = self._view(cell).ready_count(model, regions)
        reject_s, duty_max = marks.of_tier(tier)
        return OverloadTerms(
            reject_s,
            marks.overflow_s if marks.adjacent else 0.0,
            replicas=count,
            duty_max=duty_max,
            relief=self._view(cell).relief(SPAN * reject_s, plan.victims, regions),
            batch_yields=marks.batch_yields,
        )

    def overflow_pools(self, cell: str, model: str, regions: Lane = ()) -> list[str]:
        """Return the adjacent pools that serve the model and seem to have capacity; the placement itself decides."""
        marks = self._marks(cell)
        return self.with_capacity(marks.adjacent, model, marks.overflow_utilisation_max, regions)

    def batch_hosts(self, cell: str, model: str, regions: Lane = ()) -> list[str]:
        """Return the pool's batch hosts that serve the model and seem to have a free slot; the placement decides."""
        return self.with_capacity(self._marks(cell).batch_pools, model, 1.0, regions)

    def hosts(self, pool: str) -> Sequence[str]:
        """Return all pools that may have requests of this one: adjacent pools and batch hosts."""
        return (*self._marks(pool).adjacent, *self._marks(pool).batch_pools)

    def _marks(self, cell: str) -> OverloadMarks:
        plan = self._plan(cell)
        return plan.overload_marks or _NO_MARKS if plan is not None else _NO_MARKS

    def with_capacity(self, pools: Sequence[str], model: str, utilisation_max: float, regions: Lane) -> list[str]:
        """Return those of the pools that serve the model and use less than ``utilisation_max`` of their slots."""
        views = {pool: [self._view(cell) for cell in self.cells(pool)] for pool in pools}
        return [pool for pool in pools if has_capacity(views[pool], model, utilisation_max, regions)][:HOSTS_ASKED_MAX]

    def overflow_terms(self, home: str, host: str) -> OverloadTerms:
        """Return how pool ``host`` treats a request of ``home``. Raises NoReplica when ``home`` is not declared."""
        plan, other = self._plan(home), self._plan(host)
        if plan is None or plan.overload_marks is None:
            raise NoReplica(f"pool {home!r} has no adjacent pool now; retry after 2 s", retry_after_s=2)
        theirs = other.overload_marks if other is not None else None
        return OverloadTerms(
            overflow_in_backlog_s(plan.overload_marks, theirs),
            overflow_in_max=plan.overload_marks.overflow_utilisation_max,
            duty_max=min(theirs.duty_max[: BATCH_TIER + 1], default=0.0) if theirs is not None else 0.0,
        )

    def fallback_pool(self, model: str, regions: Lane) -> str | None:
        """Return the home pool of a smaller model if it seems to have a free slot; the placement itself decides."""
        pool = self.homes.find(model)
        if pool is None or not any(self.serves(cell, model, regions) for cell in self.cells(pool)):
            return None
        return next(iter(self.with_capacity([pool], model, 1.0, regions)), None)

    def fallback_terms(self, pool: str, tier: int) -> OverloadTerms:
        """Return how the pool treats a request of another model's pool: in a free slot, within its own marks."""
        reject_s, duty_max = self._marks(pool).of_tier(tier)
        return OverloadTerms(reject_s or math.inf, overflow_in_max=1.0, duty_max=duty_max)

    def sent(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        """Record that a request with this prompt went to the replica, which will have cached its prefix."""
        self._view(self._pool_by_replica.get(replica, "")).sent(replica, hashes)

    def ended(self, replica: ReplicaId) -> None:
        """Record that a request that went to the replica has ended."""
        self._view(self._pool_by_replica.get(replica, "")).ended()

    async def holder_of(self, replica: ReplicaId | None, stream: StreamId, on_queued: OnQueued = ignore) -> Holder:
        """Return who has the stream: in flight, in an inbox, or in a queue, with whose pool ``on_queued`` is called.

        ``replica``: the stream's last known producer, whose pool is asked first. None: no producer has begun.
        Raises FabricError if nobody alive has it and a pool does not answer.
        """
        home = self._pool_by_replica.get(replica) if replica is not None else None
        return await holder_of(self._pools, self._by_pool, home, stream, on_queued)
