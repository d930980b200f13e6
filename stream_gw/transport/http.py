"""One HTTP request: its body within the limit, its answer."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from stream_fabric.errors import BadRequest, BodyTooLarge, RequestTimeout, StreamGwError
from stream_fabric.limits import BODY_BYTES_MAX, BODY_S_MAX
from stream_gw.dialects.errors import error_body
from stream_gw.dialects.requests import check_depth
from stream_gw.server import CONNECTION, EdgeHttp
from stream_gw.trace import ReaderTrace, Tracer, Transport, monotonic_us

JSON = (b"content-type", b"application/json")
_T = TypeVar("_T")


class Request:
    """What a handler needs of one HTTP request."""

    __slots__ = ("_receive", "_received_us", "_send", "headers", "id", "path_params", "scope", "traced")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.id = "req_" + secrets.token_hex(12)
        self._received_us = monotonic_us()
        self.traced: ReaderTrace | None = None

    @property
    def query(self) -> dict[str, str]:
        """Raises BadRequest."""
        return query_of(self.scope["query_string"])

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def trace(self, tracer: Tracer, transport: Transport) -> ReaderTrace:
        self.traced = ReaderTrace(tracer, self.id, transport, self.header(b"traceparent"), self._received_us)
        return self.traced

    async def body(self) -> bytes:
        """The whole body, which is UTF-8. Raises BadRequest, and BodyTooLarge before reading more than the limit."""
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > BODY_BYTES_MAX:
            raise BodyTooLarge(f"the body has {int(declared)} bytes; at most {BODY_BYTES_MAX} are taken")
        try:
            async with asyncio.timeout(BODY_S_MAX):
                body = await self._whole_body()
        except TimeoutError:
            raise RequestTimeout(f"the body did not come within {BODY_S_MAX:g} s") from None
        if not body.isascii():
            try:  # JSON is UTF-8 also where only the engine reads it
                body.decode()
            except UnicodeDecodeError as error:
                raise BadRequest(f"the body is not UTF-8 at byte {error.start}") from error
        return body

    async def _whole_body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message["body"])
            size += len(message["body"])
            if size > BODY_BYTES_MAX:
                raise BodyTooLarge(f"the body has more than {BODY_BYTES_MAX} bytes, the most that are taken")
            if not message["more_body"]:
                return b"".join(parts)

    async def answer(
        self, status: int, body: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None, *, close: bool = False
    ) -> None:
        all_headers = [(b"x-request-id", self.id.encode()), *(headers or [])]
        if status != 204:
            all_headers.append((b"content-length", str(len(body)).encode()))
        if close:
            all_headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        connection: EdgeHttp = self.scope["state"][CONNECTION]
        connection.answer_begun()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def forget(self) -> None:
        """The headers are out: let go of what came in. uvicorn's cycle shares the scope and looks at its method."""
        self.scope["headers"].clear()
        for name in ("path", "raw_path", "query_string", "headers", "client", "server", "state", "path_params", "app"):
            self.scope.pop(name, None)

    async def json(self, status: int, value: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        await self.answer(status, msgspec.json.encode(value), [JSON, *(headers or [])])

    async def refuse(self, error: StreamGwError) -> None:
        headers = [JSON]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        if error.http_status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        # The rest of a refused body is not read
        await self.answer(error.http_status, error_body(error, self.id), headers, close=isinstance(error, BodyTooLarge))


class ClientGone(Exception):
    """The client left before its request was whole."""


def parse(body: bytes, type_: type[_T]) -> _T:
    check_depth(body)
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.MsgspecError as error:
        raise BadRequest(str(error)[:300]) from error


def query_of(raw: bytes) -> dict[str, str]:
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        return dict(parse_qsl(raw.decode("ascii"), max_num_fields=50))
    raise BadRequest("the query string is malformed")
