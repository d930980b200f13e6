"""Serves the OpenAPI and the AsyncAPI document, as they are committed.

A gateway that made them at its start would be ready a fifth of a second later. A change of the API is a change of these
files, for its reviewers to read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Send

from stream_gw.transport.http import JSON, Request

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
        self.document = ServedDocument(body_of(DOCUMENT)).answer
        self.asyncapi = ServedDocument(body_of(ASYNCAPI)).answer


class ServedDocument:
    """One document. Clients ask again with its tag, because the next release has another document."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        tag = hashlib.sha256(body).hexdigest()[:32]
        self._tag = f'"{tag}"'
        self._headers = [(b"etag", self._tag.encode()), (b"cache-control", b"no-cache")]

    async def answer(self, request: Request, send: Send) -> None:
        asked = request.header(b"if-none-match") or ""
        tags = [tag.strip().removeprefix("W/") for tag in asked.split(",")]
        if self._tag in tags or "*" in tags:
            await request.answer(304, headers=self._headers)
            return
        await request.answer(200, self._body, [JSON, *self._headers])
