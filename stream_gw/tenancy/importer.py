"""Adds the records of a keys file to the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stream_fabric.accounts.records import PlanRecord, Price, PricesRecord, Record, TenantRecord
from stream_fabric.errors import NotFound
from stream_fabric.events import Prices
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


async def import_records(
    plans: Plans, tenants: Tenants, keys: Keys, prices: PriceList, records: Sequence[Record]
) -> Imported:
    """Add tenants, keys and plans that are missing. Tenants that exist keep their plan; prices are overwritten.

    Raises BadRequest for a name that the database does not take, Conflict for a key of another tenant.
    """
    made, added, new_keys = 0, 0, 0
    declared = {record.name: record for record in records if isinstance(record, PlanRecord)}
    for record in records:
        match record:
            case PricesRecord():
                for model, price in _price_list(record.prices).items():
                    await prices.set(model, price)
            case TenantRecord():
                if not await _has_tenant(tenants, record.id):
                    terms = declared.get(record.plan, PlanRecord(record.plan))
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
    return Imported(made, added, new_keys)


async def _has_tenant(tenants: Tenants, tenant: str) -> bool:
    try:
        await tenants.find(tenant)
    except NotFound:
        return False
    return True


async def _plan(plans: Plans, terms: PlanRecord, name: str) -> tuple[str, bool]:
    """Find a plan with these terms, or make one of this name. Return its name, and whether it is new."""
    wanted = checked(Plan(**(msgspec.structs.asdict(terms) | {"name": DEFAULT_PLAN})))
    after = ""
    while page := await plans.page(after):
        for plan in page:
            if msgspec.structs.replace(plan, name=wanted.name) == wanted:
                return plan.name, False
        after = page[-1].name
    await plans.create(checked(msgspec.structs.replace(wanted, name=name)))
    return name, True


def _price_list(prices: dict[str, Prices]) -> dict[str, Price]:
    return {model: Price(price.prompt, price.output, price.cached) for model, price in prices.items()}
