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
from dataclasses import dataclass, field
from typing import Any

import hiredis

Arg = str | bytes | int | float
Push = Callable[[list[Any]], None]

_INCOMPLETE = object()


class ConnectionLost(Exception):
    """The connection ended or answered nothing in time; whether the command ran is unknown."""


class Refused(ConnectionLost):
    """The server will not have us, or we not its certificate; until somebody mends that, trying again is in vain."""


class ReplyError(Exception):
    """The server's error reply. ``code`` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]

    @property
    def denied(self) -> bool:
        """Whether it tells of credentials or rights that are wrong or missing."""
        # What a script may not do comes as a plain ERR from Redis before 7.2
        return self.code in _DENIED or "user executing the script" in str(self)


@dataclass(frozen=True)
class Login:
    """As whom a server is asked, and what to tell of its refusal."""

    what: str = "Redis"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ssl: ssl_module.SSLContext | None = None
    where: str = "user:password@ before the hosts"
    """Where the URL has the credentials."""

    def quote(self, error: ReplyError) -> str:
        """A reply without our password: Redis repeats what it does not understand."""
        return str(error).replace(self.password, "…") if self.password else str(error)

    @property
    def user(self) -> str:
        return f"user {self.username or 'default'!r}"

    def refused(self, server: str, error: ReplyError) -> Refused:
        name = f"{self.what} at {server}"
        match error.code:
            case "WRONGPASS":
                return Refused(f"{name} refuses the password of {self.user}; correct it in the URL, as {self.where}")
            case "NOAUTH" if self.password is None:
                return Refused(f"{name} asks for a password; put it into the URL, as {self.where}")
            case "DENIED":
                return Refused(f"{name} is in protected mode; give it a password, and put that into the URL")
        return Refused(f"{name} denies {self.user} a right that is needed, see docs/runbook.md: {self.quote(error)}")

    def distrusted(self, server: str, error: ssl_module.SSLError) -> Refused:
        name = f"{self.what} at {server}"
        if isinstance(error, ssl_module.SSLCertVerificationError):
            return Refused(
                f"the certificate of {name} does not verify: {error.verify_message.rstrip('.')}; "
                "name the CA that signed it as ?ca=<path of a PEM>, and the host as the certificate has it"
            )
        return Refused(
            f"{name} refuses TLS: {error.reason or error}; if it asks for a client's certificate, give "
            "?cert=<path>&key=<path>; if it speaks no TLS, the URL begins with redis, not rediss"
        )


_DENIED = {"WRONGPASS", "NOAUTH", "NOPERM", "DENIED"}
_ENDED = (ssl_module.SSLEOFError, ssl_module.SSLZeroReturnError, ssl_module.SSLSyscallError)
"""The link broke; nobody refused anything."""


_ANYBODY = Login()


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
        login: Login = _ANYBODY,
        database: int = 0,
        on_push: Push | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> Connection:
        """Open, authenticate and select. Raises ConnectionLost, or Refused where trying again is in vain."""
        loop = asyncio.get_running_loop()
        server = f"{host}:{port}"
        try:
            async with asyncio.timeout(timeout_s):
                _, self = await loop.create_connection(
                    lambda: cls(timeout_s, on_push, on_lost), host, port, ssl=login.ssl
                )
        except (OSError, TimeoutError) as error:
            if isinstance(error, ssl_module.SSLError) and not isinstance(error, _ENDED):
                raise login.distrusted(server, error) from error
            text = str(error) or ("timed out" if isinstance(error, TimeoutError) else type(error).__name__)
            # A server without TLS waits for the end of what it takes for a command
            hint = "; if it speaks no TLS, the URL begins with redis" if login.ssl and text == "timed out" else ""
            raise ConnectionLost(f"cannot connect to {login.what} at {server}: {text}{hint}") from error
        try:
            await self._greet(server, login, database)
        except BaseException:
            self.close()
            raise
        return self

    async def _greet(self, server: str, login: Login, database: int) -> None:
        hello: list[Arg] = ["HELLO", 3]
        if login.password is not None:
            hello += ["AUTH", login.username or "default", login.password]
        try:
            await self.call(*hello)
        except ReplyError as error:
            if error.denied:
                raise login.refused(server, error) from None
            if "unknown command" in str(error) or error.code == "NOPROTO":
                raise Refused(f"{login.what} at {server} does not know HELLO 3; Redis 6 or later is needed") from None
            raise ConnectionLost(f"{login.what} at {server} is not ready: {login.quote(error)}") from None
        except ConnectionLost as error:
            cause = error.__cause__
            if isinstance(cause, ssl_module.SSLError) and not isinstance(cause, _ENDED):
                raise login.distrusted(server, cause) from error
            hint = "" if login.ssl else "; if it speaks only TLS, the URL begins with rediss"
            raise ConnectionLost(f"{login.what} at {server} did not answer HELLO: {error}{hint}") from error
        if database:
            try:
                await self.call("SELECT", database)
            except ReplyError as error:
                raise Refused(f"{login.what} at {server} has no database {database} for us: {error}") from error

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
                lost = ConnectionLost(f"the connection to Redis was lost: {exc or 'closed'}")
                lost.__cause__ = exc
                future.set_exception(lost)
        if self._on_lost is not None:
            self._on_lost()

    def close(self) -> None:
        if self._transport is None:
            return
        if self._transport.get_extra_info("sslcontext") is not None:
            # The end that TLS has of its own waits for the peer's, and nothing of ours is on its way
            self._transport.abort()
        else:
            self._transport.close()
