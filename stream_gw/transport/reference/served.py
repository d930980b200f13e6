"""Serves the OpenAPI and the AsyncAPI document, as they are committed.

A gateway that made them at its start would be ready a fifth of a second later. A change of the API is a change of these
files, for its reviewers to read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Send

from stream_gw.transport.http import JSON, Request
from stream_gw.transport.pages import ServedBody

DOCUMENT = Path(__file__).with_name("openapi.json")
ASYNCAPI = Path(__file__).with_name("asyncapi.json")


def text_of(document: dict[str, Any]) -> str:
    """Return a document as its file holds it."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def body_of(path: Path) -> bytes:
    """Return a document as it is served, without the file's spaces."""
    return msgspec.json.format(path.read_bytes().rstrip(), indent=-1)


class ReferenceRoutes:
    """The documents."""

    def __init__(self) -> None:
        self._document = ServedBody(body_of(DOCUMENT), JSON[1])
        self._asyncapi = ServedBody(body_of(ASYNCAPI), JSON[1])

    async def document(self, request: Request, send: Send) -> None:
        await self._document.answer(request)

    async def asyncapi(self, request: Request, send: Send) -> None:
        await self._asyncapi.answer(request)
