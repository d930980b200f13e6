"""The upkeep of stored responses: completes those whose streams have ended, and writes them to the database.

Every gateway does it. A response that one of them has taken comes again later, so a gateway that dies loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence

from stream_fabric.accounts.stored import DueResponse, Queue
from stream_fabric.errors import BadRequest, FabricError
from stream_fabric.limits import (
    RESPONSES_COUNTED_EVERY_S,
    RESPONSES_DUE_EVERY_S,
    RESPONSES_DUE_MAX,
    RESPONSES_SWEEP_EVERY_S,
    RESPONSES_SWEPT_MAX,
)
from stream_fabric.ports import Random
from stream_gw.responses.held import HeldRecords
from stream_gw.tenancy.errors import DatabaseUnavailable

_log = logging.getLogger(__name__)

_AWAY_S = 5.0


class ResponseUpkeep:
    """The background work of one gateway."""

    def __init__(self, records: HeldRecords, random: Random) -> None:
        self._records = records
        self._random = random
        self._database_away = False
        self._is_told = False
        """Whether the outage is in the log."""

    async def run(self) -> None:
        """Look for ended responses, and write them, until cancelled."""
        failed = False
        while True:
            try:
                full = await self.look()
                failed = False
            except FabricError as error:
                if not failed:
                    _log.warning("stored responses wait for Redis: error=%s", error)
                full, failed = False, True
            if not full:
                await asyncio.sleep(RESPONSES_DUE_EVERY_S * self._random.uniform(0.8, 1.2))

    async def run_saves(self) -> None:
        """Write to the database until cancelled. An outage is logged once; Redis keeps what waits."""
        while self._records.rows is not None:
            try:
                full = await self.save()
            except FabricError:  # ``run`` tells it
                full = False
            pause_s = _AWAY_S if self._database_away else 0.0 if full else RESPONSES_DUE_EVERY_S
            await asyncio.sleep(pause_s * self._random.uniform(0.8, 1.2))

    async def run_sweeps(self) -> None:
        """Delete rows that have expired until cancelled."""
        while self._records.rows is not None:
            await asyncio.sleep(RESPONSES_SWEEP_EVERY_S * self._random.uniform(0.5, 1.5))
            try:
                count = RESPONSES_SWEPT_MAX
                while count >= RESPONSES_SWEPT_MAX:
                    count = await self._records.rows.sweep()
            except DatabaseUnavailable as error:
                _log.warning("expired responses not deleted yet: error=%s", error)

    async def run_counts(self, on_count: Callable[[int], None]) -> None:
        """Report how many responses wait for the database, until cancelled."""
        while True:
            with contextlib.suppress(FabricError):  # ``run`` tells it
                on_count(await self._records.held.unsaved())
            await asyncio.sleep(RESPONSES_COUNTED_EVERY_S * self._random.uniform(0.8, 1.2))

    async def look(self) -> bool:
        """Complete responses whose streams have ended. Returns whether more are due. Raises FabricError."""
        # Side by side: one that does not answer must not hold back what the others have, whose logs expire
        shards = range(self._records.held.shards)
        return _any_full(
            await asyncio.gather(*(self._take(shard, "live", self._look) for shard in shards), return_exceptions=True)
        )

    async def save(self) -> bool:
        """Write completed responses to the database. Returns whether more are due. Raises FabricError."""
        if self._records.rows is None:
            return False
        # One that the database refuses must not hold the others back
        work = self._save_singly if self._database_away else self._save
        self._database_away = False
        taken: list[bool | BaseException] = []
        for shard in range(self._records.held.shards):
            try:
                taken.append(await self._take(shard, "unsaved", work))
            except FabricError as error:  # the other shards may answer
                taken.append(error)
            if self._database_away:
                break  # the others are not taken, so that they come as soon as it is back
        return _any_full(taken)

    async def _take(self, shard: int, queue: Queue, work: Callable[[Sequence[DueResponse]], Awaitable[None]]) -> bool:
        """Do the work of a shard's responses that are due. Returns whether more are due. Raises FabricError."""
        due = await self._records.held.due(shard, queue)
        if due:
            await work(due)
        return len(due) >= RESPONSES_DUE_MAX

    async def _look(self, due: Sequence[DueResponse]) -> None:
        await asyncio.gather(*(self._records.look(each.tenant, each.id) for each in due))

    async def _save(self, due: Sequence[DueResponse]) -> None:
        try:
            await self._records.save_all([(each.tenant, each.id) for each in due])
        except (DatabaseUnavailable, BadRequest) as error:
            for _ in due:
                self._records.on_outcome("deferred")
            if not self._is_told:
                _log.warning("responses wait for the database: error=%s", error)
            self._database_away = self._is_told = True
        else:
            self._is_told = False

    async def _save_singly(self, due: Sequence[DueResponse]) -> None:
        for each in due:
            await self._save([each])
            if self._database_away:
                break


def _any_full(taken: Sequence[bool | BaseException]) -> bool:
    """Return whether a shard has more that is due. Raises the first error."""
    for outcome in taken:
        if isinstance(outcome, BaseException):
            raise outcome
    return any(taken)
