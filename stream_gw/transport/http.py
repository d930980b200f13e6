"""One HTTP request: reads its body within the limit, and answers it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from stream_fabric.errors import (
    BadRequest,
    BodyTooLarge,
    DeadlineExceeded,
    MethodNotAllowed,
    RequestTimeout,
    StreamGwError,
    Unsupported,
)
from stream_fabric.json_bounds import check_depth
from stream_fabric.limits import BODY_BYTES_MAX, BODY_S_MAX, JSON_CONTAINERS_MAX, UNSENT_COUNTED_BYTES
from stream_fabric.ports import Clock, Random
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.ids import StreamId, TenantId
from stream_gw.auth import Principal
from stream_gw.dialects.anthropic import errors as anthropic_errors
from stream_gw.dialects.errors import error_body
from stream_gw.dialects.responses import errors as responses_errors
from stream_gw.observe.trace import ReaderTrace, Tracer, Transport
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.streams.off_loop import off_loop
from stream_gw.transport.connection import CONNECTION, RESPONSE, EdgeHttp

JSON = (b"content-type", b"application/json")
_COMPRESSIONS = (b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress")
_RETRIED = (401, 409)
"""Statuses below 500 that SDKs or agents retry unless they are told not to."""
_T = TypeVar("_T")
_OPERATOR = TenantId("")
"""Stands for the callers of the admin API."""


class Request:
    """One HTTP request, as handlers use it."""

    __slots__ = (
        "_bodies", "_clock", "_parsed_us", "_receive", "_received_us", "_send", "headers", "id", "path_params", "scope",
        "traced",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, clock: Clock, random: Random, bodies: BodyBytes
    ) -> None:
        self.scope = scope
        self._receive = receive
        self._bodies = bodies
        self._send = send
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.id = "req_" + random.token_hex(12)
        self._clock = clock
        self._received_us = clock.monotonic_us()
        self._parsed_us = 0
        """0: the body is not parsed yet."""
        self.traced: ReaderTrace | None = None

    @property
    def query(self) -> dict[str, str]:
        """Parameters of the query string. Raises BadRequest."""
        return query_of(self.scope["query_string"])

    @property
    def is_anthropic(self) -> bool:
        """Whether the caller expects Anthropic's shapes of errors and models."""
        return anthropic_errors.is_anthropic(self.scope["path"], self.headers)

    def id_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers with the request's id; Anthropic's clients read another name."""
        name = self.id.encode()
        own = (b"x-request-id", name)
        return [own, (b"request-id", name)] if self.is_anthropic else [own]

    def status_of(self, error: StreamGwError) -> int:
        """Return the status with which the caller gets the error."""
        return anthropic_errors.http_status(error) if self.is_anthropic else error.http_status

    def from_caller(self, who: Principal) -> Principal:
        """Return the caller; what the connection holds unsent counts for its tenant from now on."""
        self._connection.tenant = who.tenant
        return who

    @property
    def _connection(self) -> EdgeHttp:
        connection: EdgeHttp = self.scope["state"][CONNECTION]
        return connection

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def check_upgrade(self) -> None:
        """Raise BadRequest for the handshake of a WebSocket that came without its offer: a proxy has removed it."""
        if b"sec-websocket-key" in self.headers and b"upgrade" not in self.headers:
            raise BadRequest(
                "this WebSocket handshake has no Upgrade header: a proxy in front of the gateway removed it; "
                "have the proxy pass Upgrade and Connection (docs/runbook.md, behind nginx or a load balancer)"
            )

    @property
    def is_retry(self) -> bool:
        """True if the client says that it has sent the request before, as the SDKs of OpenAI and Anthropic do."""
        return self.headers.get(b"x-stainless-retry-count", b"0") not in (b"", b"0")

    def trace(self, tracer: Tracer, transport: Transport) -> ReaderTrace:
        """Start the trace of the reader that this request opens."""
        self.traced = ReaderTrace(tracer, self.id, transport, self.header(b"traceparent"), self._received_us)
        self.traced.placing = self._parsed_us
        return self.traced

    async def body(self, tenant: TenantId = _OPERATOR, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        """Read the whole body, which is valid UTF-8. ``tenant``: whose limit of bytes it counts against.

        ``bytes_max``: a small limit for a body that is decoded on the event loop.

        Raises BadRequest, RequestTimeout, and BodyTooLarge, TooMany or GatewayFull before reading over a limit;
        Unsupported for a compressed body, which could be far larger than it arrives.
        """
        coding = self.headers.get(b"content-encoding", b"").strip().lower()
        if coding in _COMPRESSIONS:
            raise Unsupported(f"the body is compressed with {coding.decode()}; send it without Content-Encoding")
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > bytes_max:
            raise BodyTooLarge(f"the body has {int(declared)} bytes; the limit is {bytes_max}")
        try:
            async with asyncio.timeout(BODY_S_MAX):
                body = await self._whole_body(tenant, bytes_max)
        except TimeoutError:
            raise RequestTimeout(f"the body did not arrive within {BODY_S_MAX:g} s") from None
        if not body.isascii():
            try:  # JSON is UTF-8, also the parts that only the engine reads
                body.decode()
            except UnicodeDecodeError as error:
                raise BadRequest(f"the body is not UTF-8 at byte {error.start}") from error
        return body

    async def parsed(self, tenant: TenantId, read: Callable[[bytes], _T], bytes_max: int = BODY_BYTES_MAX) -> _T:
        """Read the whole body, and return what ``read`` makes of it. A large one waits for a thread, and counts
        against the tenant's limit of bytes until it was read.

        Raises like ``body``, and what ``read`` raises.
        """
        body = await self.body(tenant, bytes_max)
        with self._bodies.adding(tenant) as count:
            count(len(body))
            parsed = await off_loop(len(body), lambda: read(body))
        self._parsed_us = self._clock.monotonic_us()
        return parsed

    async def _whole_body(self, tenant: TenantId, bytes_max: int) -> bytes:
        body = bytearray()  # not a list: a body of tiny pieces would take many times its bytes
        counted = 0
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message["body"]
                if len(body) + len(piece) > bytes_max:
                    raise BodyTooLarge(f"the body has more than {bytes_max} bytes, the limit")
                self._bodies.add(tenant, len(piece))
                counted += len(piece)
                body += piece
                if not message["more_body"]:
                    return bytes(body)
        finally:
            self._bodies.remove(tenant, counted)

    async def answer(
        self, status: int, body: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None, *, close: bool = False
    ) -> None:
        """Send a complete response. ``close``: the connection ends after the response.

        Raises TooMany or GatewayFull, before anything is sent, for a large one that the connection may not hold.
        """
        if len(body) > UNSENT_COUNTED_BYTES:
            self._connection.check_room()
        all_headers = [*self.id_headers(), *(headers or [])]
        if status not in (204, 304):
            all_headers.append((b"content-length", str(len(body)).encode()))
        if close:
            all_headers.append((b"connection", b"close"))
        if self.scope["method"] != "HEAD":  # else no body follows
            self.scope["state"][RESPONSE].join_head()
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        self._connection.answer_begun()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def forget(self) -> None:
        """Release the request's data after its head was sent. uvicorn shares the scope and reads its method."""
        self.scope["headers"].clear()
        method = self.scope["method"]
        self.scope.clear()  # a dict whose keys are removed one by one keeps its size
        self.scope["method"] = method

    async def json(self, status: int, value: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        """Answer with a JSON body."""
        await self.answer(status, msgspec.json.encode(value), [JSON, *(headers or [])])

    async def refuse(
        self, error: StreamGwError, *, stream: StreamId | None = None, cursor: Cursor | None = None
    ) -> None:
        """Answer with an error; with a stream's id and cursor when the client can resume it there."""
        headers = [JSON, *error.headers]
        if stream is not None:
            headers.append((b"x-stream-id", stream.encode()))
        is_late = error.code == DeadlineExceeded.code  # sent again at once, it makes a surge three times as large
        if error.retry_after_s is not None and not is_late:
            headers.append((b"retry-after", str(error.retry_after_s).encode()))
        if (error.http_status >= 500 or error.http_status in _RETRIED) and (is_late or not error.retriable):
            headers.append((b"x-should-retry", b"false"))  # else clients send the request again, at the caller's cost
        if error.http_status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if isinstance(error, WrongMethod):
            headers.append((b"allow", ", ".join(error.allowed).encode()))
        shape = anthropic_errors.error_body if self.is_anthropic else error_body
        if responses_errors.is_open(self.scope["path"], self.headers):
            shape = responses_errors.open_error_body
        body = shape(error, self.id, stream_id=stream, cursor=cursor)
        # The rest of a refused body is not read
        await self.answer(self.status_of(error), body, headers, close=isinstance(error, BodyTooLarge))


class WrongMethod(MethodNotAllowed):
    """The path does not take the method. ``allowed``: the methods that it takes."""

    def __init__(self, method: str, path: str, allowed: Sequence[str]) -> None:
        super().__init__(f"{path} does not take {method}; it takes {', '.join(allowed)}")
        self.allowed = allowed


class ClientGone(Exception):
    """The client left before its request was complete."""


def query_as(request: Request, type_: type[_T]) -> _T:
    """Decode the query string. Raises BadRequest."""
    try:
        return msgspec.convert(request.query, type_, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"query string: {error}") from error


def parse(body: bytes, type_: type[_T], containers_max: int = JSON_CONTAINERS_MAX) -> _T:
    """Decode a JSON body as the type. Raises BadRequest or TooDeep."""
    check_depth(body, containers_max)
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.MsgspecError as error:
        raise BadRequest(str(error)[:300]) from error


def query_of(raw: bytes) -> dict[str, str]:
    """Parse a query string. Raises BadRequest."""
    with contextlib.suppress(ValueError, UnicodeDecodeError):
        return dict(parse_qsl(raw.decode("ascii"), max_num_fields=50))
    raise BadRequest("the query string is malformed")
