"""Tenants, keys, plans and prices in SQL, with the publication of every change."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stream_fabric.errors import FabricError
from stream_fabric.ports import Clock, Random, TenantRecords
from stream_gw.tenancy.audit import Audit
from stream_gw.tenancy.database import Database
from stream_gw.tenancy.errors import DatabaseUnavailable
from stream_gw.tenancy.keys import Keys
from stream_gw.tenancy.plans import Plans
from stream_gw.tenancy.prices import PriceList
from stream_gw.tenancy.publisher import Publisher
from stream_gw.tenancy.tenants import Tenants
from stream_gw.tenancy.transaction import Transaction

_log = logging.getLogger(__name__)


class Session:
    """One transaction, by subject."""

    def __init__(self, transaction: Transaction) -> None:
        self.plans = Plans(transaction)
        self.tenants = Tenants(transaction)
        self.keys = Keys(transaction)
        self.prices = PriceList(transaction)
        self.audit = Audit(transaction)


class Tenancy:
    """The database of one fleet. Methods raise DatabaseUnavailable when it cannot be reached."""

    def __init__(
        self, database: Database, records: TenantRecords | None, clock: Clock, random: Random, pepper: bytes
    ) -> None:
        """``records`` None: nothing is published; gateways publish it."""
        self.database = database
        self.publisher = None if records is None else Publisher(database, records, random)
        self._clock = clock
        self._random = random
        self._pepper = pepper
        self.unpublished: FabricError | DatabaseUnavailable | None = None
        """Error of the last publication. Gateways repeat it every few seconds."""

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Session]:
        async with self.database.transaction() as connection:
            yield Session(Transaction(connection, self._random, self._now_s()))

    @asynccontextmanager
    async def change(self, who: str) -> AsyncIterator[Session]:
        """Commit all changes together at the end, then publish them. ``who``: the actor in the audit events."""
        async with self.database.transaction() as connection:
            transaction = Transaction(connection, self._random, self._now_s(), who, self._pepper)
            await transaction.lock()
            yield Session(transaction)
            await transaction.save_revision()
        if self.publisher is not None:
            await self._publish(self.publisher)

    async def _publish(self, publisher: Publisher) -> None:
        self.unpublished = None
        try:
            await publisher.publish()
        except (FabricError, DatabaseUnavailable) as error:  # the change is committed
            _log.warning("change not published yet: error=%s", error)
            self.unpublished = error

    def _now_s(self) -> float:
        return self._clock.now_us() / 1e6
