from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from stream_fabric.events import ReadEnd
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.stream.ids import ReplicaId
from stream_gw.auth import KeyStore, read_keys_file
from stream_gw.cli.commands import replicas, up
from stream_gw.cli.main import main
from stream_gw.cli.platform.platform import Platform, UpOptions
from telemetry.ask.flags import _OUTCOMES
from tests.gateway.processes import CLI, INTERRUPTIBLE, Process, Running, alive, clean_env, need_redis, run_cli
from tests.gateway.wire import MODEL, Gate, chat, events, tokens_of_chunks
from tests.support.missing import missing
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

NOWHERE = "redis://127.0.0.1:1/0"
Here = Callable[[list[str], dict[str, str]], tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """The command in this process: its exit code, stdout and stderr."""

    def run(flags: list[str], env: dict[str, str]) -> tuple[int, str, str]:
        for name in os.environ:
            if name.startswith("STREAM_GW_"):
                monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        try:
            code = main(flags)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (["--port", "99999"], {}, ["--port", "STREAM_GW_PORT", "65535", "99999"]),
        (["--port", "http"], {}, ["--port", "STREAM_GW_PORT", "integer", "http"]),
        ([], {"STREAM_GW_PORT": "-1"}, ["--port", "STREAM_GW_PORT", "-1"]),
        ([], {"STREAM_GW_PARTITIONS": "0"}, ["--partitions", "STREAM_GW_PARTITIONS", "greater than or equal to 1"]),
        ([], {"STREAM_GW_PARTITIONS": "5000"}, ["STREAM_GW_PARTITIONS", "4096"]),
        ([], {"STREAM_GW_DRAIN_S": "never"}, ["--drain-s", "STREAM_GW_DRAIN_S", "never"]),
        (["--redis-url", "http://example.test"], {}, ["--redis-url", "STREAM_GW_REDIS_URL", "redis://", "http"]),
        (["--redis-url", "redis://host:port/0"], {}, ["--redis-url", "host:port"]),
        (["--redis-url", "redis://host:6379/db"], {}, ["--redis-url", "database", "db"]),
        (
            ["--port", "99999", "--plain-grace-s", "-1"],
            {},
            ["--port", "--plain-grace-s"],
        ),
        ([], {}, ["STREAM_GW_KEYS_FILE", "stream-gw key"]),
        (["--keys-file", "/nonexistent/keys.toml"], {}, ["--keys-file", "/nonexistent/keys.toml", "no such file"]),
        (["--keys-file", "/dev/null"], {}, ["--keys-file", "STREAM_GW_KEYS_FILE", "/dev/null", "tenant"]),
        (["--dev-key", "sk-dev", "--keys-file", "keys.toml"], {}, ["--keys-file", "STREAM_GW_DEV_KEY", "not both"]),
        (["--dev-key", "sk-dev"], {"STREAM_GW_KEYS_FILE": "k.toml"}, ["--dev-key", "STREAM_GW_KEYS_FILE", "not both"]),
        ([], {"STREAM_GW_KEYS_FILE": "k.toml", "STREAM_GW_DEV_KEY": "sk-dev"}, ["--keys-file", "--dev-key"]),
        (["--events", "kafka"], {}, ["STREAM_GW_KAFKA_SERVERS", "host:port"]),
        (["--events", "pigeon"], {}, ["--events", "STREAM_GW_EVENTS", "'redis'", "'kafka'", "'off'", "pigeon"]),
        (["--dev-key", "sk-dev", "--token-secret", "short", "--redis-url", NOWHERE], {}, ["secret", "16"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    here: Here, flags: list[str], env: dict[str, str], says: list[str]
) -> None:
    code, out, err = here(["gateway", *flags], env)
    wrong_flag = bool(flags) and flags[0] != "--keys-file"
    assert (code, out) == (2 if wrong_flag else 1, "")
    assert err.startswith("stream-gw gateway: ")
    assert all(word in err for word in says), err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["gateway", "--prot", "1"], ["--prot"]),
        (["up", "--gateways", "0"], ["--gateways", "1 to 64"]),
        (["up", "--port", "70000"], ["--port", "65535"]),
        (["up", "--engine", "magic"], ["--engine", "sim", "openai"]),
        (["up", "--upstream", "http://127.0.0.1:8000"], ["--upstream", "--engine openai"]),
        (["key"], ["--tenant"]),
        (["replicas", "drain"], ["replica"]),
        (["replicas", "drain", "r", "--wait-s", "-1"], ["--wait-s", "0 to 3600"]),
        (["replicas", "restart", "r"], ["restart", "drain", "activate"]),
        (["traces", "list", "--ended", "nope"], ["--ended", "nope", "failed", "refused"]),
        (["traces", "tail", "--ended", "nope"], ["--ended", "nope", "failed", "refused"]),
        ([], ["COMMAND"]),
        (["serve"], ["serve", "gateway"]),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(here: Here, flags: list[str], says: list[str]) -> None:
    code, _, err = here(flags, {})
    assert code == 2
    assert all(word in err for word in says), err


def test_the_outcomes_of_the_flag_are_those_of_the_traces() -> None:
    assert get_args(ReadEnd) == _OUTCOMES


@pytest.mark.parametrize("flags", [["--lease-ttl-s", "4", "--lease-renew-s", "3"], ["--lease-ttl-s", "1.5"]])
def test_a_lease_that_one_lost_renewal_would_kill_is_refused(here: Here, flags: list[str]) -> None:
    code, _, err = here(["agent", "--redis-url", NOWHERE, *flags], {})
    assert code == 2
    assert all(word in err for word in ("--lease-renew-s", "half of lease_ttl_s", flags[1])), err


def test_a_process_with_a_wrong_setting_ends_with_one_line() -> None:
    done = run_cli("gateway", STREAM_GW_PORT="99999", STREAM_GW_PARTITIONS="0")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in ("--port", "65535", "--partitions", "STREAM_GW_PARTITIONS"))


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@host:port/0", "rediss://u:hunter2@h:6379/db", "hunter2://:hunter2@h"]
)
def test_a_password_in_a_wrong_redis_url_is_not_shown(here: Here, url: str) -> None:
    code, _, err = here(["gateway", "--dev-key", "sk-dev"], {"STREAM_GW_REDIS_URL": url})
    assert code == 1
    assert "--redis-url" in err
    assert ":hunter2@" not in err


def test_a_password_for_kafka_is_not_shown_with_what_is_wrong_beside_it(here: Here) -> None:
    code, _, err = here(["gateway", "--events", "kafka", "--kafka-user", "me"], {"STREAM_GW_KAFKA_PASSWORD": "hunter2"})
    assert code == 2
    assert "STREAM_GW_KAFKA_SERVERS" in err and "hunter2" not in err


def test_a_password_in_a_wrong_clickhouse_url_is_not_shown(here: Here) -> None:
    code, _, err = here(["telemetry"], {"STREAM_GW_CLICKHOUSE": "ftp://u:hunter2@h/d"})
    assert code == 1
    assert "--clickhouse (STREAM_GW_CLICKHOUSE)" in err and "hunter2" not in err


def test_a_redis_that_does_not_answer_is_named() -> None:
    done = run_cli("gateway", "--dev-key", "sk-dev", STREAM_GW_REDIS_URL="redis://:hunter2@127.0.0.1:1/0")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_another_number_of_partitions_is_refused(platform: Running) -> None:
    done = run_cli(
        "gateway", "--port", "0", "--dev-key", "k", STREAM_GW_REDIS_URL=platform.redis_url, STREAM_GW_PARTITIONS="8"
    )
    assert done.returncode == 1
    assert "4" in done.stderr
    assert "8" in done.stderr
    assert "artitions" in done.stderr.lower()
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_refused(platform: Running) -> None:
    port = platform.gates[0].port
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    done = run_cli("gateway", "--port", str(port), "--dev-key", "sk-dev", **env)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "port" in done.stderr or "address already in use" in done.stderr


def test_help_names_every_setting_with_its_variable(here: Here) -> None:
    code, out, _ = here(["gateway", "--help"], {})
    assert code == 0
    for name in ("redis_url", "partitions", "port", "keys_file", "dev_key", "token_secret", "drain_s", "plain_grace_s"):
        assert f"--{name.replace('_', '-')}" in out
        assert f"STREAM_GW_{name.upper()}" in out.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize(
    ("flags", "absent"),
    [
        (["--help"], ["inference", "telemetry", "stream_gw.auth", "stream_gw.main", "aiohttp", "redis"]),
        (["key", "--tenant", "t"], ["inference", "telemetry", "stream_gw.main", "aiohttp", "redis"]),
        (["gateway", "--help"], ["inference", "telemetry.store", "telemetry.consume", "phonenumbers"]),
        (["agent", "--help"], ["telemetry.store", "telemetry.consume", "inference.control", "stream_gw.main"]),
        (["controller", "--help"], ["telemetry.store", "inference.agent", "stream_gw.main"]),
        (["up", "--help"], ["inference", "telemetry", "stream_gw.main"]),
        (["doctor", "--help"], ["inference.agent.main", "stream_gw.main"]),
        (["traces", "--help"], ["aiohttp", "sqlglot", "pyarrow"]),
        (["usage", "--help"], ["aiohttp", "sqlglot", "pyarrow"]),
    ],
    ids=lambda value: " ".join(value[:1]),
)
def test_a_command_imports_no_other_commands_plane(flags: list[str], absent: list[str]) -> None:
    code = (
        "import contextlib, gc, json, sys\n"
        "from stream_gw.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        "assert gc.isenabled()\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *flags], env=clean_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    found = [name for name in loaded for plane in absent if name == plane or name.startswith(f"{plane}.")]
    assert not found


def test_key_prints_a_key_and_its_entry(tmp_path: Path) -> None:
    done = run_cli("key", "--tenant", 'a "quoted" name')
    assert done.returncode == 0
    first, _, entry = done.stdout.partition("\n\n")
    key = first.rpartition(" ")[2]
    assert key.startswith("sk-")
    assert key not in entry, "the file holds hashes only"
    assert tomllib.loads(entry)["tenant"][0]["id"] == 'a "quoted" name'
    path = tmp_path / "keys.toml"
    path.write_text(entry)
    principal = KeyStore(read_keys_file(path)).find(key, 0.0)
    assert principal is not None
    assert principal.tenant == 'a "quoted" name'


def _children(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(child) for child in (task / "children").read_text().split()}
    return found | {grandchild for child in found for grandchild in _children(child)}


async def _ended(pids: set[int]) -> None:
    await eventually(lambda: not any(map(alive, pids)), f"processes {pids} to end")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=["sigterm", "sigint", "a closed terminal"]
)
async def test_up_prints_one_line_and_takes_every_child_with_it(number: int) -> None:
    need_redis()
    with Process("up", "--port", "0", "--gateways", "2", "--replicas", "1", "--no-telemetry", "--no-database") as up:
        facts = up.facts
        pids = _children(up.pid)
        named = {facts["redis_pid"], *(p["pid"] for p in facts["gateways"]), *(p["pid"] for p in facts["agents"])}
        assert named <= pids
        assert len(pids) == 5, "Redis, an agent, a controller, two gateways"
        for gateway in facts["gateways"]:
            gate = Gate(gateway["url"], gateway["pid"], facts["key"])
            assert (await gate.ask("GET", "/v1/models")).json["data"], "what follows `up` at once finds its model"
            assert (await gate.ask("GET", "/readyz")).status == 200
        up.signal(number)
        assert await asyncio.to_thread(up.wait) == 0
        assert up.rest_of_stdout() == b""
        await _ended(pids)


def test_an_ipv6_address_of_a_gateway_makes_a_url() -> None:
    need_redis()
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as absent:
        missing(f"needs IPv6: {absent}")
    flags = ("--port", "0", "--gateways", "1", "--replicas", "1", "--no-telemetry", "--no-database")
    with Process("up", "--host", "::1", *flags) as up:
        assert up.facts["gateways"][0]["url"].startswith("http://[::1]:")


def test_up_says_where_its_pages_are(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = {"url": "http://127.0.0.1:9", "token": "tt", "pid": 1}
    here = Platform(UpOptions(), "redis://r", None, gateways=[{"url": "http://127.0.0.1:8080"}], telemetry=telemetry)
    up.print_addresses(here)
    out = capsys.readouterr().out
    assert "redis    redis://r\n" in out
    assert "stream-gw replicas --redis-url redis://r\n" in out
    assert "stream-gw traces why resp_… --telemetry-url http://127.0.0.1:9 --telemetry-token tt\n" in out
    assert "http://127.0.0.1:8080/#key=sk-dev\n" in out
    assert "http://127.0.0.1:8080/ops#key=sk-dev\n" in out


def test_a_command_that_up_prints_runs_where_the_path_lacks_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After ``make up`` the command lies in ``.venv/bin``, which no shell looks into."""
    monkeypatch.setenv("PATH", "/nowhere")
    script = Path(sys.executable).parent / "stream-gw"
    for folder in (tmp_path, script.parents[2]):
        monkeypatch.chdir(folder)
        up.print_addresses(Platform(UpOptions(), "redis://r", None, gateways=[{"url": "http://127.0.0.1:8080"}]))
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  replicas ")]
        (command, *_) = shlex.split(line.removeprefix("  replicas "))
        assert subprocess.run([command, "--version"], capture_output=True, timeout=60).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
async def test_up_that_is_killed_leaves_nothing_behind() -> None:
    need_redis()
    with Process("up", "--port", "0", "--gateways", "1", "--replicas", "1", "--no-telemetry", "--no-database") as up:
        pids = _children(up.pid)
        assert len(pids) == 4, "Redis, an agent, a controller, a gateway"
        up.kill()
        await _ended(pids)


async def test_an_interrupt_ends_up_and_demo_while_they_start() -> None:
    need_redis()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts and never answers: the agent waits for it
        upstream = f"http://127.0.0.1:{mute.getsockname()[1]}"
        for flags in (
            ["up", "--port", "0", "--engine", "openai", "--upstream", upstream, "--no-telemetry", "--no-database"],
            ["demo"],
        ):
            process = await asyncio.create_subprocess_exec(
                *INTERRUPTIBLE, *CLI, *flags,
                env=clean_env(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            pids = await eventually(lambda at=process.pid: len(found := _children(at)) > 3 and found)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
            assert upstream.encode() not in err, "it waited until the agent gave its upstream up"
            assert process.returncode == 130
            assert b"is up" not in out
            assert b"Traceback" not in err, err.decode()
            await _ended(pids)


def test_up_that_cannot_start_says_why_once() -> None:
    """Five processes fail of the same cause, and only one of them is told of."""
    done = run_cli("up", "--port", "0", "--redis-url", NOWHERE, "--no-telemetry", "--no-database")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "127.0.0.1:1" in done.stderr and "connection refused" in done.stderr and "STREAM_GW_REDIS_URL" in done.stderr


def test_up_names_the_port_that_is_taken() -> None:
    need_redis()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_cli("up", "--port", str(port), "--gateways", "1", "--no-telemetry", "--no-database")
    assert done.returncode == 1
    assert done.stderr == (
        f"stream-gw up: gateway0: cannot listen on 127.0.0.1 port {port}: address already in use; "
        "choose another --port or --host\n"
    )


async def test_up_ends_soon_also_while_an_answer_runs() -> None:
    """Neither a gateway nor an agent takes the half minute that it would give a stream elsewhere."""
    need_redis()
    with Process("up", "--port", "0", "--gateways", "1", "--replicas", "1", "--no-telemetry", "--no-database") as up:
        (gateway,) = up.facts["gateways"]
        async with Gate(gateway["url"], gateway["pid"], up.facts["key"]).create(chat(4000)) as exchange:
            await exchange.events(3)
            up.signal(signal.SIGINT)
            assert await asyncio.to_thread(up.wait, 10) == 0
        assert "stream-gw up: stopping" in up.log


async def test_a_second_interrupt_kills_what_does_not_end() -> None:
    need_redis()
    with Process("up", "--port", "0", "--gateways", "1", "--replicas", "1", "--no-telemetry", "--no-database") as up:
        (agent,) = up.facts["agents"]
        os.kill(agent["pid"], signal.SIGSTOP)
        up.signal(signal.SIGINT)
        await eventually(lambda: "waiting for replica0; Ctrl-C again kills them" in up.log, "the wait to be told")
        up.signal(signal.SIGINT)
        assert await asyncio.to_thread(up.wait, 5) == 0


async def test_up_that_cannot_start_leaves_nothing_behind(platform: Running) -> None:
    port = platform.gates[0].port
    process = await asyncio.create_subprocess_exec(
        *CLI, "up", "--port", str(port), "--no-telemetry", "--no-database", "--json", env=clean_env(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    seen: set[int] = set()
    while process.returncode is None:
        try:
            seen |= _children(process.pid)
        except FileNotFoundError:
            break
        await asyncio.sleep(0.02)
    out, err = await process.communicate()
    assert process.returncode == 1
    assert out == b""
    assert b"Traceback" not in err, err.decode()
    assert seen
    await _ended(seen)


def test_a_controller_says_that_it_is_ready(platform: Running) -> None:
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    with Process("controller", **env) as controller:
        assert json.loads(json.dumps(controller.facts)) == {"ready": "controller"}
        controller.terminate()
        assert controller.wait() == 0


# --- replicas ------------------------------------------------------------------------------------------------


def _info(name: str, pool: str = "p", state: ReplicaState = "ready", **more: Any) -> ReplicaInfo:
    return ReplicaInfo(ReplicaId(name), pool, "vllm", ("m",), state, EngineLoad(1, 0, 8), **more)


@pytest.mark.parametrize(
    ("name", "found"),
    [("ab", "ab"), ("abc", "abcd"), ("b", "b1"), ("abcd", "abcd")],
    ids=["exact before a longer one", "prefix", "prefix of one", "whole"],
)
def test_a_replica_is_named_by_as_much_of_its_name_as_no_other_has(name: str, found: str) -> None:
    assert replicas.find([_info("ab"), _info("abcd"), _info("b1")], name).replica == found


@pytest.mark.parametrize(
    ("there", "name", "says", "says_not"),
    [
        (["ab1", "ab2", "c"], "ab", ["'ab'", "ab1", "ab2"], ["c ("]),
        (["ab1", "c"], "x", ["'x'", "ab1", "c (pool p, ready)"], []),
        (["ab1", "c"], "", ["ab1", "c ("], []),
        (["ab1"], "", ["''", "ab1"], []),
        ([], "x", ["no live replica"], []),
        ([f"r{n:02}" for n in range(30)], "r", ["r00", "r19", "10 more"], ["r20"]),
    ],
    ids=["ambiguous", "unknown", "empty", "empty though there is only one", "nobody", "many"],
)
def test_an_unknown_or_ambiguous_name_is_refused_with_the_candidates(
    there: list[str], name: str, says: list[str], says_not: list[str]
) -> None:
    with pytest.raises(ValueError) as refused:
        replicas.find([_info(one) for one in there], name)
    assert all(word in str(refused.value) for word in says), refused.value
    assert not any(word in str(refused.value) for word in says_not), refused.value


def test_the_table_tells_what_is_simulated_and_fits_120_columns() -> None:
    load = EngineLoad(
        1024,
        7,
        1024,
        kv_used_ratio=1.0,
        kv_capacity_tokens=10**7,
        prefix_queries_tokens=10**9,
        prefix_hits_tokens=10**8,
    )
    full: dict[str, Any] = {
        "room": 4096,
        "decode_ms": 123_456.0,
        "tokens_per_s": 50_000.0,
        "queue_p99_ms": 60_000.0,
        "prefix_blocks": 8192,
    }
    busy = ReplicaInfo(
        ReplicaId("gpu-node-0017-12345-6b0183aad81fa1"), "big", "vllm", ("m",), "draining", load,
        region="eu-west", hardware="H200", **full,
    )  # fmt: skip
    toy = ReplicaInfo(ReplicaId("toy-6b01"), "big", "sim", ("m",), "ready", EngineLoad(0, 0, 8), True, room=8)
    many = ReplicaInfo(
        ReplicaId("many"), "big", "openai", tuple(f"model-{n}" for n in range(40)), "warm", EngineLoad(0, 0, 8),
        sleepless="it knows no sleep",
    )  # fmt: skip
    pool = replicas.Pool("big", 3, (replicas.Row(busy, 4096), replicas.Row(toy, 0), replicas.Row(many, 0)))
    lines = replicas.as_text([pool, replicas.Pool("left", 0, ())]).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0] == "pool big: 1 of 3 replicas ready, 3 waiting"
    (row,) = (line.split() for line in lines if busy.replica in line)
    assert row == [
        "draining",
        "1024/1024",
        "4096/4096",
        "123456",
        "50000",
        "100%",
        "8192",
        "10%",
        "60000",
        busy.replica,
    ]
    (row,) = (line.split() for line in lines if "toy-6b01" in line)
    assert row == ["ready", "0/8", "0/8", "0", "0", "-", "0", "-", "0", "toy-6b01"]
    above = {name: lines[n - 2] for n, line in enumerate(lines) for name in ("gpu-node", "toy-6b01") if name in line}
    assert "SIMULATED" in above["toy-6b01"]
    assert above["gpu-node"] == "  m (vllm, H200, region eu-west)"
    assert sum("SIMULATED" in line for line in lines) == 1
    assert "  many cannot sleep as its plan says: it knows no sleep" in lines
    assert not any("left" in line for line in lines)


def test_no_replica_at_all_is_said() -> None:
    assert "no live replica" in replicas.as_text([replicas.Pool("left", 0, ())])
    assert replicas.as_json([]) == "[]"


async def test_replicas_lists_what_each_does(platform: Running, one: Gate) -> None:
    with platform.agent("listed", "--region", "eu-west", "--hardware", "a laptop") as agent:
        name = agent.facts["replica"]
        async with one.create(chat(1000, model="listed")) as exchange:
            await exchange.events(3)

            async def seen() -> dict[str, Any] | None:
                found = (await asyncio.to_thread(platform.replicas))[name]
                return found if found["load"]["running"] else None

            found = await eventually(seen, "the stream to be listed")
            done = await asyncio.to_thread(run_cli, "replicas", "--redis-url", platform.redis_url)
    assert (found["pool"], found["state"], found["simulated"], found["models"]) == ("listed", "ready", True, ["listed"])
    assert (found["in_flight"], found["load"]["running"], found["room"] >= found["load"]["slots"]) == (1, 1, True)
    assert found["load_ms"] > 0
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    assert "  SIMULATED, no model answers: listed (sim, a laptop, region eu-west)" in lines
    assert any(line.startswith(f"pool {MODEL}: ") for line in lines)
    (row,) = (line.split() for line in lines if name in line)
    assert row[:3] == ["ready", f"1/{found['load']['slots']}", f"1/{found['room']}"]


async def test_a_drained_replica_finishes_what_runs_and_its_agent_leaves(platform: Running, one: Gate) -> None:
    with platform.agent("drained", STREAM_GW_DRAIN_S="100") as agent:  # 20 s of tokens, on a busy machine more
        name = agent.facts["replica"]
        async with one.create(chat(1000, model="drained")) as exchange:
            first = await exchange.events(3)
            done = await asyncio.to_thread(run_cli, "replicas", "drain", "drained-", "--redis-url", platform.redis_url)
            assert done.returncode == 0, done.stderr
            assert f"{name} of pool drained is draining; 1 stream still in flight" in done.stdout
            assert "no replica of pool drained is ready" in done.stdout
            again = await asyncio.to_thread(run_cli, "replicas", "activate", name, "--redis-url", platform.redis_url)
            assert again.returncode == 1
            assert "draining" in again.stderr
            rest = events(await exchange.rest(110))
            assert rest[-1].data == "[DONE]"
            assert [event.json["choices"][0]["finish_reason"] for event in rest[-2:-1]] == ["length"]
            assert tokens_of_chunks(event.json for event in [*first, *rest[:-1]]) == 1000
        assert await asyncio.to_thread(agent.wait) == 0
    assert name not in platform.replicas()
    gone = run_cli("replicas", "drain", name, "--redis-url", platform.redis_url)
    assert gone.returncode == 1
    assert platform.process.facts["agents"][0]["replica"] in gone.stderr, "the candidates"


async def test_a_warm_replica_is_activated(platform: Running) -> None:
    with platform.agent("spare", "--standby") as agent:
        name = agent.facts["replica"]
        assert platform.replicas()[name]["state"] == "warm"
        done = run_cli("replicas", "activate", "spare", "--json", STREAM_GW_REDIS_URL=platform.redis_url)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["replica"], told["pool"], told["state"], told["heard"]) == (name, "spare", "ready", True)
        assert platform.replicas()[name]["state"] == "ready"
        again = run_cli("replicas", "activate", "spare", STREAM_GW_REDIS_URL=platform.redis_url)
        assert (again.returncode, again.stdout) == (0, f"{name} of pool spare is ready\n")


async def test_a_replica_that_does_not_hear_is_told_of(platform: Running) -> None:
    """And it drains when it hears at last."""
    with platform.agent("deaf", "--lease-ttl-s", "60") as agent:
        name = agent.facts["replica"]
        agent.signal(signal.SIGSTOP)
        try:
            done = run_cli("replicas", "drain", name, "--wait-s", "0.3", STREAM_GW_REDIS_URL=platform.redis_url)
            assert done.returncode == 1
            assert done.stdout == ""
            assert done.stderr.startswith(f"stream-gw replicas: {name} is still ready after 0.3 s")
            done = run_cli("replicas", "drain", name, "--no-wait", STREAM_GW_REDIS_URL=platform.redis_url)
            assert done.returncode == 0
            assert "was asked to drain; it is ready, with 0 streams in flight" in done.stdout
        finally:
            agent.signal(signal.SIGCONT)
        assert await asyncio.to_thread(agent.wait) == 0


def test_a_replica_that_dies_before_it_hears_is_told_of(platform: Running) -> None:
    with platform.agent("dying") as agent:
        agent.kill()
        done = run_cli("replicas", "drain", "dying", STREAM_GW_REDIS_URL=platform.redis_url)
    assert done.returncode == 1
    # Its lease runs out while it is waited for, or has just done so
    assert "died before it read the request" in done.stderr or "no live replica's name begins" in done.stderr


def test_replicas_without_a_redis_end_with_one_line() -> None:
    done = run_cli("replicas", STREAM_GW_REDIS_URL=NOWHERE)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("stream-gw replicas: ")
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in ("127.0.0.1:1", "--redis-url", "STREAM_GW_REDIS_URL"))
