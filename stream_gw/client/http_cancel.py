"""Cancel by HTTP, for the time without a WebSocket connection."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from stream_gw.client.errors import GatewayError
from stream_gw.client.requests import PendingRequests
from stream_gw.client.tokens import Tokens
from stream_gw.client.wire import Ack, ErrorBody

HTTP_S: Final = 5.0  # for one gateway's answer
_REFUSALS: Final = (403, 404)


class _Told(msgspec.Struct):
    result: str
    at: str | None = None
    status: str | None = None


class _Refusal(msgspec.Struct):
    error: ErrorBody


class HttpCancels:
    """Asks by HTTP for cancels whose requests also wait for the next connection. The first answer counts."""

    def __init__(self, requests: PendingRequests, socket_urls: Sequence[str], tokens: Tokens) -> None:
        self._requests = requests
        self._urls = socket_urls
        self._tokens = tokens
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, group: asyncio.TaskGroup, first: int, id: str, stream_id: str) -> None:
        """Ask one gateway after the other, from the URL number ``first``, until one answers the request ``id``."""
        task = group.create_task(self._ask([*self._urls[first:], *self._urls[:first]], id, stream_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _ask(self, socket_urls: Sequence[str], id: str, stream_id: str) -> None:
        try:
            token = await self._tokens.current(refresh=False)
        except GatewayError:
            return  # the next connection asks for a token too, and reports the error
        for url in socket_urls:
            try:
                told = await asyncio.to_thread(_post, _cancel_url(url, stream_id), token)
            except (OSError, HTTPException, ValueError):  # ValueError: no answer of a gateway, or no token of a header
                continue
            except GatewayError as error:
                self._requests.receive_error(id, error)
            else:
                self._requests.receive_ack(Ack(id, told.result, told.at, told.status))
            return


def _cancel_url(socket_url: str, stream_id: str) -> str:
    """Return the URL of the stream's cancel at the gateway with this WebSocket URL."""
    parts = urlsplit(socket_url)
    scheme = {"ws": "http", "wss": "https"}[parts.scheme]
    path = f"{parts.path}s/{quote(stream_id, safe='')}/cancel"  # of /v1/stream
    return urlunsplit((scheme, parts.netloc, path, "", ""))


def _post(url: str, token: str | None) -> _Told:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, b"", headers, method="POST")  # noqa: S310 - ws and wss alone
    try:
        with urllib.request.urlopen(request, timeout=HTTP_S) as answer:  # noqa: S310
            return msgspec.json.decode(answer.read(), type=_Told)
    except urllib.error.HTTPError as error:
        with error:  # it is a response too, and holds its connection
            if error.code in _REFUSALS:
                raise msgspec.json.decode(error.read(), type=_Refusal).error.exception() from error
            raise
