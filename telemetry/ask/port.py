"""The port through which commands read telemetry: saved queries and an analyst's SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from telemetry.ask.queries import Value
from telemetry.store.store import Rows

Row = dict[str, Any]


class Ask(Protocol):
    """Port to query telemetry. ``StoreAsk`` asks ClickHouse; ``HttpAsk`` asks the telemetry process."""

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        """Run a saved query. Raises BadRequest, NotFound, StoreUnavailable or StoreRefused."""

    async def sql(self, text: str, rows_max: int) -> Rows:
        """Run an analyst's SQL. Raises BadRequest if the check refuses it."""
