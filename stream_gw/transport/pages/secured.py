"""Answers with the pages and their files, and with the security headers that a browser should get."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from stream_fabric.errors import NotFound
from stream_gw.transport.http import Request, WrongMethod
from stream_gw.transport.pages.served import ServedBody
from stream_gw.transport.pages.site import Site
from stream_gw.transport.reference.unserved import unserved

_CONTENT_SECURITY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY = [
    (b"content-security-policy", _CONTENT_SECURITY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
_METHODS = ("GET", "HEAD")
_API_PATH = re.compile(
    r"/(chat/completions|completions|responses|conversations|messages|embeddings|rerank|classify|score|models|streams)"
    r"(/[^/]+)?/?$"
)
"""End of a path that a client has put behind a base URL without ``/v1``, or with one too many."""

RequestMaker = Callable[[Scope, Receive, Send], Request]


class SiteApp:
    """Answers with a page, or with the file that the path names. Refuses like the API, and adds security headers."""

    def __init__(self, site: Site, make_request: RequestMaker, page: ServedBody | None = None) -> None:
        self._site = site
        self._make_request = make_request
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_secured(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_SECURITY]
            await send(message)

        request = self._make_request(scope, receive, send_secured)
        if scope["method"] not in _METHODS:
            await request.refuse(WrongMethod(scope["method"], scope["path"][:200], _METHODS))
        elif self._page is not None:
            await self._page.answer(request)
        elif (found := self._site.file(request.path_params["path"])) is not None:
            file, cache_control = found
            await file.answer(request, cache_control)
        else:
            await request.refuse(no_path(scope))


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
