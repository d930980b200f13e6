"""Settles the reservations of streams that have ended.

Whoever writes a stream's terminal settles it, in the background. What is lost with a process, or with a failover of
Redis, is found by the check of overdue reservations: an admission of the same tenant returns them, and the log knows
how each stream ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import islice

from stream_fabric.accounts.account import Settlement
from stream_fabric.accounts.ports import Accounts
from stream_fabric.errors import FabricError
from stream_fabric.ports import StreamLog
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import StreamId, TenantId

log = logging.getLogger(__name__)

_WAITING_MAX = 50_000
"""Settlements that wait while Redis is away; more are left to the check."""
_BATCH_MAX = 100
_RETRY_S = 0.5


class Settlements:
    """Settlements of one process that have not arrived yet. ``run`` sends them."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._waiting: dict[StreamId, tuple[TenantId, Settlement]] = {}
        self._arrived = asyncio.Event()

    def add(self, tenant: TenantId, stream: StreamId, usage: Usage) -> None:
        """Settle a stream soon, because it has ended with this usage."""
        if len(self._waiting) < _WAITING_MAX:
            self._waiting[stream] = tenant, settlement_of(stream, usage)
            self._arrived.set()

    async def run(self) -> None:
        """Send settlements until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                try:
                    await self._send_batch()
                except FabricError as error:
                    log.warning("settlements wait for Redis: waiting=%d error=%s", len(self._waiting), error)
                    await asyncio.sleep(_RETRY_S)

    async def flush(self) -> None:
        """Send everything that waits, because this process ends. What fails is left to the check."""
        try:
            while self._waiting:
                await self._send_batch()
        except FabricError as error:
            log.warning("settlements left to the check: waiting=%d error=%s", len(self._waiting), error)

    async def _send_batch(self) -> None:
        """Send the oldest settlements, one call a tenant. Those that fail stay."""
        batch = list(islice(self._waiting.values(), _BATCH_MAX))
        tenants: dict[TenantId, list[Settlement]] = {}
        for tenant, settlement in batch:
            tenants.setdefault(tenant, []).append(settlement)
        await asyncio.gather(*(self._accounts.settle(tenant, each) for tenant, each in tenants.items()))
        for _, settlement in batch:
            self._waiting.pop(settlement.stream, None)


def tokens_of(usage: Usage) -> int:
    """Tokens that count against limits: the whole prompt, cached or not, and the output."""
    return usage.prompt + usage.output


def settlement_of(stream: StreamId, usage: Usage) -> Settlement:
    """Make the settlement of a stream that has ended with this usage."""
    return Settlement(stream, tokens_of(usage), 1, min(usage.cached, usage.prompt), usage.output)


async def settle_overdue(accounts: Accounts, streams: StreamLog, tenant: TenantId, overdue: Sequence[StreamId]) -> None:
    """Settle the overdue reservations whose streams have ended, or do not exist. Raises FabricError."""
    ended = await asyncio.gather(*map(streams.settled, overdue))
    settlements = [
        Settlement(stream, 0) if found is None else settlement_of(stream, found[1])
        for stream, found in zip(overdue, ended, strict=True)
        if found is None or found[0] != "live"
    ]
    if settlements:
        await accounts.settle(tenant, settlements)
