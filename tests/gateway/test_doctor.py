"""``stream-gw doctor`` against real services, each configured as an operator does: by the environment."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from aiohttp import web
from redis.asyncio import Redis

from inference.agent.settings import AgentSettings
from inference.control.settings import ControllerSettings
from stream_fabric.pool.overload import OverloadMarks
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId
from stream_gw.auth import key_digest
from stream_gw.cli.checks.engine import check_engine
from stream_gw.cli.checks.files import check_keys, check_pools
from stream_gw.cli.checks.redis import check_clock, check_redis
from stream_gw.cli.checks.replies import check_images, check_structured
from stream_gw.cli.checks.report import Finding, Report, as_text
from stream_gw.cli.checks.responses import check_responses
from stream_gw.cli.checks.telemetry import check_clickhouse, check_consumer
from stream_gw.settings import GatewaySettings
from telemetry.ask.api import api
from telemetry.consume.metrics import ConsumerMetrics
from telemetry.settings import TelemetrySettings
from telemetry.store.migrations import migrations
from tests.gateway.processes import Running, run_cli
from tests.gateway.wire import MODEL
from tests.support.clickhouse import ClickHouseFront
from tests.support.redis import RedisServer, Secured, SentinelSetup
from tests.support.stores import make_store
from tests.support.tls import Authority, need_tls
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def report() -> Report:
    return Report(lambda finding: None)


def one(report: Report, what: str) -> Finding:
    """The only finding whose text begins so."""
    (found,) = (finding for finding in report.findings if finding.what.startswith(what))
    return found


def statuses(report: Report) -> set[str]:
    return {finding.status for finding in report.findings}


# --- the command -----------------------------------------------------------------------------------------------


def test_is_content_with_a_running_platform(platform: Running) -> None:
    done = run_cli("doctor", "--redis-url", platform.redis_url, STREAM_GW_PARTITIONS="4")
    assert done.returncode == 0, done.stdout
    assert "replicas alive" in done.stdout
    assert "MISSING" not in done.stdout


def test_misses_the_partitions_that_redis_has(platform: Running) -> None:
    done = run_cli("doctor", "--redis-url", platform.redis_url)
    assert done.returncode == 1
    assert (
        "MISSING  the partitions of this Redis: this environment has 16, and Redis holds streams in 4\n" in done.stdout
    )
    gateway = run_cli("gateway", "--redis-url", platform.redis_url, "--dev-key", "sk-x")
    assert gateway.returncode == 1 and "set STREAM_GW_PARTITIONS=4" in gateway.stderr


async def test_counts_the_pools_that_have_replicas(platform: Running) -> None:
    def alive() -> tuple[int, int]:
        """Number of replicas and of their pools: other tests' agents may be among them."""
        replicas = platform.replicas().values()
        return len(replicas), len({replica["pool"] for replica in replicas})

    async def told(expected: tuple[int, int]) -> str | None:
        """Doctor's output while so many are alive, before it looked and after."""
        before = await asyncio.to_thread(alive)
        done = await asyncio.to_thread(run_cli, "doctor", "--redis-url", platform.redis_url)
        after = await asyncio.to_thread(alive)
        return done.stdout if before == after == expected else None

    replicas, pools = await asyncio.to_thread(alive)
    with platform.agent("patient") as agent:
        more = await eventually(lambda: told((replicas + 1, pools + 1)), "one replica more")
        agent.terminate()
        assert await asyncio.to_thread(agent.wait) == 0
    assert f"{replicas + 1} replicas alive in {pools + 1} pools\n" in more, more
    less = await eventually(lambda: told((replicas, pools)), "the replicas that were there before")
    assert f"{replicas} replicas alive in {pools} pool{'s' if pools > 1 else ''}\n" in less, less


async def test_does_without_what_redis_does_not_tell(platform: Running) -> None:
    """As of a managed Redis, or of a user with the rights of the runbook."""
    client = RedisClient(platform.redis_url)
    try:
        for slot in (0, 8192, 16383):  # of a cluster each primary has users of its own
            await client.execute(
                slot, "ACL", "SETUSER", "least", "on", ">least", "~*", "&*", "+@all", "-config", "-info"
            )
    finally:
        await client.close()
    scheme, _, where = platform.redis_url.partition("://")
    url = f"{scheme}://least:least@{where.rpartition('@')[2]}"
    done = await asyncio.to_thread(run_cli, "doctor", "--redis-url", url, STREAM_GW_PARTITIONS="4")
    assert done.returncode == 0, done.stdout
    assert "MISSING" not in done.stdout
    assert "maxmemory-policy" in done.stdout
    assert "replicas alive" in done.stdout


@pytest.mark.parametrize("url", [NOWHERE, "http://example.test"])
def test_says_what_is_wrong_with_a_redis(url: str) -> None:
    done = run_cli("doctor", "--redis-url", url)
    assert done.returncode == 1
    assert "MISSING" in done.stdout
    assert "Traceback" not in done.stderr


def test_misses_a_redis_server(tmp_path: Path) -> None:
    done = run_cli("doctor", PATH=str(tmp_path))
    if "a Redis server to start:" in done.stdout:  # the one that a wheel carries
        assert done.returncode == 0
        return
    assert done.returncode == 1
    assert "apt install redis-server" in done.stdout


def test_json_holds_every_finding_with_its_remedy() -> None:
    done = run_cli("doctor", "--json", "--redis-url", NOWHERE)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["ok"] is False
    (redis,) = (finding for finding in told["findings"] if finding["what"] == "Redis at 127.0.0.1:1")
    assert redis["status"] == "missing" and "start Redis" in redis["remedy"]
    assert all(finding.keys() == {"what", "status", "found", "remedy"} for finding in told["findings"])


def test_what_is_not_configured_is_skipped_and_says_how_to_configure_it() -> None:
    findings = {finding["what"]: finding for finding in json.loads(run_cli("doctor", "--json").stdout)["findings"]}
    for what, name in (
        ("Redis", "STREAM_GW_REDIS_URL"),
        ("API keys", "STREAM_GW_KEYS_FILE"),
        ("pools file", "STREAM_GW_POOLS_FILE"),
        ("engine", "STREAM_GW_ENGINE"),
        ("ClickHouse", "STREAM_GW_CLICKHOUSE"),
        ("telemetry consumer", "STREAM_GW_TELEMETRY_URL"),
    ):
        assert findings[what]["status"] == "skipped"
        assert name in findings[what]["remedy"]


def test_a_wrong_setting_is_told_once_with_the_roles_it_stops() -> None:
    done = run_cli("doctor", STREAM_GW_PARTITIONS="0", STREAM_GW_PORT="x")
    assert done.returncode == 1
    assert done.stdout.count("usable settings of stream-gw gateway\n") == 1
    assert "usable settings of stream-gw controller, agent, telemetry" in done.stdout


@pytest.mark.parametrize(
    ("variable", "value"),
    [("STREAM_GW_TOKEN_SECRET", "fifteen bytes.."), ("STREAM_GW_TOKEN_SECRETS_ACCEPTED", f"{'x' * 16}, short")],
)
def test_a_token_secret_that_stops_a_gateway_is_told(variable: str, value: str) -> None:
    done = run_cli("doctor", **{variable: value})
    assert done.returncode == 1
    assert f"({variable}): each secret must have at least 16 bytes\n" in done.stdout


@pytest.mark.parametrize("sim", ["itl=20", "itl_ms=quick"])
def test_settings_of_the_simulator_that_stop_an_agent_are_told(sim: str) -> None:
    done = run_cli("doctor", STREAM_GW_SIM=sim)
    assert done.returncode == 1
    assert "usable settings of the simulator\n           correct STREAM_GW_SIM: --sim: " in done.stdout


def test_a_variable_that_nothing_reads_is_told_with_the_one_that_may_be_meant() -> None:
    done = run_cli("doctor", STREAM_GW_REDIS_ULR="redis://x")
    assert "absent   a setting of this name: STREAM_GW_REDIS_ULR\n" in done.stdout
    assert "did you mean STREAM_GW_REDIS_URL?" in done.stdout
    assert "unknown environment variable" not in done.stderr


def test_a_finding_is_a_line_with_its_value_and_a_line_with_its_remedy() -> None:
    assert as_text(Finding("a safe policy", "missing", "allkeys-lru", "set another")) == (
        "  MISSING  a safe policy: allkeys-lru\n           set another"
    )
    assert as_text(Finding("Redis", "skipped", "", "set its URL")) == "  -        Redis: set its URL"


# --- Redis -----------------------------------------------------------------------------------------------------


async def test_a_redis_tells_version_policy_limit_and_persistence(report: Report) -> None:
    with RedisServer(**{"maxmemory": "64mb", "maxmemory-policy": "noeviction", "appendonly": "yes"}) as server:
        await check_redis(report, server.url)
    assert statuses(report) == {"ok", "absent"}, report.findings
    assert one(report, "Redis at ").found.startswith("version ")
    assert one(report, "maxmemory-policy").found == "noeviction"
    assert one(report, "maxmemory at").found.startswith("64 MiB, ")
    assert one(report, "persistence").found == "append-only file"
    assert one(report, "a live replica").status == "absent"


@pytest.mark.parametrize("evicts", ["allkeys-lru", "volatile-ttl"])
async def test_a_redis_that_evicts_is_missing_and_one_without_limit_or_copy_is_absent(
    report: Report, evicts: str
) -> None:
    """Logs of running streams have an expiry, so every policy that evicts ends them."""
    with RedisServer(**{"maxmemory-policy": evicts}) as server:
        await check_redis(report, server.url)
    policy = one(report, "a safe maxmemory-policy")
    assert (policy.status, policy.found) == ("missing", evicts)
    assert "noeviction" in policy.remedy
    assert one(report, "a memory limit").status == "absent"
    assert one(report, "persistence").status == "absent"


async def test_a_redis_that_has_evicted_tells_how_many_keys(report: Report) -> None:
    with RedisServer(**{"maxmemory-policy": "volatile-ttl"}) as server:
        server("SET", "log", "x" * 1000, "EX", 60)
        server("CONFIG", "SET", "maxmemory", 1)
        server("CONFIG", "SET", "maxmemory", 0)
        await check_redis(report, server.url)
    assert one(report, "a safe maxmemory-policy").found == "volatile-ttl, 1 keys evicted since Redis started"


async def test_a_redis_at_its_memory_limit_is_missing_and_one_close_to_it_absent(report: Report) -> None:
    """At the limit gateways answer 503 ``fabric_full``."""
    with RedisServer() as server:
        server("SETRANGE", "filler", 40 << 20, "x")
        server("CONFIG", "SET", "maxmemory", 20 << 20)
        await check_redis(report, server.url)
        full = one(report, "free memory at")
        used = re.search(rb"used_memory:(\d+)", server("INFO", "memory"))
        assert used
        server("CONFIG", "SET", "maxmemory", int(int(used[1]) / 0.95))
        close = Report(lambda finding: None)
        await check_redis(close, server.url)
    assert full.status == "missing" and "of 20 MiB" in full.found and "fabric_full" in full.remedy
    assert one(close, "free memory at").status == "absent"


class Shifted(HostClock):
    """A host whose clock is ``ahead_s`` ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_us = int(ahead_s * 1e6)

    def now_us(self) -> int:
        return super().now_us() + self._ahead_us


@pytest.mark.parametrize(
    ("ahead_s", "found"), [(0.5, "that of this host"), (300.0, "Redis is 300 s behind"), (-60.0, "Redis is 60 s ahead")]
)
async def test_a_clock_that_differs_from_this_hosts_is_told(
    report: Report, redis_url: str, ahead_s: float, found: str
) -> None:
    async with Redis.from_url(redis_url) as primary:
        await check_clock(report, "", primary, Shifted(ahead_s))
    (finding,) = report.findings
    assert (finding.status, finding.found) == ("ok" if ahead_s == 0.5 else "absent", found)


async def test_a_redis_that_refuses_writes_is_missing(report: Report) -> None:
    """It answers reads, and no process of the platform starts on it."""
    with RedisServer() as primary, RedisServer(replicaof=f"127.0.0.1 {primary.port}") as replica:
        await check_redis(report, replica.url)
        primary("CONFIG", "SET", "min-replicas-to-write", "2")
        alone = Report(lambda finding: None)
        await check_redis(alone, primary.url)
    read_only, without = one(report, "writes to Redis"), one(alone, "writes to Redis")
    assert read_only.status == without.status == "missing"
    assert "READONLY" in read_only.found and "name the primary" in read_only.remedy
    assert "NOREPLICAS" in without.found and "min-replicas-to-write" in without.remedy


async def test_sentinels_lead_to_the_master(report: Report, sentinel: SentinelSetup) -> None:
    await check_redis(report, sentinel.url)
    assert not report.failed, report.findings
    assert one(report, f"Redis at 127.0.0.1:{sentinel.primary().port} answers, sentinel")
    assert "replicas hold a copy" in one(report, "persistence").found


async def test_sentinels_that_know_no_such_master_are_missing(report: Report, sentinel: SentinelSetup) -> None:
    assert not await check_redis(report, sentinel.url.replace("mymaster", "another"))
    (found,) = report.findings
    assert found.status == "missing" and "does not know the master 'another'" in found.remedy
    assert " object at 0x" not in found.remedy


async def test_each_primary_of_a_cluster_is_checked(report: Report, redis_cluster_url: str) -> None:
    await check_redis(report, redis_cluster_url)
    assert not report.failed, report.findings
    assert sum(finding.what.endswith("answers, cluster") for finding in report.findings) == 3


async def test_a_server_that_is_no_cluster_and_a_login_that_a_cluster_refuses(report: Report) -> None:
    with RedisServer(Secured(password="hunter2")) as server:
        url = server.url.replace("redis://", "redis+cluster://")
        assert not await check_redis(report, url)
        assert not await check_redis(report, url.replace("hunter2", "hunter3"))
    alone, login = report.findings
    assert alone.status == "missing" and "cluster support disabled" in alone.remedy
    assert login.what.startswith("a login to Redis") and "refuses the password" in login.remedy


def test_a_wrong_redis_url_hides_no_other_finding() -> None:
    done = run_cli("doctor", "--json", STREAM_GW_REDIS_URL="http://127.0.0.1:1", STREAM_GW_ENGINE="sim")
    findings = {finding["what"]: finding["status"] for finding in json.loads(done.stdout)["findings"]}
    assert findings["a usable Redis URL"] == "missing"
    assert any(what.startswith("Chromium") for what in findings), "the last check was not reached"
    assert done.returncode == 1 and not done.stderr


async def test_a_redis_with_tls_and_a_password(report: Report, tmp_path: Path) -> None:
    need_tls()
    with RedisServer(Secured(Authority(tmp_path), clients=True, password="hunter2")) as server:
        await check_redis(report, server.url)
        assert not report.failed, report.findings
        wrong = Report(lambda finding: None)
        await check_redis(wrong, server.url.replace("hunter2", "hunter3"))
        plain = Report(lambda finding: None)
        await check_redis(plain, f"redis://127.0.0.1:{server.port}/0")
    (found,) = wrong.findings
    assert found.what.startswith("a login to Redis") and "hunter" not in found.remedy
    (found,) = plain.findings
    assert found.status == "missing" and "rediss://" in found.remedy


async def test_a_batch_host_with_another_base_model_or_other_files_is_missing(report: Report) -> None:
    with RedisServer() as server:
        client = RedisClient(server.url)
        await client.start()
        control, pools = RedisControl(client), RedisPools(client)
        term = await control.lead("a", 60)
        for home, host in (
            ("right", "right-spot"),
            ("wrong", "wrong-spot"),
            ("old", "old-spot"),
            ("none", "none-spot"),
        ):
            plan = PoolPlan(1, 0, 1, overload_marks=OverloadMarks((0.0, 0.0, 0.0), batch_pools=(host,)))
            assert await control.write_plan("a", term, home, plan)
        for pool, models, artifact in (
            ("right", ("m", "french"), "f1"), ("right-spot", ("m",), "f1"), ("wrong", ("m", "french"), ""),
            ("wrong-spot", ("n", "french"), ""), ("old", ("m",), "f1"), ("old-spot", ("m",), "f2"),
            ("none", ("m",), ""),
        ):  # fmt: skip
            info = ReplicaInfo(
                ReplicaId(f"r-{pool}"), pool, "sim", models, "ready", EngineLoad(0, 0, 4), adapters=("french",),
                artifact=artifact,
            )  # fmt: skip
            await pools.report(info, ttl_s=60, running={})
        await check_redis(report, server.url)
        await client.close()
    found = {finding.what: finding for finding in report.findings if "batch host" in finding.what}
    assert found.keys() == {f"the base model of pool {name} at its batch host {name}-spot" for name in ("wrong", "old")}
    assert one(report, "the base model of pool wrong").found == "it serves n, and the pool m"
    assert "load the same files" in one(report, "the base model of pool old").remedy and report.failed


# --- keys and pools --------------------------------------------------------------------------------------------


def test_a_keys_file_is_counted(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[tenant]]\nid = "a"\n[[tenant.key]]\nsha256 = "{key_digest("k")}"\n[[tenant]]\nid = "b"\n')
    check_keys(report, GatewaySettings(keys_file=path))
    assert one(report, "keys file").found == f"{path}, 1 keys of 2 tenants"


@pytest.mark.parametrize(
    ("text", "what"),
    [("tenant = 3", "a usable keys file"), ('[[tenant]]\nid = "a"', "an API key"), (None, "a usable keys file")],
    ids=["wrong", "empty", "not there"],
)
def test_a_keys_file_without_use_is_missing(report: Report, tmp_path: Path, text: str | None, what: str) -> None:
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    check_keys(report, GatewaySettings(keys_file=path))
    found = one(report, what)
    assert found.status == "missing" and str(path) in found.found + found.remedy


def test_a_pools_file_is_read(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "pools.toml"
    path.write_text("[pool.big]\n[pool.small]\n")
    check_pools(report, ControllerSettings(pools_file=path))
    assert one(report, "pools file").found == f"{path} declares big, small"
    path.write_text("[pool.big]\nnonsense = 1\n")
    check_pools(report, ControllerSettings(pools_file=path))
    found = one(report, "a usable pools file")
    assert found.status == "missing" and "nonsense" in found.remedy


# --- engines ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def upstream() -> AsyncIterator[str]:
    """An OpenAI-compatible server that takes the key ``right``."""

    async def models(request: web.Request) -> web.Response:
        if request.headers.get("authorization") != "Bearer right":
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": "llama-8b"}]})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_an_upstream_tells_its_models(report: Report, upstream: str) -> None:
    settings = AgentSettings(engine="openai", upstream=upstream, upstream_api_key="right")
    await check_engine(report, settings)
    assert one(report, "OpenAI-compatible server").found == "serves llama-8b"


@pytest.mark.parametrize("key", ["wrong", ""])
async def test_an_upstream_that_refuses_the_key_is_missing(report: Report, upstream: str, key: str) -> None:
    await check_engine(report, AgentSettings(engine="openai", upstream=upstream, upstream_api_key=key))
    found = one(report, "an OpenAI-compatible server")
    assert found.status == "missing"
    assert "401" in found.remedy and "STREAM_GW_UPSTREAM_API_KEY" in found.remedy


async def test_an_upstream_that_is_away_is_missing(report: Report) -> None:
    await check_engine(report, AgentSettings(engine="openai", upstream="http://127.0.0.1:1"))
    assert one(report, "an OpenAI-compatible server").status == "missing"


@pytest.mark.parametrize(
    ("prints", "code", "what", "status"),
    [
        ("0.32.0", 0, "vLLM", "ok"),
        ("1.0.0rc1", 0, "vLLM", "ok"),
        ("0.9.2", 0, "a tested version of vLLM", "absent"),
        ("ImportError: libcudart", 1, "a vLLM that starts", "missing"),
    ],
)
async def test_vllms_version_is_asked(
    report: Report, tmp_path: Path, prints: str, code: int, what: str, status: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    python.chmod(0o755)
    await check_engine(report, AgentSettings(engine="vllm", model="m", vllm_python=str(python)))
    (found,) = report.findings
    assert (found.what, found.status) == (what, status)
    assert prints in found.found


async def test_a_vllm_that_is_not_installed_is_missing(report: Report) -> None:
    await check_engine(report, AgentSettings(engine="vllm", model="m", vllm_python="/nonexistent/python"))
    assert "--vllm-python" in one(report, "vLLM").remedy


# --- responses, structured replies, images -----------------------------------------------------------------------


async def test_bounds_of_stored_responses_that_contradict_each_other_are_missing(report: Report) -> None:
    bounds = {"response_bytes_max": 2 << 20, "response_held_bytes_max": 1 << 20, "response_stored_bytes_max": 1 << 20}
    await check_responses(report, GatewaySettings(**bounds), None)  # type: ignore[arg-type]
    for where, name in (("Redis", "HELD"), ("the database", "STORED")):
        found = one(report, f"room in {where} for one response")
        assert found.status == "missing" and f"STREAM_GW_RESPONSE_{name}_BYTES_MAX" in found.remedy + found.found
    assert "STREAM_GW_DATABASE_URL" in one(report, "stored responses and conversations in a database").remedy


async def test_a_database_that_keeps_no_response_and_a_missing_secret_are_absent(
    report: Report, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'x.db'}"
    await check_responses(report, GatewaySettings(database_url=url, response_days=0), None)
    assert "STREAM_GW_RESPONSE_DAYS" in one(report, "days that stored responses").remedy
    assert "STREAM_GW_TOKEN_SECRET" in one(report, "STREAM_GW_TOKEN_SECRET, for compactions").what
    assert statuses(report) == {"absent"}


async def test_a_plan_that_stores_and_keeps_nothing_is_missing(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        "[plan.strict]\nretention_s = 0\nresponse_days = 30\n"
        f'[[tenant]]\nid = "a"\nplan = "strict"\nkey = [{{ sha256 = "{key_digest("sk-a")}" }}]\n'
    )
    await check_responses(report, GatewaySettings(keys_file=path), None)
    found = one(report, "one retention of plan strict")
    assert found.status == "missing" and "response_days" in found.remedy


async def test_stored_responses_must_leave_redis_room_and_find_a_database(report: Report) -> None:
    with RedisServer(**{"maxmemory": "64mb", "maxmemory-policy": "noeviction"}) as server:
        client = RedisClient(server.url)
        await client.start()
        await client.execute(0, "ZADD", "sg:{rsp3}:unsaved", 1, "resp_1")
        await client.close()
        await check_responses(report, GatewaySettings(), server.url)
    found = one(report, "room in Redis beside the stored responses")
    assert (found.status, found.found) == ("absent", "256 MiB of 64 MiB")
    assert "STREAM_GW_RESPONSE_HELD_BYTES_MAX" in found.remedy
    waits = one(report, "a database for stored responses")
    assert waits.found.startswith("1 wait") and "STREAM_GW_DATABASE_URL" in waits.remedy


@pytest.mark.parametrize(("waiting", "what"), [(150, "stored responses that wait"), (300, "a database that takes")])
async def test_a_backlog_of_stored_responses_is_told(report: Report, tmp_path: Path, waiting: int, what: str) -> None:
    with RedisServer() as server:
        server("ZADD", "sg:{rsp0}:unsaved", *(part for number in range(waiting) for part in (number, f"r{number}")))
        await check_responses(report, GatewaySettings(database_url=f"sqlite:///{tmp_path / 'a.db'}"), server.url)
    assert str(waiting) in one(report, what).found


async def test_checks_of_structured_replies_run_or_say_why_not(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    await check_structured(report)
    assert statuses(report) == {"ok"}
    broken = Report(lambda finding: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    await check_structured(broken)
    assert statuses(broken) == {"absent"} and "jsonschema-rs" in broken.findings[0].remedy


async def test_models_that_take_images_must_be_served(report: Report, platform: Running) -> None:
    for named, status, word in (
        ("", "skipped", "STREAM_GW_IMAGE_MODELS"),
        ("*", "ok", ""),
        (MODEL, "ok", ""),
        ("*,m", "absent", "STREAM_GW_IMAGE_MODELS to * alone"),
        (f"{MODEL},gpt-image", "absent", "STREAM_GW_IMAGE_MODELS"),
    ):
        await check_images(report, named, platform.redis_url)
        assert (report.findings[-1].status, word in report.findings[-1].remedy) == (status, True), named
    assert "no replica serves gpt-image" in report.findings[-1].found


# --- telemetry -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def front() -> Iterator[ClickHouseFront]:
    with ClickHouseFront() as started:
        started.database = f"t{uuid4().hex}"
        yield started


async def test_clickhouse_tells_its_version_and_its_schemas(front: ClickHouseFront) -> None:
    report = Report(lambda finding: None)
    await check_clickhouse(report, TelemetrySettings(clickhouse=front.url))
    assert one(report, "ClickHouse's schema").found == "none yet"
    assert not report.failed, report.findings

    store = make_store(front.url)
    await store.open()
    report = Report(lambda finding: None)
    await check_clickhouse(report, TelemetrySettings(clickhouse=front.url))
    assert one(report, "ClickHouse's schema") == Finding(
        "ClickHouse's schema", "ok", f"version {len(migrations())}", ""
    )
    assert one(report, "ClickHouse at ").found.startswith("version ")

    await store.command("DROP TABLE bills_feed")
    report = Report(lambda finding: None)
    await check_clickhouse(report, TelemetrySettings(clickhouse=front.url))
    assert one(report, "a whole schema").found == "bills_feed is not there"

    await store.command("INSERT INTO migrations (version, name, checksum) VALUES (1000, 'later', 'x')")
    await store.close()
    report = Report(lambda finding: None)
    await check_clickhouse(report, TelemetrySettings(clickhouse=front.url))
    found = one(report, "a release that knows ClickHouse's schema")
    assert found.status == "missing" and "upgrade stream-gw" in found.remedy


async def test_a_clickhouse_that_is_away_is_missing_and_its_password_is_not_shown(report: Report) -> None:
    await check_clickhouse(report, TelemetrySettings(clickhouse="http://u:hunter2@127.0.0.1:1/d"))
    (found,) = report.findings
    assert found.status == "missing"
    assert "127.0.0.1:1" in found.what and "hunter2" not in f"{found}"


async def test_the_folder_of_an_embedded_engine_must_be_writable(report: Report, tmp_path: Path) -> None:
    await check_clickhouse(report, TelemetrySettings(clickhouse=f"chdb://{tmp_path}/new"))
    assert one(report, "ClickHouse's engine").status == "ok"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    await check_clickhouse(report, TelemetrySettings(clickhouse=f"chdb://{tmp_path}/file"))
    assert one(report, "a folder for ClickHouse's engine").status == "missing"


@pytest.mark.parametrize(
    ("token", "given", "status", "says"),
    [
        ("right", "right", "ok", "takes"),
        ("right", "wrong", "missing", "401"),
        ("right", "", "missing", "401"),
        ("", "any", "missing", "403"),
    ],
)
async def test_a_consumer_is_asked_with_the_token(
    front: ClickHouseFront, report: Report, token: str, given: str, status: str, says: str
) -> None:
    store = make_store(front.url)
    async with api(store, ConsumerMetrics(), {}, lambda: True, token, 0) as url:
        await check_consumer(report, url, given, HostClock())
    await store.close()
    (found,) = report.findings
    assert found.status == status and says in found.found


@pytest.mark.parametrize(("ahead_s", "found"), [(300.0, "behind"), (-60.0, "ahead")])
async def test_a_consumer_whose_clock_is_wrong_is_told(
    front: ClickHouseFront, report: Report, ahead_s: float, found: str
) -> None:
    store = make_store(front.url)
    async with api(store, ConsumerMetrics(), {}, lambda: True, "t", 0) as url:
        await check_consumer(report, url, "t", Shifted(ahead_s))
    await store.close()
    told = one(report, "one time at the telemetry consumer")
    assert told.status == "absent" and found in told.found and not report.failed


async def test_a_consumer_that_is_away_unhealthy_or_another_service_is_missing(
    front: ClickHouseFront, report: Report, upstream: str
) -> None:
    await check_consumer(report, "http://127.0.0.1:1", "t", HostClock())
    store = make_store(front.url)
    async with api(store, ConsumerMetrics(), {}, lambda: False, "t", 0) as url:
        await check_consumer(report, url, "t", HostClock())
    await store.close()
    assert one(report, "telemetry consumer at http://127.0.0.1:1").status == "missing"
    assert one(report, "a healthy telemetry consumer").found == "/healthz says 503"
