"""Leadership and plans of the controllers in Redis. All keys share one slot, ``{control}``."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from stream_fabric.pool.plan import PoolPlan, decode_plan, encode_plan
from stream_fabric.ports import Control
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.skipped import SkippedRecords
from stream_fabric.redis.topology import slot_of

_SLOT = slot_of("control")
_LEADER, _TERMS, _PLANS = "sg:{control}:leader", "sg:{control}:terms", "sg:{control}:plans"
_LEARNED = "sg:{control}:profiles"


def _hold_key(pool: str) -> str:
    return f"sg:{{control}}:hold:{pool}"


class RedisControl(Control):
    """``Control`` in Redis."""

    def __init__(self, client: RedisClient, on_skip: Callable[[str], None] | None = None) -> None:
        """Make the port; ``on_skip`` is called with the kind of each record that cannot be decoded."""
        self._client = client
        self._skipped = SkippedRecords(on_skip)

    async def lead(self, controller: str, ttl_s: float) -> int:
        term: int = await script("leader_lease")(
            self._client, _SLOT, [_LEADER, _TERMS], [controller, int(ttl_s * 1000)]
        )
        return term

    async def leave(self, controller: str) -> None:
        await script("leader_lease")(self._client, _SLOT, [_LEADER, _TERMS], [controller, 0])

    async def leader(self) -> str:
        held: bytes | None = await self._client.execute(_SLOT, "GET", _LEADER)
        return (held or b"").decode().partition(" ")[0]

    async def write_plan(self, controller: str, term: int, pool: str, plan: PoolPlan | None) -> bool:
        record = b"" if plan is None else encode_plan(plan)
        return bool(
            await script("plan_write")(self._client, _SLOT, [_LEADER, _PLANS], [controller, str(term), pool, record])
        )

    async def plans(self) -> dict[str, PoolPlan]:
        found: dict[str, PoolPlan] = {}
        reply = await self._client.execute(_SLOT, "HGETALL", _PLANS)
        for name, record in reply.items():
            try:
                found[name.decode()] = decode_plan(record)
            except msgspec.MsgspecError as error:
                self._skipped.add("plan", name.decode(), error)
        return found

    async def put_learned(self, pool: str, record: bytes) -> None:
        await self._client.execute(_SLOT, "HSET", _LEARNED, pool, record)

    async def learned(self, pool: str) -> bytes | None:
        record: bytes | None = await self._client.execute(_SLOT, "HGET", _LEARNED, pool)
        return record

    async def hold(self, pool: str, seconds: float) -> None:
        if seconds > 0:
            await self._client.execute(_SLOT, "SET", _hold_key(pool), "1", "PX", int(seconds * 1000))
        else:
            await self._client.execute(_SLOT, "DEL", _hold_key(pool))

    async def held_s(self, pool: str) -> float:
        left_ms: int = await self._client.execute(_SLOT, "PTTL", _hold_key(pool))
        return max(left_ms, 0) / 1000
