"""Serves the OpenAPI and the AsyncAPI document."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from starlette.types import Send

from stream_gw.transport.http import JSON, Request
from stream_gw.transport.reference.asyncapi import make_asyncapi
from stream_gw.transport.reference.document import make_document
from stream_gw.transport.reference.operations import OPERATIONS


class ReferenceRoutes:
    """The documents, made once."""

    def __init__(self) -> None:
        self.document = ServedDocument(make_document(OPERATIONS)).answer
        self.asyncapi = ServedDocument(make_asyncapi(OPERATIONS)).answer


class ServedDocument:
    """One document. Clients ask again with its tag, because the next release has another document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._body = msgspec.json.encode(document)
        tag = hashlib.sha256(self._body).hexdigest()[:32]
        self._tag = f'"{tag}"'
        self._headers = [(b"etag", self._tag.encode()), (b"cache-control", b"no-cache")]

    async def answer(self, request: Request, send: Send) -> None:
        asked = request.header(b"if-none-match") or ""
        tags = [tag.strip().removeprefix("W/") for tag in asked.split(",")]
        if self._tag in tags or "*" in tags:
            await request.answer(304, headers=self._headers)
            return
        await request.answer(200, self._body, [JSON, *self._headers])
