"""Answers over HTTP, from the process that has the store: ``stream-gw telemetry``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from stream_fabric.errors import BadRequest, Forbidden, NotFound, StreamGwError, Unauthenticated
from telemetry.ask.port import Row
from telemetry.ask.queries import Value, saved
from telemetry.store import QUERY_ROWS_MAX, Rows, StoreRefused, StoreUnavailable

ANSWER_BYTES_MAX = 64 << 20
TIMEOUT_S = 60.0
_ERRORS: Mapping[int, type[StreamGwError]] = {400: StoreRefused, 401: Unauthenticated, 403: Forbidden, 404: NotFound}


class HttpAsk:
    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        body = {"query": name, "parameters": saved(name).values(parameters), "rows_max": QUERY_ROWS_MAX}
        return _rows(await self._post("/query", body)).dicts()

    async def sql(self, text: str, rows_max: int) -> Rows:
        return _rows(await self._post("/sql", {"sql": text, "rows_max": rows_max}))

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
                session.post(self._url + path, data=msgspec.json.encode(body), headers=self._headers) as answer,
            ):
                told = bytearray()
                async for part in answer.content.iter_any():
                    told += part
                    if len(told) > ANSWER_BYTES_MAX:
                        raise StoreUnavailable(f"the answer is larger than {ANSWER_BYTES_MAX} bytes; ask for less")
                status = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise StoreUnavailable(f"stream-gw telemetry at {self._url} does not answer: {error!r}") from error
        try:
            value = msgspec.json.decode(told)
        except msgspec.MsgspecError as error:
            raise StoreUnavailable(f"{self._url} is no stream-gw telemetry: {error}") from error
        if status != 200:
            message = value.get("error", {}).get("message", "") if isinstance(value, dict) else ""
            raise _ERRORS.get(status, StoreUnavailable)(message or f"{self._url} answered {status}")
        return value


def _rows(value: Any) -> Rows:
    try:
        rows = [tuple(row) for row in value["rows"]]
        return Rows(tuple(value["columns"]), tuple(value["types"]), rows, bool(value["truncated"]))
    except (KeyError, TypeError) as error:
        raise BadRequest(f"the answer is no rows: {error!r}") from error
