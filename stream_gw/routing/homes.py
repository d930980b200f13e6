"""The home pool of each model. Sans I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.plan import PoolPlan


class Homes:
    """The home pool of each model: the first pool that is declared for the model, else the first that serves it.

    A batch host is the home of no model, because only batch requests go there.
    """

    def __init__(self, served: Iterable[tuple[str, Iterable[str]]], plans: Mapping[str, PoolPlan]) -> None:
        """``served``: each cell with the models that its live replicas serve."""
        hosts = {host for plan in plans.values() if (marks := plan.overload_marks) for host in marks.batch_pools}
        self.declared: dict[str, str] = {}
        """Home of each model that a pool is declared for, whether or not a replica serves it."""
        for pool, plan in plans.items():
            if pool not in hosts:
                self.declared |= {model: pool for model in plan.models if model not in self.declared}
        self.live: dict[str, str] = {}
        """Home of each model that a live replica serves."""
        declared: set[str] = set()
        for cell, models in served:
            pool = pool_of(cell)
            if pool in hosts:
                continue
            for model in models:
                is_declared = pool in plans and model in plans[pool].models
                if model not in self.live or (is_declared and model not in declared):
                    self.live[model] = pool
                if is_declared:
                    declared.add(model)

    def find(self, model: str) -> str | None:
        """Return the home of a model; None: no pool serves it or is declared for it."""
        return self.live.get(model) or self.declared.get(model)
