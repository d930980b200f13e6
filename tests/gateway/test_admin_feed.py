"""The operations feed: one shared snapshot, bounded for slow viewers, and visible to operators only."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stream_fabric import limits
from stream_fabric.errors import Draining, FabricUnavailable, TooMany
from stream_fabric.pool.placement import TIERS
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import EngineLoad, ReplicaInfo, SlotUse, TierQueue
from stream_fabric.pool.replica_load import TTFT_BUCKETS_S
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.stream.ids import ReplicaId, TenantId
from stream_gw.admin.feed import Ops
from stream_gw.admin.records import GatewayStats
from stream_gw.admin.traces import Traces, TracesUnavailable
from stream_gw.admin.viewer import Viewer
from stream_gw.auth import ALL_SCOPES, Principal, key_digest, new_key
from stream_gw.observe.local_stats import LocalStatsWindow
from stream_gw.observe.trace import ReaderOutcome
from stream_gw.transport.connection import ResponseWriter
from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Exchange, Gate, chat, refusal
from tests.support.waiting import eventually

PATH = "/v1/admin/ops"
OPERATOR = Principal(TenantId("operations"), frozenset({"admin"}))


class Transport:
    """A connection that accepts everything or, when stopped, nothing."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False


class Flow:
    write_paused = False


class Connection:
    def __init__(self) -> None:
        self.transport = Transport()
        self.flow = Flow()
        self.listener: Any = None

    def events(self) -> list[Any]:
        data = b"".join(piece.split(b"\r\n", 1)[1][:-2] for piece in self.transport.written).decode()
        return [json.loads(line[6:]) for line in data.split("\n") if line.startswith("data: ")]


class Pools:
    """A fleet that counts how often it is read."""

    def __init__(self) -> None:
        self.by_pool: dict[str, list[ReplicaInfo]] = {}
        self.plans: dict[str, PoolPlan] = {}
        self.held: dict[str, list[SlotUse]] = {}
        self.lined: dict[str, list[TierQueue]] = {}
        self.reads = 0
        self.away = False
        self.silent = asyncio.Event()
        self.silent.set()

    def add(self, pool: str, replica: str, *, left_s: float = 2.0, state: Any = "ready", known: bool = True) -> None:
        self.held.setdefault(pool, []).append(SlotUse(ReplicaId(replica), left_s, 3))
        if known:
            load = EngineLoad(2, 1, 8, kv_used_ratio=0.25, prefix_queries_tokens=100, prefix_hits_tokens=40)
            info = ReplicaInfo(ReplicaId(replica), pool, "vllm", ("m", "m:lora"), state, load, room=10, tokens_per_s=50)
            info = msgspec.structs.replace(info, adapters=("m:lora",))
            self.by_pool.setdefault(pool, []).append(info)

    async def pools(self) -> list[str]:
        self.reads += 1
        await self.silent.wait()
        if self.away:
            raise FabricUnavailable("Redis did not answer in 5 s")
        return sorted(self.held)

    async def slot_uses(self, pool: str) -> list[SlotUse]:
        return self.held.get(pool, [])

    async def replicas(self, pool: str) -> list[ReplicaInfo]:
        return self.by_pool.get(pool, [])

    async def tier_queues(self, pool: str) -> list[TierQueue]:
        return self.lined.get(pool, [TierQueue(0, 0.0, 0, 0)] * len(TIERS))


class Telemetry(Traces):
    def __init__(self, answer: bytes | None) -> None:
        super().__init__("http://telemetry.test", "t")
        self.answer = answer
        self.asked = 0

    async def query(self, name: str, since: str, within_s: float) -> bytes:
        self.asked += 1
        if self.answer is None:
            raise TracesUnavailable("stream-gw telemetry does not answer: TimeoutError")
        return self.answer


class Clock(HostClock):
    """The host's clock, of which the monotonic part stands still until the test moves it."""

    now = 1000.0

    def monotonic_us(self) -> int:
        return round(self.now * 1e6)


class Desk:
    """A feed, with its fleet and its clock."""

    def __init__(self, telemetry: Traces | None = None) -> None:
        self.clock = Clock()
        self.pools = Pools()
        self.recent = LocalStatsWindow(self.clock)
        self.ops = Ops(
            self.pools,  # type: ignore[arg-type]
            self.pools,
            telemetry or Traces("", ""),
            lambda viewers: GatewayStats("gateway0", "eu", 7, 1, 0, viewers),
            self.recent.stats,
            self.clock,
        )

    def viewer(self, who: Principal = OPERATOR) -> tuple[Viewer, Connection]:
        connection = Connection()
        viewer = Viewer(ResponseWriter(connection), who, "req_1")  # type: ignore[arg-type]
        self.ops.watch(viewer)
        viewer.open(None)
        return viewer, connection

    async def snapshot(self) -> Any:
        body = (await self.ops.snapshot_chunk()).split(b"\r\n", 1)[1]
        return json.loads(body.split(b"data: ", 1)[1])


@pytest.fixture
async def desk() -> Desk:
    return Desk()


# --- the feed --------------------------------------------------------------------------------------------------


async def test_a_first_viewer_sees_the_loads_of_the_minutes_before(desk: Desk) -> None:
    desk.pools.add("llama", "a")
    for _ in range(3):
        desk.ops.sample_loads()
        desk.clock.now += limits.OPS_LOAD_EVERY_S
    assert not desk.pools.reads, "from the directory's copy"
    told = await desk.snapshot()
    assert told["fleet"]["pools"][0]["replicas"][0]["recent"] == [[38, 25, 1]] * 3, "3 of 8 slots"


async def test_all_viewers_share_one_snapshot(desk: Desk) -> None:
    desk.pools.add("llama", "a")
    await asyncio.sleep(0)
    assert not desk.pools.reads, "nobody looks"
    viewers = [desk.viewer() for _ in range(3)]
    connections = [connection for _, connection in viewers]
    await eventually(lambda: all(connection.events() for connection in connections), "a snapshot")
    assert desk.pools.reads == 1
    assert len({id(connection.transport.written[-1]) for connection in connections}) == 1, "the same bytes object"
    late, connection = desk.viewer()
    assert connection.events() == connections[0].events(), "who comes later has it at once"
    assert desk.pools.reads == 1
    told = connection.events()[0]
    assert told["gateway"]["viewers"] == 3
    assert told["telemetry"]["state"] == "off"
    for viewer in (*(viewer for viewer, _ in viewers), late):
        desk.ops.leave(viewer)
    assert not desk.ops.viewers


async def test_the_number_of_viewers_is_limited(desk: Desk) -> None:
    viewers = [desk.viewer()[0] for _ in range(limits.OPS_VIEWERS_MAX)]
    with pytest.raises(TooMany):
        desk.viewer()
    assert len(desk.ops.viewers) == limits.OPS_VIEWERS_MAX
    desk.ops.leave(viewers[0])
    desk.viewer()


async def test_a_stalled_viewer_costs_one_snapshot_that_all_share(desk: Desk) -> None:
    viewer, connection = desk.viewer()
    connection.listener.connection_paused()
    before = len(connection.transport.written)
    pieces = [b"5\r\n%05d\r\n" % number for number in range(1000)]
    for piece in pieces:
        viewer.show(piece)
    assert len(connection.transport.written) == before, "nothing is queued at its socket"
    assert [value for value in gc.get_referents(viewer) if isinstance(value, bytes)] == pieces[-1:]
    connection.listener.connection_resumed()
    assert connection.transport.written[before:] == pieces[-1:], "it goes on with the newest"
    viewer.show(pieces[0])
    assert connection.transport.written[-1] is pieces[0]


async def test_an_expired_token_ends_the_feed_with_the_reason(desk: Desk) -> None:
    who = Principal(OPERATOR.tenant, OPERATOR.scopes, expires_at=time.time() - 1)
    viewer, connection = desk.viewer(who)
    assert await asyncio.wait_for(viewer.done, 5)
    assert connection.events()[-1]["error"]["code"] == "invalid_api_key"


async def test_a_failed_feed_sends_an_error_and_the_next_viewer_starts_it_again(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(desk.ops, "_local_stats", broken)
        viewer, connection = desk.viewer()
        assert await asyncio.wait_for(viewer.done, 5)
    assert connection.events()[-1]["error"]["code"] == "internal_error"
    assert "operations feed failed" in caplog.text
    desk.ops.leave(viewer)
    _, connection = desk.viewer()
    await eventually(connection.events, "a snapshot")
    assert "error" not in connection.events()[0]


async def test_a_draining_gateway_sends_its_viewers_to_another(desk: Desk) -> None:
    viewer, connection = desk.viewer()
    desk.ops.drain()
    assert await viewer.done
    told = connection.events()[-1]["error"]
    assert (told["code"], told["retriable"]) == ("draining", True)
    with pytest.raises(Draining):
        desk.viewer()


# --- what it tells ---------------------------------------------------------------------------------------------


async def test_a_snapshot_shows_pools_and_replicas(desk: Desk) -> None:
    desk.pools.add("llama", "b")
    desk.pools.add("llama", "a", state="draining")
    desk.pools.add("llama", "gone", left_s=-4.0, known=False)
    desk.pools.add("qwen", "fresh", known=False)
    desk.pools.lined["llama"] = [
        TierQueue(2, 8.25, 0, 0),
        TierQueue(0, 0.0, 0, 0),
        TierQueue(5, 40.0, 0, 0),
        TierQueue(1, 3.0, 0, 0),
    ]
    told = await desk.snapshot()
    llama, qwen = told["fleet"]["pools"]
    assert llama["states"] == {"ready": 1, "draining": 1, "lost": 1}
    assert (llama["slots"], llama["asked"], llama["tokens_per_s"]) == (8, 2 * 3 + 8, 100.0)
    assert [(tier["tier"], tier["waiting"], tier["oldest_s"]) for tier in llama["tiers"]] == [
        ("interactive", 2, 8.2), ("standard", 0, 0.0), ("batch", 5, 40.0), ("free", 1, 3.0),
    ]  # fmt: skip
    assert [row["replica"] for row in llama["replicas"]] == ["a", "b", "gone"]
    ready = llama["replicas"][1]
    assert (ready["running"], ready["slots"], ready["waiting"], ready["in_flight"], ready["room"]) == (2, 8, 1, 3, 10)
    assert (ready["kv_used"], ready["prefix_hits"]) == (0.25, 0.4)
    assert (ready["models"], ready["adapters"]) == (["m", "m:lora"], ["m:lora"])
    assert llama["replicas"][2]["lease_left_s"] == -4.0
    assert [row["state"] for row in qwen["replicas"]] == ["new"]


async def test_a_declared_pool_is_shown_with_its_plan(desk: Desk) -> None:
    desk.pools.plans["asleep"] = PoolPlan(0, 0, 0, models=("m",), at_us=5_000_000, reason="no request for 900 s")
    desk.pools.add("planned", "a")
    desk.pools.plans["planned"] = PoolPlan(3, 1, 4, reason="more arrives than one can do", is_yielding=True)
    desk.pools.add("wild", "b")
    asleep, planned, wild = (await desk.snapshot())["fleet"]["pools"]
    assert asleep["pool"] == "asleep"
    assert (asleep["states"], asleep["replicas"], asleep["slots"]) == ({}, [], 0)
    assert asleep["plan"] == {
        "ready": 0, "warm": 0, "pods": 0, "reason": "no request for 900 s", "at_ms": 5000, "yielding": False,
    }  # fmt: skip
    assert planned["plan"]["yielding"] is True
    assert (planned["plan"]["ready"], planned["plan"]["warm"], planned["plan"]["pods"]) == (3, 1, 4)
    assert wild["plan"] is None


async def test_a_pools_time_to_first_token_covers_all_its_replicas(desk: Desk) -> None:
    desk.pools.add("llama", "a")
    desk.pools.add("llama", "b")
    (pool,) = (await desk.snapshot())["fleet"]["pools"]
    assert (pool["ttft_p50_ms"], pool["ttft_p99_ms"]) == (None, None)
    told = ((*(90 if bound == 0.05 else 0 for bound in TTFT_BUCKETS_S), 0), (*(0 for _ in TTFT_BUCKETS_S), 10))
    infos = desk.pools.by_pool["llama"]
    desk.pools.by_pool["llama"] = [
        msgspec.structs.replace(info, ttft_counts=counts) for info, counts in zip(infos, told, strict=True)
    ]
    (pool,) = (await desk.snapshot())["fleet"]["pools"]
    assert pool["ttft_p50_ms"] == pytest.approx(25 + 25 * 50 / 90, abs=0.1)
    assert pool["ttft_p99_ms"] == 1000 * TTFT_BUCKETS_S[-1]


async def test_a_large_fleet_shows_replicas_in_trouble_and_counts_all(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_gw.admin.feed.OPS_REPLICAS_MAX", 5)
    monkeypatch.setattr("stream_gw.admin.feed.OPS_POOLS_MAX", 2)
    for number in range(20):
        desk.pools.add("large", f"r{number:02}", state="draining" if number == 17 else "ready")
    desk.pools.add("other", "s")
    desk.pools.add("sick", "t", state="starting")
    told = (await desk.snapshot())["fleet"]
    assert told["pools_all"] == 3
    large, sick = told["pools"]
    assert sick["pool"] == "sick", "a pool without a ready replica goes before one that is well"
    assert large["states"] == {"ready": 19, "draining": 1}
    assert (large["slots"], large["tokens_per_s"]) == (19 * 8, 1000.0), "also of those that are not listed"
    assert "r17" in [row["replica"] for row in large["replicas"]]
    assert len(large["replicas"]) + len(sick["replicas"]) == 5


async def test_while_redis_is_away_the_last_figures_are_shown_with_their_age(desk: Desk) -> None:
    desk.pools.add("llama", "a")
    assert (await desk.snapshot())["fabric"] == {"state": "ok", "age_s": 0.0, "message": ""}
    desk.pools.away = True
    desk.clock.now += 8
    told = await desk.snapshot()
    assert told["fabric"] == {"state": "away", "age_s": 8.0, "message": "Redis did not answer in 5 s"}
    assert told["fleet"]["pools"][0]["pool"] == "llama"
    desk.pools.away = False
    assert (await desk.snapshot())["fabric"]["state"] == "ok"


async def test_a_hanging_redis_delays_no_snapshot_and_gets_one_query(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stream_gw.admin.feed.OPS_WAIT_S_MAX", 0.01)
    desk.pools.silent.clear()
    for _ in range(3):
        desk.clock.now += 2
        told = await desk.snapshot()
    assert desk.pools.reads == 1
    assert told["fabric"] == {"state": "away", "age_s": 6.0, "message": "no answer within 0.01 s"}
    assert told["fleet"] is None
    desk.pools.silent.set()
    await asyncio.sleep(0)


async def test_telemetry_is_queried_every_ten_seconds_for_any_number_of_viewers() -> None:
    row = {
        "minute_us": 0, "pool": "llama", "requests": 60, "failed": 1, "refused": 2, "tokens": 5,
        "ttft_p50_ms": 40.5, "ttft_p95_ms": None, "ttft_p99_ms": None,
    }  # fmt: skip
    telemetry = Telemetry(json.dumps([row]).encode())
    desk = Desk(telemetry)
    for _ in range(20):
        told = await desk.snapshot()
        await asyncio.sleep(0)
        desk.clock.now += 1
    assert telemetry.asked == 2
    assert told["history"] == [row]
    assert told["telemetry"]["state"] == "ok"
    for answer, says in ((None, "does not answer"), (b"[{}]", "minute_us"), (b"<html>", "malformed")):
        telemetry.answer = answer
        desk.clock.now += limits.OPS_HISTORY_S
        await desk.snapshot()
        await asyncio.sleep(0)
        told = await desk.snapshot()
        assert told["telemetry"]["state"] == "away"
        assert says in told["telemetry"]["message"]
        assert told["history"] == [row], "what was known is shown on"
        assert told["fabric"]["state"] == "ok"


def over(
    pool: str = "llama", *, ttft_ms: float = 0, ended: Any = "completed", error: str = "", tokens: int = 10
) -> ReaderOutcome:
    role: Any = "refused" if ended == "refused" else "created"
    return ReaderOutcome(pool, role, ended, 200, error, 1, int(ttft_ms * 1000), 10, "", "", "", TenantId("acme"))


def test_local_stats_cover_the_last_minutes() -> None:
    clock = Clock()
    recent = LocalStatsWindow(clock)
    for _ in range(600):
        recent.receive_outcome(over(ttft_ms=100))
        recent.receive_outcome(over("qwen", ttft_ms=1000))
        clock.now += 1
    told = recent.stats()
    assert told.window_s == limits.OPS_RECENT_S
    assert told.requests_per_s == pytest.approx(2, rel=0.05)
    assert told.tokens_per_s == pytest.approx(20, rel=0.05)
    everyone, llama, qwen = told.ttft
    assert (everyone.pool, llama.pool, qwen.pool) == ("", "llama", "qwen")
    assert llama.count == qwen.count == pytest.approx(limits.OPS_RECENT_S, abs=16)
    assert llama.p50_ms == llama.p99_ms == pytest.approx(100, rel=0.125)
    assert everyone.p50_ms < 200 < everyone.p95_ms == pytest.approx(1000, rel=0.125)
    for layer in ("pool_full", "pool_full", "deadline_exceeded"):
        recent.receive_outcome(over(ended="refused", error=layer))
    recent.receive_outcome(over(ended="failed", error="replica_lost", ttft_ms=5))
    told = recent.stats()
    assert told.sheds == {"pool": 2, "queue": 1}
    assert (told.ended["refused"], told.ended["failed"]) == (3, 1)
    clock.now += limits.OPS_RECENT_S
    told = recent.stats()
    assert (told.ended, told.sheds, told.ttft, told.requests_per_s) == ({}, {}, [], 0)


def test_local_stats_are_bounded() -> None:
    clock = Clock()
    recent = LocalStatsWindow(clock)
    for number in range(5000):
        recent.receive_outcome(over(f"pool{number}", ttft_ms=number))
        clock.now += 1
    assert len(recent.stats().ttft) <= 66


# --- a real gateway --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {name: new_key(HostRandom()) for name in ("operator", "tenant", "some_models")}


@pytest.fixture(scope="module")
def keys_file(keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f"""
        [[tenant]]
        id = "operations"
        [[tenant.key]]
        sha256 = "{key_digest(keys["operator"])}"
        scopes = ["admin"]
        [[tenant.key]]
        sha256 = "{key_digest(keys["some_models"])}"
        scopes = ["admin"]
        models = ["{MODEL}"]

        [[tenant]]
        id = "acme"
        [[tenant.key]]
        sha256 = "{key_digest(keys["tenant"])}"
        """
    )
    return path


@pytest.fixture(scope="module")
def gates(platform: Running, keys: dict[str, str], keys_file: Path) -> Iterator[dict[str, Gate]]:
    """The gateway with the key of each kind of caller."""
    env = {"STREAM_GW_KEYS_FILE": str(keys_file), "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16)}
    with platform.gateway(**env) as process:
        yield {name: Gate(process.facts["url"], process.pid, key) for name, key in keys.items()}


async def snapshots(exchange: Exchange, count: int) -> list[Any]:
    assert exchange.status == 200
    return [json.loads(event.data) for event in await exchange.events(count)]


async def test_an_operator_sees_the_fleet_through_a_gateway(gates: dict[str, Gate], platform: Running) -> None:
    operator = gates["operator"]
    async with operator.open("GET", PATH) as exchange:
        assert exchange.headers["content-type"].startswith("text/event-stream")
        assert exchange.headers["cache-control"] == "no-store, no-transform"
        found = await exchange.events(2)
        first, second = (json.loads(event.data) for event in found)
        assert [int(event.id or 0) for event in found] == [first["at_ms"], second["at_ms"]]
        assert 1500 < second["at_ms"] - first["at_ms"] < 6000
    (pool,) = [pool for pool in second["fleet"]["pools"] if pool["pool"] == MODEL]
    assert pool["states"] == {"ready": 2}
    assert all(0 < row["lease_left_s"] <= limits.LEASE_TTL_S for row in pool["replicas"])
    assert second["fabric"]["state"] == "ok"
    token = (await operator.ask("POST", "/v1/tokens", {"scopes": ["admin"]})).json["token"]
    async with Gate(operator.url, operator.pid, token).open("GET", PATH) as exchange:
        await snapshots(exchange, 1)
    assert (await operator.ask("HEAD", PATH)).status == 200


async def test_only_operators_see_the_feed(gates: dict[str, Gate]) -> None:
    operator = gates["operator"]
    refusal(await gates["tenant"].ask("GET", PATH), 403, "forbidden")
    refusal(await gates["some_models"].ask("GET", PATH), 403, "forbidden")
    user_bound = (await operator.ask("POST", "/v1/tokens", {"scopes": ["admin"], "user": "u"})).json["token"]
    refusal(await Gate(operator.url, operator.pid, user_bound).ask("GET", PATH), 403, "forbidden")
    refusal(await Gate(operator.url, operator.pid, "sk-nobody").ask("GET", PATH), 401, "invalid_api_key")
    refusal(await operator.ask("GET", PATH, headers={"authorization": ""}), 401, "invalid_api_key")
    cookie = f"stream_gw={user_bound}"
    refusal(await operator.ask("GET", PATH, headers={"authorization": "", "cookie": cookie}), 401, "invalid_api_key")
    assert ALL_SCOPES.isdisjoint({"admin"})


async def test_a_viewer_above_the_limit_gets_429_until_another_leaves(gates: dict[str, Gate]) -> None:
    operator = gates["operator"]
    async with AsyncExitStack() as stack:
        first = [await stack.enter_async_context(operator.open("GET", PATH)) for _ in range(limits.OPS_VIEWERS_MAX)]
        refused = await operator.ask("GET", PATH)
        refusal(refused, 429, "too_many")
        assert refused.headers["retry-after"] == "5"
        first[0].abort()

        async def room() -> bool:
            async with operator.open("GET", PATH) as exchange:
                return exchange.status == 200

        await eventually(room, "room for one more")
        last = (await snapshots(first[-1], 2))[-1]
        assert last["gateway"]["viewers"] >= limits.OPS_VIEWERS_MAX - 1
        assert last["gateway"]["open_streams"] == 0, "who watches is no stream"


async def test_a_drain_disconnects_viewers_and_does_not_wait_for_them(
    platform: Running, keys: dict[str, str], keys_file: Path
) -> None:
    env = {"STREAM_GW_KEYS_FILE": str(keys_file), "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16)}
    with await asyncio.to_thread(platform.gateway, "--drain-s", "60", **env) as process:
        gate = Gate(process.facts["url"], process.pid, keys["operator"])
        async with gate.open("GET", PATH) as exchange:
            await snapshots(exchange, 1)
            process.terminate()
            body = (await exchange.rest()).decode()
            told = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")][-1]
            assert told["error"]["code"] == "draining"
        assert await asyncio.to_thread(process.wait, 15) == 0, "long before its grace is over"


async def test_the_feed_shows_the_gateways_own_requests(gates: dict[str, Gate]) -> None:
    tenant = gates["tenant"]
    async with tenant.create(chat(20)) as exchange:
        await exchange.rest()
    refusal(await tenant.ask("POST", "/v1/chat/completions", chat(5, model="nobody's")), 404, "model_not_found")
    async with gates["operator"].open("GET", PATH) as exchange:
        here = (await snapshots(exchange, 1))[0]["here"]
    assert here["ended"]["completed"] >= 1
    assert here["ended"]["refused"] >= 1
    assert here["ttft"][0]["pool"] == ""
    assert here["ttft"][0]["count"] >= 1
    assert here["tokens_per_s"] > 0


async def test_the_page_runs_no_script_but_its_own(gates: dict[str, Gate]) -> None:
    reply = await gates["operator"].ask("GET", "/ops", headers={"authorization": ""})
    assert reply.status == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "style-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    page = reply.body.decode()
    assert not re.search(r"<script>|\sstyle=|\son\w+=", page)
