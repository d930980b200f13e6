"""Commands to a single Redis, to Sentinel's master, or to a Redis Cluster, with one retry loop.

Every script of ours is idempotent, so a command whose fate is unknown is sent again until its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl as ssl_module
from binascii import crc_hqx
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.redis.wire import Arg, Connection, ConnectionLost, Push, ReplyError

SLOTS = 16384
_RETRY = {"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "NOREPLICAS", "BUSY", "OOM", "MISCONF"}


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def slot_of(tag: str) -> int:
    """The cluster slot of the keys with hash tag ``{tag}``."""
    return crc_hqx(tag.encode(), 0) % SLOTS


@dataclass(frozen=True)
class RedisUrl:
    """Where Redis is: ``redis://host:6379/0``, ``rediss://`` with TLS, ``redis+sentinel://a:26379,b:26379/mymaster``,
    ``redis+cluster://a:6379,b:6379``; credentials as ``user:password@``."""

    mode: str
    addresses: tuple[Address, ...]
    username: str | None
    password: str | None
    database: int
    master: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises ValueError that says what is allowed."""
        parts = urlsplit(url)
        modes = {
            "redis": ("single", False),
            "rediss": ("single", True),
            "redis+sentinel": ("sentinel", False),
            "rediss+sentinel": ("sentinel", True),
            "redis+cluster": ("cluster", False),
            "rediss+cluster": ("cluster", True),
        }
        if parts.scheme not in modes:
            raise ValueError(
                f"a Redis URL starts with one of {', '.join(f'{m}://' for m in modes)}; got {parts.scheme!r}"
            )
        mode, tls = modes[parts.scheme]
        credentials, _, hosts = parts.netloc.rpartition("@")
        user, colon, password = credentials.partition(":")
        default_port = 26379 if mode == "sentinel" else 6379
        addresses = []
        for host in hosts.split(","):
            name, _, port = host.rpartition(":") if ":" in host else (host, "", "")
            if not name or (port and not port.isdecimal()):
                raise ValueError(f"a Redis URL names hosts as host:port, separated by commas; got {hosts!r}")
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
        )


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

    def __init__(self, url: RedisUrl) -> None:
        self._url = url
        self._address: Address | None = None

    def address(self, slot: int) -> Address:
        if self._address is None:
            raise ConnectionLost("no sentinel has named a master yet")
        return self._address

    def moved(self, slot: int, to: Address) -> None: ...

    async def refresh(self) -> None:
        failures = []
        for sentinel in self._url.addresses:
            try:
                connection = await Connection.connect(sentinel.host, sentinel.port, timeout_s=1.0)
                try:
                    reply = await connection.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.master)
                finally:
                    connection.close()
            except (ConnectionLost, ReplyError) as error:
                failures.append(f"{sentinel}: {error}")
                continue
            if reply:
                self._address = Address(reply[0].decode(), int(reply[1]))
                return
            failures.append(f"{sentinel}: does not know the master {self._url.master!r}")
        raise ConnectionLost("; ".join(failures))


class Cluster:
    def __init__(self, url: RedisUrl, connect: Connect) -> None:
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
        for node in dict.fromkeys([*(a for a in self._slots[:: SLOTS // 64] if a), *self._seeds]):
            try:
                reply = await (await self._connect(node)).call("CLUSTER", "SLOTS")
            except (ConnectionLost, ReplyError) as error:
                failures.append(f"{node}: {error}")
                continue
            slots: list[Address | None] = [None] * SLOTS
            for start, end, primary, *_ in reply:
                host = primary[0].decode() if primary[0] else node.host
                slots[start : end + 1] = [Address(host, primary[1])] * (end - start + 1)
            self._slots = slots
            return
        raise ConnectionLost("no node of the cluster answers: " + "; ".join(failures))


class RedisClient:
    """Commands by slot. One pipelined connection a server; ``dedicated`` gives another for a blocking caller."""

    def __init__(self, url: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self.url = RedisUrl.parse(url)
        self._timeout_s = timeout_s
        self._ssl = ssl_module.create_default_context() if self.url.tls else None
        self._connections: dict[Address, Connection] = {}
        self._connecting: dict[Address, asyncio.Task[Connection]] = {}
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False
        self.topology: Topology
        if self.url.mode == "cluster":
            self.topology = Cluster(self.url, self.connection)
        else:
            self.topology = Sentinel(self.url) if self.url.mode == "sentinel" else Single(self.url)
        self.publish = "PUBLISH"
        self.publish_is_counted = True

    async def start(self) -> None:
        """Find the servers and what they offer. Raises FabricUnavailable."""
        try:
            await self.topology.refresh()
        except (ConnectionLost, ReplyError) as error:
            raise FabricUnavailable(f"cannot reach Redis: {error}") from error
        info = await self.execute(0, "COMMAND", "INFO", "SPUBLISH")
        sharded = bool(info and info[0])
        self.publish = "SPUBLISH" if sharded else "PUBLISH"
        # A classic publish in a cluster reaches the other nodes' subscribers but does not count them
        self.publish_is_counted = sharded or self.url.mode != "cluster"

    async def dedicated(
        self, address: Address, *, on_push: Push | None = None, on_lost: Callable[[], None] | None = None
    ) -> Connection:
        return await Connection.connect(
            address.host,
            address.port,
            timeout_s=self._timeout_s,
            username=self.url.username,
            password=self.url.password,
            database=self.url.database,
            ssl=self._ssl,
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
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self.topology.refresh())
        with contextlib.suppress(ConnectionLost, ReplyError):
            await asyncio.shield(self._refreshing)

    async def execute(self, slot: int, *args: Arg, timeout_s: float | None = None) -> Any:
        """Run one idempotent command where the slot lives. Raises ReplyError or FabricUnavailable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout_s or self._timeout_s)
        delay_s = 0.005
        redirect: Address | None = None
        asking = False
        while True:
            try:
                connection = await self.connection(redirect or self.topology.address(slot))
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
                elif error.code not in _RETRY:
                    raise
            except ConnectionLost as error:
                redirect, asking = None, False
                cause = error
            if loop.time() + delay_s >= deadline:
                raise FabricUnavailable(
                    f"Redis did not answer in {timeout_s or self._timeout_s:g} s: {cause}"
                ) from cause
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

    def __init__(self, count: int) -> None:
        self.count = count
        self.slots: Sequence[int] = [slot_of(f"p{k}") for k in range(count)]
