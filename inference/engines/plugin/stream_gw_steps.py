"""vLLM's side of the step socket: an ASGI middleware that writes what one turn of its event loop made in one message.

By HTTP every token of every stream is a write in vLLM's API server and a read in the agent. vLLM makes the tokens of
one step for all its streams together, so both sides save nearly all of these system calls, and HTTP's framing.

vLLM imports this file by its name (``--middleware stream_gw_steps.Steps``), in an environment without stream-gw. The
agent listens at the Unix socket that ``STREAM_GW_STEPS`` names; each API server connects, and connects again when the
connection is lost. The application behind this middleware gets a request from the socket as it gets one by HTTP.

A message is a row of records: size of the payload, number of the request, kind, payload.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

VERSION = 1
"""First payload of a connection, as a decimal number: both sides must speak the same."""
ADDRESS = "STREAM_GW_STEPS"
"""Environment variable with the socket's path."""
RECORD = struct.Struct("<IIB")
PAYLOAD_BYTES_MAX = 1 << 26
PIECE_BYTES_MAX = 1 << 18
"""Longer parts of a body go in several records."""
HELLO, ASK, LEAVE, HEAD, BODY, END, BROKEN = range(7)
"""Kinds. From the agent: ``ASK`` (a line of JSON with path and headers, then the body) and ``LEAVE`` (nobody reads the
answer any more). From vLLM: ``HELLO``, ``HEAD`` (JSON: status and headers), ``BODY``, ``END``, and ``BROKEN`` (the
reason why no more of the answer comes)."""

_RETRY_S = 0.5
log = logging.getLogger("uvicorn.error")


class Steps:
    """The middleware. It has to be vLLM's last ``--middleware``: then the others see the socket's requests too."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._scope: dict[str, Any] = {}
        self._connecting: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._connecting is None and ADDRESS in os.environ:
            # Starlette finds its application here, and what it made at its start; both are the same in every request
            self._scope = {name: scope[name] for name in ("app", "state") if name in scope}
            self._connecting = asyncio.create_task(self._keep_connected(os.environ[ADDRESS]), name="stream-gw-steps")
        await self._app(scope, receive, send)

    async def _keep_connected(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):  # the agent does not listen yet, or starts again
                transport, link = await loop.create_unix_connection(lambda: _Link(self._app, self._scope), path)
                try:
                    await link.lost
                finally:
                    transport.abort()
                log.info("stream-gw's agent closed the step socket: path=%s", path)
            await asyncio.sleep(_RETRY_S)


class Records:
    """Cuts a connection's bytes into records."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = 0
        """Bytes from the start of the rest up to the end of its first record, as far as that is known."""

    def receive(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Return number, kind and payload of each record that these bytes complete. Raises ValueError: too large."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        records = []
        at, end = 0, len(data)
        self._wanted = RECORD.size
        while end - at >= RECORD.size:
            size, number, kind = RECORD.unpack_from(data, at)
            if size > PAYLOAD_BYTES_MAX:
                raise ValueError(f"a record of the step socket has {size} bytes")
            begin = at + RECORD.size
            if begin + size > end:
                self._wanted = RECORD.size + size
                break
            at = begin + size
            records.append((number, kind, data[begin:at]))
        if at < end:
            self._rest += data[at:]
        return records


class _Link(asyncio.Protocol):
    """The connection to an agent, with the requests that are being served for it."""

    def __init__(self, app: App, scope: dict[str, Any]) -> None:
        self._app, self._scope = app, scope
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._records = Records()
        self._running: dict[int, _Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._out: list[bytes] = []
        self.writable = asyncio.Event()
        """Clear while the agent reads more slowly than vLLM writes: the applications wait."""
        self.writable.set()

    def put(self, number: int, kind: int, payload: bytes = b"") -> None:
        """Add a record to this loop turn's message."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += (RECORD.pack(len(payload), number, kind), payload)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    # --- asyncio's protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self.put(0, HELLO, b"%d" % VERSION)

    def data_received(self, data: bytes) -> None:
        for number, kind, payload in self._records.receive(data):
            if kind == ASK:
                self._start(number, payload)
            elif kind == LEAVE and number in self._running:
                self._running.pop(number).left.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()
        for exchange in self._running.values():
            exchange.left.set()
        self._running.clear()
        if not self.lost.done():
            self.lost.set_result(None)

    def _start(self, number: int, asked: bytes) -> None:
        head, _, body = asked.partition(b"\n")
        exchange = self._running[number] = _Exchange(self, number, body)
        task = self._loop.create_task(self._serve(number, exchange, json.loads(head)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, number: int, exchange: _Exchange, head: dict[str, Any]) -> None:
        """Serve one request as uvicorn does."""
        path: str = head["path"]
        scope = {
            **self._scope,
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},  # uvicorn's: a disconnect comes by receive()
            "http_version": "1.1",
            "server": ("stream-gw", None),
            "client": None,
            "scheme": "http",
            "method": "POST",
            "root_path": "",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]],
        }
        if "state" in scope:
            scope["state"] = scope["state"].copy()
        why = "the application ended before its answer"
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:  # the application is foreign code: one request must not end the others
            log.exception("Exception in ASGI application")
            why = repr(error)
        finally:
            exchange.close(why)
            if self._running.get(number) is exchange:
                del self._running[number]


class _Exchange:
    """One request and its answer."""

    def __init__(self, link: _Link, number: int, body: bytes) -> None:
        self._link, self._number = link, number
        self._body: bytes | None = body
        self.left = asyncio.Event()
        """Nobody reads the answer: the application hears of it as of a closed connection."""
        self._begun = self._ended = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.left.is_set():
            return
        link = self._link
        if message["type"] == "http.response.start":
            self._begun = True
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            link.put(self._number, HEAD, json.dumps({"status": message["status"], "headers": headers}).encode())
        elif message["type"] == "http.response.body":
            body = bytes(message.get("body", b""))
            for at in range(0, len(body), PIECE_BYTES_MAX):
                link.put(self._number, BODY, body[at : at + PIECE_BYTES_MAX])
            if not message.get("more_body", False):
                self._end()
            elif not link.writable.is_set():
                await link.writable.wait()

    def close(self, why: str) -> None:
        """End the answer if the application did not."""
        if self._ended or self.left.is_set():
            return
        if self._begun:
            self._ended = True
            self._link.put(self._number, BROKEN, why.encode())
        else:  # uvicorn's answer to an application that failed
            self._link.put(self._number, HEAD, b'{"status":500,"headers":{"content-type":"text/plain"}}')
            self._link.put(self._number, BODY, b"Internal Server Error")
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._link.put(self._number, END)
        self.left.set()
