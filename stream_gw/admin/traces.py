"""``GET /v1/admin/traces…``: passes operators' queries on to ``stream-gw telemetry``, which has the store."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stream_fabric.errors import BadRequest, Forbidden, NotFound, StreamGwError, TooMany
from stream_gw.auth import Principal

TIMEOUT_S = 60.0
ANSWER_BYTES_MAX = 16 << 20
AT_ONCE_MAX = 4
"""Further queries wait their turn: this is for people, and streams need the gateway's loop."""
WAITING_MAX = 16
WAIT_S = 10.0
"""A query that gets no turn within this time, or finds ``WAITING_MAX`` before it, gets 429."""
_QUERY_CHARS_MAX = 2000
_REST = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9_.:-]{0,200}){0,3}/?")


class TracesUnavailable(StreamGwError):
    """Telemetry is not configured, or does not answer."""

    code = "traces_unavailable"
    http_status = 503
    retriable = True


def check_operator(who: Principal) -> None:
    """Check that the caller has scope ``admin`` and is not limited to a user or to models. Raises Forbidden."""
    who.require("admin")
    if who.user is not None or who.models is not None:
        raise Forbidden("this covers the whole fleet; use a key that is not limited to a user or to models")


class Traces:
    """Client of ``stream-gw telemetry``. An empty ``url`` means that telemetry is not configured."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)
        self._waiting = 0

    async def get(self, who: Principal, rest: str, query: bytes) -> tuple[int, bytes]:
        """Forward an operator's query to path ``/traces<rest>``; return (status, body) of the response. Raises
        StreamGwError."""
        check_operator(who)
        if not self._url:
            raise TracesUnavailable(
                "this gateway has no telemetry; set STREAM_GW_TELEMETRY_URL to the URL of stream-gw telemetry and "
                "STREAM_GW_TELEMETRY_TOKEN to its token"
            )
        if not _REST.fullmatch(rest):
            raise NotFound("no such path below /v1/admin/traces")
        if len(query) > _QUERY_CHARS_MAX or not query.isascii():
            raise BadRequest(f"the query string must be ASCII and have at most {_QUERY_CHARS_MAX} characters")
        return await self.fetch(f"/traces{rest}" + (f"?{query.decode()}" if query else ""))

    async def fetch(self, path_and_query: str, within_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Return (status, body) of a path of telemetry, after its turn. Raises TracesUnavailable or TooMany."""
        async with self._turn():
            return await self._fetch(f"{self._url}{path_and_query}", within_s)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the queries that run at once. A page that goes on to its next view leaves queries behind, which
        end by themselves. Raises TooMany."""
        if self._waiting >= WAITING_MAX:
            raise self._too_many()
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError:
            raise self._too_many() from None
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    @staticmethod
    def _too_many() -> TooMany:
        told = f"this gateway runs {AT_ONCE_MAX} trace queries, its limit, and more wait; retry after 2 s"
        return TooMany(told, retry_after_s=2)

    @property
    def configured(self) -> bool:
        return bool(self._url)

    async def query(self, name: str, since: str, within_s: float) -> bytes:
        """Rows of a saved query as JSON, for the gateway itself. Raises TracesUnavailable."""
        status, body = await self._fetch(f"{self._url}/traces/queries/{name}?since={since}", within_s)
        if status != 200:
            raise TracesUnavailable(f"stream-gw telemetry answered {status} to query {name!r}; is its version older?")
        return body

    async def _fetch(self, url: str, within_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        # aiohttp takes memory, and most gateways are never asked
        from yarl import URL

        from stream_fabric.process.http_client import HTTP_ERRORS, BodyTooLarge, open_session, read_body

        try:
            async with (
                open_session(total_s=within_s, headers=self._headers) as session,
                session.get(URL(url, encoded=True), allow_redirects=False) as response,
            ):
                status, body = response.status, await read_body(response, ANSWER_BYTES_MAX)
        except BodyTooLarge as error:
            raise TracesUnavailable(
                f"the response is larger than {ANSWER_BYTES_MAX} bytes; narrow the query"
            ) from error
        except HTTP_ERRORS as error:
            raise TracesUnavailable(f"stream-gw telemetry does not answer: {type(error).__name__}") from error
        if status in (401, 403):
            raise TracesUnavailable(
                "stream-gw telemetry refuses this gateway's token; set the same STREAM_GW_TELEMETRY_TOKEN on both"
            )
        return status, body
