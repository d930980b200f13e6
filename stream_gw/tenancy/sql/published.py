"""Makes the published records of changed rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Row, literal, null, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from stream_fabric.accounts.records import (
    PRICES,
    KeyRecord,
    Price,
    PricesRecord,
    Record,
    TenantRecord,
    UserRecord,
    encode_record,
)
from stream_fabric.events import Prices
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.plans import plan_of

_log = logging.getLogger(__name__)

_DELETED = b""
_TENANTS, _USERS, _PLANS = tables.tenants, tables.users, tables.plans
_KEYS, _REVISIONS = tables.api_keys, tables.revisions


async def last_revision(connection: AsyncConnection) -> int:
    reply = await connection.execute(select(_REVISIONS.c.revision).where(_REVISIONS.c.name == "last"))
    revision: int = reply.scalar_one()
    return revision


async def records_after(
    connection: AsyncConnection, since: int, limit: int
) -> tuple[int, dict[str, tuple[int, bytes]]]:
    """Return up to ``limit`` records of rows that changed after ``since``, and the revision up to which these are all.

    The oldest changes come first. A row that changes meanwhile is left out, because its new revision is higher.
    """
    named = (
        ("tenant", _TENANTS.c.id, _TENANTS.c.revision),
        ("user", literal(""), _USERS.c.revision),
        ("plan", _PLANS.c.name, _PLANS.c.revision),
    )
    # Each part reads its index and stops at the limit: a union would read 100,000 users for each page
    parts = [
        select(literal(kind).label("kind"), id_.label("id"), revision.label("revision"))
        .where(revision > since)
        .order_by(revision)
        .limit(limit)
        .subquery()
        for kind, id_, revision in named
    ]
    changed = union_all(
        *(select(part) for part in parts),
        select(literal(PRICES), literal(""), _REVISIONS.c.revision).where(
            _REVISIONS.c.name == PRICES, _REVISIONS.c.revision > since
        ),
    ).subquery()
    query = select(changed).order_by(changed.c.revision).limit(limit)
    rows = (await connection.execute(query)).all()
    if not rows:
        return since, {}
    upto: int = rows[-1].revision
    found = await _tenants(connection, [row.id for row in rows if row.kind == "tenant"])
    found |= await _users(connection, [row.revision for row in rows if row.kind == "user"])
    found |= await _plans(connection, [row.id for row in rows if row.kind == "plan"])
    if any(row.kind == PRICES for row in rows):
        found |= await _prices(connection)
    return upto, {name: record for name, record in found.items() if record[0] <= upto}


async def _tenants(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, tuple[int, bytes]]:
    if not ids:
        return {}
    rows = (await connection.execute(select(_TENANTS).where(_TENANTS.c.id.in_(ids)))).all()
    valid = select(_KEYS).where(_KEYS.c.tenant.in_(ids), _KEYS.c.revoked_at.is_(None)).order_by(_KEYS.c.id)
    keys: dict[str, list[Row[Any]]] = {}
    for key in await connection.execute(valid):
        keys.setdefault(key.tenant, []).append(key)
    return _encoded((f"tenant:{row.id}", row, partial(_tenant_record, row, keys.get(row.id, ()))) for row in rows)


async def _users(connection: AsyncConnection, revisions: Sequence[int]) -> dict[str, tuple[int, bytes]]:
    """Find users by revision: SQLite has no index for a list of pairs."""
    if not revisions:
        return {}
    rows = (await connection.execute(select(_USERS).where(_USERS.c.revision.in_(revisions)))).all()
    return _encoded((f"user:{row.tenant}:{row.id}", row, partial(_user_record, row)) for row in rows)


async def _plans(connection: AsyncConnection, names: Sequence[str]) -> dict[str, tuple[int, bytes]]:
    if not names:
        return {}
    rows = (await connection.execute(select(_PLANS).where(_PLANS.c.name.in_(names)))).all()
    return _encoded((f"plan:{row.name}", row, partial(plan_of, row)) for row in rows)


async def _prices(connection: AsyncConnection) -> dict[str, tuple[int, bytes]]:
    counter = select(_REVISIONS.c.revision, null().label("deleted_at")).where(_REVISIONS.c.name == PRICES)
    counted = (await connection.execute(counter)).one()
    rows = (await connection.execute(select(tables.prices))).all()
    prices = {row.model: row.price for row in rows}
    return _encoded([(PRICES, counted, lambda: PricesRecord(_price_values(prices)))])


def _encoded(
    found: Iterable[tuple[str, Row[Any], Callable[[], Record]]],
) -> dict[str, tuple[int, bytes]]:
    """Encode records by name, each with the revision of its row. Skip a row that somebody made unreadable by hand."""
    records = {}
    for name, row, make in found:
        try:
            record = _DELETED if row.deleted_at is not None else encode_record(make())
        except msgspec.ValidationError as error:
            _log.error("row not published, correct it in the database: record=%s error=%s", name, error)
            continue
        records[name] = (row.revision, record)
    return records


def _tenant_record(row: Row[Any], keys: Iterable[Row[Any]]) -> TenantRecord:
    made = tuple(_key_record(key) for key in keys)
    return TenantRecord(row.id, row.plan, made, row.suspended, _price_values(row.prices))


def _user_record(row: Row[Any]) -> UserRecord:
    return msgspec.convert(tables.fields_of(row), UserRecord)


def _key_record(row: Row[Any]) -> KeyRecord:
    fields = tables.fields_of(row)
    fields["user"] = fields.pop("user_id")
    return msgspec.convert(fields, KeyRecord)


def _price_values(prices: Mapping[str, Any]) -> dict[str, Prices]:
    return {model: msgspec.convert(price, Price).prices() for model, price in prices.items()}
