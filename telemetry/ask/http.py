"""Client of the HTTP API of ``stream-gw telemetry``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stream_fabric.errors import Forbidden, NotFound, StreamGwError, Unauthenticated
from stream_fabric.process.http_client import HTTP_ERRORS, BodyTooLarge, open_session, read_body
from stream_fabric.system_errors import reason
from telemetry.ask.port import Row
from telemetry.ask.queries import Value, saved
from telemetry.store.connection import QUERY_ROWS_MAX
from telemetry.store.errors import StoreRefused, StoreUnavailable
from telemetry.store.store import Rows

ANSWER_BYTES_MAX = 64 << 20
TIMEOUT_S = 60.0
_ERRORS: Mapping[int, type[StreamGwError]] = {400: StoreRefused, 403: Forbidden}


class HttpAsk:
    """Port ``Ask`` over HTTP, for a process without access to ClickHouse."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}

    async def query(self, name: str, parameters: Mapping[str, Value]) -> list[Row]:
        body = {"query": name, "parameters": saved(name).values(parameters), "rows_max": QUERY_ROWS_MAX}
        return _decode_rows(await self.post("/query", body)).dicts()

    async def sql(self, text: str, rows_max: int) -> Rows:
        return _decode_rows(await self.post("/sql", {"sql": text, "rows_max": rows_max}))

    async def post(self, path: str, body: Mapping[str, Any], within_s: float = TIMEOUT_S) -> Any:
        """Post to the telemetry process and return its JSON. Raises the errors of ``Ask``."""
        if not self._url.startswith(("http://", "https://")):
            raise StoreUnavailable(f"{self._url!r} is no URL of stream-gw telemetry; write http://host:port")
        try:
            async with (
                open_session(total_s=within_s, headers=self._headers) as session,
                session.post(self._url + path, data=msgspec.json.encode(body)) as answer,
            ):
                text = await read_body(answer, ANSWER_BYTES_MAX)
                status = answer.status
        except BodyTooLarge as error:
            raise StoreUnavailable(f"the answer is larger than {ANSWER_BYTES_MAX} bytes; request fewer rows") from error
        except HTTP_ERRORS as error:
            raise StoreUnavailable(
                f"stream-gw telemetry at {self._url} does not answer: {reason(error)}; is stream-gw telemetry or "
                "stream-gw up running there? --telemetry-url names another address"
            ) from error
        try:
            value = msgspec.json.decode(text)
        except msgspec.MsgspecError as error:
            raise StoreUnavailable(f"{self._url} does not answer as stream-gw telemetry does: {error}") from error
        if status != 200:
            message = value.get("error", {}).get("message", "") if isinstance(value, dict) else ""
            raise self._error(status, message)
        return value

    def _error(self, status: int, message: str) -> StreamGwError:
        """Make the error of an answer. The server does not know how its caller is configured."""
        match status:
            case 401:
                return Unauthenticated(
                    f"stream-gw telemetry at {self._url} refuses the token; set STREAM_GW_TELEMETRY_TOKEN or "
                    "--telemetry-token to the STREAM_GW_TELEMETRY_TOKEN of that process"
                )
            case 404:  # a gateway, or telemetry of another release
                return NotFound(
                    f"{self._url} answers 404: {message}; is it stream-gw telemetry of this release? "
                    "--telemetry-url names another address"
                )
        return _ERRORS.get(status, StoreUnavailable)(message or f"{self._url} answered {status}")


def _decode_rows(value: Any) -> Rows:
    try:
        rows = [tuple(row) for row in value["rows"]]
        return Rows(tuple(value["columns"]), tuple(value["types"]), rows, bool(value["truncated"]))
    except (KeyError, TypeError) as error:
        raise StoreUnavailable(f"the answer of stream-gw telemetry has no rows: {error!r}") from error
