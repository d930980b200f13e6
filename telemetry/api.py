"""The consumer's HTTP door on loopback: ``/healthz``, ``/metrics``, and ``POST /query``, by which others read a
ClickHouse that lives inside this process."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from stream_fabric.errors import BadRequest, Forbidden, NotFound, StreamGwError, Unauthenticated
from telemetry.metrics import ConsumerMetrics
from telemetry.queries import Query
from telemetry.store import QUERY_ROWS_MAX, Store

_BODY_BYTES_MAX = 64 << 10


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
) -> AsyncIterator[str]:
    """Serve; gives the URL. Raises OSError when the port is taken."""

    async def query(request: web.Request) -> web.Response:
        try:
            if not token:
                raise Forbidden("/query is off: set STREAM_GW_TELEMETRY_TOKEN")
            given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), token.encode()):
                raise Unauthenticated("the bearer token is not this process's STREAM_GW_TELEMETRY_TOKEN")
            return _json(await _answer(store, queries, await request.read()))
        except StreamGwError as error:
            told = {"error": {"code": error.code, "message": error.message}}
            return _json(told, status=error.http_status)

    async def healthz(request: web.Request) -> web.Response:
        well = healthy()
        return web.Response(text="ok\n" if well else "no log\n", status=200 if well else 503)

    async def page(request: web.Request) -> web.Response:
        found = await metrics.scraped()
        return web.Response(body=found.body, headers={"content-type": found.content_type})

    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    app.add_routes([web.post("/query", query), web.get("/healthz", healthz), web.get("/metrics", page)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _answer(store: Store, queries: Mapping[str, Query], body: bytes) -> dict[str, Any]:
    try:
        ask = msgspec.json.decode(body, type=Ask)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is no query: {error}") from None
    if not 1 <= ask.rows_max <= QUERY_ROWS_MAX:
        raise BadRequest(f"rows_max is 1 to {QUERY_ROWS_MAX}")
    known = queries.get(ask.query)
    if known is None:
        raise NotFound(f"there is no query {ask.query}; there are {', '.join(sorted(queries))}")
    rows = await store.query(known.sql, ask.parameters, rows_max=ask.rows_max)
    return {"columns": rows.columns, "types": rows.types, "rows": rows.rows, "truncated": rows.truncated}


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value, enc_hook=str), status=status, content_type="application/json")
