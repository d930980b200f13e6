"""Tenants, keys, plans and prices in SQL, with the publication of every change."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.errors import FabricError
from stream_fabric.ports import Clock, Random
from stream_gw.auth import read_keys_file
from stream_gw.auth.peppered import Peppers
from stream_gw.tenancy.errors import DatabaseUnavailable
from stream_gw.tenancy.importer import Imported, import_records
from stream_gw.tenancy.publisher import Publisher
from stream_gw.tenancy.sql.audit import Audit
from stream_gw.tenancy.sql.database import Database
from stream_gw.tenancy.sql.keys import Keys
from stream_gw.tenancy.sql.plans import Plans
from stream_gw.tenancy.sql.prices import PriceList
from stream_gw.tenancy.sql.republish import published_names, renew_revisions, unknown_names
from stream_gw.tenancy.sql.tenants import Tenants
from stream_gw.tenancy.sql.transaction import Transaction
from stream_gw.tenancy.sql.users import Users

_log = logging.getLogger(__name__)


class Session:
    """One transaction, by subject."""

    def __init__(self, transaction: Transaction) -> None:
        self.plans = Plans(transaction)
        self.tenants = Tenants(transaction)
        self.users = Users(transaction)
        self.keys = Keys(transaction)
        self.prices = PriceList(transaction)
        self.audit = Audit(transaction)


class Tenancy:
    """The database of one fleet. Methods raise DatabaseUnavailable when it cannot be reached."""

    def __init__(
        self, database: Database, records: TenantRecords | None, clock: Clock, random: Random, peppers: Peppers
    ) -> None:
        """``records`` None: nothing is published here; gateways publish it."""
        self.database = database
        self._records = records
        self._publisher = None if records is None else Publisher(database, records, random)
        self._clock = clock
        self._random = random
        self._peppers = peppers
        self.unpublished: FabricError | DatabaseUnavailable | None = None
        """Error of the last publication. Gateways repeat it every few seconds."""

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Session]:
        async with self.database.transaction() as connection:
            yield Session(Transaction(connection, self._random, self._now_s(), peppers=self._peppers))

    @asynccontextmanager
    async def change(self, who: str) -> AsyncIterator[Session]:
        """Commit all changes together at the end, then publish them. ``who``: the actor in the audit events."""
        async with self.database.transaction() as connection:
            transaction = Transaction(connection, self._random, self._now_s(), who, self._peppers)
            await transaction.lock()
            yield Session(transaction)
            await transaction.save_revision()
        await self._publish()

    async def import_file(self, path: Path, who: str) -> Imported:
        """Add what the keys file has and the database lacks. Raises ValueError or OSError about the file."""
        records = read_keys_file(path)
        async with self.change(who) as session:
            return await import_records(session.plans, session.tenants, session.keys, session.prices, records)

    async def republish(self, who: str) -> int:
        """Replace everything published by the database's rows, after a restore; return the number of deleted names.

        Raises FabricError.
        """
        assert self._records is not None and self._publisher is not None
        published, names = await self._records.revision(), await published_names(self._records)
        async with self.database.transaction() as connection:
            transaction = Transaction(connection, self._random, self._now_s(), who)
            await transaction.lock()
            unknown = await unknown_names(connection, names)
            await renew_revisions(transaction, published)
            # Deleted under one more revision, so that gateways read it
            revision = transaction.next_revision()
            await transaction.audit("republish", "all", None, {"deleted": sorted(unknown)})
            await transaction.save_revision()
        await self._publisher.publish()
        await self._records.publish(dict.fromkeys(unknown, (revision, b"")))
        return len(unknown)

    async def run(self) -> None:
        """Publish what gateways and commands could not."""
        if self._publisher is not None:
            await self._publisher.run()

    async def _publish(self) -> None:
        self.unpublished = None
        if self._publisher is None:
            return
        try:
            await self._publisher.publish()
        except (FabricError, DatabaseUnavailable) as error:  # the change is committed
            _log.warning("change not published yet: error=%s", error)
            self.unpublished = error

    def _now_s(self) -> float:
        return self._clock.now_us() / 1e6
