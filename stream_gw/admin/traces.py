"""``GET /v1/admin/traces…``: an operator's questions, passed on to ``stream-gw telemetry``, which has the store."""

from __future__ import annotations

import asyncio
import re

from stream_fabric.errors import BadRequest, Forbidden, NotFound, StreamGwError, TooMany
from stream_gw.auth import Principal

TIMEOUT_S = 60.0
ANSWER_BYTES_MAX = 16 << 20
AT_ONCE_MAX = 4
"""Over: 429. What asks here is people, and the gateway's loop has better to do."""
_QUERY_CHARS_MAX = 2000
_REST = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9_.:-]{0,200}){0,3}/?")


class TracesUnavailable(StreamGwError):
    """Nobody to ask."""

    code = "traces_unavailable"
    http_status = 503
    retriable = True


def check_operator(who: Principal) -> None:
    """Raises Forbidden."""
    who.require("admin")
    if who.user is not None or who.models is not None:
        raise Forbidden("this is of the whole fleet; the credential is of one user or of some models")


class Traces:
    """``url``: of stream-gw telemetry; empty: there is none."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {token}"}
        self._asking = 0

    async def get(self, who: Principal, rest: str, query: bytes) -> tuple[int, bytes]:
        """The answer's status and body. Raises StreamGwError."""
        check_operator(who)
        if not self._url:
            raise TracesUnavailable(
                "this gateway knows no telemetry; its operator must set STREAM_GW_TELEMETRY_URL to where stream-gw "
                "telemetry answers, and STREAM_GW_TELEMETRY_TOKEN to its token"
            )
        if not _REST.fullmatch(rest):
            raise NotFound("there is no such page below /v1/admin/traces")
        if len(query) > _QUERY_CHARS_MAX or not query.isascii():
            raise BadRequest(f"the query string has at most {_QUERY_CHARS_MAX} characters, of ASCII")
        if self._asking >= AT_ONCE_MAX:
            raise TooMany("this gateway passes on as many questions as it may; try again", retry_after_s=2)
        self._asking += 1
        try:
            return await self._ask(f"{self._url}/traces{rest}" + (f"?{query.decode()}" if query else ""))
        finally:
            self._asking -= 1

    @property
    def known(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._url)

    async def query(self, name: str, since: str, within_s: float) -> bytes:
        """A saved query's rows, for the gateway itself. Raises TracesUnavailable."""
        status, body = await self._ask(f"{self._url}/traces/queries/{name}?since={since}", within_s)
        if status != 200:
            raise TracesUnavailable(f"stream-gw telemetry answers {status} to {name}; is it of an earlier version?")
        return body

    async def _ask(self, url: str, within_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        # Only a gateway that is asked pays for the client
        import aiohttp
        from yarl import URL

        try:
            async with (
                asyncio.timeout(within_s),
                aiohttp.ClientSession() as session,
                session.get(URL(url, encoded=True), headers=self._headers, allow_redirects=False) as answer,
            ):
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > ANSWER_BYTES_MAX:
                        raise TracesUnavailable(f"the answer is larger than {ANSWER_BYTES_MAX} bytes; ask for less")
                status = answer.status
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a TimeoutError is an OSError
            raise TracesUnavailable(f"stream-gw telemetry does not answer: {type(error).__name__}") from error
        if status in (401, 403):
            raise TracesUnavailable(
                "stream-gw telemetry does not take this gateway's token; "
                "STREAM_GW_TELEMETRY_TOKEN must be the same there"
            )
        return status, bytes(body)
