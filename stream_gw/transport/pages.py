"""The browser's pages and their files, with the security headers that a browser should get."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from stream_fabric.errors import NotFound
from stream_gw.transport.http import Request, WrongMethod
from stream_gw.transport.reference.unserved import unserved

_CONTENT_SECURITY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_METHODS = ("GET", "HEAD")
_API_PATH = re.compile(
    r"/(chat/completions|completions|responses|conversations|messages|embeddings|rerank|classify|score|models|streams)"
    r"(/[^/]+)?/?$"
)
"""End of a path that a client has put behind a base URL without ``/v1``, or with one too many."""

RequestMaker = Callable[[Scope, Receive, Send], Request]


class Secured:
    """Adds the security headers to a static app's answers, and answers its refusals like the API's."""

    def __init__(self, app: ASGIApp, make_request: RequestMaker) -> None:
        self._app = app
        self._make_request = make_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", _CONTENT_SECURITY),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cache-control", b"no-cache"),
                ]
            await send(message)

        request = self._make_request(scope, receive, send_secured)
        if scope["method"] not in _METHODS:
            await request.refuse(WrongMethod(scope["method"], scope["path"][:200], _METHODS))
            return
        try:
            await self._app(scope, receive, send_secured)
        except HTTPException:  # Starlette's refusal of a path without a file
            await request.refuse(no_path(scope))


class Page:
    """One HTML file, after a head that pages share. ``$name`` in the head is the file's name without its suffix."""

    def __init__(self, path: Path, make_request: RequestMaker, head: Path | None = None) -> None:
        self._path = path
        self._head = head
        self._make_request = make_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await asyncio.to_thread(self._read)
        await self._make_request(scope, receive, send).answer(
            200, body, [(b"content-type", b"text/html; charset=utf-8")]
        )

    def _read(self) -> bytes:
        head = b"" if self._head is None else self._head.read_bytes().replace(b"$name", self._path.stem.encode())
        return head + self._path.read_bytes()


def no_path(scope: Scope) -> NotFound:
    """Make the error of a path that does not exist. A path of the API at another base URL is answered with its own."""
    path = scope["path"][:200]
    if (missing := unserved(path)) is not None:
        return missing
    if (found := _API_PATH.search(path)) and path != f"/v1{found[0]}":
        what_to_do = "set the client's base URL to this server's address followed by /v1"
        if path == f"/v1/v1{found[0]}":  # Anthropic's SDKs add it themselves
            what_to_do = "the client's base URL has one /v1 too many"
        return NotFound(f"no such path {path!r}; did you mean /v1{found[0]}? {what_to_do}")
    return NotFound(f"no such path {scope['path'][:200]!r}; docs/protocol.md lists the API's paths")
