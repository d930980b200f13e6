"""Lease and committed position of the one consumer of the event stream; the lease fences the consumer's writes."""

from __future__ import annotations

from dataclasses import dataclass

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg

_SLOT = slot_of("events")


@dataclass(frozen=True)
class IngestState:
    """Values of the consumer's last commit."""

    next: int | None
    """The next offset; None: nothing was ever committed."""
    claim: str


class RedisIngest:
    """Ownership and position of one consumer. Its methods raise FabricError."""

    def __init__(self, client: RedisClient, consumer: str, ttl_ms: int) -> None:
        self._client = client
        self._consumer = consumer
        self._ttl_ms = ttl_ms

    async def own(self) -> IngestState | None:
        """Take or renew the lease; return the last commit. None: another consumer has the lease."""
        return await self._run_script()

    async def commit(self, next: int, claim: str) -> bool:
        """Commit ``next`` and ``claim``, and delete events below ``next``. False: another consumer has the lease."""
        return await self._run_script(next, claim) is not None

    async def leave(self) -> None:
        """Release the lease, if this consumer has it."""
        if await self._run_script() is not None:
            await self._client.execute(_SLOT, "DEL", "sg:{events}:owner")

    async def _run_script(self, *args: Arg) -> IngestState | None:
        """Renew the lease and commit ``args``, if any; return the last commit. None: another consumer has the lease."""
        keys = ["sg:{events}:owner", "sg:{events}:state", "sg:{events}"]
        reply = await script("consumer_commit")(self._client, _SLOT, keys, [self._consumer, self._ttl_ms, *args])
        if not reply[0]:
            return None
        return IngestState(int(reply[1]) if reply[1] else None, bytes(reply[2]).decode())
