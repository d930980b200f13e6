"""A gateway's services in the test's own process: real Redis behind links that a test can cut or slow down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import msgspec

from stream_fabric.errors import StreamGwError
from stream_fabric.events import RequestTrace
from stream_fabric.ports import Clock, Pools, StreamLog
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.failover import Failover
from stream_fabric.redis.client import Address, Partitions, RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import Status
from stream_fabric.stream.ids import GatewayId, ReplicaId, TenantId
from stream_fabric.stream.reader import Gap, Reset
from stream_gw.auth import ALL_SCOPES, Authenticator, KeyStore, Principal
from stream_gw.auth.tokens import TokenSigner
from stream_gw.delivery.hub import Hub
from stream_gw.dialects.requests import CreateRequest, parse_create
from stream_gw.observe.trace import ReaderTrace, Tracer
from stream_gw.routing.directory import Directory
from stream_gw.routing.queue_positions import QueuePositions
from stream_gw.settings import GatewaySettings
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.parts import GatewayParts
from tests.fabric.test_placement import FAR_S, info_of
from tests.support.events import Heard
from tests.support.proxy import Proxy

TENANT = TenantId("acme")
WHO = Principal(TENANT, ALL_SCOPES)
TIMEOUT_S = 0.2
SETTINGS = GatewaySettings.model_construct(
    queue_wait_s=60.0, plain_grace_s=2.0, kept_grace_s=30.0, ready_without_redis_s=30.0
)


class Silence:
    """A ``Subscription`` that nothing is published to."""

    healthy = True

    async def wait_ready(self) -> None: ...

    async def run(self) -> None: ...


def silent(peer: str, on_message: Callable[[bytes], None], on_subscribed: Callable[[list[str]], None]) -> Silence:
    return Silence()


class Reading:
    """An outlet that keeps what it is called with."""

    full = False

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.places: list[tuple[int, int]] = []
        self.failures: list[tuple[StreamGwError, Cursor]] = []
        self.ended: list[Status] = []

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        self.lines += lines

    def gap(self, gap: Gap) -> bool:
        return True

    def reset(self, reset: Reset) -> bool:
        return True

    def epoch_changed(self, epoch: str, head: int) -> None: ...

    def queued(self, position: int, of: int, warming_s: float | None) -> None:
        self.places.append((position, of))

    def end(self, status: Status) -> None:
        self.ended.append(status)

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        self.failures.append((error, cursor))


def failover_of(log: StreamLog) -> Failover:
    """A failover that can end streams, and place none."""
    return Failover(cast(Pools, None), log, HostClock(), HostRandom())


@dataclass
class InProcess:
    """``log_link`` and ``pools_link`` carry the commands of the gateway; ``log`` and ``index`` are the test's own."""

    gateway: Gateway
    log_link: Proxy
    pools_link: Proxy
    accounts_link: Proxy
    log: RedisStreamLog
    pools: RedisPools
    index: RedisIndex
    model: str
    replica: ReplicaId
    heard: Heard

    @property
    def traces(self) -> list[RequestTrace]:
        return [event for event in self.heard.events if isinstance(event, RequestTrace)]

    def call(self, *, key: str | None = None, **fields: object) -> CreateCall:
        trace = ReaderTrace(self.gateway.parts.tracer, "req", "sse")
        return CreateCall(WHO, self.request(**fields), trace, key=key, dialect="openai.chat")

    def request(self, **fields: object) -> CreateRequest:
        body = {"model": self.model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields}
        return parse_create(msgspec.json.encode(body), "chat")


@asynccontextmanager
async def in_process(
    client: RedisClient,
    clock: Clock | None = None,
    keys: KeyStore | None = None,
    settings: GatewaySettings = SETTINGS,
) -> AsyncIterator[InProcess]:
    """A gateway whose pool has one replica with room. ``client``: the test's own connection to the same Redis."""
    address = Address(*client.url.addresses[0])
    clock = clock or HostClock()
    async with (
        Proxy.before(address.port, address.host) as log_link,
        Proxy.before(address.port, address.host) as pools_link,
        Proxy.before(address.port, address.host) as accounts_link,
        asyncio.TaskGroup() as tasks,
    ):
        log_client, pools_client = RedisClient(log_link.url), RedisClient(pools_link.url, timeout_s=TIMEOUT_S)
        await log_client.start()
        await pools_client.start()
        accounts_client = RedisClient(accounts_link.url, timeout_s=TIMEOUT_S)
        await accounts_client.start()
        log, pools, index = RedisStreamLog(client, Partitions(4)), RedisPools(client), RedisIndex(client)
        model = f"m-{HostRandom().token_hex(4)}"
        info = msgspec.structs.replace(info_of("a", models=(model,)), pool=model)
        await pools.report(info, ttl_s=FAR_S, running={})
        linked_pools = RedisPools(pools_client)
        directory = Directory(linked_pools, RedisControl(client).plans)
        await directory.refresh()
        await directory.pool_of(model)
        name, linked_log = GatewayId("g"), RedisStreamLog(log_client, Partitions(4))
        hub = Hub(name, linked_log, clock, silent, tasks)
        heard = Heard()
        parts = GatewayParts(
            name,
            settings,
            Authenticator(keys or KeyStore(), TokenSigner(bytes(16))),
            linked_log,
            linked_pools,
            index,
            RedisAccounts(accounts_client),
            clock,
            HostRandom(),
            hub,
            directory,
            QueuePositions(linked_pools, directory, clock.now_us, hub.local),
            Tracer(heard, clock, name),
        )
        try:
            gateway = Gateway(parts)
            yield InProcess(gateway, log_link, pools_link, accounts_link, log, pools, index, model, info.replica, heard)
        finally:
            for link in (log_link, pools_link, accounts_link):
                link.refuse, link.delay_s = False, 0.0
                link.resume()
            await pools.retire(model, info.replica, leaving=True)
            await log_client.close()
            await pools_client.close()
            await accounts_client.close()
