"""Wires the parts of the room for one gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.accounts.stored import HeldResponses
from stream_fabric.ports import Clock, Random, StreamLog
from stream_fabric.stream.ids import StreamId, TenantId
from stream_gw.responses.conversations import Conversations
from stream_gw.responses.held import HeldRecords, Outcome, StorePolicy
from stream_gw.responses.job import ResponseUpkeep
from stream_gw.responses.seal import Seals
from stream_gw.responses.store import ResponseStore

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy


class DeletingLog(StreamLog, Protocol):
    """A log that also deletes content at its tenant's wish."""

    async def delete(self, stream: StreamId, tenant: TenantId) -> bool:
        """Delete the content of an ended stream of the tenant. False: there is none, or it has not ended."""


@asynccontextmanager
async def open_responses(
    held: HeldResponses,
    log: DeletingLog,
    tenancy: Tenancy | None,
    plan: Callable[[TenantId], PlanRecord],
    clock: Clock,
    random: Random,
    policy: StorePolicy,
    secrets: Sequence[bytes],
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    on_unsaved: Callable[[int], None] = lambda count: None,
) -> AsyncIterator[ResponseStore]:
    """Open the store, and do its upkeep meanwhile.

    ``on_unsaved`` gets the number of responses that wait for the database, again and again. ``tenancy`` None: this
    gateway has no database. ``secrets``: of compactions, the newest first.
    """
    rows = None
    if tenancy is not None:
        from stream_gw.responses.database import ResponseRows

        rows = ResponseRows(tenancy.database, lambda: clock.now_us() / 1e6)
    records = HeldRecords(held, log, rows, clock, policy, on_outcome)
    conversations = Conversations(records, plan, clock, random)
    upkeep = ResponseUpkeep(records, random)
    async with asyncio.TaskGroup() as tasks:
        works = (upkeep.run(), upkeep.run_saves(), upkeep.run_sweeps(), upkeep.run_counts(on_unsaved))
        background = [tasks.create_task(work) for work in works]
        try:
            yield ResponseStore(records, log, conversations, plan, Seals(secrets, random))
        finally:
            for task in background:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*background, return_exceptions=True)
            if rows is not None:
                await rows.close()
