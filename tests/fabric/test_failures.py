"""Failures of a real Redis: links, servers, replicas that lack the tail, sentinels, moving slots.

A real agent with a small engine writes; a follower made of ``Reader``, ``Subscriber`` and ``watch`` reads, as a gateway
does. The claim is the same in every test: whole, once, in order, and the same bytes for ever.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

import msgspec
import pytest

from inference.agent.agent import Agent
from inference.agent.replica import AgentPolicy, LeasePolicy
from stream_fabric.errors import FabricFull, FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.pool.placement import Placed
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, Loaded, ReplicaInfo, Work
from stream_fabric.ports import FrameSink
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.redis import subscriber as subscriber_module
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.subscriber import Subscriber, partition_channels
from stream_fabric.redis.topology import SLOTS, slot_of
from stream_fabric.redis_url import Address, RedisUrl
from stream_fabric.stream.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.stream.frames import End, decode, is_end, is_text, text_parts
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import CreateCode
from stream_fabric.stream.reader import Gap, Need, Reader, Reset, Run, Step
from tests.support.agents import make_agent
from tests.support.proxy import Proxy
from tests.support.published import unpack_parts
from tests.support.redis import RedisCluster, RedisServer, SentinelSetup
from tests.support.waiting import PATIENCE_S, eventually

ACME = TenantId("acme")
POOL = "pool"
PARTITIONS = 4


class Teller:
    """An engine that says its numbers: ``count`` of them, ``pace_s`` apart."""

    def __init__(self, count: int = 60, pace_s: float = 0.01) -> None:
        self.count = count
        self.pace_s = pace_s
        self.tasks: dict[StreamId, asyncio.Task[None]] = {}
        self.aborted: list[StreamId] = []
        self.hold: asyncio.Event | None = None
        """When set, the engine waits for it before its last number."""

    async def start(self) -> Sequence[str]:
        return ["m"]

    async def serving(self) -> None:
        await asyncio.Event().wait()

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        self.tasks[request.stream] = asyncio.create_task(self._tell(sink))

    async def _tell(self, sink: FrameSink) -> None:
        sink.usage(5)
        for number in range(1, self.count + 1):
            if self.hold is not None and number == self.count:
                await self.hold.wait()
            sink.text(0, f"{number} ")
            await asyncio.sleep(self.pace_s)
        sink.end("completed")

    def abort(self, stream: StreamId) -> None:
        self.aborted.append(stream)
        task = self.tasks.pop(stream, None)
        if task is not None:
            task.cancel()

    def load(self) -> EngineLoad:
        return EngineLoad(len(self.tasks), 0, 256)

    def loaded(self) -> Loaded:
        return Loaded()

    async def close(self) -> None:
        for stream in list(self.tasks):
            self.abort(stream)


class Follower:
    """A gateway's worth of reading: one subscriber, readers, pages, and the watchdog."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.partitions = Partitions(PARTITIONS)
        self.name = GatewayId(f"g-{os.urandom(3).hex()}")
        self.log = RedisStreamLog(client, self.partitions)
        self.pools = RedisPools(client)
        self.readers: dict[StreamId, Reader] = {}
        self.lines: dict[StreamId, list[bytes]] = {}
        self.told: list[Step] = []
        self.subscribed: list[list[str]] = []
        self.subscriber = Subscriber(
            client, partition_channels(self.name, self.partitions.slots), self._receive, self._again
        )

    async def begin(self, replica: ReplicaId) -> StreamId:
        """Create a stream, place it and follow it."""
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        request = EngineRequest(stream, "chat", "m", msgspec.Raw(b"{}"))
        work = Work(request, str(Epoch(1, "aa")), ACME, b'{"facts":1}', None)
        self.readers[stream], self.lines[stream] = Reader(BEGINNING), []
        self.readers[stream].need = Need.LIVE
        code = await self.log.create(stream, Epoch(1, "aa"), ACME, work.facts, self.name)
        assert code in (CreateCode.CREATED, CreateCode.EXISTS)
        placed = await self.pools.place(POOL, work, [Candidate(replica, 0)], wait_s=60, jitter=0.0)
        assert isinstance(placed, Placed)
        return stream

    def _receive(self, payload: bytes) -> None:
        for stream, epoch, first, last, frames in unpack_parts(payload):
            if stream in self.readers:
                self._take(stream, self.readers[stream].receive_live(epoch.n, first, last, frames))

    def _again(self, names: list[str]) -> None:
        self.subscribed.append(names)
        for reader in self.readers.values():
            reader.recheck()

    def _take(self, stream: StreamId, steps: list[Step]) -> None:
        lines = self.lines[stream]
        for step in steps:
            match step:
                case Run(_, first, some):
                    assert first == len(lines) + 1, "invariant 3"
                    lines += some
                case Reset(_, to):
                    self.told.append(step)
                    del lines[to:]
                case Gap():
                    self.told.append(step)

    async def pages(self) -> None:
        """Read the log for whoever lacks frames; look at everybody now and then."""
        looked_at = 0.0
        while True:
            loop = asyncio.get_running_loop()
            if loop.time() - looked_at > 0.5:
                looked_at = loop.time()
                for reader in self.readers.values():
                    reader.recheck()
            for stream, reader in list(self.readers.items()):
                if reader.need is not Need.PAGE:
                    continue
                with suppress(FabricUnavailable):
                    page = await self.log.watch(stream, ACME, self.name, reader.cursor)
                    if page is not None and reader.need is Need.PAGE:
                        self._take(stream, reader.receive_page(page))
            await asyncio.sleep(0.01)

    def ended(self, stream: StreamId) -> bool:
        return self.readers[stream].need is Need.NOTHING

    async def check_whole(self, stream: StreamId, count: int) -> None:
        """The follower has everything once and in order, and so has the log."""
        texts = [text_parts(line)[2].decode() for line in self.lines[stream] if is_text(line)]
        assert texts == [f'"{n} "' for n in range(1, count + 1)]
        end = decode(self.lines[stream][-1])
        assert isinstance(end, End) and end.status == "completed"
        assert end.usage is not None and end.usage.output == count
        log: list[bytes] = []
        after = BEGINNING
        while True:
            page = await self.log.watch(stream, ACME, None, after)
            assert page is not None
            if not page.entries:
                break
            log += [line for entry in page.entries for line in entry.frames.split(b"\n")]
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)
        assert log == self.lines[stream], "invariant 2"
        assert sum(map(is_end, log)) == 1


@asynccontextmanager
async def running(url: str, engine: Teller, *, agent_url: str = "") -> AsyncIterator[tuple[Follower, Agent]]:
    """An agent and a follower with clients of their own."""
    ours, agents = RedisClient(url), RedisClient(agent_url or url)
    await ours.start()
    await agents.start()
    follower = Follower(ours)
    policy = AgentPolicy(LeasePolicy(POOL, "teller", ("m",), True, 3.0, 1.0), 0.3, 1.0)
    agent = make_agent(policy, engine, agents, Partitions(PARTITIONS))
    tasks = [asyncio.create_task(work) for work in (follower.subscriber.run(), follower.pages(), agent.run())]
    try:
        await follower.subscriber.wait_ready()
        await asyncio.wait_for(agent.ready.wait(), 5)
        yield follower, agent
        for task in tasks:
            if task.done():
                task.result()
                raise AssertionError("a task ended early")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await ours.close()
        await agents.close()


def port_of(url: str) -> int:
    return RedisUrl.parse(url).addresses[0].port


async def test_streams_whole_without_any_fault(redis_url: str) -> None:
    async with running(redis_url, Teller(40, 0.002)) as (follower, agent):
        streams = [await follower.begin(agent.replica) for _ in range(8)]
        await eventually(lambda: all(map(follower.ended, streams)), "the ends")
        for stream in streams:
            await follower.check_whole(stream, 40)
        assert follower.told == []
        await eventually(lambda: _flight(follower, agent), "invariant 7: the slots to be free")


async def _flight(follower: Follower, agent: Agent) -> bool:
    return await follower.pools.in_flight(POOL, agent.replica) == []


async def test_a_connection_cut_in_the_middle_of_its_replies(redis_url: str) -> None:
    """Every link of agent and follower is cut again and again, amid commands and messages."""
    port = port_of(redis_url)
    async with (
        Proxy.before(port) as agents,
        Proxy.before(port) as ours,
        running(ours.url, Teller(60, 0.01), agent_url=agents.url) as (follower, agent),
    ):
        streams = [await follower.begin(agent.replica) for _ in range(6)]
        for number, proxy in enumerate((agents, ours, agents, ours)):
            seen = sum(map(len, follower.lines.values()))
            proxy.cut_after_bytes(150 + 37 * number)
            before = proxy.accepted
            await eventually(lambda p=proxy, b=before: p.accepted > b, "a new connection")
            await eventually(lambda s=seen: sum(map(len, follower.lines.values())) > s, "the stream to go on")
        await eventually(lambda: all(map(follower.ended, streams)), "the ends")
        for stream in streams:
            await follower.check_whole(stream, 60)
        assert follower.told == []
        assert len(follower.subscribed) >= 2, "whoever listens is told to read the log"


async def test_a_cut_pipeline_is_sent_again(redis_url: str) -> None:
    async with Proxy.before(port_of(redis_url)) as proxy:
        client = RedisClient(proxy.url)
        await client.start()
        key = f"cut-{os.urandom(4).hex()}"
        proxy.delay_s = 0.02
        calls = [asyncio.create_task(client.execute(0, "HSET", key, n, n)) for n in range(200)]
        proxy.cut_after_bytes(100)
        await asyncio.gather(*calls)
        assert await client.execute(0, "HLEN", key) == 200
        assert proxy.accepted >= 2
        proxy.half_close_all()
        await eventually(lambda: proxy.open == 0, "the half-closed link to go")
        assert await client.execute(0, "DEL", key) == 1
        await client.close()


async def test_an_unreachable_redis_is_said_in_time(redis_url: str) -> None:
    async with Proxy.before(port_of(redis_url)) as proxy:
        client = RedisClient(proxy.url, timeout_s=0.4)
        await client.start()
        for fault in ("refuse", "pause"):
            if fault == "refuse":
                proxy.refuse = True
                proxy.cut_all()
            else:
                proxy.refuse = False
                assert await client.execute(0, "PING") == b"PONG"
                proxy.pause()
            started = asyncio.get_running_loop().time()
            with pytest.raises(FabricUnavailable):
                await client.execute(0, "PING")
            assert asyncio.get_running_loop().time() - started < 2.0
        proxy.resume()
        assert await eventually(lambda: client.execute(0, "PING")) == b"PONG"
        await client.close()


class Failover:
    """A topology that learns of the new server only when it is asked again."""

    def __init__(self, before: int, after: int) -> None:
        self._port, self._after = before, after

    def address(self, slot: int) -> Address:
        return Address("127.0.0.1", self._port)

    def moved(self, slot: int, to: Address) -> None: ...

    def doubt(self, node: Address) -> None: ...

    async def refresh(self) -> None:
        self._port = self._after


async def test_invariant_10_a_server_that_falls_silent_is_left_for_the_one_in_its_place(redis_url: str) -> None:
    """A dead host answers nothing, not even a refusal: each try takes as long as a command may."""
    async with Proxy.before(port_of(redis_url)) as proxy:
        client = RedisClient(proxy.url, timeout_s=0.4)
        await client.start()
        client.topology = Failover(proxy.port, port_of(redis_url))
        assert await client.execute(0, "PING") == b"PONG"
        proxy.pause()
        with pytest.raises(FabricUnavailable):
            await client.execute(0, "PING")

        async def answers() -> bool:
            with suppress(FabricUnavailable):
                return bool(await client.execute(0, "PING") == b"PONG")
            return False

        await eventually(answers, "the server in its place")
        await client.close()


async def test_a_server_that_became_a_replica_is_left_for_the_one_that_has_its_name() -> None:
    """Managed Redis and Kubernetes move a name to the new primary; connections to the old one stay open."""
    with RedisServer() as old, RedisServer() as new:
        async with Proxy.before(old.port) as name:
            client = RedisClient(name.url)
            await client.start()
            old("REPLICAOF", "127.0.0.1", new.port)
            name.point_at(new.port)
            await client.execute(0, "SET", "key", "value")
            assert new("GET", "key") == b"value" and name.accepted == 2
            await client.close()


class Silent(Failover):
    """A topology whose servers answer nothing."""

    async def refresh(self) -> None:
        await asyncio.Event().wait()


async def test_a_query_of_the_servers_does_not_outlast_the_command_that_waits_for_it(redis_url: str) -> None:
    """Several silent hosts are queried one after the other, each for as long as a query may take."""
    async with Proxy.before(port_of(redis_url)) as proxy:
        client = RedisClient(proxy.url, timeout_s=0.4)
        await client.start()
        client.topology = Silent(proxy.port, proxy.port)
        proxy.refuse = True
        proxy.cut_all()
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            with pytest.raises(FabricUnavailable, match=r"did not answer in 0\.4 s"):
                await client.execute(0, "PING")
        await client.close()


async def test_a_silent_node_does_not_keep_the_others_from_being_asked(redis_cluster_url: str) -> None:
    one = RedisUrl.parse(redis_cluster_url).addresses[0]
    async with Proxy.before(one.port, one.host) as proxy:
        proxy.pause()
        client = RedisClient(f"redis+cluster://127.0.0.1:{proxy.port},{one}")
        started = asyncio.get_running_loop().time()
        await client.start()
        assert asyncio.get_running_loop().time() - started < COMMAND_TIMEOUT_S / 2
        await client.close()


async def test_what_is_sent_once_is_not_sent_again_but_for_a_redirection(
    redis_url: str, redis_cluster_url: str
) -> None:
    async with Proxy.before(port_of(redis_url)) as proxy:
        client = RedisClient(proxy.url)
        await client.start()
        proxy.refuse = True
        proxy.cut_all()
        started = asyncio.get_running_loop().time()
        for _ in range(2):
            with pytest.raises(FabricUnavailable):
                await client.execute(0, "PING", timeout_s=0.0)
        assert asyncio.get_running_loop().time() - started < 2.0
        await client.close()
    cluster = RedisClient(redis_cluster_url)
    await cluster.start()
    slot = slot_of("once")
    elsewhere = next(a for s in range(SLOTS) if (a := cluster.topology.address(s)) != cluster.topology.address(slot))
    cluster.topology.moved(slot, elsewhere)
    assert await cluster.execute(slot, "SET", "{once}", "1", timeout_s=0.0) == b"OK"
    await cluster.close()


async def test_commands_of_a_closed_client_end_at_once(redis_url: str) -> None:
    async with Proxy.before(port_of(redis_url)) as proxy:
        client = RedisClient(proxy.url)
        await client.start()
        proxy.pause()
        waiting = asyncio.create_task(client.execute(0, "PING"))
        await asyncio.sleep(0)
        started = asyncio.get_running_loop().time()
        await client.close()
        with pytest.raises(FabricUnavailable, match="closed"):
            await waiting
        with pytest.raises(FabricUnavailable, match="closed"):
            await client.execute(0, "PING")
        assert asyncio.get_running_loop().time() - started < COMMAND_TIMEOUT_S / 2


async def test_a_server_out_of_memory_is_an_outage_not_a_crash(redis_server: RedisServer) -> None:
    engine = Teller(30, 0.01)
    async with running(redis_server.url, engine) as (follower, agent):
        stream = await follower.begin(agent.replica)
        await eventually(lambda: len(follower.lines[stream]) > 5)
        redis_server("CONFIG", "SET", "maxmemory", 1)
        small = RedisClient(redis_server.url, timeout_s=0.2)
        await small.start()
        with pytest.raises(FabricFull, match="memory limit"):
            await RedisStreamLog(small, Partitions(PARTITIONS)).put_placements([(stream, b"{}")])
        await small.close()
        redis_server("CONFIG", "SET", "maxmemory", 0)
        await eventually(lambda: follower.ended(stream), "the end")
        await follower.check_whole(stream, 30)


async def test_the_subscriber_reports_what_it_subscribed_again(redis_server: RedisServer) -> None:
    async with Proxy.before(redis_server.port) as proxy:
        client = RedisClient(proxy.url)
        await client.start()
        heard: list[bytes] = []
        told: list[list[str]] = []
        channels = partition_channels("me", Partitions(PARTITIONS).slots)
        subscriber = Subscriber(client, channels, heard.append, told.append)
        task = asyncio.create_task(subscriber.run())
        await subscriber.wait_ready()
        assert sorted(told.pop()) == sorted(channels)
        for number in range(3):
            if number < 2:
                proxy.cut_all()
            else:
                redis_server.restart()
            await eventually(lambda: told and subscriber.healthy, "a new subscription")
            assert sorted(name for names in told for name in names) == sorted(channels)
            told.clear()
            for name, slot in channels.items():
                assert await client.execute(slot, client.publish, name, b"%d" % number) == 1
            await eventually(lambda n=number: heard.count(b"%d" % n) == PARTITIONS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()


class Split:
    """A topology of two servers, one for each of the first two slots."""

    def __init__(self, *ports: int) -> None:
        self._ports = ports

    def address(self, slot: int) -> Address:
        return Address("127.0.0.1", self._ports[slot])

    def moved(self, slot: int, to: Address) -> None: ...

    def doubt(self, node: Address) -> None: ...

    async def refresh(self) -> None: ...


class Apart(NamedTuple):
    """A subscriber with one channel on each of two servers."""

    subscriber: Subscriber
    one: Proxy
    other: Proxy
    reported: list[str]
    """Channels that were subscribed."""


@asynccontextmanager
async def subscribed_apart(redis_url: str, timeout_s: float) -> AsyncIterator[Apart]:
    port = port_of(redis_url)
    async with Proxy.before(port) as one, Proxy.before(port) as other, asyncio.TaskGroup() as tasks:
        client = RedisClient(redis_url, timeout_s=timeout_s)
        await client.start()
        client.topology = Split(one.port, other.port)
        reported: list[str] = []
        subscriber = Subscriber(client, {"sg:{p0}:>a": 0, "sg:{p1}:>b": 1}, lambda message: None, reported.extend)
        running = tasks.create_task(subscriber.run())
        try:
            await subscriber.wait_ready()
            yield Apart(subscriber, one, other, reported)
        finally:
            running.cancel()
            await client.close()


async def test_a_silent_connection_is_noticed_while_another_server_is_away(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its channels are subscribed anew: a dead host sends neither messages nor an end of the connection."""
    async with subscribed_apart(redis_url, 0.4) as apart:
        apart.other.refuse = True
        apart.other.cut_all()
        await eventually(lambda: not apart.subscriber.healthy, "the loss to be noticed")
        apart.one.pause()
        await eventually(lambda: "subscription ping failed" in caplog.text, "the silence to be noticed")
        apart.one.resume()
        await eventually(lambda: apart.reported.count("sg:{p0}:>a") == 2, "its channel to be subscribed anew")


async def test_a_silent_server_delays_the_subscriptions_to_no_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "_PING_S", 0.05)
    async with subscribed_apart(redis_url, 2 * PATIENCE_S) as apart:
        apart.one.pause()
        unanswered = apart.subscriber._connections[Address("127.0.0.1", apart.one.port)]._waiting
        await eventually(lambda: unanswered, "a ping that is not answered")
        apart.other.cut_all()
        await eventually(lambda: apart.reported.count("sg:{p1}:>b") == 2, "the other's channel, subscribed anew")


@pytest.mark.parametrize("first", (True, False))
async def test_a_server_that_answers_no_subscription_delays_those_of_no_other(redis_url: str, first: bool) -> None:
    async with subscribed_apart(redis_url, 2 * PATIENCE_S) as apart:
        silent, works = (apart.one, apart.other) if first else (apart.other, apart.one)
        silent.pause()
        silent.cut_all()
        await eventually(lambda: len(silent.accepted_at) == 2, "an attempt to subscribe at the silent server")
        works.cut_all()
        name = "sg:{p1}:>b" if first else "sg:{p0}:>a"
        await eventually(lambda: apart.reported.count(name) == 2, "the other's channel, subscribed anew", 2.0)
        assert not apart.subscriber.healthy


class PoolsApart(Split):
    """A topology of two servers: the second one has the list of pools alone."""

    def address(self, slot: int) -> Address:
        return super().address(int(slot == slot_of("pools")))


@pytest.mark.parametrize("fault", ["refuse", "pause"])
async def test_a_replica_keeps_its_lease_while_the_list_of_pools_is_away(redis_url: str, fault: str) -> None:
    """The list is on one shard of a cluster. Its absence must not end the leases of all pools."""
    port, pool = port_of(redis_url), f"pool-{os.urandom(4).hex()}"
    async with Proxy.before(port) as listed:
        client = RedisClient(redis_url)
        await client.start()
        client.topology = PoolsApart(port, listed.port)
        pools = RedisPools(client)
        info = ReplicaInfo(ReplicaId("r"), pool, "test", ("m",), "ready", EngineLoad(0, 0, 8))
        if fault == "refuse":
            listed.refuse = True
            listed.cut_all()
        else:
            listed.pause()
        async with asyncio.timeout(1.0):
            for _ in range(3):
                await pools.report(info, ttl_s=3.0, running={})
        listed.refuse = False
        listed.resume()

        async def is_listed() -> bool:
            await pools.report(info, ttl_s=3.0, running={})
            return pool in await pools.pools()

        await eventually(is_listed, "the pool to be listed once the shard is back", 15.0)
        await pools.retire(pool, info.replica, leaving=True)
        await client.close()


class Elected:
    """A topology of one primary; ``refresh`` finds out which server it is now."""

    def __init__(self, port: int) -> None:
        self.port = self._known = port

    def address(self, slot: int) -> Address:
        return Address("127.0.0.1", self._known)

    def moved(self, slot: int, to: Address) -> None: ...

    def doubt(self, node: Address) -> None: ...

    async def refresh(self) -> None:
        self._known = self.port


async def test_a_subscriber_leaves_a_former_primary_that_still_answers(
    redis_url: str, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_fabric.redis.subscriber._PING_S", 0.05)
    client = RedisClient(redis_url)
    await client.start()
    client.topology = topology = Elected(port_of(redis_url))
    heard: list[bytes] = []
    reported: list[list[str]] = []
    subscriber = Subscriber(client, {"sg:{p0}:>me": 0}, heard.append, reported.append)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(subscriber.run())
        try:
            await subscriber.wait_ready()
            topology.port = redis_server.port  # no command of this process fails, so nothing else tells it
            await eventually(lambda: len(reported) == 2, "a subscription to the new primary")
            assert redis_server(client.publish, "sg:{p0}:>me", "news") == 1
            await eventually(lambda: heard == [b"news"], "the message")
        finally:
            running.cancel()
            await client.close()


async def test_invariant_10_redis_may_fail_over_restarted_empty(redis_server: RedisServer) -> None:
    """Total loss: the producer makes the log again from its buffer, the same bytes."""
    engine = Teller(50, 0.01)
    async with running(redis_server.url, engine) as (follower, agent):
        streams = [await follower.begin(agent.replica) for _ in range(3)]
        await eventually(lambda: all(len(follower.lines[s]) > 10 for s in streams))
        redis_server.restart()
        await eventually(lambda: all(map(follower.ended, streams)), "the ends")
        for stream in streams:
            await follower.check_whole(stream, 50)
        assert follower.told == []


async def test_a_cancel_that_comes_after_a_total_loss_stops_the_engine(redis_server: RedisServer) -> None:
    engine = Teller(2000, 0.01)
    async with running(redis_server.url, engine) as (follower, agent):
        stream = await follower.begin(agent.replica)
        await eventually(lambda: len(follower.lines[stream]) > 5)
        # In one step, so that the producer cannot come between
        key = f"sg:{{p{follower.log.partition(stream)}}}:{stream}:m"
        redis_server("EVAL", "redis.call('FLUSHALL') redis.call('HSET', KEYS[1], 'cx', '0', 't', 'acme')", 1, key)
        await eventually(lambda: stream in engine.aborted, "the engine to stop")
        assert stream not in agent.running
        assert redis_server("EXISTS", key[:-1] + "l") == 0


async def test_invariant_10_redis_may_fail_over_to_a_replica_without_the_tail() -> None:
    """The promoted replica lacks the last frames: the agent sends the same bytes again."""
    engine = Teller(60, 0.01)
    with RedisServer() as primary, RedisServer() as replica:
        replica.follow(primary)
        async with Proxy.before(primary.port) as proxy, running(proxy.url, engine) as (follower, agent):
            engine.hold = asyncio.Event()
            streams = [await follower.begin(agent.replica) for _ in range(4)]
            await eventually(lambda: all(len(follower.lines[s]) > 15 for s in streams))
            replica("REPLICAOF", "NO", "ONE")
            await eventually(lambda: all(len(follower.lines[s]) > 40 for s in streams))
            proxy.point_at(replica.port)
            primary.kill()
            engine.hold.set()
            await eventually(lambda: all(map(follower.ended, streams)), "the ends")
            for stream in streams:
                await follower.check_whole(stream, 60)
            assert follower.told == []


async def test_invariant_10_redis_may_fail_over_after_the_end() -> None:
    """The lost tail is the terminal alone: it is written again, for readers still to come."""
    engine = Teller(10, 0.005)
    with RedisServer() as primary, RedisServer() as replica:
        replica.follow(primary)
        async with Proxy.before(primary.port) as proxy, running(proxy.url, engine) as (follower, agent):
            engine.hold = asyncio.Event()
            stream, cancelled = await follower.begin(agent.replica), await follower.begin(agent.replica)
            await eventually(lambda: len(follower.lines[stream]) == 10 and len(follower.lines[cancelled]) == 10)
            await eventually(lambda: b"master_link_status:up" in replica("INFO", "replication"))
            replica("REPLICAOF", "NO", "ONE")
            reply = await follower.log.cancel(cancelled, ACME)
            assert reply.result == "accepted" and reply.at == Cursor(1, 10)
            engine.hold.set()
            await eventually(lambda: follower.ended(stream) and follower.ended(cancelled))
            proxy.point_at(replica.port)
            primary.kill()
            await eventually(lambda: _statuses(follower, [stream, cancelled], ["completed", "cancelled"]), "repair")
            await follower.check_whole(stream, 10)
            page = await follower.log.watch(cancelled, ACME, None, Cursor(1, 10))
            assert page is not None and page.entries[-1].frames.split(b"\n")[-1] == follower.lines[cancelled][-1]
            assert (await follower.log.cancel(cancelled, ACME)).at == Cursor(1, 10)


async def _statuses(follower: Follower, streams: list[StreamId], wanted: list[str]) -> bool:
    pages = [await follower.log.watch(s, ACME, None, BEGINNING) for s in streams]
    return [page and page.status for page in pages] == wanted


# --- Sentinel and cluster ----------------------------------------------------------------------------------


@pytest.mark.chaos
async def test_a_sentinel_failover(sentinel: SentinelSetup) -> None:
    engine = Teller(400, 0.01)
    async with running(sentinel.url, engine) as (follower, agent):
        streams = [await follower.begin(agent.replica) for _ in range(4)]
        await eventually(lambda: all(len(follower.lines[s]) > 15 for s in streams))
        old = sentinel.primary()
        old.kill()
        await eventually(lambda: sentinel.primary() is not old, "the sentinels to agree", 20)
        await eventually(lambda: all(map(follower.ended, streams)), "the ends", 30)
        for stream in streams:
            await follower.check_whole(stream, 400)
        assert follower.told == []


@pytest.mark.chaos
async def test_invariant_10_a_failover_that_an_operator_orders(sentinel: SentinelSetup) -> None:
    """The former primary goes on to take writes, which are lost: Sentinel makes it a replica ten seconds later."""
    engine = Teller(600, 0.01)
    async with running(sentinel.url, engine) as (follower, agent):
        streams = [await follower.begin(agent.replica) for _ in range(4)]
        await eventually(lambda: all(len(follower.lines[s]) > 15 for s in streams))
        old = sentinel.primary()
        sentinel.fail_over()

        async def has_moved() -> bool:
            await follower.client.refresh()  # as after any command that fails; none of the agent's does
            return follower.client.topology.address(0).port != old.port

        await eventually(has_moved, "the sentinels to agree", 5)
        reaper = asyncio.create_task(LeaseReaper(follower.pools, follower.log, HostClock(), HostRandom()).run())
        try:
            await eventually(lambda: all(map(follower.ended, streams)), "the ends", 9)
            assert old("ROLE")[0] == b"master", "it still takes writes"
        finally:
            reaper.cancel()
        for stream in streams:
            await follower.check_whole(stream, 600)
        assert follower.told == []


@asynccontextmanager
async def naming(*masters: int | None) -> AsyncIterator[str]:
    """Sentinels that name these masters by their ports, as the URL lists them; None: one that says nothing."""

    def sentinel(master: int | None) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while (data := await reader.read(4096)) and master is not None:
                port = str(master).encode()
                named = b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%b\r\n" % (len(port), port)
                writer.write(b"+OK\r\n" if b"HELLO" in data else named)
            await reader.read()
            writer.close()
            ended.append(master)

        return answer

    ended: list[int | None] = []
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(await asyncio.start_server(sentinel(m), "127.0.0.1", 0)) for m in masters
        ]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        yield "redis+sentinel://" + ",".join(f"127.0.0.1:{port}" for port in ports) + "/mymaster"
        await eventually(lambda: len(ended) >= len(masters), "the connections to end")


async def test_the_master_that_most_sentinels_name_is_taken() -> None:
    """A sentinel that a broken network cuts off with a former master goes on to name it."""
    for masters in ((1, 2, 2), (2, 2, 1), (None, 2, 2), (2, None, None)):
        async with naming(*masters) as url:
            client = RedisClient(url)
            async with asyncio.timeout(COMMAND_TIMEOUT_S / 2):
                await client.topology.refresh()
            assert client.topology.address(0).port == 2
            await client.close()


async def test_a_cluster_node_without_slots_does_not_hide_the_others() -> None:
    """A node that was started anew without its configuration answers, and knows of no other."""
    config: dict[str, str | int] = {"cluster-enabled": "yes", "cluster-require-full-coverage": "no"}
    with RedisServer(**config) as lost, RedisServer(**config) as node:
        node("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS // 2 - 1)
        client = RedisClient(f"redis+cluster://127.0.0.1:{lost.port},127.0.0.1:{node.port}", timeout_s=1)
        await client.refresh()
        assert client.topology.address(0).port == node.port, "the most that a node knows"
        node("CLUSTER", "ADDSLOTSRANGE", SLOTS // 2, SLOTS - 1)
        await eventually(lambda: b"cluster_state:ok" in node("CLUSTER", "INFO"))
        await client.start()
        assert await client.execute(slot_of("p0"), "SET", "sg:{p0}:x", 1) == b"OK"
        await client.close()


async def test_a_cluster_node_that_sees_no_majority_does_not_hide_the_others() -> None:
    """A primary that a broken network cuts off from its peers goes on to tell what it served before."""
    config: dict[str, str | int] = {"cluster-enabled": "yes", "cluster-node-timeout": 200}
    with RedisServer(**config) as cut_off, RedisServer(**config) as peer, RedisServer(**config) as successor:
        for number, node in enumerate((cut_off, peer), 1):
            node("CLUSTER", "SET-CONFIG-EPOCH", number)
        cut_off("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS // 2 - 1)
        peer("CLUSTER", "ADDSLOTSRANGE", SLOTS // 2, SLOTS - 1)
        cut_off("CLUSTER", "MEET", "127.0.0.1", peer.port, int(peer("CONFIG", "GET", "cluster-port")[1]))
        await eventually(lambda: b"cluster_state:ok" in cut_off("CLUSTER", "INFO"), "the two to meet")
        peer.kill()
        await eventually(lambda: b"cluster_state:fail" in cut_off("CLUSTER", "INFO"), "the loss to be noticed")
        successor("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        await eventually(lambda: b"cluster_state:ok" in successor("CLUSTER", "INFO"))
        client = RedisClient(f"redis+cluster://127.0.0.1:{cut_off.port},127.0.0.1:{successor.port}", timeout_s=1)
        await client.refresh()
        assert client.topology.address(0).port == cut_off.port
        assert await client.execute(0, "SET", "{3560}", 1) == b"OK"
        await client.refresh()
        assert client.topology.address(0).port == successor.port, "it does not come back"
        await client.close()


async def _work_on(cluster: RedisCluster, follower: Follower, agent: Agent, engine: Teller) -> list[StreamId]:
    streams: list[StreamId] = []
    while len({follower.log.partition(s) for s in streams}) < PARTITIONS:
        streams.append(await follower.begin(agent.replica))
    await eventually(lambda: all(len(follower.lines[s]) > 10 for s in streams), "the first tokens")
    return streams


@pytest.mark.chaos
async def test_a_slot_moves_while_its_streams_run(redis_cluster: RedisCluster) -> None:
    """ASK and TRYAGAIN while the keys move one by one, MOVED and new subscriptions after."""
    engine = Teller(300, 0.01)
    async with running(redis_cluster.url, engine) as (follower, agent):
        streams = await _work_on(redis_cluster, follower, agent, engine)
        for partition in range(PARTITIONS):
            slot = follower.partitions.slots[partition]
            move = await asyncio.to_thread(redis_cluster.move_slot, slot)
            for key in await asyncio.to_thread(move.keys):
                await asyncio.to_thread(move.migrate, [key])
                await asyncio.sleep(0.02)  # requests meet the slot with its keys on both sides
            await asyncio.to_thread(move.finish)
        await eventually(lambda: all(map(follower.ended, streams)), "the ends", 30)
        for stream in streams:
            await follower.check_whole(stream, 300)
        assert follower.told == []


@pytest.mark.chaos
async def test_a_script_waits_for_a_key_that_moves_ahead_of_its_slot(redis_cluster: RedisCluster) -> None:
    """Scripts make the names of most keys themselves, so that Redis redirects by the first one alone."""
    tag = f"moving-{os.urandom(4).hex()}"
    slot, source = slot_of(tag), f"return redis.call('GET', '{{{tag}}}:b')"
    client = RedisClient(redis_cluster.url)
    await client.start()
    try:
        for name in ("a", "b"):
            await client.execute(slot, "SET", f"{{{tag}}}:{name}", name)
        move = await asyncio.to_thread(redis_cluster.move_slot, slot)
        await asyncio.to_thread(move.migrate, [f"{{{tag}}}:b".encode()])
        sha = hashlib.sha1(source.encode()).hexdigest()
        reading = asyncio.create_task(client.run_script(slot, "read", sha, source, [1, f"{{{tag}}}:a"]))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.shield(reading)
        await asyncio.to_thread(move.finish)
        assert await reading == b"b"
    finally:
        await client.close()


@pytest.mark.chaos
async def test_a_primary_of_the_cluster_dies(redis_cluster: RedisCluster) -> None:
    engine = Teller(500, 0.01)
    async with running(redis_cluster.url, engine) as (follower, agent):
        streams = await _work_on(redis_cluster, follower, agent, engine)
        slot = follower.partitions.slots[follower.log.partition(streams[0])]
        killed = await asyncio.to_thread(redis_cluster.kill_primary_of, slot)
        await asyncio.to_thread(redis_cluster.wait_failover, slot, killed)
        await eventually(lambda: all(map(follower.ended, streams)), "the ends", 30)
        for stream in streams:
            await follower.check_whole(stream, 500)
        assert follower.told == []
