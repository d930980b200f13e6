"""One connection to a Redis server: RESP3 on an asyncio protocol, parsed by hiredis.

Commands of one loop turn leave in one write, replies resolve futures in order, pushes go to a callback: no task
switch and no lock stand between a caller and the socket. ``docs/adr/0001-own-redis-connection.md`` has the
measurement that decided this against a general client.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections import deque
from collections.abc import Callable
from typing import Any

import hiredis

Arg = str | bytes | int | float
Push = Callable[[list[Any]], None]

_INCOMPLETE = object()


class ConnectionLost(Exception):
    """The connection ended or answered nothing in time; whether the command ran is unknown."""


class ReplyError(Exception):
    """The server's error reply. ``code`` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


class Connection(asyncio.Protocol):
    """Pipelined commands and pushes. Create with ``connect``."""

    def __init__(self, timeout_s: float, on_push: Push | None, on_lost: Callable[[], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._on_push = on_push
        self._on_lost = on_lost
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=_INCOMPLETE)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._heard_at = self._loop.time()
        self._tick: asyncio.TimerHandle | None = None
        self.lost = False

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        timeout_s: float,
        username: str | None = None,
        password: str | None = None,
        database: int = 0,
        ssl: ssl_module.SSLContext | None = None,
        on_push: Push | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> Connection:
        """Open, authenticate and select. Raises ConnectionLost or ReplyError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, self = await loop.create_connection(lambda: cls(timeout_s, on_push, on_lost), host, port, ssl=ssl)
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"cannot connect to Redis at {host}:{port}: {error or 'timed out'}") from error
        try:
            hello: list[Arg] = ["HELLO", 3]
            if password is not None:
                hello += ["AUTH", username or "default", password]
            await self.call(*hello)
            if database:
                await self.call("SELECT", database)
        except BaseException:
            self.close()
            raise
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._tick = self._loop.call_later(self._timeout_s / 2, self._check)

    def call(self, *args: Arg) -> asyncio.Future[Any]:
        """Send a command; the future gives its reply or raises ReplyError or ConnectionLost."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.lost:
            future.set_exception(ConnectionLost("the connection to Redis is closed"))
            return future
        if not self._waiting:
            self._heard_at = self._loop.time()
        self._waiting.append(future)
        self.send(*args)
        return future

    def send(self, *args: Arg) -> None:
        """Send a command that has no reply but pushes (SUBSCRIBE and its kin in RESP3)."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(hiredis.pack_command(args))  # type: ignore[arg-type]  # its stub names a 1-tuple

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self.lost:
            self._transport.write(b"".join(out))

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        reader = self._reader
        reader.feed(data)
        while True:
            reply = reader.gets()
            if reply is _INCOMPLETE:
                return
            if isinstance(reply, hiredis.PushNotification):
                if self._on_push is not None:
                    self._on_push(reply)
                continue
            if not self._waiting:  # a subscribe that was refused: its success would have been a push
                if self._on_push is not None:
                    self._on_push([b"error", reply])
                continue
            future = self._waiting.popleft()
            if future.done():  # its caller was cancelled
                continue
            if isinstance(reply, ReplyError):
                future.set_exception(reply)
            else:
                future.set_result(reply)

    def _check(self) -> None:
        if self._waiting and self._loop.time() - self._heard_at > self._timeout_s and self._transport is not None:
            self._transport.abort()
            return
        self._tick = self._loop.call_later(self._timeout_s / 2, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._tick is not None:
            self._tick.cancel()
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(ConnectionLost(f"the connection to Redis was lost: {exc or 'closed'}"))
        if self._on_lost is not None:
            self._on_lost()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
