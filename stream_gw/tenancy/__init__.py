"""Tenants, keys, plans and prices in SQL, published to Redis for the gateways. No request of a tenant waits for SQL.

Importing this package imports no SQL library; ``open_tenancy`` does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.ports import Clock, Random
from stream_gw.auth.peppered import Peppers
from stream_gw.tenancy.errors import Conflict, DatabaseUnavailable, NoDatabase, SchemaOutdated

if TYPE_CHECKING:
    from stream_gw.tenancy.tenancy import Session, Tenancy

__all__ = [
    "Conflict",
    "DatabaseUnavailable",
    "NoDatabase",
    "SchemaOutdated",
    "Session",
    "Tenancy",
    "open_tenancy",
]


@asynccontextmanager
async def open_tenancy(
    url: str, records: TenantRecords | None, clock: Clock, random: Random, pepper: str, previous_pepper: str = ""
) -> AsyncIterator[Tenancy]:
    """Open the database of tenants, which need not be reachable yet. Raises ValueError for an unusable URL.

    ``records``: where changes are published; None: nowhere. ``pepper`` empty: no key can be made. ``previous_pepper``:
    that of keys that are not rotated yet; empty: none.
    """
    try:
        from stream_gw.tenancy.sql.database import Database
        from stream_gw.tenancy.tenancy import Tenancy
    except ImportError as error:
        raise ValueError(f"a database of tenants needs pip install 'stream-gw[tenants]': {error}") from error
    database = Database(url)
    try:
        yield Tenancy(database, records, clock, random, Peppers(pepper.encode(), previous_pepper.encode()))
    finally:
        await database.close()
