"""Published records of tenants, keys and plans in Redis. Both keys share one slot, ``{tenants}``."""

from __future__ import annotations

from collections.abc import Mapping

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.errors import FabricLost
from stream_fabric.limits import TENANT_RECORDS_MAX
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.scripts import script
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis.wire import Arg

_SLOT = slot_of("tenants")
_REVISIONS = "sg:{tenants}:revisions"
_KEYS = ["sg:{tenants}:records", _REVISIONS]


class RedisTenants(TenantRecords):
    """``TenantRecords`` in Redis."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    async def publish(self, records: Mapping[str, tuple[int, bytes]], *, after: int = 0) -> None:
        args: list[Arg] = [after]
        for name, (revision, record) in records.items():
            args += [name, revision, record]
        if records and not await script("tenants_publish")(self._client, _SLOT, _KEYS, args):
            raise FabricLost(f"Redis has lost published records of tenants: it had revision {after}")

    async def changes(self, since: int) -> tuple[int, dict[str, bytes]]:
        newest, found = await script("tenants_changes")(self._client, _SLOT, _KEYS, [since, TENANT_RECORDS_MAX])
        return int(newest), {name.decode(): record for name, record in zip(found[::2], found[1::2], strict=True)}

    async def revision(self) -> int:
        newest = await self._client.execute(_SLOT, "ZRANGE", _REVISIONS, -1, -1, "WITHSCORES")
        return int(newest[0][1]) if newest else 0  # RESP3: pairs of name and score
