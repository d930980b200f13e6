"""Commands to a single Redis, to Sentinel's master, or to a Redis Cluster, with one retry loop.

Every command and script of the platform is idempotent: one whose outcome is unknown is sent again until its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from collections.abc import Callable, Sequence
from typing import Any

from stream_fabric.errors import FabricError, FabricFault, FabricFull, FabricRefused, FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.redis.topology import Cluster, Sentinel, Single, Topology, slot_of
from stream_fabric.redis.wire import Arg, Connection, ConnectionLost, ConnectionRefused, Login, Push, ReplyError
from stream_fabric.redis_url import Address, RedisUrl

_RETRY = {"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "NOREPLICAS", "BUSY", "MISCONF"}
_MOVING = "Script attempted to access a non local key"
"""Begin of the reply to a script that needs a key which has moved already: its slot is on the way to another server."""
_READONLY_S = 1.0
"""Age from which a connection to a server that takes no writes is replaced."""


def logins(url: RedisUrl) -> tuple[Login, Login]:
    """Make two logins: for the servers that hold data, and for the sentinels.

    Raises ValueError when a file of the URL cannot be used.
    """
    ssl = _tls(url) if url.tls else None
    return (
        Login("Redis", url.username, url.password, ssl),
        Login(
            "the sentinel",
            url.sentinel_user,
            url.sentinel_password,
            ssl,
            "?sentinel_user=…&sentinel_password=…",
        ),
    )


def _tls(url: RedisUrl) -> ssl_module.SSLContext:
    """Make the TLS context of a Redis URL; it verifies certificates and host names."""
    try:
        context = ssl_module.create_default_context(cafile=url.ca)
    except OSError as error:
        raise ValueError(f"ca of the Redis URL: {url.ca} cannot be read as certificates in PEM form") from error
    if url.cert is not None:
        try:
            # With an empty password given, OpenSSL does not ask the terminal for one
            context.load_cert_chain(url.cert, url.key, password="")
        except OSError as error:
            raise ValueError(
                f"cert and key of the Redis URL: {url.cert} and {url.key} are not a certificate and its key in "
                "PEM form, without a passphrase"
            ) from error
    return context


class RedisClient:
    """Commands by slot, on one pipelined connection per server. A blocking caller uses a ``dedicated`` one."""

    def __init__(self, url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.url = RedisUrl.parse(url)
        self._timeout_s = timeout_s
        self._login, sentinel_login = logins(self.url)
        self._connections: dict[Address, Connection] = {}
        self._connecting: dict[Address, asyncio.Task[Connection]] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._on_left: list[Callable[[], None]] = []
        self._started = False
        self._closed = False
        self.topology: Topology
        match self.url.mode:
            case "cluster":
                self.topology = Cluster(self.url, self._login, self.connection)
            case "sentinel":
                self.topology = Sentinel(self.url, sentinel_login, self._leave)
            case _:
                self.topology = Single(self.url)
        self.publish = "PUBLISH"
        self.publish_is_counted = True

    async def start(self) -> None:
        """Find the servers, their features, and whether the login has the rights it needs.

        Raises FabricUnavailable; a refused login is not retried here. After the start it is retried like an outage.
        """
        try:
            await self.topology.refresh()
        except ConnectionRefused as error:
            raise FabricRefused("Redis refuses the login", detail=error) from error
        except (ConnectionLost, ReplyError) as error:
            raise FabricUnavailable("cannot reach Redis", detail=error) from error
        info = await self.execute(0, "COMMAND", "INFO", "SPUBLISH")
        sharded = bool(info and info[0])
        self.publish = "SPUBLISH" if sharded else "PUBLISH"
        # A classic publish in a cluster reaches the other nodes' subscribers but does not count them
        self.publish_is_counted = sharded or self.url.mode != "cluster"
        # Test the rights to the platform's keys and channels: an ACL user of Redis 7 has no channel by default
        await self.execute(slot_of("p0"), "GET", "sg:{p0}:partitions")
        await self.execute(slot_of("p0"), self.publish, "sg:{p0}:>", "")
        self._started = True
        if isinstance(self.topology, Sentinel):
            self._watching = asyncio.create_task(self.topology.watch(self.refresh))

    def on_left(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever another server than before serves the slots."""
        self._on_left.append(callback)

    def _leave(self, address: Address) -> None:
        """Send the commands that a former primary has not answered to its successor."""
        if (connection := self._connections.pop(address, None)) is not None:
            connection.close()
        for callback in self._on_left:
            callback()

    async def dedicated(
        self, address: Address, *, on_push: Push | None = None, on_lost: Callable[[], None] | None = None
    ) -> Connection:
        """Open a connection that only the caller uses and closes. Raises ConnectionLost."""
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
        """Return the shared connection to a server, and open it if needed; concurrent callers wait for one attempt.

        Raises ConnectionLost.
        """
        connection = self._connections.get(address)
        if connection is not None and not connection.lost:
            return connection
        task = self._connecting.get(address)
        if task is None:
            task = asyncio.create_task(self.dedicated(address))
            self._connecting[address] = task
            task.add_done_callback(lambda done: self._store_connection(address, done))
        return await asyncio.shield(task)

    def open_connection(self, slot: int) -> Connection | None:
        """Return the shared connection to the server of a slot; None: none is open."""
        try:
            return self._connections.get(self.topology.address(slot))
        except ConnectionLost:
            return None

    def _store_connection(self, address: Address, task: asyncio.Task[Connection]) -> None:
        """Store the connection that a finished task opened; close it if this client is closed."""
        del self._connecting[address]
        if not task.cancelled() and task.exception() is None:
            if self._closed:
                task.result().close()
            else:
                self._connections[address] = task.result()

    async def refresh(self) -> None:
        """Query the topology again; concurrent callers share one query. Failures are ignored: commands retry."""
        with contextlib.suppress(ConnectionLost, ReplyError):
            await asyncio.shield(self._begin_refresh())

    def _begin_refresh(self) -> asyncio.Task[None]:
        """Return the running query of the topology, or start one."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self.topology.refresh())
            self._refreshing.add_done_callback(retrieve_error)
        return self._refreshing

    async def execute(self, slot: int, *args: Arg, timeout_s: float | None = None) -> Any:
        """Run one idempotent command on the server of the slot. Raises FabricError.

        ``timeout_s``: time for retries; 0: retry only after a redirection.
        """
        try:
            return await self._request(slot, args, timeout_s)
        except ReplyError as error:
            raise fabric_error(str(args[0]), error, self._login) from error

    async def run_script(
        self,
        slot: int,
        name: str,
        sha: str,
        source: str,
        args: Sequence[Arg],
        timeout_s: float | None = None,
    ) -> Any:
        """Run a Lua script by its SHA; send its source where the server does not know it. Raises FabricError.

        ``args``: number of keys, keys, arguments.
        """
        try:
            try:
                return await self._request(slot, ("EVALSHA", sha, *args), timeout_s)
            except ReplyError as error:
                if error.code != "NOSCRIPT":
                    raise
            return await self._request(slot, ("EVAL", source, *args), timeout_s)
        except ReplyError as error:
            raise fabric_error(f"script {name}", error, self._login) from error

    async def _request(self, slot: int, args: Sequence[Arg], timeout_s: float | None) -> Any:
        """Send a command and retry it until its deadline. Raises ReplyError or FabricUnavailable."""
        loop = asyncio.get_running_loop()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + limit_s
        delay_s = 0.005
        redirect: Address | None = None
        asking = redirected = False
        while True:
            if self._closed:
                raise FabricUnavailable("this process has closed its connections to Redis")
            server: Address | None = redirect
            try:
                server = server or self.topology.address(slot)
                connection = await self.connection(server)
                if asking:
                    asked = connection.call("ASKING")
                    asked.add_done_callback(retrieve_error)
                return await connection.call(*args)
            except ReplyError as error:
                redirect, asking = None, False
                cause: Exception = error
                if error.code in ("MOVED", "ASK"):
                    _, _, where = str(error).split(" ", 2)
                    host, _, port = where.rpartition(":")
                    redirect = Address(host or (server or self.url.addresses[0]).host, int(port))
                    asking = error.code == "ASK"
                    if not asking:
                        self.topology.moved(slot, redirect)
                elif error.denied:
                    cause = self._login.refused(str(server), error)
                elif not _passes(error):
                    raise
                elif error.code == "CLUSTERDOWN" and server is not None:
                    self.topology.doubt(server)
                elif error.code == "READONLY" and loop.time() - connection.opened_at > _READONLY_S:
                    # The server has become a replica: its name may lead to its successor, but only a new
                    # connection follows the name
                    connection.close()
            except ConnectionLost as error:
                redirect, asking = None, False
                cause = error
            again, redirected = redirected and redirect is not None, redirect is not None
            late = loop.time() + delay_s >= deadline and (redirect is None or again)
            if isinstance(cause, ConnectionRefused) and (late or not self._started):
                raise FabricRefused("Redis refuses the login", detail=cause) from cause
            if late:
                if redirect is None and not self._closed:
                    self._begin_refresh()  # for the next command: a silent host has used up this one's time
                raise FabricUnavailable(f"Redis did not answer in {limit_s:g} s", detail=cause) from cause
            if (redirect is None or again) and not self._closed:  # two nodes may redirect to each other for a while
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 0.2)
            if redirect is None and not self._closed:
                try:
                    async with asyncio.timeout_at(deadline):
                        await self.refresh()
                except TimeoutError:  # the query goes on for the next command
                    raise FabricUnavailable(f"Redis did not answer in {limit_s:g} s", detail=cause) from cause

    async def close(self) -> None:
        self._closed = True
        for task in [*self._connecting.values(), *filter(None, (self._refreshing, self._watching))]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionLost, ReplyError):
                await task
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def fabric_error(command: str, error: ReplyError | ConnectionLost, login: Login | None = None) -> FabricError:
    """Convert the failure of a command into the error that the adapter's callers get."""
    if isinstance(error, ConnectionLost):
        return FabricUnavailable(f"Redis did not answer {command}", detail=error)
    if error.code == "OOM":
        return FabricFull(f"Redis is at its memory limit (OOM) and refused {command}; retry later, or raise maxmemory")
    text = login.quote(error) if login is not None else str(error)
    if _passes(error) or error.code in ("MOVED", "ASK"):
        return FabricUnavailable(f"Redis does not serve {command} now", detail=text)
    return FabricFault(f"Redis refused {command}", detail=text)


def _passes(error: ReplyError) -> bool:
    """Whether the server's state that the reply tells of passes by itself."""
    return error.code in _RETRY or _MOVING in str(error)


def retrieve_error(future: asyncio.Future[Any]) -> None:
    """Retrieve a future's exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


class Partitions:
    """The partitions of the streams, and the cluster slot of each; keys of partition k have the hash tag ``{p<k>}``."""

    def __init__(self, count: int, *, new: bool = False) -> None:
        self.count = count
        self.new = new
        """True when this Redis had no number of partitions yet: it is unused, or has lost its data."""
        self.slots: Sequence[int] = [slot_of(f"p{k}") for k in range(count)]
