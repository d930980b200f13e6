"""One connection to a Redis server: RESP3 on an asyncio protocol, parsed by hiredis.

Commands of one loop turn leave in one write, replies resolve futures in order, pushes go to a callback: no task
switch and no lock stand between a caller and the socket. ``docs/adr/0001-own-redis-connection.md`` has the
measurement that decided this against a general client.
"""

from __future__ import annotations

import asyncio
import re
import ssl as ssl_module
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hiredis

from stream_fabric.system_errors import reason

try:  # in the platform's wheel; hiredis makes a string of its own of every argument: 110 to 150 ns, alone and hot
    from stream_fabric.native._native import pack_command
except ModuleNotFoundError:
    from hiredis import pack_command  # type: ignore[assignment]  # its stub names a 1-tuple

Arg = str | bytes | int | float
Push = Callable[[list[Any]], None]

_INCOMPLETE = object()
_TIMES = (9, 10)
"""OpenSSL's codes of a certificate that is not valid yet, and of one that has expired."""
_IN_SCRIPT = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")


class ConnectionLost(Exception):
    """The connection ended or answered nothing in time; whether the command ran is unknown."""


class ConnectionRefused(ConnectionLost):
    """The server refuses the login, or its certificate does not verify; retries fail until an operator acts."""


class ReplyError(Exception):
    """The server's error reply. ``code`` is its first word, also where Redis 6 wraps a script's error in another."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        inner = _IN_SCRIPT.search(message) if message.startswith("ERR ") else None
        self.code = inner[1] if inner else message.partition(" ")[0]

    @property
    def denied(self) -> bool:
        """True if the server denied the command because credentials or ACL rights are wrong or missing."""
        # Redis before 7.2 reports rights that a script lacks as a plain ERR
        return self.code in _DENIED or "user executing the script" in str(self)


@dataclass(frozen=True)
class Login:
    """Credentials and TLS for a server, and the errors to raise if the server refuses them."""

    what: str = "Redis"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ssl: ssl_module.SSLContext | None = None
    where: str = "user:password@ before the hosts"
    """Place of the credentials in the URL."""

    def quote(self, error: ReplyError) -> str:
        """Text of an error reply without the password; Redis repeats commands that it does not understand."""
        return str(error).replace(self.password, "…") if self.password else str(error)

    @property
    def user(self) -> str:
        return f"user {self.username or 'default'!r}"

    def refused(self, server: str, error: ReplyError) -> ConnectionRefused:
        """Make the error for refused credentials or rights; its text says what to correct."""
        name = f"{self.what} at {server}"
        match error.code:
            case "WRONGPASS":
                return ConnectionRefused(
                    f"{name} refuses the password of {self.user}; correct it in the URL, as {self.where}"
                )
            case "NOAUTH" if self.password is None:
                return ConnectionRefused(f"{name} asks for a password; put it into the URL, as {self.where}")
            case "DENIED":
                return ConnectionRefused(f"{name} is in protected mode; give it a password, and put that into the URL")
        return ConnectionRefused(
            f"{name} denies {self.user} a right that is needed, see docs/runbook.md: {self.quote(error)}"
        )

    def distrusted(self, server: str, error: ssl_module.SSLError) -> ConnectionRefused:
        """Make the error for a failed TLS handshake; its text says what to correct."""
        name = f"{self.what} at {server}"
        if isinstance(error, ssl_module.SSLCertVerificationError):
            remedy = "name the CA that signed it as ?ca=<path of a PEM>, and the host as the certificate has it"
            if error.verify_code in _TIMES:
                remedy = "renew it, or correct this host's clock"
            return ConnectionRefused(
                f"the certificate of {name} does not verify: {error.verify_message.rstrip('.')}; {remedy}"
            )
        return ConnectionRefused(
            f"{name} refuses TLS: {error.reason or error}; if it asks for a client's certificate, give "
            "?cert=<path>&key=<path>; if it speaks no TLS, the URL begins with redis, not rediss"
        )

    def misread(self, server: str, error: hiredis.ProtocolError) -> ConnectionRefused:
        """Make the error for a server that answers HELLO in another protocol; its text says what to correct."""
        hint = "" if self.ssl else ", or begin it with rediss if the server speaks only TLS"
        return ConnectionRefused(
            f"{self.what} at {server} does not answer as Redis does: {error}; correct host and port in the URL{hint}"
        )


_DENIED = {"WRONGPASS", "NOAUTH", "NOPERM", "DENIED"}
_ENDED = (ssl_module.SSLEOFError, ssl_module.SSLZeroReturnError, ssl_module.SSLSyscallError)
"""TLS errors of a broken link, which are no refusal."""


_ANYBODY = Login()


class Connection(asyncio.Protocol):
    """One connection with pipelined commands and pub/sub messages. Created with ``connect``."""

    def __init__(self, timeout_s: float, on_push: Push | None, on_lost: Callable[[], None] | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._on_push = on_push
        self._on_lost = on_lost
        self._reader = hiredis.Reader(replyError=ReplyError, notEnoughData=_INCOMPLETE)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._heard_at = self.opened_at = self._loop.time()
        self._tick: asyncio.TimerHandle | None = None
        self._misread: hiredis.ProtocolError | None = None
        """The bytes that are no reply of Redis, after which the connection is aborted."""
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
        """Open a connection, log in and select the database.

        Raises ConnectionLost; ConnectionRefused if a retry cannot help.
        """
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
            text = reason(error)
            # A server without TLS takes the handshake for an unfinished command and waits
            hint = "; if it speaks no TLS, the URL begins with redis" if login.ssl and text == "timed out" else ""
            raise ConnectionLost(f"cannot connect to {login.what} at {server}: {text}{hint}") from error
        try:
            await self._greet(server, login, database)
        except BaseException:
            self.close()
            raise
        return self

    async def _greet(self, server: str, login: Login, database: int) -> None:
        """Send HELLO 3 with the credentials, then SELECT; convert their errors."""
        hello: list[Arg] = ["HELLO", 3]
        if login.password is not None:
            hello += ["AUTH", login.username or "default", login.password]
        try:
            await self.call(*hello)
        except ReplyError as error:
            if error.denied:
                raise login.refused(server, error) from None
            if "unknown command" in str(error) or error.code == "NOPROTO":
                raise ConnectionRefused(
                    f"{login.what} at {server} does not know HELLO 3; Redis 6 or later is needed"
                ) from None
            raise ConnectionLost(f"{login.what} at {server} is not ready: {login.quote(error)}") from None
        except ConnectionLost as error:
            cause = error.__cause__
            if isinstance(cause, ssl_module.SSLError) and not isinstance(cause, _ENDED):
                raise login.distrusted(server, cause) from error
            if isinstance(cause, hiredis.ProtocolError):
                raise login.misread(server, cause) from error
            hint = "" if login.ssl else "; if it speaks only TLS, the URL begins with rediss"
            raise ConnectionLost(f"{login.what} at {server} did not answer HELLO: {error}{hint}") from error
        if database:
            try:
                await self.call("SELECT", database)
            except ReplyError as error:
                raise ConnectionRefused(
                    f"{login.what} at {server} has no database {database} for us: {error}"
                ) from error

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._tick = self._loop.call_later(self._timeout_s / 2, self._check_timeout)

    def call(self, *args: Arg) -> asyncio.Future[Any]:
        """Send a command; the future returns the reply, or raises ReplyError or ConnectionLost."""
        future: asyncio.Future[Any] = self._loop.create_future()
        if self.lost:
            future.set_exception(ConnectionLost("the connection to Redis is closed"))
            return future
        self.send(*args)  # raises for what cannot be encoded, before anything waits for its reply
        if not self._waiting:
            self._heard_at = self._loop.time()
        self._waiting.append(future)
        return future

    def send(self, *args: Arg) -> None:
        """Send a command whose only replies are push messages, such as SUBSCRIBE in RESP3."""
        packed = pack_command(args)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(packed)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self.lost:
            self._transport.write(b"".join(out))

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            self._read_replies(data)
        except hiredis.ProtocolError as error:  # no Redis, or TLS: asyncio would log a traceback at each attempt
            self._misread = error
            if self._transport is not None:
                self._transport.abort()

    def _read_replies(self, data: bytes) -> None:
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

    def _check_timeout(self) -> None:
        """Abort the connection if a reply is due and the server was silent for the timeout."""
        if self._waiting and self._loop.time() - self._heard_at > self._timeout_s and self._transport is not None:
            self._transport.abort()
            return
        self._tick = self._loop.call_later(self._timeout_s / 2, self._check_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        exc = self._misread or exc
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
            # The closing handshake of TLS would wait for the peer, and no data is on its way
            self._transport.abort()
        else:
            self._transport.close()
