"""Which server serves a slot: a single Redis, Sentinel's master, or the nodes of a cluster."""

from __future__ import annotations

import asyncio
import logging
from binascii import crc_hqx
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.wire import Connection, ConnectionLost, ConnectionRefused, Login, ReplyError
from stream_fabric.redis_url import Address, RedisUrl

log = logging.getLogger(__name__)

SLOTS = 16384
_QUERY_TIMEOUT_S = 1.0
"""Timeout of one topology query; after it the next node is asked."""
_QUERIED_MAX = 64
"""Known nodes that are queried before the addresses of the URL."""
_SWITCHED = b"+switch-master"
"""Channel on which a sentinel tells of a new master."""
_LISTEN_PING_S = 5.0
_LISTEN_AGAIN_S = 2.0
_AGREE_S = 3.0
"""Time for most sentinels to name the new master after the first one told of it."""
_AGREE_EVERY_S = 0.03
_TOLD_MAX = 64
"""Messages of new masters that wait; over: further ones are passed over, and the queries find the master."""


def slot_of(tag: str) -> int:
    """Compute the cluster slot of the keys with hash tag ``{tag}``."""
    return crc_hqx(tag.encode(), 0) % SLOTS


class Topology(Protocol):
    """Map from cluster slots to Redis servers."""

    def address(self, slot: int) -> Address:
        """Return the server of the slot. Raises ConnectionLost while none is known."""

    def moved(self, slot: int, to: Address) -> None:
        """Apply a MOVED reply: the server ``to`` now serves the slot."""

    def doubt(self, node: Address) -> None:
        """Apply a CLUSTERDOWN reply: the node may be cut off from the others, and know only a former map."""

    async def refresh(self) -> None:
        """Query the servers for the map and replace it. Raises ConnectionLost or ReplyError if none answers."""


Connect = Callable[[Address], Awaitable[Connection]]


class Single:
    """Map of all slots to one server, whose address never changes."""

    def __init__(self, url: RedisUrl) -> None:
        self._address = url.addresses[0]

    def address(self, slot: int) -> Address:
        return self._address

    def moved(self, slot: int, to: Address) -> None:
        raise FabricUnavailable("Redis is a cluster node; use redis+cluster:// in its URL", detail=self._address)

    def doubt(self, node: Address) -> None: ...

    async def refresh(self) -> None: ...


class Sentinel:
    """Map of all slots to the master that the sentinels report."""

    def __init__(self, url: RedisUrl, login: Login, on_left: Callable[[Address], None]) -> None:
        """``on_left`` is called with each former master, once its successor is known."""
        self._url = url
        self._login = login
        self._on_left = on_left
        self._address: Address | None = None

    def address(self, slot: int) -> Address:
        if self._address is None:
            raise ConnectionLost("no sentinel has reported a master yet")
        return self._address

    def moved(self, slot: int, to: Address) -> None: ...

    def doubt(self, node: Address) -> None: ...

    async def refresh(self) -> None:
        """Take the master that most sentinels name; one that is cut off from the others may name a former one."""
        asked = [asyncio.create_task(self._query_master(sentinel)) for sentinel in self._url.addresses]
        pending, answers = set(asked), Counter[Address]()
        try:
            while pending and max(answers.values(), default=0) <= len(asked) // 2:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                answers = Counter(task.result() for task in asked if task.done() and task.exception() is None)
        finally:
            for task in pending:
                task.cancel()
        if answers:
            before, self._address = self._address, answers.most_common(1)[0][0]
            if before is not None and before != self._address:
                self._on_left(before)
            return
        failures = [task.exception() for task in asked]
        refused = next((error for error in failures if isinstance(error, ConnectionRefused)), None)
        raise refused or ConnectionLost("; ".join(map(str, failures)))

    async def watch(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Call ``refresh`` when a sentinel tells of a new master, until most of them name it; run until cancelled.

        In a failover that an operator orders, the former master takes writes for ten seconds more. They are lost.
        """
        told: asyncio.Queue[Address] = asyncio.Queue(_TOLD_MAX)
        async with asyncio.TaskGroup() as tasks:
            for sentinel in self._url.addresses:
                tasks.create_task(self._listen(sentinel, told))
            while True:
                master, before = await told.get(), self._address
                try:
                    async with asyncio.timeout(_AGREE_S):
                        while self._address == before != master:
                            await refresh()
                            await asyncio.sleep(_AGREE_EVERY_S)
                except TimeoutError:
                    log.warning("most sentinels do not name the new master that one told of: master=%s", master)

    async def _listen(self, sentinel: Address, told: asyncio.Queue[Address]) -> None:
        """Put each new master that this sentinel tells of into ``told``, until cancelled or refused."""
        while True:
            try:
                await self._hear(sentinel, told)
            except ConnectionLost:  # the queries of the master say why
                await asyncio.sleep(_LISTEN_AGAIN_S)
            except ReplyError as error:
                log.warning(
                    "sentinel may not tell of a new master, a failover by hand is noticed late: sentinel=%s error=%s; "
                    "give its user +subscribe and &+switch-master",
                    sentinel,
                    self._login.quote(error),
                )
                return

    async def _hear(self, sentinel: Address, told: asyncio.Queue[Address]) -> None:
        """Subscribe once and listen. Raises ConnectionLost, or ReplyError if the sentinel refuses."""
        refused: list[ReplyError] = []

        def receive(push: list[Any]) -> None:
            match push:
                case [b"message", _, payload]:
                    name, _, _, host, port = payload.decode().split(" ")
                    if name == self._url.master and not told.full():
                        told.put_nowait(Address(host, int(port)))
                case [b"error", error]:
                    refused.append(error)

        connection = await Connection.connect(*sentinel, timeout_s=_QUERY_TIMEOUT_S, login=self._login, on_push=receive)
        try:
            connection.send("SUBSCRIBE", _SWITCHED)
            while True:
                # A sentinel's user has the right to it, and perhaps not to PING
                await connection.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.master)
                if refused:
                    raise refused[0]
                await asyncio.sleep(_LISTEN_PING_S)
        finally:
            connection.close()

    async def _query_master(self, sentinel: Address) -> Address:
        """Query one sentinel for the master. Raises ConnectionLost."""
        try:
            async with asyncio.timeout(_QUERY_TIMEOUT_S):
                connection = await Connection.connect(*sentinel, timeout_s=_QUERY_TIMEOUT_S, login=self._login)
                try:
                    reply = await connection.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.master)
                finally:
                    connection.close()
        except TimeoutError as error:
            raise ConnectionLost(f"{sentinel}: no answer in {_QUERY_TIMEOUT_S:g} s") from error
        except ConnectionRefused:
            raise
        except (ConnectionLost, ReplyError) as error:
            if isinstance(error, ReplyError) and error.denied:
                raise self._login.refused(str(sentinel), error) from error
            raise ConnectionLost(f"{sentinel}: {error}") from error
        if not reply:
            raise ConnectionLost(f"{sentinel}: does not know the master {self._url.master!r}")
        return Address(reply[0].decode(), int(reply[1]))


class Cluster:
    """Map of slots to the primaries of a Redis Cluster, from CLUSTER SLOTS."""

    def __init__(self, url: RedisUrl, login: Login, connect: Connect) -> None:
        self._login = login
        self._connect = connect
        self._seeds = url.addresses
        self._slots: list[Address | None] = [None] * SLOTS
        self._doubted: Address | None = None
        """The node to query last."""

    def address(self, slot: int) -> Address:
        address = self._slots[slot]
        if address is None:
            raise ConnectionLost(f"no node of the cluster serves slot {slot}")
        return address

    def moved(self, slot: int, to: Address) -> None:
        self._slots[slot] = to

    def doubt(self, node: Address) -> None:
        self._doubted = node

    async def refresh(self) -> None:
        failures = []
        refused: ConnectionRefused | None = None
        best: list[Address | None] = []
        known = dict.fromkeys([*(a for a in self._slots[:: SLOTS // _QUERIED_MAX] if a), *self._seeds])
        for node in sorted(known, key=lambda node: node == self._doubted):
            try:
                async with asyncio.timeout(_QUERY_TIMEOUT_S):
                    reply = await (await self._connect(node)).call("CLUSTER", "SLOTS")
            except TimeoutError:
                failures.append(f"{node}: no answer in {_QUERY_TIMEOUT_S:g} s")
                continue
            except (ConnectionLost, ReplyError) as error:
                if isinstance(error, ReplyError) and error.denied:
                    error = self._login.refused(str(node), error)
                refused = refused or (error if isinstance(error, ConnectionRefused) else None)
                failures.append(f"{node}: {error}")
                continue
            slots: list[Address | None] = [None] * SLOTS
            for start, end, primary, *_ in reply:
                host = primary[0].decode() if primary[0] else node.host
                slots[start : end + 1] = [Address(host, primary[1])] * (end - start + 1)
            if None not in slots:
                self._slots = slots
                return
            # A node that has lost its configuration, or is not part of the cluster yet, knows of few slots or none
            failures.append(f"{node}: knows the nodes of {SLOTS - slots.count(None)} of {SLOTS} slots")
            if not best or slots.count(None) < best.count(None):
                best = slots
        if any(best):
            self._slots = best
            return
        raise refused or ConnectionLost("no node of the cluster answers: " + "; ".join(failures))
