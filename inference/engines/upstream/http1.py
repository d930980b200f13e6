"""HTTP/1.1 client of one model server. A piece of an answer reaches its reader in the loop turn that reads it.

A general client hands each piece to a task through a buffer: a wake-up, a timer and a loop turn for every token.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from inference.engines.upstream.answer import Answer, AnswerBroken

_HEAD_BYTES_MAX: Final = 1 << 16
_PIECE_BYTES: Final = 1 << 16
"""A piece of this size is not the last one: the loop serves everything else before it reads on."""
_DRAIN_S: Final = 1.0
"""Time for the rest of an answer whose reader has all it needs; afterwards the connection is closed."""


class HttpClient:
    """Connections to one server.

    ``base_url``: ``http://`` or ``https://``, with a path if the server has one; ``headers`` go with every request.
    ``connect_s``: time to open a connection, and to wait for a free one when all are in use. ``silence_s``: a request
    fails when the server sends nothing for this time. ``idle_s``: a connection that was idle for longer is not used
    again.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        connect_s: float,
        silence_s: float,
        idle_s: float,
        connections_max: int,
    ) -> None:
        url = urlsplit(base_url)
        secure = url.scheme == "https"
        self._host = url.hostname or ""
        self._port = url.port or (443 if secure else 80)
        self._tls = ssl.create_default_context() if secure else None
        self._path = url.path.rstrip("/")
        own = {"host": url.netloc.rpartition("@")[2], "accept-encoding": "identity"}
        self._headers = _header_lines({**own, **headers})
        self._connect_s, self._idle_s = connect_s, idle_s
        self.silence_s = silence_s
        self._free = asyncio.Semaphore(connections_max)
        self._open: set[_Connection] = set()
        self._idle: dict[_Connection, None] = {}
        """The connections that serve nothing, the one that was used last at the end."""

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a request and return its answer, of which the head has come; the caller closes it.

        Raises OSError (TimeoutError and AnswerBroken included). A server may close an idle connection at the moment at
        which it is used again. The request is then sent once more on a new connection: nothing of its answer has come,
        and the server drops what a closed connection asked for.
        """
        request = self._encode(path, headers, body)
        try:
            async with asyncio.timeout(self._connect_s):
                await self._free.acquire()
        except TimeoutError:
            raise TimeoutError("all connections to it are in use") from None
        try:
            connection = self._take_idle()
            if connection is not None:
                try:
                    return await connection.ask(request)
                except AnswerBroken:
                    if connection.heard:
                        raise
            connection = await self._connect()
            return await connection.ask(request)
        except BaseException:
            self._free.release()
            raise

    def close(self) -> None:
        """Close every connection; answers that are being read fail."""
        for connection in list(self._open):
            connection.fail(AnswerBroken("the client is closed"))

    def _encode(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        own = f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}{_header_lines(headers)}"
        return f"{own}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(
                lambda: _Connection(self), self._host, self._port, ssl=self._tls
            )
        return connection

    def _take_idle(self) -> _Connection | None:
        """Return the connection that was used last; close those that were idle for too long."""
        oldest = asyncio.get_running_loop().time() - self._idle_s
        while self._idle and (first := next(iter(self._idle))).idle_since < oldest:
            del self._idle[first]
            first.close()
        return self._idle.popitem()[0] if self._idle else None

    # --- what its connections tell ---------------------------------------------------------------------------

    def on_open(self, connection: _Connection) -> None:
        self._open.add(connection)

    def on_idle(self, connection: _Connection) -> None:
        self._idle[connection] = None

    def on_lost(self, connection: _Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def on_answer_closed(self) -> None:
        self._free.release()


def _header_lines(headers: Mapping[str, str]) -> str:
    """Spell headers. Raises ValueError for a line break, which would begin another header."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header for the model server has a line break")
    return "".join(line + "\r\n" for line in lines)


class _Connection(asyncio.Protocol):
    """One connection: idle, or with one answer, or with the rest of an answer that nobody reads any more."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        """None: the connection is idle."""
        self._answer: Answer | None = None
        self._head_bytes = 0
        self._until_closed = False
        """The present answer's body has no length: it ends with the connection."""
        self._draining: asyncio.TimerHandle | None = None
        self.idle_since = 0.0
        self.heard = False
        """A byte of the present answer has come."""

    async def ask(self, request: bytes) -> Answer:
        """Send a request and wait for the head of its answer."""
        self.heard = self._until_closed = False
        answer = self._answer = Answer(self, self._client.silence_s)
        try:
            if self._transport is None or self._transport.is_closing():
                raise AnswerBroken("the connection is closed")
            self._parser = httptools.HttpResponseParser(self)
            self._transport.write(request)
            await answer.wait_head()
        except BaseException:
            answer.stop_watch()
            self._answer = None
            self.close()
            raise
        return answer

    def leave(self, answer: Answer) -> None:
        """Forget an answer; close the connection if the answer is not whole."""
        self._client.on_answer_closed()
        if self._answer is answer:
            self._answer = None
            self.close()

    def drain(self, answer: Answer) -> None:
        """Pass over the rest of an answer, so that the connection can be used again."""
        if self._answer is answer:
            self._answer = None
            self._draining = self._loop.call_later(_DRAIN_S, self.close)

    def fail(self, error: BaseException) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.on_failure(error)
        self.close()

    def close(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client.on_open(self)

    def data_received(self, data: bytes) -> None:
        parser, answer = self._parser, self._answer
        if parser is None:  # nothing was asked
            self.close()
            return
        self.heard = True
        if answer is not None:
            answer.heard_at = self._loop.time()
        if len(data) >= _PIECE_BYTES and self._transport is not None:
            self._transport.pause_reading()  # else the loop reads tens of pieces of one connection in one turn
            self._loop.call_soon(self._read_on)
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as failed:  # what a method below raised
            self.fail(failed.__context__ or failed)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as wrong:
            self.fail(AnswerBroken(f"it sent no valid HTTP: {wrong}"))

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self._until_closed and self._answer is not None:
            self._answer.on_end()
            self._answer = None
        self.fail(AnswerBroken(str(error) if error is not None else "it closed the connection"))
        self._client.on_lost(self)

    # --- httptools' callbacks --------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _HEAD_BYTES_MAX:
            raise AnswerBroken(f"the head of its answer is larger than {_HEAD_BYTES_MAX} bytes")
        if self._answer is not None:
            self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status, answer = self._parser.get_status_code(), self._answer
        self._head_bytes = 0
        if answer is None:
            return
        if status < 200:  # "100 Continue" and its like come before the answer
            answer.headers.clear()
            return
        encoding = answer.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise AnswerBroken(f"its answer is compressed though nobody asked for it: content-encoding {encoding}")
        self._until_closed = not answer.headers.keys() & {"content-length", "transfer-encoding"}
        answer.on_head(status)

    def on_body(self, piece: bytes) -> None:
        if self._answer is not None and self._answer.on_piece(piece):
            self.drain(self._answer)

    def on_message_complete(self) -> None:
        parser, answer = self._parser, self._answer
        if parser is None:
            raise AnswerBroken("it sent an answer to nothing")
        if parser.get_status_code() < 200:
            return
        self._parser = self._answer = None
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        if answer is not None:
            answer.on_end()
        if parser.should_keep_alive():
            self.idle_since = self._loop.time()
            self._client.on_idle(self)
        else:
            self.close()
