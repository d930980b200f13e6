"""The rows of stored responses and conversations, with a bound on how long a request waits for the database."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from stream_fabric.limits import (
    RESPONSE_CHAIN_MAX,
    RESPONSE_SQL_CALLS_MAX,
    RESPONSE_SQL_S_MAX,
    RESPONSE_SQL_TENANT_CALLS_MAX,
    RESPONSES_SWEPT_MAX,
)
from stream_gw.responses.errors import ResponsesUnavailable, storage_full
from stream_gw.tenancy.errors import DatabaseUnavailable
from stream_gw.tenancy.sql.conversations import Conversations, StoredConversation, StoredItem, StoredPage
from stream_gw.tenancy.sql.database import Database
from stream_gw.tenancy.sql.responses import Link, NewRow, Responses, StoredResponse, count_bytes

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_ALL = ""
"""Stands for the tenant of a transaction that is not one tenant's."""


class ResponseRows:
    """The rows. Methods raise ResponsesUnavailable. ``now_s``: Unix time in seconds."""

    def __init__(self, database: Database, now_s: Callable[[], float]) -> None:
        self._database = database
        self._now_s = now_s
        self._running: set[asyncio.Task[Any]] = set()
        self._asking: Counter[str] = Counter()
        """Transactions that run, by tenant."""
        self._is_told = False
        """True if the log has the outage that lasts."""

    async def close(self) -> None:
        """Wait for statements that run: a driver's connection must not be dropped within one."""
        await asyncio.gather(*self._running, return_exceptions=True)

    # --- responses -----------------------------------------------------------------------------------------

    async def find(self, tenant: str, response: str) -> StoredResponse | None:
        return await self._ask(tenant, lambda connection: Responses(connection).find(tenant, response, self._now_s()))

    async def chain(self, tenant: str, response: str) -> list[Link]:
        """Return a response and those that it builds on, the newest first, as far as they are there."""
        depth = RESPONSE_CHAIN_MAX + 1
        return await self._ask(
            tenant, lambda connection: Responses(connection).chain(tenant, response, self._now_s(), depth)
        )

    async def read(self, tenant: str, responses: Sequence[str]) -> dict[str, StoredResponse]:
        return await self._ask(tenant, lambda connection: Responses(connection).read(tenant, responses))

    async def insert_all(self, rows: Sequence[NewRow]) -> dict[str, int]:
        """Add rows, and the items to their conversations, each once. Return the bytes of each tenant's rows."""

        async def work(connection: Any) -> dict[str, int]:
            responses, conversations = Responses(connection), Conversations(connection)
            added: dict[str, int] = {}
            # In one order, so that two gateways do not wait for each other's rows
            for row, conversation, items in sorted(rows, key=lambda each: (each.response.tenant, each.response.id)):
                size = row.bytes if await responses.insert(row) else 0
                if size and conversation is not None:
                    size += await conversations.append(row.tenant, conversation, items, row.expires_at)
                added[row.tenant] = added.get(row.tenant, 0) + size
            return {tenant: await count_bytes(connection, tenant, size) for tenant, size in added.items()}

        return await self._ask(_ALL, work) if rows else {}

    async def delete(self, tenant: str, response: str) -> bool:
        return await self._ask(tenant, lambda connection: Responses(connection).delete(tenant, response))

    # --- conversations -------------------------------------------------------------------------------------

    # ``bytes_max``: bytes of the tenant's rows above which a change is refused (ResponseStorageFull); 0: no limit

    async def begin_conversation(self, row: StoredConversation, items: Sequence[StoredItem], bytes_max: int) -> None:
        async def work(connection: Any) -> None:
            conversations = Conversations(connection)
            size = await conversations.insert(row)
            size += await conversations.append(row.tenant, row.id, items, row.expires_at)
            await _grow(connection, row.tenant, size, bytes_max)

        await self._ask(row.tenant, work)

    async def conversation(self, tenant: str, conversation: str) -> StoredConversation | None:
        return await self._ask(
            tenant, lambda connection: Conversations(connection).find(tenant, conversation, self._now_s())
        )

    async def change_conversation(self, row: StoredConversation, bytes_max: int) -> None:
        async def work(connection: Any) -> None:
            size = await Conversations(connection).change(row.tenant, row.id, row.metadata, row.expires_at)
            await _grow(connection, row.tenant, size, bytes_max)

        await self._ask(row.tenant, work)

    async def delete_conversation(self, tenant: str, conversation: str) -> bool:
        return await self._ask(tenant, lambda connection: Conversations(connection).delete(tenant, conversation))

    async def append(
        self, tenant: str, conversation: str, items: Sequence[StoredItem], expires_at: float, bytes_max: int
    ) -> None:
        async def work(connection: Any) -> None:
            size = await Conversations(connection).append(tenant, conversation, items, expires_at)
            await _grow(connection, tenant, size, bytes_max)

        await self._ask(tenant, work)

    async def items(self, tenant: str, conversation: str) -> list[StoredItem]:
        return await self._ask(tenant, lambda connection: Conversations(connection).items(tenant, conversation))

    async def page(
        self, tenant: str, conversation: str, after: str | None, limit: int, bytes_max: int, *, newest_first: bool
    ) -> StoredPage | None:
        """See ``Conversations.page``."""
        return await self._ask(
            tenant,
            lambda connection: Conversations(connection).page(
                tenant, conversation, after, limit, bytes_max, newest_first=newest_first
            ),
        )

    async def item(self, tenant: str, conversation: str, item: str) -> StoredItem | None:
        return await self._ask(tenant, lambda connection: Conversations(connection).item(tenant, conversation, item))

    async def delete_item(self, tenant: str, conversation: str, item: str) -> bool:
        return await self._ask(
            tenant, lambda connection: Conversations(connection).delete_item(tenant, conversation, item)
        )

    # --- upkeep --------------------------------------------------------------------------------------------

    async def bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's rows."""
        return await self._ask(tenant, lambda connection: Responses(connection).bytes(tenant))

    async def sweep(self) -> int:
        """Delete rows that have expired, at most a few hundred; return how many."""

        async def work(connection: Any) -> int:
            now = self._now_s()
            count = await Responses(connection).sweep(now, RESPONSES_SWEPT_MAX)
            return count + await Conversations(connection).sweep(now, RESPONSES_SWEPT_MAX)

        return await self._ask(_ALL, work)

    async def _ask(self, tenant: str, work: Callable[[Any], Awaitable[_T]]) -> _T:
        """Run a transaction for a tenant. One that outlasts the caller's patience runs on, bounded by the driver."""
        if len(self._running) >= RESPONSE_SQL_CALLS_MAX:
            raise ResponsesUnavailable(
                f"the database of stored responses is busy with {RESPONSE_SQL_CALLS_MAX} requests; retry"
            )
        if tenant != _ALL and self._asking[tenant] >= RESPONSE_SQL_TENANT_CALLS_MAX:
            raise ResponsesUnavailable(
                f"{RESPONSE_SQL_TENANT_CALLS_MAX} requests of your tenant wait for the database of stored responses, "
                "the most that may; retry"
            )
        task = asyncio.create_task(self._run(work))
        self._running.add(task)
        self._asking[tenant] += 1
        task.add_done_callback(partial(self._forget, tenant))
        done, _ = await asyncio.wait([task], timeout=RESPONSE_SQL_S_MAX)
        if not done:
            raise ResponsesUnavailable(
                f"the database of stored responses did not answer in {RESPONSE_SQL_S_MAX:g} s; retry"
            )
        try:
            return task.result()
        except DatabaseUnavailable as error:
            if not self._is_told:
                _log.warning("stored responses cannot be reached: error=%s", error)
            self._is_told = True
            raise ResponsesUnavailable("stored responses cannot be reached; retry", detail=error) from error

    async def _run(self, work: Callable[[Any], Awaitable[_T]]) -> _T:
        async with self._database.transaction() as connection:
            made = await work(connection)
        self._is_told = False
        return made

    def _forget(self, tenant: str, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._asking[tenant] -= 1
        if not self._asking[tenant]:
            del self._asking[tenant]
        if not task.cancelled():
            task.exception()  # retrieved, also when nobody waits any more


async def _grow(connection: Any, tenant: str, size: int, bytes_max: int) -> None:
    """Count further bytes of a tenant's rows. Raises ResponseStorageFull, which undoes the transaction."""
    held = await count_bytes(connection, tenant, size)
    if size > 0 and 0 < bytes_max < held:
        raise storage_full("delete some")
