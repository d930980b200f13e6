"""What the adapters of HTTP servers have in common."""

from __future__ import annotations

import aiohttp


async def read_most(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body up to ``most`` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= most:
            break
    return bytes(body[:most])
