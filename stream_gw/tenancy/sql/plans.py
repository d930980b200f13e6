"""Plans: limits, models and settings that tenants share."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row, func, insert, select, update

from stream_fabric.accounts.records import PlanRecord, contradiction
from stream_fabric.errors import BadRequest, NotFound
from stream_gw.tenancy.errors import Conflict
from stream_gw.tenancy.models import Plan, PlanChange, merged_plan
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.transaction import Transaction

_PLANS = tables.plans


class Plans:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def find(self, name: str) -> Plan:
        """Raises NotFound."""
        row = await self._row(name)
        if row is None or row.deleted_at is not None:
            raise NotFound(f"there is no plan {name[:64]!r}; list them with stream-gw plans list", param="plan")
        return plan_of(row)

    async def page(self, after: str = "", limit: int = 100) -> list[Plan]:
        """List plans by name, at most ``limit`` after a name."""
        query = select(_PLANS).where(_PLANS.c.name > after, _PLANS.c.deleted_at.is_(None))
        reply = await self._transaction.connection.execute(query.order_by(_PLANS.c.name).limit(limit))
        return [plan_of(row) for row in reply]

    async def create(self, plan: Plan) -> Plan:
        """Raises Conflict when the plan exists, BadRequest when its terms exclude each other."""
        _check_terms(plan)
        row = await self._row(plan.name)
        if row is not None and row.deleted_at is None:
            raise Conflict(f"plan {plan.name!r} exists; change it with PATCH or stream-gw plans set", param="name")
        values = {"terms": _terms(plan), "deleted_at": None, "revision": self._transaction.next_revision()}
        if row is None:
            await self._transaction.connection.execute(insert(_PLANS).values(name=plan.name, **values))
        else:
            await self._update(plan.name, values)
        await self._transaction.audit("plan.create", f"plan:{plan.name}", None, plan)
        return plan

    async def change(self, name: str, change: PlanChange) -> Plan:
        """Raises NotFound, or BadRequest when terms exclude each other."""
        before = await self.find(name)
        after = merged_plan(before, change)
        _check_terms(after)
        await self._update(name, {"terms": _terms(after), "revision": self._transaction.next_revision()})
        await self._transaction.audit("plan.change", f"plan:{name}", before, after)
        return after

    async def delete(self, name: str) -> None:
        """Raises NotFound, or Conflict while tenants are on the plan."""
        before = await self.find(name)
        on_plan = select(func.count()).where(tables.tenants.c.plan == name, tables.tenants.c.deleted_at.is_(None))
        count = (await self._transaction.connection.execute(on_plan)).scalar_one()
        if count:
            raise Conflict(f"{count} tenants are on plan {name!r}; give them another plan first")
        now, revision = self._transaction.now, self._transaction.next_revision()
        await self._update(name, {"deleted_at": now, "revision": revision})
        await self._transaction.audit("plan.delete", f"plan:{name}", before, None)

    async def _row(self, name: str) -> Row[Any] | None:
        return (await self._transaction.connection.execute(select(_PLANS).where(_PLANS.c.name == name))).one_or_none()

    async def _update(self, name: str, values: dict[str, Any]) -> None:
        await self._transaction.connection.execute(update(_PLANS).where(_PLANS.c.name == name).values(**values))


def plan_of(row: Row[Any]) -> Plan:
    """Raises msgspec.ValidationError."""
    return msgspec.convert({"name": row.name, **row.terms}, Plan)


def _check_terms(plan: Plan) -> None:
    if wrong := contradiction(plan):
        raise BadRequest(wrong, param="retention_s")


def _terms(plan: Plan) -> dict[str, Any]:
    """Return the terms that differ from their defaults: an earlier release refuses fields that it does not know."""
    terms: dict[str, Any] = msgspec.to_builtins(msgspec.convert(plan, PlanRecord, from_attributes=True))
    del terms["name"]
    return terms
