"""One transaction: the revision that its changes get, and their audit events."""

from __future__ import annotations

import msgspec
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from stream_fabric.ports import Random
from stream_gw.auth.peppered import NO_PEPPERS, Peppers
from stream_gw.tenancy.sql import tables

_LAST = tables.revisions.c.name == "last"


class Transaction:
    """A transaction on the database. One that changes rows begins with ``lock``."""

    def __init__(
        self,
        connection: AsyncConnection,
        random: Random,
        now: float,
        who: str = "",
        peppers: Peppers = NO_PEPPERS,
    ) -> None:
        self.connection = connection
        self.random = random
        self.now = now
        self.who = who
        self.peppers = peppers
        self._last: int | None = None
        self._locked_at = 0

    async def lock(self) -> None:
        """Wait until every other change is committed: revisions become visible in their order, without gaps."""
        counter = update(tables.revisions).where(_LAST).values(revision=tables.revisions.c.revision)
        reply = await self.connection.execute(counter.returning(tables.revisions.c.revision))
        self._last = self._locked_at = reply.scalar_one()

    async def save_revision(self) -> None:
        """Write the counter, at the end of a transaction."""
        if self._last != self._locked_at:
            await self.connection.execute(update(tables.revisions).where(_LAST).values(revision=self._last))

    def skip_revisions(self, upto: int) -> None:
        """Let further revisions be higher than ``upto``."""
        assert self._last is not None, "this transaction only reads"
        self._last = max(self._last, upto)

    def next_revision(self) -> int:
        """Return the revision of one more changed row."""
        assert self._last is not None, "this transaction only reads"
        self._last += 1
        return self._last

    async def audit(self, action: str, subject: str, before: object, after: object) -> None:
        """Add the event of one change. ``before``, ``after``: the subject, None where it does not exist."""
        await self.connection.execute(
            insert(tables.audit).values(
                at=self.now,
                who=self.who,
                action=action,
                subject=subject,
                before=msgspec.to_builtins(before),
                after=msgspec.to_builtins(after),
            )
        )
