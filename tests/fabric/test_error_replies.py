"""Redis answers with an error at any moment: callers get a FabricError, and no loop of a process ends."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import hiredis
import msgspec
import pytest

from stream_fabric.errors import BadRequest, FabricError, FabricFault, FabricFull, FabricUnavailable
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, ReplicaInfo, Work
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.redis.client import Partitions, RedisClient, fabric_error
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.events import RedisEvents
from stream_fabric.redis.inbox import RedisInbox
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.ingest import RedisIngest
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from stream_fabric.redis.wire import ConnectionLost, ReplyError
from stream_fabric.redis_url import Address
from stream_fabric.stream.cursor import BEGINNING, Epoch
from stream_fabric.stream.frames import ErrorInfo, Usage
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, UserId
from stream_fabric.stream.log import Append
from tests.fabric.test_failures import PARTITIONS, Teller, running
from tests.support.redis import RedisServer, free_port
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
ACME = TenantId("acme")
STREAM, REPLICA = StreamId("strm_0123456789abcdef0123456789abcdef"), ReplicaId("r-1")
CASES = ("READONLY", "NOSCRIPT", "LOADING", "MASTERDOWN", "OOM")


@asynccontextmanager
async def failing(server: RedisServer, case: str) -> AsyncIterator[None]:
    """Make the server answer most commands with this error."""
    match case:
        case "OOM":
            server("CONFIG", "SET", "maxmemory", 1)
            yield
            server("CONFIG", "SET", "maxmemory", 0)
        case "NOSCRIPT":
            server("SCRIPT", "FLUSH")
            yield
        case "READONLY" | "MASTERDOWN":
            server("CONFIG", "SET", "replica-serve-stale-data", "yes" if case == "READONLY" else "no")
            server("REPLICAOF", "127.0.0.1", free_port())
            yield
            server("REPLICAOF", "NO", "ONE")
        case "LOADING":
            for number in range(2000):
                server("SET", f"filler:{number}", "x" * 100)
            server("CONFIG", "SET", "loading-process-events-interval-bytes", 1024)
            server("CONFIG", "SET", "key-load-delay", 1000)
            reload = asyncio.create_task(asyncio.to_thread(server, "DEBUG", "RELOAD"))
            await eventually(lambda: b"loading:1" in server("INFO", "persistence"), "the load")
            yield
            await reload


@pytest.fixture
def debuggable() -> RedisServer:
    return RedisServer(**{"enable-debug-command": "yes"})


def calls(client: RedisClient) -> dict[str, Callable[[], Awaitable[object]]]:
    """One call of each method of the adapter."""
    unbilled = RedisUnbilled(client, Partitions(PARTITIONS))
    pools, streams = RedisPools(client), RedisStreamLog(client, Partitions(PARTITIONS))
    index, control, events = RedisIndex(client), RedisControl(client), RedisEvents(client)
    inbox, ingest = RedisInbox(client, "pool", REPLICA), RedisIngest(client, "me", 1000)
    info = ReplicaInfo(REPLICA, "pool", "test", ("m",), "ready", EngineLoad(0, 0, 8))
    work = Work(EngineRequest(STREAM, "chat", "m", msgspec.Raw(b"{}")), "1.aa", ACME, b"{}", None)
    epoch, error = Epoch(1, "aa"), ErrorInfo.of(BadRequest("x"))
    append = Append(STREAM, str(epoch), 1, 1, b"x", Usage(), b"", "")
    return {
        "report": lambda: pools.report(info, ttl_s=3.0, running={}),
        "pools": pools.pools,
        "replicas": lambda: pools.replicas("pool"),
        "slot_uses": lambda: pools.slot_uses("pool"),
        "place": lambda: pools.place("pool", work, [Candidate(REPLICA, 0)], wait_s=1.0, jitter=0.0),
        "remove_queued": lambda: pools.remove_queued("pool", [STREAM]),
        "queue_positions": lambda: pools.queue_positions("pool", [STREAM]),
        "tier_queues": lambda: pools.tier_queues("pool"),
        "demand_totals": lambda: pools.demand_totals("pool"),
        "overload_totals": lambda: pools.overload_totals("pool"),
        "waiting": lambda: pools.waiting("pool", overdue=True),
        "holder": lambda: pools.holder("pool", STREAM),
        "work": lambda: pools.work("pool", STREAM),
        "expired": lambda: pools.expired("pool"),
        "in_flight": lambda: pools.in_flight("pool", REPLICA),
        "remove_in_flight": lambda: pools.remove_in_flight("pool", REPLICA, [STREAM]),
        "retire": lambda: pools.retire("pool", REPLICA),
        "claim_recovery": lambda: pools.claim_recovery("pool", REPLICA, 1.0, "a"),
        "request_state": lambda: pools.request_state("pool", REPLICA, "draining"),
        "put_prefix": lambda: pools.put_prefix("pool", REPLICA, b""),
        "prefix": lambda: pools.prefix("pool", REPLICA),
        "inbox.read": lambda: inbox.read(0.01),
        "create": lambda: streams.create(STREAM, epoch, ACME, b"{}", GatewayId("g")),
        "append": lambda: streams.append(streams.partition(STREAM), [append]),
        "cancel": lambda: streams.cancel(STREAM, ACME),
        "fence": lambda: streams.fence(STREAM, None, "bb", error),
        "bills_late": lambda: unbilled.late(0),
        "billed": lambda: unbilled.remove([STREAM]),
        "takeover": lambda: streams.takeover(STREAM, epoch, "bb"),
        "put_placements": lambda: streams.put_placements([(STREAM, b"{}")]),
        "placements": lambda: streams.placements(STREAM),
        "settled": lambda: streams.settled(STREAM),
        "usage": lambda: streams.usage(ACME, 1),
        "watch": lambda: streams.watch(STREAM, ACME, GatewayId("g"), BEGINNING),
        "unwatch": lambda: streams.unwatch(STREAM, GatewayId("g")),
        "heads": lambda: streams.heads(streams.partition(STREAM), [STREAM], None),
        "input": lambda: streams.input(STREAM, ACME, "i", msgspec.Raw(b"{}")),
        "inputs": lambda: streams.inputs(STREAM),
        "partitions": lambda: check_partitions(client, PARTITIONS),
        "claim": lambda: index.claim(ACME, "key", STREAM, "print"),
        "is_claimed": lambda: index.is_claimed(ACME, "key"),
        "release": lambda: index.release(ACME, "key", STREAM),
        "add_live": lambda: index.add_live(ACME, UserId("u"), STREAM, 1),
        "live": lambda: index.live(ACME, UserId("u")),
        "remove_live": lambda: index.remove_live(ACME, UserId("u"), [STREAM]),
        "lead": lambda: control.lead("me", 1.0),
        "leave": lambda: control.leave("me"),
        "leader": control.leader,
        "write_plan": lambda: control.write_plan("me", 1, "pool", PoolPlan(1, 0, 1)),
        "plans": control.plans,
        "put_learned": lambda: control.put_learned("pool", b"{}"),
        "learned": lambda: control.learned("pool"),
        "hold": lambda: control.hold("pool", 1.0),
        "held_s": lambda: control.held_s("pool"),
        "events.append": lambda: events.append("me", 1, [(b"{}", False)]),
        "events.read": lambda: events.read(0, 1),
        "events.trim": lambda: events.trim(0),
        "events.drop": lambda: events.drop([1]),
        "events.head": events.head,
        "own": ingest.own,
        "commit": lambda: ingest.commit(1, ""),
        "ingest.leave": ingest.leave,
    }


@pytest.mark.parametrize("case", CASES)
async def test_every_call_of_the_adapter_raises_only_fabric_errors(debuggable: RedisServer, case: str) -> None:
    with debuggable as server:
        # Where every call fails, each takes its whole time; where none may, a busy machine needs more
        client = RedisClient(server.url, timeout_s=10.0 if case == "NOSCRIPT" else 0.1)
        await client.start()
        async with failing(server, case):
            failed: dict[str, FabricError] = {}
            for name, call in calls(client).items():
                try:
                    await call()
                except FabricError as error:
                    failed[name] = error
        await client.close()
        if case == "NOSCRIPT":
            assert not failed, "a script is sent again with its source"
        elif case == "OOM":
            others = [e for e in failed.values() if type(e) is not FabricFull]
            assert "place" in failed and others == []
        else:
            assert set(map(type, failed.values())) == {FabricUnavailable} and "place" in failed


@pytest.mark.parametrize("case", CASES)
async def test_no_loop_ends_while_redis_answers_with_errors(debuggable: RedisServer, case: str) -> None:
    with debuggable as server:
        async with running(server.url, Teller(150, 0.02)) as (follower, agent):
            reaper = asyncio.create_task(LeaseReaper(follower.pools, follower.log, HostClock(), HostRandom()).run())
            stream = await follower.begin(agent.replica)
            await eventually(lambda: len(follower.lines[stream]) > 5)
            async with failing(server, case):
                await asyncio.sleep(1.0)  # several turns of every loop
                assert not reaper.done()
            await eventually(lambda: follower.ended(stream), "the end")
            await follower.check_whole(stream, 150)
            assert not reaper.done()
            reaper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reaper


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", FabricFull),
        ("ERR Error running script (call to f_1): @user_script:3: -OOM command not allowed", FabricFull),
        ("READONLY You can't write against a read only replica.", FabricUnavailable),
        ("ERR Error running script (call to f_1): @user_script: 3: -READONLY You can't write", FabricUnavailable),
        ("LOADING Redis is loading the dataset in memory", FabricUnavailable),
        ("MOVED 1 127.0.0.1:1", FabricUnavailable),
        ("WRONGTYPE Operation against a key", FabricFault),
        ("ERR unknown command 'X'", FabricFault),
    ],
)
def test_a_reply_has_its_error(reply: str, kind: type[FabricError]) -> None:
    error = fabric_error("X", ReplyError(reply))
    assert type(error) is kind
    assert "127.0.0.1" not in error.message, "clients get no address"
    assert kind is FabricFull or reply in str(error), "logs have the reply"


def test_a_lost_connection_is_an_unreachable_fabric() -> None:
    error = fabric_error("X", ConnectionLost("cannot connect to Redis at 10.0.0.7:6379: timed out"))
    assert (type(error), error.message) == (FabricUnavailable, "Redis did not answer X")
    assert "10.0.0.7:6379: timed out" in str(error)


async def test_a_refused_command_is_a_fault_that_names_it(redis_url: str) -> None:
    client = RedisClient(redis_url)
    await client.start()
    with pytest.raises(FabricFault, match="Redis refused NOSUCH: ERR unknown command"):
        await client.execute(0, "NOSUCH")
    await client.close()


async def test_an_argument_that_cannot_be_encoded_does_not_shift_the_replies(redis_url: str) -> None:
    client = RedisClient(redis_url)
    await client.start()
    with pytest.raises(UnicodeEncodeError):
        await client.execute(0, "ECHO", "\ud800")
    assert await client.execute(0, "ECHO", "mine") == b"mine"
    await client.close()


async def test_nodes_that_redirect_to_each_other_are_not_asked_without_a_pause() -> None:
    """After a failover each of two nodes may name the other for a while. Every process of the platform asks them."""
    asked = served = 0

    def redirecting(to: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked, served
            commands = hiredis.Reader()
            while data := await reader.read(4096):
                commands.feed(data)
                while command := commands.gets():
                    asked += command[0] == b"GET"
                    writer.write(b"+OK\r\n" if command[0] == b"HELLO" else b"-MOVED 1 127.0.0.1:%d\r\n" % to)
            writer.close()
            served += 1

        return answer

    one, other = free_port(), free_port()
    async with (
        await asyncio.start_server(redirecting(other), "127.0.0.1", one),
        await asyncio.start_server(redirecting(one), "127.0.0.1", other),
    ):
        client = RedisClient(f"redis+cluster://127.0.0.1:{one}", timeout_s=1.0)
        client.topology.moved(1, Address("127.0.0.1", one))
        with pytest.raises(FabricUnavailable, match="MOVED"):
            await client.execute(1, "GET", "x")
        assert 4 <= asked < 30
        await client.close()
        await eventually(lambda: served == 2, "the connections to end")


def test_no_module_outside_the_adapter_knows_its_errors() -> None:
    for room in ("stream_fabric", "stream_gw", "inference", "telemetry"):
        for path in (ROOT / room).rglob("*.py"):
            if path.is_relative_to(ROOT / "stream_fabric" / "redis"):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "stream_fabric.redis.wire":
                    raise AssertionError(f"{path.relative_to(ROOT)} imports redis.wire; catch FabricError")
