"""The port through which commands read telemetry: saved queries and an analyst's SQL, and its adapter for a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from telemetry.ask.queries import Value, saved
from telemetry.ask.sql.check import check_sql
from telemetry.store.store import Rows, Store

Row = dict[str, Any]


class Ask(Protocol):
    """Port to query telemetry. ``StoreAsk`` asks ClickHouse; ``HttpAsk`` asks the telemetry process."""

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        """Run a saved query. Raises BadRequest, NotFound, StoreUnavailable or StoreRefused."""

    async def sql(self, text: str, rows_max: int) -> Rows:
        """Run an analyst's SQL. Raises BadRequest if the check refuses it."""


class StoreAsk:
    """Port ``Ask`` on a store that this process has open."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        query = saved(name)
        return (await self._store.query(query.sql, query.values(parameters))).dicts()

    async def sql(self, text: str, rows_max: int) -> Rows:
        return await self._store.query(await check_sql(text), rows_max=rows_max)
