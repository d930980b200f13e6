"""Subscriptions that outlive lost connections, failovers and moved slots.

Pub/sub delivers at most once. After every new subscription a callback tells the owner that messages may have been
missed; it then reads the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S, RECONNECT_S_MAX
from stream_fabric.ports import Subscribe, Subscription
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.wire import Connection, ConnectionLost, ReplyError
from stream_fabric.redis_url import Address

log = logging.getLogger(__name__)

_PING_S = 2.0
_PINGS_A_REFRESH = 5
"""Pings after which the topology is queried: a server that is no longer the primary may answer pings for ever."""


class Subscriber(Subscription):
    """Subscription of one process to its channels, in Redis. ``channels``: name → slot."""

    def __init__(
        self,
        client: RedisClient,
        channels: Mapping[str, int],
        on_message: Callable[[bytes], None],
        on_subscribed: Callable[[list[str]], None],
    ) -> None:
        self._client = client
        self._slots = {name.encode(): slot for name, slot in channels.items()}
        self._on_message = on_message
        self._on_subscribed = on_subscribed
        self._sharded = client.publish == "SPUBLISH"
        self._missing = set(self._slots)
        self._subscribing: set[Address] = set()
        """Servers with an attempt to subscribe that goes on."""
        self._pending: dict[Address, set[bytes]] = {}
        self._fresh: list[bytes] = []
        self._connections: dict[Address, Connection] = {}
        self._owned: dict[Address, set[bytes]] = {}
        self._pinged: set[Connection] = set()
        """Connections whose last ping is not answered."""
        self._changed = asyncio.Event()
        self._ready = asyncio.Event()
        client.on_left(self._leave_former_primaries)

    async def wait_ready(self) -> None:
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await self._ready.wait()
        except TimeoutError:
            raise FabricUnavailable("cannot subscribe to the fabric's channels; is Redis healthy?") from None

    @property
    def healthy(self) -> bool:
        return not self._missing

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._keep_subscribed(tasks)
        finally:
            for connection in list(self._connections.values()):
                connection.close()

    async def _keep_subscribed(self, tasks: asyncio.TaskGroup) -> None:
        """Subscribe channels that are missing, and ping the connections every ``_PING_S`` seconds."""
        now = asyncio.get_running_loop().time
        delay_s, ping_at, pings = 0.01, now() + _PING_S, 0
        while True:
            if self._missing:
                await self._client.refresh()
                self._subscribe_missing(tasks)
            if now() >= ping_at:
                self._ping()
                pings += 1
                if pings % _PINGS_A_REFRESH == 0:
                    await self._client.refresh()
                self._leave_former_primaries()
                ping_at = now() + _PING_S
            if self._missing or self._subscribing:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, RECONNECT_S_MAX)
                continue
            delay_s = 0.01
            self._ready.set()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ping_at):
                    await self._changed.wait()

    def _subscribe_missing(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to subscribe all missing channels.

        Nothing waits for it: a server that is silent must not delay the channels of the others.
        """
        by_address: dict[Address, list[bytes]] = {}
        for name in self._missing:
            try:
                by_address.setdefault(self._client.topology.address(self._slots[name]), []).append(name)
            except ConnectionLost as error:
                log.warning("subscription delayed, retrying: error=%s", error)
                return
        for address, names in by_address.items():
            if address not in self._subscribing:
                self._subscribing.add(address)
                tasks.create_task(self._subscribe(address, names))

    async def _subscribe(self, address: Address, names: Sequence[bytes]) -> None:
        """Try once to subscribe the channels at a server; call ``on_subscribed`` with those that succeeded."""
        try:
            await self._ask(await self._connection(address), address, names)
        except (ConnectionLost, ReplyError) as error:
            log.warning("subscription failed, retrying: server=%s error=%s", address, error)
        finally:
            self._subscribing.discard(address)
        fresh, self._fresh = self._fresh, []
        if fresh:
            self._on_subscribed([name.decode() for name in fresh])

    async def _ask(self, connection: Connection, address: Address, names: Sequence[bytes]) -> None:
        """Send the subscriptions and wait for the replies. The connection of a server that is silent is closed."""
        pending = self._pending[address] = set(names)
        verb = "SSUBSCRIBE" if self._sharded else "SUBSCRIBE"
        for name in names:  # one command a channel: in a cluster each may be of another slot
            connection.send(verb, name)
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S / 2):
                while pending and not connection.lost:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            connection.close()
        finally:
            del self._pending[address]

    async def _connection(self, address: Address) -> Connection:
        """Return this subscriber's connection to a server, and open it if needed."""
        connection = self._connections.get(address)
        if connection is None or connection.lost:
            connection = await self._client.dedicated(
                address,
                on_push=lambda push: self._receive_push(address, push),
                on_lost=lambda: self._receive_connection_lost(address),
            )
            self._connections[address] = connection
            self._owned[address] = set()
        return connection

    def _ping(self) -> None:
        """Ping the connections. Nothing waits for the answers: a silent server must not delay the other channels."""
        for connection in self._connections.values():
            if connection in self._pinged:
                continue
            self._pinged.add(connection)
            connection.call("PING").add_done_callback(partial(self._receive_pong, connection))

    def _receive_pong(self, connection: Connection, pong: asyncio.Future[Any]) -> None:
        self._pinged.discard(connection)
        if not pong.cancelled() and (error := pong.exception()) is not None:
            log.warning("subscription ping failed, reconnecting: error=%s", error)
            connection.close()

    def _leave_former_primaries(self) -> None:
        """Close connections to servers that serve the slot of none of their channels any more."""
        for address, names in list(self._owned.items()):
            try:
                serving = {self._client.topology.address(self._slots[name]) for name in names}
            except ConnectionLost:  # no primary is known
                continue
            if names and address not in serving:
                log.warning("subscribed server is no longer the primary, moving: server=%s", address)
                self._connections[address].close()

    def _receive_push(self, address: Address, push: list[Any]) -> None:
        """Handle a message, or the result of a subscribe or unsubscribe."""
        match push:
            case [b"message" | b"smessage", _, payload]:
                self._on_message(payload)
            case [b"subscribe" | b"ssubscribe", name, _]:
                self._missing.discard(name)
                self._pending.get(address, set()).discard(name)
                self._owned[address].add(name)
                self._fresh.append(name)
                self._changed.set()
            case [b"unsubscribe" | b"sunsubscribe", name, _]:  # its slot moved away
                self._owned[address].discard(name)
                self._missing.add(name)
                self._changed.set()
            case [b"error", error]:  # the reply does not name the channel: all pending ones are retried
                log.warning("subscription refused, retrying: error=%s", error)
                self._pending.get(address, set()).clear()
                self._changed.set()

    def _receive_connection_lost(self, address: Address) -> None:
        """Mark the channels of a lost connection as missing."""
        self._connections.pop(address, None)
        self._missing |= self._owned.pop(address, set())
        self._changed.set()


def subscriptions(client: RedisClient, partitions: Partitions) -> Subscribe:
    """Make the ``ports.Subscribe`` function of this Redis."""

    def subscribe(
        peer: str, on_message: Callable[[bytes], None], on_subscribed: Callable[[list[str]], None]
    ) -> Subscription:
        return Subscriber(client, partition_channels(peer, partitions.slots), on_message, on_subscribed)

    return subscribe


def partition_channels(peer: str, slots: Iterable[int]) -> dict[str, int]:
    """Map the channels of ``peer`` (a gateway or an agent), one per partition, to their slots."""
    return {f"sg:{{p{k}}}:>{peer}": slot for k, slot in enumerate(slots)}
