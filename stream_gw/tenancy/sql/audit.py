"""The audit events of all changes."""

from __future__ import annotations

import msgspec
from sqlalchemy import or_, select

from stream_gw.tenancy.models import AuditEvent, AuditFilter
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.transaction import Transaction

_AUDIT = tables.audit


class Audit:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def page(self, asked: AuditFilter, after: int | None = None, limit: int = 100) -> list[AuditEvent]:
        """List events, the newest first, at most ``limit`` that are older than the event ``after``."""
        query = select(_AUDIT).where(_AUDIT.c.at >= asked.since)
        if asked.subject is not None:
            query = query.where(_AUDIT.c.subject == asked.subject)
        if asked.who is not None:
            query = query.where(_AUDIT.c.who == asked.who)
        if asked.tenant is not None:
            keys = select("key:" + tables.api_keys.c.id).where(tables.api_keys.c.tenant == asked.tenant)
            own, users = f"tenant:{asked.tenant}", f"user:{asked.tenant}:"
            subject = _AUDIT.c.subject
            query = query.where(or_(subject == own, subject.in_(keys), subject.startswith(users, autoescape=True)))
        if after is not None:
            query = query.where(_AUDIT.c.id < after)
        reply = await self._transaction.connection.execute(query.order_by(_AUDIT.c.id.desc()).limit(limit))
        return [msgspec.convert(tables.fields_of(row), AuditEvent) for row in reply]
