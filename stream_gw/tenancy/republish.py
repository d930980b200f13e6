"""Replaces everything that is published, after the database was restored from a backup."""

from __future__ import annotations

from sqlalchemy import select, update

from stream_fabric.accounts.records import PRICES
from stream_fabric.ports import TenantRecords
from stream_gw.tenancy import tables
from stream_gw.tenancy.database import Database
from stream_gw.tenancy.transaction import Transaction


async def renew_revisions(transaction: Transaction, published: int) -> None:
    """Give every row a revision above the published ones."""
    transaction.skip_revisions(published)
    for table, id_ in ((tables.plans, tables.plans.c.name), (tables.tenants, tables.tenants.c.id)):
        for row in (await transaction.connection.execute(select(id_).order_by(id_))).all():
            stamped = update(table).where(id_ == row[0]).values(revision=transaction.next_revision())
            await transaction.connection.execute(stamped)
    changed = update(tables.revisions).where(tables.revisions.c.name == PRICES)
    await transaction.connection.execute(changed.values(revision=transaction.next_revision()))


async def published_names(records: TenantRecords) -> set[str]:
    names: set[str] = set()
    since = 0
    while page := (await records.changes(since)):
        since, found = page
        if not found:
            break
        names |= found.keys()
    return names


async def delete_unknown(database: Database, records: TenantRecords, names: set[str]) -> int:
    """Publish the deletion of tenants and plans that the database does not have; return their number."""
    async with database.transaction() as connection:
        tenants = {f"tenant:{row.id}" for row in await connection.execute(select(tables.tenants.c.id))}
        plans = {f"plan:{row.name}" for row in await connection.execute(select(tables.plans.c.name))}
    unknown = sorted(names - tenants - plans - {PRICES})
    revision = await records.revision()
    await records.publish(dict.fromkeys(unknown, (revision, b"")))
    return len(unknown)
