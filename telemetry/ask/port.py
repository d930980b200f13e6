"""Where answers come from: by the name of a saved query, from a store or, over HTTP, from the process that has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from telemetry.ask.queries import Value, saved
from telemetry.ask.sql import checked
from telemetry.store import Rows, Store

Row = dict[str, Any]


class Ask(Protocol):
    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        """The rows of a saved query. Raises BadRequest, NotFound, StoreUnavailable or StoreRefused."""

    async def sql(self, text: str, rows_max: int) -> Rows:
        """An analyst's own. Raises BadRequest where it may not run."""


class StoreAsk:
    """Asks ClickHouse itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        query = saved(name)
        return (await self._store.query(query.sql, query.values(parameters))).dicts()

    async def sql(self, text: str, rows_max: int) -> Rows:
        return await self._store.query(checked(text), rows_max=rows_max)
