"""Adds the records of a keys file to the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stream_fabric.accounts.records import PlanRecord, Price, PricesRecord, Record, TenantRecord
from stream_fabric.errors import BadRequest, NotFound
from stream_fabric.events import Prices
from stream_gw.tenancy.errors import Conflict
from stream_gw.tenancy.models import DEFAULT_PLAN, Plan, TenantChange, TenantCreate, checked
from stream_gw.tenancy.sql.keys import Keys
from stream_gw.tenancy.sql.plans import Plans
from stream_gw.tenancy.sql.prices import PriceList
from stream_gw.tenancy.sql.tenants import Tenants


class Imported(NamedTuple):
    """Numbers of added rows."""

    plans: int
    tenants: int
    keys: int
    differing: tuple[str, ...] = ()
    """Tenants that were there already, on a plan with other terms than the file's."""


async def import_records(
    plans: Plans, tenants: Tenants, keys: Keys, prices: PriceList, records: Sequence[Record]
) -> Imported:
    """Add tenants, keys and plans that are missing. Tenants that exist keep their plan; prices are overwritten.

    Raises BadRequest for a name that the database does not take, Conflict for a key of another tenant, or for a new
    tenant whose plan exists with other terms.
    """
    made, added, new_keys = 0, 0, 0
    differing: list[str] = []
    declared = {record.name: record for record in records if isinstance(record, PlanRecord)}
    for record in records:
        match record:
            case PricesRecord():
                for model, price in _price_list(record.prices).items():
                    await prices.set(model, price)
            case TenantRecord():
                terms = declared.get(record.plan, PlanRecord(record.plan))
                if await _has_tenant(tenants, record.id):
                    held_plan = await plans.find((await tenants.find(record.id)).plan)
                    if _difference(held_plan, _wanted(terms)):
                        differing.append(record.id)
                else:
                    plan, is_new = await _plan(plans, terms, f"of-{record.id}")
                    await tenants.create(checked(TenantCreate(record.id, plan=plan)))
                    made, added = made + is_new, added + 1
                if record.prices:
                    held = (await tenants.find(record.id)).prices
                    merged = held | _price_list(record.prices)
                    if merged != held:
                        await tenants.change(record.id, TenantChange(prices=merged))
                for key in record.keys:
                    new_keys += await keys.add_digest(record.id, key)
    return Imported(made, added, new_keys, tuple(differing))


async def _has_tenant(tenants: Tenants, tenant: str) -> bool:
    try:
        await tenants.find(tenant)
    except NotFound:
        return False
    return True


async def _plan(plans: Plans, terms: PlanRecord, own_name: str) -> tuple[str, bool]:
    """Find or make the plan of a new tenant. Return its name, and whether it is new.

    A plan that the file names keeps its name. Terms without a name, or of one tenant alone, get the plan that has them,
    or a new one of ``own_name``. Raises Conflict when the plan exists with other terms.
    """
    wanted = _wanted(terms)
    try:
        name = checked(msgspec.structs.replace(wanted, name=terms.name)).name
    except BadRequest:  # "team of acme"; the database takes no such name
        name = ""
    found: dict[str, Plan] = {}
    while page := await plans.page(max(found, default="")):
        found |= {plan.name: plan for plan in page}
    if not name:
        same = next((plan.name for plan in found.values() if not _difference(plan, wanted)), None)
        if same is not None:
            return same, False
        name = own_name
    if name not in found:
        await plans.create(checked(msgspec.structs.replace(wanted, name=name)))
        return name, True
    if differs := _difference(found[name], wanted):
        raise Conflict(
            f"plan {name!r} exists and differs from the file's in {', '.join(differs)}; change it with "
            f"stream-gw plans set {name}, or rename it in the file; nothing was imported"
        )
    return name, False


def _wanted(terms: PlanRecord) -> Plan:
    return checked(Plan(**(msgspec.structs.asdict(terms) | {"name": DEFAULT_PLAN})))


def _difference(plan: Plan, wanted: Plan) -> list[str]:
    """Return the terms that differ."""
    names = [name for name in Plan.__struct_fields__ if name != "name"]
    return [name for name in names if getattr(plan, name) != getattr(wanted, name)]


def _price_list(prices: dict[str, Prices]) -> dict[str, Price]:
    return {model: Price(price.prompt, price.output, price.cached) for model, price in prices.items()}
