"""``TenantRecords`` in memory, held to the same contract as the one in Redis."""

from __future__ import annotations

from collections.abc import Mapping

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.errors import FabricLost
from stream_fabric.limits import TENANT_RECORDS_MAX


class MemoryTenants(TenantRecords):
    def __init__(self) -> None:
        self.records: dict[str, tuple[int, bytes]] = {}

    async def publish(self, records: Mapping[str, tuple[int, bytes]], *, after: int = 0) -> None:
        if records and max((revision for revision, _ in self.records.values()), default=0) < after:
            raise FabricLost("the records are lost")
        for name, (revision, record) in records.items():
            if name not in self.records or self.records[name][0] < revision:
                self.records[name] = (revision, record)

    async def changes(self, since: int) -> tuple[int, dict[str, bytes]]:
        newer = sorted((revision, name) for name, (revision, _) in self.records.items() if revision > since)
        page = newer[:TENANT_RECORDS_MAX]
        if len(newer) > TENANT_RECORDS_MAX:
            cut = newer[TENANT_RECORDS_MAX][0]
            page = [each for each in newer if each[0] < cut] or [each for each in newer if each[0] == cut]
        return page[-1][0] if page else since, {name: self.records[name][1] for _, name in page}

    async def revision(self) -> int:
        return max((revision for revision, _ in self.records.values()), default=0)
