"""Publishes what Redis lacks of the database's records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.errors import FabricError
from stream_fabric.limits import TENANT_RECORDS_PUBLISHED_MAX, TENANTS_PUBLISH_EVERY_S
from stream_fabric.ports import Random
from stream_gw.tenancy.errors import DatabaseUnavailable
from stream_gw.tenancy.sql.database import Database
from stream_gw.tenancy.sql.published import last_revision, records_after

_log = logging.getLogger(__name__)

_RETRY_S_MAX = 60.0


class Publisher:
    """Brings Redis to the database's revision. Any number may run at once.

    Each publishes everything after Redis's revision in order, not only its own change. Therefore Redis lacks nothing
    up to its revision, also when a process dies between its commit and its publish.
    """

    def __init__(self, database: Database, records: TenantRecords, random: Random) -> None:
        self._database = database
        self._records = records
        self._random = random
        self._is_ahead = False

    async def publish(self) -> int:
        """Publish what Redis lacks; return the number of records.

        Raises DatabaseUnavailable or FabricError, FabricLost when Redis loses records meanwhile.
        """
        since = held = await self._records.revision()
        count = 0
        while True:
            async with self._database.transaction() as connection:
                self._compare(since, await last_revision(connection))
                before = since
                since, records = await records_after(connection, since, TENANT_RECORDS_PUBLISHED_MAX)
            if records:
                await self._records.publish(records, after=held)
                held = max(held, *(revision for revision, _ in records.values()))
                count += len(records)
            elif since == before:
                return count

    async def run(self) -> None:
        """Publish every few seconds; an outage of either side is logged once and retried with backoff.

        A cancel waits for the publication that runs: a driver's connection must not be dropped within a statement.
        """
        wait_s, failed = TENANTS_PUBLISH_EVERY_S, False
        while True:
            try:
                await _finish(self.publish())
                if failed:
                    _log.info("publishing of tenants works again")
                wait_s, failed = TENANTS_PUBLISH_EVERY_S, False
            except (DatabaseUnavailable, FabricError) as error:
                if not failed:
                    _log.warning("tenants not published, retried; the last published ones serve: error=%s", error)
                wait_s, failed = min(wait_s * 2, _RETRY_S_MAX) if failed else wait_s, True
            await asyncio.sleep(wait_s * self._random.uniform(0.8, 1.2))

    def _compare(self, published: int, last: int) -> None:
        """Log once when Redis has a revision that the database does not have, as after a restore of an old backup."""
        if published > last and not self._is_ahead:
            _log.error(
                "published tenants are newer than the database, run stream-gw tenants republish: "
                "published=%d database=%d",
                published,
                last,
            )
        self._is_ahead = published > last


async def _finish(publication: Coroutine[Any, Any, int]) -> None:
    """Run to the end, also when the caller is cancelled meanwhile."""
    running = asyncio.ensure_future(publication)
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
