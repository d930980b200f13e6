"""Pools for requests that are bound to regions.

A pinned request is served by replicas of its regions or refused; it is never moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from stream_fabric.errors import RegionUnavailable
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.queue import Lane

_Value = TypeVar("_Value")


class Pools(Protocol):
    """The part of the directory that is used here."""

    @property
    def plans(self) -> Mapping[str, object]: ...
    @property
    def by_pool(self) -> Mapping[str, Sequence[object]]: ...
    def hosts(self, pool: str) -> Sequence[str]: ...
    def cells(self, pool: str) -> Sequence[str]: ...
    def serves(self, cell: str, model: str, regions: Lane) -> bool: ...


def pinned_home(pools: Pools, model: str, home: str, regions: Lane) -> str:
    """Return the home pool of a pinned request: ``home``, the model's, or another pool with a replica in the regions.

    A declared pool without any replica stays the home: the request waits for a cold start, and only a replica of its
    regions takes it. Raises RegionUnavailable.
    """
    hosts = pools.hosts(home)
    for pool in dict.fromkeys((home, *hosts, *sorted(map(pool_of, pools.by_pool)))):
        if any(pools.serves(cell, model, regions) for cell in pools.cells(pool)):
            return pool
    if home in pools.plans and not any(pools.by_pool.get(cell) for cell in pools.cells(home)):
        return home
    raise RegionUnavailable(
        f"no replica in your regions ({', '.join(regions)}) serves model {model!r} now; retry after 2 s",
        retry_after_s=2,
    )


def served_in(pools: Pools, served: Mapping[str, _Value], regions: Lane) -> Iterable[tuple[str, _Value]]:
    """Yield the models that these regions serve, and models of pools without a replica."""
    for model, value in served.items():
        cells = [cell for cell in pools.by_pool if pools.serves(cell, model, ())]
        if not cells or any(pools.serves(cell, model, regions) for cell in cells):
            yield model, value
