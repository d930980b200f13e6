"""Who consumes an event stream, and how far: one consumer at a time, by a lease that fences its writes."""

from __future__ import annotations

from dataclasses import dataclass

from stream_fabric.redis.client import RedisClient, slot_of
from stream_fabric.redis.scripts import script
from stream_fabric.redis.wire import Arg

_SLOT = slot_of("events")


@dataclass(frozen=True)
class IngestState:
    next: int | None
    """The next offset; None: nothing was ever committed."""
    claim: str


class RedisIngest:
    """One consumer's view. Its methods raise FabricUnavailable."""

    def __init__(self, client: RedisClient, consumer: str, ttl_ms: int) -> None:
        self._client = client
        self._consumer = consumer
        self._ttl_ms = ttl_ms

    async def own(self) -> IngestState | None:
        """Become the owner, or stay it for another while; None: another is."""
        return await self._call()

    async def commit(self, next: int, claim: str) -> bool:
        """Write down how far it has come, and forget the events below; False: this is not the owner any more."""
        return await self._call(next, claim) is not None

    async def leave(self) -> None:
        """Let another one come at once."""
        if await self._call() is not None:
            await self._client.execute(_SLOT, "DEL", "sg:{events}:owner")

    async def _call(self, *args: Arg) -> IngestState | None:
        keys = ["sg:{events}:owner", "sg:{events}:state", "sg:{events}"]
        reply = await script("ingest")(self._client, _SLOT, keys, [self._consumer, self._ttl_ms, *args])
        if not reply[0]:
            return None
        return IngestState(int(reply[1]) if reply[1] else None, bytes(reply[2]).decode())
