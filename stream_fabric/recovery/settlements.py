"""Settles the reservations of streams that have ended.

Whoever writes a stream's terminal settles it, in the background. What is lost with a process, or with a failover of
Redis, is found by the check of overdue reservations: an admission of the same tenant returns them, and the log knows
how each stream ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice

from stream_fabric.accounts.account import Settlement
from stream_fabric.accounts.ports import Accounts
from stream_fabric.errors import FabricError
from stream_fabric.limits import ORPHAN_GRACE_S
from stream_fabric.ports import Random, StreamLog
from stream_fabric.process.backoff import Backoff, BackoffPolicy
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId, partition_of

log = logging.getLogger(__name__)

_WAITING_MAX = 50_000
"""Settlements that wait while Redis is away; more are left to the check."""
_BATCH_MAX = 100
_RETRY = BackoffPolicy(0.5, 5.0)
"""Delays of one tenant: thousands may wait for one Redis, and every try takes time of the process's event loop."""
_LOG_EVERY_S = 10.0


class Settlements:
    """Settlements of one process that have not arrived yet. ``run`` sends them, one call of each tenant at a time.

    Tenants do not wait for each other: a shard of Redis that does not answer delays its own tenants alone.
    """

    def __init__(self, accounts: Accounts, random: Random) -> None:
        self._accounts = accounts
        self._random = random
        self._waiting: dict[TenantId, dict[StreamId, Settlement]] = {}
        self._count = 0
        self._due: dict[TenantId, None] = {}
        """Tenants that got a settlement while none of theirs was being sent."""
        self._sending: set[TenantId] = set()
        self._arrived = asyncio.Event()
        self._log_at = 0.0

    def add(self, tenant: TenantId, stream: StreamId, usage: Usage) -> None:
        """Settle a stream soon, because it has ended with this usage."""
        if self._count >= _WAITING_MAX:
            return
        waiting = self._waiting.setdefault(tenant, {})
        self._count += stream not in waiting
        waiting[stream] = settlement_of(stream, usage)
        if tenant not in self._sending:
            self._due[tenant] = None
            self._arrived.set()

    async def run(self) -> None:
        """Send settlements until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                due, self._due = self._due, {}
                self._sending.update(due)
                for tenant in due:
                    tasks.create_task(self._send(tenant))

    async def _send(self, tenant: TenantId) -> None:
        """Send the tenant's settlements until none waits."""
        backoff = Backoff(_RETRY, self._random)
        while tenant in self._waiting:
            try:
                await self._send_batch(tenant)
                backoff.reset()
            except FabricError as error:
                now = asyncio.get_running_loop().time()
                if now >= self._log_at:  # thousands of tenants may share a shard
                    self._log_at = now + _LOG_EVERY_S
                    log.warning("settlements wait for Redis: waiting=%d error=%s", self._count, error)
                await asyncio.sleep(backoff.next_s())
        self._sending.discard(tenant)

    async def flush(self) -> None:
        """Send everything that waits, because this process ends. What fails is left to the check."""
        await asyncio.gather(*map(self._flush, list(self._waiting)))
        if self._count:
            log.warning("settlements left to the check: waiting=%d", self._count)

    async def _flush(self, tenant: TenantId) -> None:
        with contextlib.suppress(FabricError):
            while tenant in self._waiting:
                await self._send_batch(tenant)

    async def _send_batch(self, tenant: TenantId) -> None:
        """Send the tenant's oldest settlements in one call. If it fails, they stay."""
        batch = list(islice(self._waiting[tenant].values(), _BATCH_MAX))
        await self._accounts.settle(tenant, batch)
        waiting = self._waiting.get(tenant, {})
        for settlement in batch:
            self._count -= waiting.pop(settlement.stream, None) is not None
        if not waiting:
            self._waiting.pop(tenant, None)


def tokens_of(usage: Usage) -> int:
    """Tokens that count against limits: the whole prompt, cached or not, and the output."""
    return usage.prompt + usage.output


def settlement_of(stream: StreamId, usage: Usage) -> Settlement:
    """Make the settlement of a stream that has ended with this usage."""
    return Settlement(stream, tokens_of(usage), 1, min(usage.cached, usage.prompt), usage.output)


async def settle_overdue(
    accounts: Accounts,
    streams: StreamLog,
    tenant: TenantId,
    overdue: Sequence[StreamId],
    holder_of: Callable[[ReplicaId | None, StreamId], Awaitable[int]],
) -> None:
    """Settle the overdue reservations whose streams have ended, do not exist, or run nowhere.

    Redis may have come back with data of a minute before, in which ended streams run. ``holder_of(replica, stream)``: 0
    if no pool has the stream, ``replica`` its last producer. Raises FabricError.
    """
    found = dict(zip(overdue, await asyncio.gather(*map(streams.settled, overdue)), strict=True))
    live = {stream: each[1] for stream, each in found.items() if each is not None and each[0] == "live"}
    over = {stream: each for stream, each in found.items() if stream not in live}
    await _settle(accounts, tenant, {stream: None if each is None else each[1] for stream, each in over.items()})
    orphans = await _orphans(streams, live, holder_of)
    if orphans:
        await asyncio.sleep(ORPHAN_GRACE_S)  # after a loss the agents first report what they run
        again = await _orphans(streams, orphans, holder_of)
        lost = {stream: live[stream] for stream, last in again.items() if last == orphans[stream]}
        if lost:
            log.warning("reservations of streams that nobody runs settled: tenant=%s streams=%d", tenant, len(lost))
        await _settle(accounts, tenant, lost)


async def _orphans(
    streams: StreamLog, live: Iterable[StreamId], holder_of: Callable[[ReplicaId | None, StreamId], Awaitable[int]]
) -> dict[StreamId, int]:
    """Return the live streams that no pool has, each with its last seq. Raises FabricError."""
    found: dict[StreamId, int] = {}
    for stream in live:
        (head,) = await streams.heads(partition_of(stream, streams.partitions), [stream], None)
        if head is not None and head.status == "live" and not await holder_of(head.replica, stream):
            found[stream] = head.last
    return found


async def _settle(accounts: Accounts, tenant: TenantId, used: Mapping[StreamId, Usage | None]) -> None:
    """Settle streams with their usage; None: there is no such stream."""
    if used:
        settlements = [
            Settlement(stream, 0) if usage is None else settlement_of(stream, usage) for stream, usage in used.items()
        ]
        await accounts.settle(tenant, settlements)
