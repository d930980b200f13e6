"""The telemetry store: inserts of blocks, queries, and how long rows are kept."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stream_fabric.ports import Clock, Random
from telemetry.store.connection import (
    MIGRATION_S_MAX,
    QUERY_ROWS_MAX,
    QUERY_WAIT_S_MAX,
    Address,
    ClientThread,
    connect_reader,
    connect_writer,
)
from telemetry.store.errors import StoreRefused, StoreUnavailable
from telemetry.store.migrations import check_schema, migrate, missing_tables, schema_too_old

if TYPE_CHECKING:
    import pyarrow as pa
    from clickhouse_connect.driver.client import Client

_CONTENT = ("prompt", "completion")


@dataclass(frozen=True)
class Rows:
    """The result of a query."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool

    def dicts(self) -> list[dict[str, Any]]:
        """Return each row as column name → value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def _row_expiry(days: int) -> str:
    """Return when a row expires: at the end of a day, so that a part of one day is written anew once for each term."""
    return f"toDate(at) + toIntervalDay(if(retention_days = 0, {days}, retention_days) + 1)"


class Store:
    """ClickHouse with our schema. Call ``open`` first, ``close`` last. Methods raise StoreUnavailable or StoreRefused.

    ``reader_url``: the same ClickHouse with the user that queries run as; empty: the user of ``url``.
    """

    def __init__(
        self,
        url: str,
        reader_url: str = "",
        *,
        clock: Clock,
        random: Random,
    ) -> None:
        self._address = Address.parse(url)
        reader = Address.parse(reader_url or url)
        if (reader.embedded or self._address.embedded) and reader != self._address:
            raise ValueError("the embedded ClickHouse has one user; a reader's URL is for a server")
        if reader.database != self._address.database:
            raise ValueError("the reader's ClickHouse URL must name the same database")
        self._clock = clock
        self._random = random
        self._writer = ClientThread(self._address, lambda: connect_writer(self._address))
        self._reader = ClientThread(reader, lambda: connect_reader(reader))

    def __repr__(self) -> str:
        return f"Store({self.shown})"

    @property
    def embedded(self) -> bool:
        """True for the embedded engine in this process."""
        return self._address.embedded

    @property
    def shown(self) -> str:
        """URL without user and password."""
        return self._address.shown

    async def open(self, *, migrate_schema: bool = True) -> None:
        """Connect and migrate the schema; without ``migrate_schema`` only check it, which needs SELECT only."""
        if not migrate_schema:
            await self._check()
            return
        # The embedded engine answers when it is done; a server may need longer than for the insert of a block
        apart = None
        if not self.embedded:
            apart = ClientThread(self._address, lambda: connect_writer(self._address, MIGRATION_S_MAX))
        try:
            await (apart or self._writer).run(
                lambda client: migrate(client, self.shown, self._random, lambda: connect_writer(self._address))
            )
        finally:
            if apart is not None:
                await apart.close()

    async def _check(self) -> None:
        try:
            await self._reader.run(lambda client: check_schema(client, self.shown))
        except StoreRefused as error:
            if "UNKNOWN_DATABASE" not in error.message:
                raise
            raise schema_too_old(0, self.shown) from error

    async def close(self) -> None:
        """Close the clients after the calls that are running."""
        await self._writer.close()
        await self._reader.close()

    async def insert(self, table: str, rows: pa.Table, name: str) -> float:
        """Insert a block under a name, and return the seconds that the insert took.

        A second insert under the same name changes nothing, in the table and in the roll-ups.
        """

        def put(client: Client) -> float:
            began = self._clock.monotonic_us()
            client.insert_arrow(table, rows, settings={"insert_deduplication_token": f"{name}:{table}"})
            return (self._clock.monotonic_us() - began) / 1e6

        return await self._writer.run(put)

    async def query(
        self, sql: str, parameters: Mapping[str, Any] | None = None, *, rows_max: int = QUERY_ROWS_MAX
    ) -> Rows:
        """Run a read-only query of at most ``QUERY_S_MAX`` seconds. ``{name:Type}`` in the SQL are parameters.

        Raises StoreUnavailable after ``QUERY_WAIT_S_MAX``, also while other queries come first.
        """
        assert 0 < rows_max <= QUERY_ROWS_MAX

        def ask(client: Client) -> Rows:
            result = client.query(sql, parameters=dict(parameters or {}))
            rows = [tuple(row) for row in result.result_rows[:rows_max]]
            types = tuple(kind.name for kind in result.column_types)
            return Rows(tuple(result.column_names), types, rows, len(result.result_rows) > rows_max)

        try:
            async with asyncio.timeout(QUERY_WAIT_S_MAX):
                return await self._reader.run(ask)
        except TimeoutError:
            raise StoreUnavailable(
                f"ClickHouse at {self.shown} has not answered for {QUERY_WAIT_S_MAX:g} s; it hangs, or other queries "
                "of this process come first"
            ) from None

    async def missing_tables(self) -> list[str]:
        """Return the tables and views of the schema that the database lacks."""
        return await self._reader.run(missing_tables)

    async def command(self, sql: str) -> None:
        """Run a statement of this package, never one from outside."""
        await self._writer.run(lambda client: client.command(sql))

    async def set_retention(self, raw_days: int, rollup_days: int, content_days: int = 7) -> None:
        """Set for how many days rows are kept, and for how many the prompts and completions in them.

        Billed usage, ``usage_hour``, is kept without limit.
        """
        wanted = [(table, _row_expiry(raw_days)) for table in ("requests", "attempts")]
        wanted.append(("fleet", f"toDateTime(at) + toIntervalDay({raw_days})"))
        wanted += [
            (table, f"minute + toIntervalDay({rollup_days})") for table in ("requests_minute", "attempts_minute")
        ]
        wanted += [
            (table, f"hour + toIntervalDay({rollup_days})") for table in ("lengths_hour", "speeds_hour", "bills")
        ]

        def alter(client: Client) -> None:
            sql = "SELECT name, engine_full FROM system.tables WHERE database = currentDatabase()"
            tables = {str(row[0]): str(row[1]) for row in client.query(sql).result_rows}
            for table, expiry in wanted:
                if f"TTL {expiry} " not in tables[table]:
                    client.command(
                        f"ALTER TABLE {table} MODIFY TTL {expiry}",
                        settings={"materialize_ttl_after_modify": 0},
                    )
            sql = (
                "SELECT create_table_query FROM system.tables WHERE database = currentDatabase() AND name = 'requests'"
            )
            made = str(client.query(sql).result_rows[0][0])
            for column in _CONTENT:
                if not re.search(rf"`{column}` [^`]*TTL [^`]*toIntervalDay\({content_days}\)", made):
                    client.command(
                        f"ALTER TABLE requests MODIFY COLUMN {column} String CODEC(ZSTD(3)) "
                        f"TTL toDate(at) + INTERVAL {content_days} DAY",
                        settings={"materialize_ttl_after_modify": 0},
                    )

        await self._writer.run(alter)
