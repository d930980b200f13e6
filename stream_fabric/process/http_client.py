"""HTTP client of every process: sessions with timeouts and TLS, and bodies with a size limit.

A caller catches ``HTTP_ERRORS``. Importing this module loads aiohttp: a process that seldom needs a client imports it
where it is used.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import aiohttp

HTTP_ERRORS = (aiohttp.ClientError, OSError, ValueError)
"""Failures of a request: no connection, a timeout (an ``OSError``), an answer that cannot be read or is too large."""

CONNECTIONS_MAX = 100
"""Default of a session's connections. Further requests wait for a free one."""


class BodyTooLarge(ValueError):
    """The answer's body exceeds the size limit; the rest of it is not read."""


def open_session(
    *,
    total_s: float | None,
    connect_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    idle_s: float = 15.0,
    connections_max: int = CONNECTIONS_MAX,
) -> aiohttp.ClientSession:
    """Open a session; the caller closes it. None means no limit.

    ``total_s``: time for a whole request. ``connect_s``: time to get a connection. ``headers`` are sent with every
    request. ``tls``: instead of the system's CAs. ``idle_s``: a connection that was idle for longer is not used again.
    """
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=total_s, connect=connect_s),
        connector=aiohttp.TCPConnector(
            limit=connections_max, ssl=tls if tls is not None else True, keepalive_timeout=idle_s
        ),
    )


async def read_body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read the whole body. Raises BodyTooLarge when it has more than ``bytes_max`` bytes."""
    body = await read_start(response, bytes_max + 1)
    if len(body) > bytes_max:
        raise BodyTooLarge(f"the answer of {response.url.path} is larger than {bytes_max} bytes")
    return body


async def read_start(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read at most the first ``bytes_max`` bytes of the body; the rest is not read."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) >= bytes_max:
            break
    return bytes(body[:bytes_max])
