"""Replaces everything that is published, after the database was restored from a backup."""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.accounts.records import PRICES
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.transaction import Transaction
from stream_gw.tenancy.sql.users import Users


async def renew_revisions(transaction: Transaction, published: int) -> None:
    """Give every row a revision above the published ones."""
    transaction.skip_revisions(published)
    for table, id_ in ((tables.plans, tables.plans.c.name), (tables.tenants, tables.tenants.c.id)):
        for row in (await transaction.connection.execute(select(id_).order_by(id_))).all():
            stamped = update(table).where(id_ == row[0]).values(revision=transaction.next_revision())
            await transaction.connection.execute(stamped)
    await Users(transaction).renew_revisions()
    changed = update(tables.revisions).where(tables.revisions.c.name == PRICES)
    await transaction.connection.execute(changed.values(revision=transaction.next_revision()))


async def published_names(records: TenantRecords) -> set[str]:
    """Return the names of all published records."""
    names: set[str] = set()
    since, found = await records.changes(0)
    while found:
        names |= found.keys()
        since, found = await records.changes(since)
    return names


async def unknown_names(connection: AsyncConnection, names: set[str]) -> set[str]:
    """Return the published names of tenants, users and plans that the database does not have."""
    tenants = {f"tenant:{row.id}" for row in await connection.execute(select(tables.tenants.c.id))}
    plans = {f"plan:{row.name}" for row in await connection.execute(select(tables.plans.c.name))}
    ids = select(tables.users.c.tenant, tables.users.c.id)
    users = {f"user:{row.tenant}:{row.id}" for row in await connection.execute(ids)}
    return names - tenants - plans - users - {PRICES}
