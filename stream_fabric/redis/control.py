"""What controllers agree on in Redis: who leads, and what is wanted of each pool. One slot, ``{control}``."""

from __future__ import annotations

import logging

import msgspec

from stream_fabric.plans import PoolPlan, decode_plan, encode_plan
from stream_fabric.redis.client import RedisClient, slot_of
from stream_fabric.redis.scripts import script

log = logging.getLogger(__name__)

_SLOT = slot_of("control")
_LEADER, _TERMS, _PLANS = "sg:{control}:leader", "sg:{control}:terms", "sg:{control}:plans"
_LEARNED = "sg:{control}:profiles"


def _hold(pool: str) -> str:
    return f"sg:{{control}}:hold:{pool}"


class RedisControl:
    """Calls are idempotent and raise FabricUnavailable."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def lead(self, controller: str, ttl_s: float) -> int:
        """The term that this controller leads in for ``ttl_s`` from now; 0: another does. A term has one leader."""
        term: int = await script("lead")(self._client, _SLOT, [_LEADER, _TERMS], [controller, int(ttl_s * 1000)])
        return term

    async def leave(self, controller: str) -> None:
        """Another may lead at once."""
        await script("lead")(self._client, _SLOT, [_LEADER, _TERMS], [controller, 0])

    async def leader(self) -> str:
        """Who leads; empty: nobody."""
        held: bytes | None = await self._client.execute(_SLOT, "GET", _LEADER)
        return (held or b"").decode().partition(" ")[0]

    async def decree(self, controller: str, term: int, pool: str, plan: PoolPlan | None) -> bool:
        """Write a pool's plan, or remove it; False: this controller does not lead in that term any more."""
        record = b"" if plan is None else encode_plan(plan)
        return bool(
            await script("decree")(self._client, _SLOT, [_LEADER, _PLANS], [controller, str(term), pool, record])
        )

    async def plans(self) -> dict[str, PoolPlan]:
        """By pool. One that another version has written is left out, and said."""
        found: dict[str, PoolPlan] = {}
        reply = await self._client.execute(_SLOT, "HGETALL", _PLANS)
        for name, record in reply.items():
            try:
                found[name.decode()] = decode_plan(record)
            except msgspec.MsgspecError as error:
                log.warning("the plan of pool %s cannot be read: %s", name.decode(), error)
        return found

    async def put_learned(self, pool: str, record: bytes) -> None:
        """What has been learned of a pool, as ``learned.decode_learned`` reads it."""
        await self._client.execute(_SLOT, "HSET", _LEARNED, pool, record)

    async def learned(self, pool: str) -> bytes | None:
        record: bytes | None = await self._client.execute(_SLOT, "HGET", _LEARNED, pool)
        return record

    async def hold(self, pool: str, seconds: float) -> None:
        """Nothing of the pool is taken away for so long; 0: from now on it may be."""
        if seconds > 0:
            await self._client.execute(_SLOT, "SET", _hold(pool), "1", "PX", int(seconds * 1000))
        else:
            await self._client.execute(_SLOT, "DEL", _hold(pool))

    async def held_s(self, pool: str) -> float:
        """For how long it still is held; 0: it is not."""
        left_ms: int = await self._client.execute(_SLOT, "PTTL", _hold(pool))
        return max(left_ms, 0) / 1000
