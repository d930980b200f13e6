"""The HTTP API of ``stream-gw telemetry``: ``/healthz``, ``/metrics``, and with the bearer token the queries.

``POST /query`` runs a query by name, ``POST /sql`` an analyst's SQL. Gateways forward ``GET /traces…`` to operators,
and ask ``GET /usage``.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from stream_fabric.errors import BadRequest, Forbidden, NotFound, StreamGwError, Unauthenticated
from stream_fabric.process.health_server import listen
from telemetry.ask import views
from telemetry.ask.named_queries import Query
from telemetry.ask.store_ask import StoreAsk
from telemetry.ask.usage.routes import OpenSettled, UsageRoutes
from telemetry.consume.metrics import ConsumerMetrics
from telemetry.store.connection import QUERY_ROWS_MAX
from telemetry.store.store import Rows, Store

_BODY_BYTES_MAX = 64 << 10


class SqlBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /sql``."""

    sql: str
    rows_max: int = 1000


class QueryBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /query``."""

    query: str
    parameters: dict[str, str | int | float | list[str | int]] = {}
    rows_max: int = 1000


@asynccontextmanager
async def api(
    store: Store,
    metrics: ConsumerMetrics,
    queries: Mapping[str, Query],
    healthy: Callable[[], bool],
    token: str,
    port: int,
    host: str = "127.0.0.1",
    bills_kept_days: int = 400,
    open_settled: OpenSettled | None = None,
) -> AsyncIterator[str]:
    """Serve the API while the context is open, and yield its URL. Raises OSError when the port is in use.

    ``bills_kept_days``: days that bills are kept; usage before them is by model and tenant only. ``open_settled``
    connects to the usage that Redis settled; None: ``POST /reconcile`` is refused.
    """

    ask = StoreAsk(store)

    def require_token(
        answer: Callable[[web.Request], Awaitable[Any]],
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Wrap a handler: check the bearer token, and encode its answer or its error as JSON."""

        async def handle(request: web.Request) -> web.Response:
            try:
                if not token:
                    raise Forbidden("queries are disabled: set STREAM_GW_TELEMETRY_TOKEN")
                given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
                if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
                    raise Unauthenticated("the bearer token does not match STREAM_GW_TELEMETRY_TOKEN of this process")
                return _json(await answer(request))
            except StreamGwError as error:
                told = {"error": {"code": error.code, "message": error.message}}
                return _json(told, status=error.http_status)

        return handle

    async def query(request: web.Request) -> Any:
        return await _run_query(store, queries, await request.read())

    async def sql(request: web.Request) -> Any:
        try:
            select = msgspec.json.decode(await request.read(), type=SqlBody)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"the body is no valid SQL request: {error}") from None
        _check_rows_max(select.rows_max)
        return _rows_value(await ask.sql(select.sql, select.rows_max))

    async def traces(request: web.Request) -> Any:
        given = dict(request.query)
        format = given.pop("format", "json")
        view = await views.answer_path(ask, request.match_info["path"], given, time.time_ns() // 1000)
        if format == "object":
            return {"data": view.value, "note": view.note}
        return {"text": view.text} if format == "text" else view.value

    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    app.add_routes(_service_routes(healthy, metrics))
    app.add_routes([web.post("/query", require_token(query)), web.post("/sql", require_token(sql))])
    usage = UsageRoutes(store, bills_kept_days, open_settled, lambda: time.time_ns() // 1000)
    app.add_routes(usage.routes(require_token))
    app.add_routes([web.get("/traces{path:(/.*)?}", require_token(traces))])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        yield await listen(runner, host, port, "telemetry")
    finally:
        await runner.cleanup()


def _service_routes(healthy: Callable[[], bool], metrics: ConsumerMetrics) -> list[web.RouteDef]:
    """Make the routes that need no token."""

    async def healthz(request: web.Request) -> web.Response:
        well = healthy()
        return web.Response(text="ok\n" if well else "no log\n", status=200 if well else 503)

    async def metrics_page(request: web.Request) -> web.Response:
        found = await metrics.scraped()
        return web.Response(body=found.body, headers={"content-type": found.content_type})

    return [web.get("/healthz", healthz), web.get("/metrics", metrics_page)]


async def _run_query(store: Store, queries: Mapping[str, Query], body: bytes) -> dict[str, Any]:
    """Run the named query of a ``POST /query`` body."""
    try:
        ask = msgspec.json.decode(body, type=QueryBody)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is no valid query request: {error}") from None
    _check_rows_max(ask.rows_max)
    known = queries.get(ask.query)
    if known is None:
        raise NotFound(f"there is no query {ask.query}; there are {', '.join(sorted(queries))}")
    rows = await store.query(known.sql, ask.parameters, rows_max=ask.rows_max)
    return _rows_value(rows)


def _check_rows_max(rows_max: int) -> None:
    if not 1 <= rows_max <= QUERY_ROWS_MAX:
        raise BadRequest(f"rows_max must be 1 to {QUERY_ROWS_MAX}")


def _rows_value(rows: Rows) -> dict[str, Any]:
    return {"columns": rows.columns, "types": rows.types, "rows": rows.rows, "truncated": rows.truncated}


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value, enc_hook=str), status=status, content_type="application/json")
