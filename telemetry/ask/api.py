"""The consumer's HTTP door: ``/healthz``, ``/metrics``, and, for who has its token, what others read a
ClickHouse by that lives inside this process: ``POST /query`` by a query's name, ``POST /sql`` an analyst's own, and
``GET /traces…``, which the gateways pass on to their operators."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from stream_fabric.errors import BadRequest, Forbidden, NotFound, StreamGwError, Unauthenticated
from stream_fabric.monitor import url_of
from telemetry.ask import views
from telemetry.ask.port import StoreAsk
from telemetry.metrics import ConsumerMetrics
from telemetry.queries import Query
from telemetry.store import QUERY_ROWS_MAX, Rows, Store

_BODY_BYTES_MAX = 64 << 10


class Select(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``POST /sql``."""

    sql: str
    rows_max: int = 1000


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ``POST /query``."""

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
) -> AsyncIterator[str]:
    """Serve; gives the URL. Raises OSError when the port is taken."""

    ask = StoreAsk(store)

    def known(answer: Callable[[web.Request], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        """For who has the token."""

        async def handle(request: web.Request) -> web.Response:
            try:
                if not token:
                    raise Forbidden("asking is off: set STREAM_GW_TELEMETRY_TOKEN")
                given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
                if not hmac.compare_digest(given.encode(), token.encode()):
                    raise Unauthenticated("the bearer token is not this process's STREAM_GW_TELEMETRY_TOKEN")
                return _json(await answer(request))
            except StreamGwError as error:
                told = {"error": {"code": error.code, "message": error.message}}
                return _json(told, status=error.http_status)

        return handle

    async def query(request: web.Request) -> Any:
        return await _answer(store, queries, await request.read())

    async def sql(request: web.Request) -> Any:
        try:
            select = msgspec.json.decode(await request.read(), type=Select)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"the body is no select: {error}") from None
        _check_rows_max(select.rows_max)
        return _rows(await ask.sql(select.sql, select.rows_max))

    async def traces(request: web.Request) -> Any:
        given = dict(request.query)
        as_text = given.pop("format", "json") == "text"
        view = await views.answer(ask, request.match_info["path"], given, time.time_ns() // 1000)
        return {"text": view.text} if as_text else view.value

    async def healthz(request: web.Request) -> web.Response:
        well = healthy()
        return web.Response(text="ok\n" if well else "no log\n", status=200 if well else 503)

    async def page(request: web.Request) -> web.Response:
        found = await metrics.scraped()
        return web.Response(body=found.body, headers={"content-type": found.content_type})

    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    app.add_routes([web.get("/healthz", healthz), web.get("/metrics", page)])
    app.add_routes([web.post("/query", known(query)), web.post("/sql", known(sql))])
    app.add_routes([web.get("/traces{path:(/.*)?}", known(traces))])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield url_of(runner.addresses[0])
    finally:
        await runner.cleanup()


async def _answer(store: Store, queries: Mapping[str, Query], body: bytes) -> dict[str, Any]:
    try:
        ask = msgspec.json.decode(body, type=Ask)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is no query: {error}") from None
    _check_rows_max(ask.rows_max)
    known = queries.get(ask.query)
    if known is None:
        raise NotFound(f"there is no query {ask.query}; there are {', '.join(sorted(queries))}")
    rows = await store.query(known.sql, ask.parameters, rows_max=ask.rows_max)
    return _rows(rows)


def _check_rows_max(rows_max: int) -> None:
    if not 1 <= rows_max <= QUERY_ROWS_MAX:
        raise BadRequest(f"rows_max is 1 to {QUERY_ROWS_MAX}")


def _rows(rows: Rows) -> dict[str, Any]:
    return {"columns": rows.columns, "types": rows.types, "rows": rows.rows, "truncated": rows.truncated}


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value, enc_hook=str), status=status, content_type="application/json")
