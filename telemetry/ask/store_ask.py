"""The adapter of port ``Ask`` for a store. Importing it loads the parser of SQL, 0.1 s."""

from __future__ import annotations

from collections.abc import Mapping

from telemetry.ask.port import Row
from telemetry.ask.queries import Value, saved
from telemetry.ask.sql.check import check_sql
from telemetry.store.store import Rows, Store


class StoreAsk:
    """Port ``Ask`` on a store that this process has open."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        query = saved(name)
        return (await self._store.query(query.sql, query.values(parameters))).dicts()

    async def sql(self, text: str, rows_max: int) -> Rows:
        return await self._store.query(await check_sql(text), rows_max=rows_max)
