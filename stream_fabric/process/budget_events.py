"""Fleet events of budgets: a budget of a period is nearly used up, or exceeded."""

from __future__ import annotations

from collections.abc import Callable

from stream_fabric.accounts.budgets import Crossed
from stream_fabric.events import What
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.stream.ids import TenantId

KINDS: tuple[tuple[What, str], ...] = (
    ("budget_warning", "user_day"),
    ("budget_warning", "tenant_hour"),
    ("budget_warning", "tenant_month"),
    ("budget_exceeded", "user_day"),
    ("budget_exceeded", "tenant_month"),
    ("velocity_trip", "tenant_hour"),
)
"""Each kind of event with its kind of budget: a counter must exist before it rises, or an alert misses its first."""


class BudgetEvents:
    """Reports each crossing that the accounts tell of: they tell it once in a period, to one process.

    ``count`` is called with the kind of event and of budget.
    """

    def __init__(self, fleet_events: FleetEventReporter, count: Callable[[What, str], None] = lambda *_: None) -> None:
        self._fleet_events = fleet_events
        self._count = count

    def report(self, tenant: TenantId, crossed: Crossed, model: str) -> None:
        """Report a crossing that a request or a stream for ``model`` caused."""
        kind = crossed.name.partition(":")[0]
        what: What = "budget_warning"
        if crossed.what == "exceeded":
            what = "velocity_trip" if kind == "tenant_hour" else "budget_exceeded"
        self._count(what, kind)
        self._fleet_events.report(what, pool="", tenant=tenant, state=crossed.name, reason=f"by a request for {model}")
