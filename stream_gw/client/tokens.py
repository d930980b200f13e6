"""Token of the next connection or request: the given one, or that of the caller's function."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from stream_gw.client.errors import ConnectionLost, GatewayError

GetToken: TypeAlias = Callable[[bool], Awaitable[str]]
GET_TOKEN_S: Final = 60.0  # until get_token is called again: it may ask a person, or hang

_log = logging.getLogger(__name__)


class Tokens:
    def __init__(self, token: str | None, get_token: GetToken | None) -> None:
        self._token = token
        self._get_token = get_token

    @property
    def can_refresh(self) -> bool:
        return self._get_token is not None

    async def current(self, *, refresh: bool) -> str | None:
        """Return the token. Raises GatewayError, whatever ``get_token`` raises: httpx's errors are no OSError.

        ``refresh``: a gateway refused the last one.
        """
        if self._get_token is None:
            return self._token
        try:
            async with asyncio.timeout(GET_TOKEN_S):
                return await self._get_token(refresh)
        except GatewayError:
            raise
        except Exception as error:  # the caller's code, which may use any library
            _log.warning("get_token failed, will be called again: error=%r", error)
            raise ConnectionLost("token_unavailable", f"get_token failed: {error!r}", retriable=True) from error
