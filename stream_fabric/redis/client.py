"""Commands to a single Redis, to Sentinel's master, or to a Redis Cluster, with one retry loop.

Every script of ours is idempotent, so a command whose fate is unknown is sent again until its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl as ssl_module
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.redis.wire import Arg, Connection, ConnectionLost, Login, Push, Refused, ReplyError

SLOTS = 16384
_ASK_S = 1.0
"""Who is asked for the topology answers in so long, or another is asked: a dead host says nothing."""
_RETRY = {"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "NOREPLICAS", "BUSY", "OOM", "MISCONF"}


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def slot_of(tag: str) -> int:
    """The cluster slot of the keys with hash tag ``{tag}``."""
    return crc_hqx(tag.encode(), 0) % SLOTS


_MODES = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_FILES = ("ca", "cert", "key")
_OF_SENTINELS = ("sentinel_user", "sentinel_password")


@dataclass(frozen=True)
class RedisUrl:
    """Where Redis is: ``redis://host:6379/0``, ``rediss://`` with TLS, ``redis+sentinel://a:26379,b:26379/mymaster``,
    ``redis+cluster://a:6379,b:6379``; credentials as ``user:password@``.

    With TLS: ``?ca=<path>`` to trust that CA in place of the system's, ``?cert=<path>&key=<path>`` to show a
    certificate. With Sentinel: ``?sentinel_user=…&sentinel_password=…``. What is reserved in URLs is percent-encoded.
    """

    mode: str
    addresses: tuple[Address, ...]
    username: str | None
    password: str | None = field(repr=False)
    database: int
    master: str
    tls: bool
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises ValueError that says what is allowed and repeats nothing that may be of a password."""
        try:
            parts = urlsplit(url)
        except ValueError:  # its text may have the password
            raise ValueError(
                "a Redis URL has its reserved characters percent-encoded, those of a password too"
            ) from None
        if parts.scheme not in _MODES:
            raise ValueError(
                f"a Redis URL starts with one of {', '.join(f'{m}://' for m in _MODES)}; got {parts.scheme!r}"
            )
        mode, tls = _MODES[parts.scheme]
        if parts.fragment or "@" in parts.path or ("@" in parts.query and "@" not in parts.netloc):
            raise ValueError(
                "the password in a Redis URL has '/', '?', '#' and '@' percent-encoded, as %2F, %3F, %23, %40"
            )
        credentials, _, hosts = parts.netloc.rpartition("@")
        user, colon, password = credentials.partition(":")
        default_port = 26379 if mode == "sentinel" else 6379
        addresses = []
        for number, host in enumerate(hosts.split(","), 1):
            name, _, port = host.rpartition(":") if ":" in host else (host, "", "")
            if not name or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
                raise ValueError(
                    f"a Redis URL names hosts as host:port, separated by commas, ports up to 65535; see number {number}"
                )
            addresses.append(Address(name.strip("[]"), int(port or default_port)))
        path = parts.path.strip("/")
        if mode == "single" and path and not path.isdecimal():
            raise ValueError(f"the path of a redis:// URL is the database number; got {path!r}")
        return cls(
            mode=mode,
            addresses=tuple(addresses),
            username=unquote(user) or None,
            password=unquote(password) if colon else None,
            database=int(path or 0) if mode == "single" else 0,
            master=path or "mymaster",
            tls=tls,
            **_parameters(parts.query, mode, tls),
        )

    def logins(self) -> tuple[Login, Login]:
        """As whom the servers are asked that hold the data, and the sentinels. Raises ValueError when a file holds
        something else than it should."""
        ssl = self._tls() if self.tls else None
        return (
            Login("Redis", self.username, self.password, ssl),
            Login(
                "the sentinel",
                self.sentinel_user,
                self.sentinel_password,
                ssl,
                "?sentinel_user=…&sentinel_password=…",
            ),
        )

    def _tls(self) -> ssl_module.SSLContext:
        # It verifies certificates and the names of hosts
        try:
            context = ssl_module.create_default_context(cafile=self.ca)
        except OSError as error:
            raise ValueError(f"ca of the Redis URL: {self.ca} cannot be read as certificates in PEM form") from error
        if self.cert is not None:
            try:
                # With a password given OpenSSL does not ask the terminal for one
                context.load_cert_chain(self.cert, self.key, password="")
            except OSError as error:
                raise ValueError(
                    f"cert and key of the Redis URL: {self.cert} and {self.key} are not a certificate and its key in "
                    "PEM form, without a passphrase"
                ) from error
        return context


def _parameters(query: str, mode: str, tls: bool) -> dict[str, str]:
    """What stands after the question mark, by name. Raises ValueError."""
    allowed = (*(_FILES if tls else ()), *(_OF_SENTINELS if mode == "sentinel" else ()))
    hint = f"allowed here: {', '.join(allowed) or 'none'} (ca, cert and key with rediss, sentinel_… with +sentinel)"
    found: dict[str, str] = {}
    for item in query.split("&") if query else ():
        name, _, value = item.partition("=")
        if name not in allowed:
            # Cut, as it may be the end of a password that holds a question mark
            shown = repr(name) if name.isidentifier() and len(name) <= 32 else "a parameter"
            raise ValueError(f"the Redis URL has {shown}, which it may not have; {hint}")
        if name in found:
            raise ValueError(f"the Redis URL has {name} twice; {hint}")
        if not value:
            raise ValueError(f"{name} of the Redis URL is empty; {hint}")
        found[name] = unquote(value)
    for name in _FILES:
        if name in found and not os.path.isfile(found[name]):
            raise ValueError(f"{name} of the Redis URL is the path of a PEM file; there is none at {found[name]!r}")
    for name, other in (("cert", "key"), ("key", "cert"), ("sentinel_user", "sentinel_password")):
        if name in found and other not in found:
            raise ValueError(f"the Redis URL has {name} but not {other}; they go together")
    return found


class Topology(Protocol):
    """Which server holds a slot."""

    def address(self, slot: int) -> Address: ...

    def moved(self, slot: int, to: Address) -> None: ...

    async def refresh(self) -> None:
        """Ask again. Raises ConnectionLost or ReplyError when nobody answers."""


Connect = Callable[[Address], Awaitable[Connection]]


class Single:
    def __init__(self, url: RedisUrl) -> None:
        self._address = url.addresses[0]

    def address(self, slot: int) -> Address:
        return self._address

    def moved(self, slot: int, to: Address) -> None:
        raise FabricUnavailable(f"Redis at {self._address} is a cluster node; use redis+cluster:// in its URL")

    async def refresh(self) -> None: ...


class Sentinel:
    """Follows the master that the sentinels name."""

    def __init__(self, url: RedisUrl, login: Login) -> None:
        self._url = url
        self._login = login
        self._address: Address | None = None

    def address(self, slot: int) -> Address:
        if self._address is None:
            raise ConnectionLost("no sentinel has named a master yet")
        return self._address

    def moved(self, slot: int, to: Address) -> None: ...

    async def refresh(self) -> None:
        failures = []
        refused: Refused | None = None
        for sentinel in self._url.addresses:
            try:
                reply = await self._ask(sentinel)
            except (ConnectionLost, ReplyError) as error:
                refused = refused or (error if isinstance(error, Refused) else None)
                failures.append(f"{sentinel}: {error}")
                continue
            if reply:
                self._address = Address(reply[0].decode(), int(reply[1]))
                return
            failures.append(f"{sentinel}: does not know the master {self._url.master!r}")
        raise refused or ConnectionLost("; ".join(failures))

    async def _ask(self, sentinel: Address) -> Any:
        connection = await Connection.connect(*sentinel, timeout_s=_ASK_S, login=self._login)
        try:
            return await connection.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.master)
        except ReplyError as error:
            if error.denied:
                raise self._login.refused(str(sentinel), error) from error
            raise
        finally:
            connection.close()


class Cluster:
    def __init__(self, url: RedisUrl, login: Login, connect: Connect) -> None:
        self._login = login
        self._connect = connect
        self._seeds = url.addresses
        self._slots: list[Address | None] = [None] * SLOTS

    def address(self, slot: int) -> Address:
        address = self._slots[slot]
        if address is None:
            raise ConnectionLost(f"no node of the cluster serves slot {slot}")
        return address

    def moved(self, slot: int, to: Address) -> None:
        self._slots[slot] = to

    async def refresh(self) -> None:
        failures = []
        refused: Refused | None = None
        for node in dict.fromkeys([*(a for a in self._slots[:: SLOTS // 64] if a), *self._seeds]):
            try:
                async with asyncio.timeout(_ASK_S):
                    reply = await (await self._connect(node)).call("CLUSTER", "SLOTS")
            except TimeoutError:
                failures.append(f"{node}: silent for {_ASK_S:g} s")
                continue
            except (ConnectionLost, ReplyError) as error:
                if isinstance(error, ReplyError) and error.denied:
                    error = self._login.refused(str(node), error)
                refused = refused or (error if isinstance(error, Refused) else None)
                failures.append(f"{node}: {error}")
                continue
            slots: list[Address | None] = [None] * SLOTS
            for start, end, primary, *_ in reply:
                host = primary[0].decode() if primary[0] else node.host
                slots[start : end + 1] = [Address(host, primary[1])] * (end - start + 1)
            self._slots = slots
            return
        raise refused or ConnectionLost("no node of the cluster answers: " + "; ".join(failures))


class RedisClient:
    """Commands by slot. One pipelined connection a server; ``dedicated`` gives another for a blocking caller."""

    def __init__(self, url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.url = RedisUrl.parse(url)
        self._timeout_s = timeout_s
        self._login, sentinel_login = self.url.logins()
        self._connections: dict[Address, Connection] = {}
        self._connecting: dict[Address, asyncio.Task[Connection]] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._started = False
        self._closed = False
        self.topology: Topology
        match self.url.mode:
            case "cluster":
                self.topology = Cluster(self.url, self._login, self.connection)
            case "sentinel":
                self.topology = Sentinel(self.url, sentinel_login)
            case _:
                self.topology = Single(self.url)
        self.publish = "PUBLISH"
        self.publish_is_counted = True

    async def start(self) -> None:
        """Find the servers, what they offer and whether they let us. Raises FabricUnavailable, at once for what no
        waiting would mend; later that is an outage like others, which may be over before a command's deadline."""
        try:
            await self.topology.refresh()
        except Refused as error:
            raise FabricUnavailable(str(error)) from error
        except (ConnectionLost, ReplyError) as error:
            raise FabricUnavailable(f"cannot reach Redis: {error}") from error
        info = await self.execute(0, "COMMAND", "INFO", "SPUBLISH")
        sharded = bool(info and info[0])
        self.publish = "SPUBLISH" if sharded else "PUBLISH"
        # A classic publish in a cluster reaches the other nodes' subscribers but does not count them
        self.publish_is_counted = sharded or self.url.mode != "cluster"
        # Whether our keys and channels are allowed: a user of Redis 7 has no channel unless it is given some
        await self.execute(slot_of("p0"), "GET", "sg:{p0}:partitions")
        await self.execute(slot_of("p0"), self.publish, "sg:{p0}:>", "")
        self._started = True

    async def dedicated(
        self, address: Address, *, on_push: Push | None = None, on_lost: Callable[[], None] | None = None
    ) -> Connection:
        return await Connection.connect(
            address.host,
            address.port,
            timeout_s=self._timeout_s,
            login=self._login,
            database=self.url.database,
            on_push=on_push,
            on_lost=on_lost,
        )

    async def connection(self, address: Address) -> Connection:
        """The shared connection to a server; callers that find it missing wait for one attempt together."""
        connection = self._connections.get(address)
        if connection is not None and not connection.lost:
            return connection
        task = self._connecting.get(address)
        if task is None:
            task = asyncio.create_task(self.dedicated(address))
            self._connecting[address] = task
            task.add_done_callback(lambda done: self._connected(address, done))
        return await asyncio.shield(task)

    def _connected(self, address: Address, task: asyncio.Task[Connection]) -> None:
        del self._connecting[address]
        if not task.cancelled() and task.exception() is None:
            if self._closed:
                task.result().close()
            else:
                self._connections[address] = task.result()

    async def refresh(self) -> None:
        """Ask for the topology again, once for all who want it now. Failures are the retry loop's to meet."""
        with contextlib.suppress(ConnectionLost, ReplyError):
            await asyncio.shield(self._begin_refresh())

    def _begin_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self.topology.refresh())
            self._refreshing.add_done_callback(_consume)
        return self._refreshing

    async def execute(self, slot: int, *args: Arg, timeout_s: float | None = None) -> Any:
        """Run one idempotent command where the slot lives; ``timeout_s`` 0: it is sent once, and after a redirection.
        Raises ReplyError or FabricUnavailable."""
        loop = asyncio.get_running_loop()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + limit_s
        delay_s = 0.005
        redirect: Address | None = None
        asking = redirected = False
        while True:
            server: Address | None = redirect
            try:
                server = server or self.topology.address(slot)
                connection = await self.connection(server)
                if asking:
                    asked = connection.call("ASKING")
                    asked.add_done_callback(_consume)
                return await connection.call(*args)
            except ReplyError as error:
                redirect, asking = None, False
                cause: Exception = error
                if error.code in ("MOVED", "ASK"):
                    _, _, where = str(error).split(" ", 2)
                    host, _, port = where.rpartition(":")
                    redirect = Address(host or self.topology.address(slot).host, int(port))
                    asking = error.code == "ASK"
                    if not asking:
                        self.topology.moved(slot, redirect)
                elif error.denied:
                    cause = self._login.refused(str(server), error)
                elif error.code not in _RETRY:
                    raise
            except ConnectionLost as error:
                redirect, asking = None, False
                cause = error
            late = loop.time() + delay_s >= deadline and (redirect is None or redirected)
            redirected = redirect is not None
            if isinstance(cause, Refused) and (late or not self._started):
                raise FabricUnavailable(str(cause)) from cause
            if late:
                if redirect is None and not self._closed:
                    self._begin_refresh()  # for who comes next: to find a dead host silent took all the time there was
                raise FabricUnavailable(f"Redis did not answer in {limit_s:g} s: {cause}") from cause
            if redirect is None:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 0.2)
                await self.refresh()

    async def close(self) -> None:
        self._closed = True
        for task in [*self._connecting.values(), *([self._refreshing] if self._refreshing else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionLost, ReplyError):
                await task
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _consume(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class Partitions:
    """The slots that streams are spread over: keys of partition k carry the tag ``{p<k>}``."""

    def __init__(self, count: int, *, new: bool = False) -> None:
        self.count = count
        self.new = new
        """Whether this Redis knew of no partitions yet: nobody has used it, or it has lost everything."""
        self.slots: Sequence[int] = [slot_of(f"p{k}") for k in range(count)]
