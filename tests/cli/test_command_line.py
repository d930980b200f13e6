"""The command line itself: version, unknown flags, files that are missing, an early Ctrl-C, completion of a shell."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from stream_gw.cli.main import main
from stream_gw.cli.variables import unknown_variables
from tests.gateway.processes import run_cli
from tests.support.web import served

_INTERRUPTED_IMPORT = """
import runpy, sys

class Interrupting:
    module = sys.argv[1]

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = ["stream-gw", "up", "--port", "0", "--no-telemetry", "--no-database"]
runpy.run_module("stream_gw.cli", run_name="__main__")
"""
"""Runs ``stream-gw up`` with a Ctrl-C in the moment when it imports a module."""


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """The command in this process: its exit code, stdout and stderr."""
    try:
        code = main(flags)
    except SystemExit as ended:
        code = int(ended.code or 0)
    return (code, *capsys.readouterr())


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"stream-gw {version('stream-gw')}\n", "")


NOWHERE = "redis://127.0.0.1:1"


@pytest.mark.parametrize(
    "flags",
    [
        ["telemetry", "--redis-url", NOWHERE, "dlq", "list"],
        ["telemetry", "dlq", "--redis-url", NOWHERE, "list"],
        ["telemetry", "dlq", "list", "--redis-url", NOWHERE],
        ["telemetry", "dlq", "list", "--json", "--redis-url", NOWHERE],
        ["traces", "--telemetry-url", "http://127.0.0.1:1", "list"],
        ["traces", "list", "--telemetry-url", "http://127.0.0.1:1"],
        ["usage", "--telemetry-url", "http://127.0.0.1:1", "show"],
        ["pools", "--redis-url", NOWHERE, "hold", "p"],
        ["pools", "hold", "p", "--redis-url", NOWHERE],
    ],
    ids=" ".join,
)
def test_a_flag_stands_before_or_after_the_verb(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    code, out, err = run(capsys, *flags)
    assert (code, out) == (1, "") and "127.0.0.1:1" in err and "refused" in err, err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["key", "--tenant", ""], "--tenant: must not be empty"),
        (["traces", "list", "--since", "then"], "--since: 'then' is no time; write 15m,"),
        (["traces", "slow", "--until", "then"], "--until: 'then' is no time; write 15m,"),
        (["traces", "list", "--since", "1h", "--until", "2h"], "the time window ends before it begins"),
        (["traces", "pool", "p", "--top", "0"], "--top: must be 1 to 1000, got '0'"),
        (["traces", "diff", "then", "now"], "'then' is no part of a cohort"),
        (["traces", "list", "--telemetry-url", "host:1"], "--telemetry-url (STREAM_GW_TELEMETRY_URL): a URL of"),
        (["usage", "--since", "then"], "--since: 'then' is no time; write 15m,"),
        (["usage", "show", "--from", "then"], "--from: 'then' is no time; write 15m,"),
        (["usage", "show", "--kept-days", "0"], "--kept-days: must be 1 to 36500, got '0'"),
        (["usage", "reconcile", "--until", "then"], "--until: 'then' is no time; write 15m,"),
        (["usage", "rebuild", "--since", "then"], "--since: 'then' is no time; write 15m,"),
        (["audit", "--since", "then"], "--since: 'then' is no time; write 15m,"),
        (["audit", "--limit", "0"], "--limit: must be 1 to 10000, got '0'"),
        (["plans", "add", "p", "--share", "0"], "--share: must be 1 to 10000, got '0'"),
        (["plans", "add", "p", "--retention-s", "9999999"], "--retention-s: must be 0 to 604800 or default, got"),
        (["plans", "add", "p q"], "a name has 1 to 64 letters"),
        (["telemetry", "dlq", "list", "--count", "-1"], "--count: must be 1 to 1000000, got '-1'"),
        (["pools", "--redis-url", "http://h"], "--redis-url (STREAM_GW_REDIS_URL): a Redis URL starts with one of"),
        (["pools", "--redis-url", "foo"], "rediss+cluster://; got one without a scheme\n"),
        (["gateway", "--key-pepper-previous", "x" * 16], "STREAM_GW_KEY_PEPPER_PREVIOUS needs STREAM_GW_KEY_PEPPER,"),
        (["controller", "--scaler-port", "1"], "STREAM_GW_SCALER_PORT needs STREAM_GW_POOLS_FILE"),
        (["audit", "--database-url", "h"], "--database-url (STREAM_GW_DATABASE_URL): must begin with postgresql://"),
        (["bench", "localhost"], "URL: must be a URL such as http://localhost:8080, got 'localhost'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_of_a_flag_is_named_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], says: str
) -> None:
    monkeypatch.setenv("STREAM_GW_TELEMETRY_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("STREAM_GW_DATABASE_URL", f"sqlite:///{tmp_path}/tenants.db")
    code, out, err = run(capsys, *flags)
    assert (code, out) == (2, "") and says in err, err


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["pools", "hold", "p", "3"], 2, "stream-gw pools: unrecognized arguments: 3\nstream-gw pools --help"),
        (["tenants", "list", "--database-url", "postgresql://u:hunter2@127.0.0.1:1/x"], 1, "database 127.0.0.1:1/x "),
        (["tenants", "list", "--database-url", "sqlite:////no-folder/x"], 1, "folder of database /no-folder/x does"),
        (
            ["traces", "list", "--clickhouse", "http://127.0.0.1:1"],
            1,
            "ClickHouse at http://127.0.0.1:1 does not answer",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_names_what_the_flags_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], code: int, says: str
) -> None:
    monkeypatch.setenv("STREAM_GW_TELEMETRY_URL", "http://127.0.0.1:9")
    found, out, err = run(capsys, *flags)
    assert (found, out) == (code, "") and says in err and "hunter2" not in err, err


async def test_a_server_that_is_no_clickhouse_is_named() -> None:
    async with served([]) as url:
        done = await asyncio.to_thread(run_cli, "traces", "list", "--clickhouse", url)
    assert done.returncode == 1 and f"{url} does not answer as ClickHouse does" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("role", "variables", "code"),
    [
        (["gateway", "--log-level", "debug"], {"KEY_PEPPER_PREVIOUS": "x" * 16}, 1),
        (["gateway", "--log-level", "debug"], {"EVENTS": "kafka"}, 1),
        (["gateway", "--events", "kafka"], {}, 2),
        (["gateway", "--kafka-user", "me"], {"EVENTS": "kafka", "KAFKA_SERVERS": "h:1"}, 2),
        (["agent", "--log-level", "debug"], {"LEASE_RENEW_S": "3"}, 1),
        (["agent", "--lease-ttl-s", "4"], {"LEASE_RENEW_S": "3"}, 2),
        (["controller", "--scaler-host", "0.0.0.0"], {"SCALER_PORT": "1", "POOLS_FILE": "p"}, 2),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_together_are_the_flags_fault_if_one_of_them_is_a_flag(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    role: list[str],
    variables: dict[str, str],
    code: int,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"STREAM_GW_{name}", value)
    assert run(capsys, *role)[:2] == (code, "")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--versoin"], "stream-gw: unknown flag --versoin; did you mean --version?\n"),
        (["--frobnicate", "up"], "stream-gw: unknown flag --frobnicate; there are --help, --version\n"),
        (["up", "--gatway", "2"], "stream-gw up: unknown flag --gatway; did you mean --gateways?\n"),
        (["key", "--tenent=acme"], "stream-gw key: unknown flag --tenent; did you mean --tenant?\n"),
        (["replicas", "drain", "r", "--wait", "3", "--froce"], "stream-gw replicas: unknown flag --froce; there are"),
        (["traces", "lsit"], "stream-gw traces: unknown verb 'lsit'; did you mean list?\n"),
        (["telemetry", "dlq"], "stream-gw telemetry dlq: the following arguments are required: {list,replay}\n"),
        (["upp"], "stream-gw: unknown command 'upp'; did you mean up?\n"),
    ],
    ids=" ".join,
)
def test_an_unknown_word_is_named_first(capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    code, out, err = run(capsys, *flags)
    assert (code, out) == (2, "")
    assert err.startswith(says), err
    assert len(err.splitlines()) == 2, "the error, and where the flags are listed"


@pytest.mark.parametrize(
    ("flags", "env", "says"),
    [
        (["simulate", "--trace", "/nope.csv", "--policy", "ours"], {}, "simulate: --trace: /nope.csv: no such file"),
        (["capacity", "--trace", "/nope.csv"], {}, "capacity: --trace: /nope.csv: no such file"),
        (["up", "--state-folder", "/dev/null/x"], {}, "up: --state-folder: /dev/null/x: not a directory"),
        (["controller", "--pools-file", "/nope.toml"], {}, "controller: --pools-file: /nope.toml: no such file"),
        (["controller"], {"STREAM_GW_POOLS_FILE": "/nope"}, "controller: STREAM_GW_POOLS_FILE: /nope: no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_missing_file_is_named_with_its_flag(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    env: dict[str, str],
    says: str,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, _, err = run(capsys, *flags)
    assert code == 1
    assert err.startswith(f"stream-gw {says}"), err
    assert "Errno" not in err


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("STREAM_GW_DRAINS_S", "STREAM_GW_DRAIN_S"),
        ("STREAM_GW_POOL_FILE", "STREAM_GW_POOLS_FILE"),
        ("STREAM_GW_METRIC_PORT", "STREAM_GW_METRICS_PORT"),
        ("STREAM_GW_XYZZY", ""),
    ],
)
def test_a_process_warns_once_of_a_variable_that_nothing_reads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's: a process has none
    monkeypatch.setenv(variable, "1")
    code, _, err = run(capsys, "controller", "--redis-url", "http://wrong.test")
    first, *rest = err.splitlines()
    logged = json.loads(first)
    assert (logged["level"], logged["event"]) == ("warning", "unknown environment variable ignored")
    assert (logged["variable"], logged["nearest_known"]) == (variable, nearest)
    assert code == 2 and variable not in "".join(rest), "also where a setting is wrong, and once"


def test_an_environment_that_all_commands_share_gives_no_warning() -> None:
    shared = {"STREAM_GW_DRAIN_S": "1", "STREAM_GW_POOLS_FILE": "p", "stream_gw_port": "1", "STREAM_GW_TRACES": "f"}
    tests = {"STREAM_GW_TEST_FABRIC": "cluster", "STREAM_GW_SIM_SEEDS": "9", "STREAM_GW_COMPILE": "1"}
    service = {
        "STREAM_GW_GATEWAY_PORT": "tcp://10.0.0.1:80",
        "STREAM_GW_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
        "STREAM_GW_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "STREAM_GW_GATEWAY_SERVICE_PORT_HTTP": "80",
    }
    assert unknown_variables(shared | tests | service | {"PATH": "/bin", "STREAM": "1"}) == {}


@pytest.mark.parametrize("url", ["collector:4318", "grpc://collector:4317"])
def test_a_gateway_refuses_an_otlp_endpoint_that_no_span_could_reach(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    code, _, err = run(capsys, "gateway", "--otlp-endpoint", url, "--redis-url", "redis://127.0.0.1:1")
    assert code == 2
    assert err.startswith("stream-gw gateway: --otlp-endpoint (STREAM_GW_OTLP_ENDPOINT): "), err


def test_traces_say_in_words_that_telemetry_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "traces", "list", "--telemetry-url", "http://127.0.0.1:1", "--telemetry-token", "t")
    assert code == 1
    assert err.startswith("stream-gw traces: stream-gw telemetry at http://127.0.0.1:1 does not answer: connection ref")
    assert "--telemetry-url" in err and "(" not in err


@pytest.mark.parametrize("verb", ["why", "show"])
def test_an_empty_id_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    """As of a shell's variable that is not set."""
    code, _, err = run(capsys, "traces", verb, "", "--telemetry-url", "http://127.0.0.1:1", "--telemetry-token", "t")
    assert code == 2
    assert err.startswith("stream-gw traces: the id is empty; give the id of a stream, request, trace or completion\n")


@pytest.mark.parametrize("module", ["stream_gw.cli.main", "stream_gw.cli.parser", "pydantic", "aiohttp", "hiredis"])
def test_ctrl_c_while_modules_load_leaves_no_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT, module], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("flags", ["key --tenant a", "doctor"])
def test_output_that_nobody_reads_to_its_end_is_no_error(flags: str) -> None:
    """The reader leaves before the first line, as ``head`` does behind its last one."""
    script = "import sys; from stream_gw.cli.main import main; sys.exit(main())"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", script, *flags.split()]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 2>&-", "1>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_change_no_exit_code(closed: str) -> None:
    script = f"exec {closed}; {sys.executable} -m stream_gw.cli"
    done = subprocess.run(["bash", "-c", f"{script} key --tenant a && {script} --no-such-flag"], capture_output=True)
    assert done.returncode == 2, done
    assert b"[[tenant]]" in done.stdout or "1>&-" in closed, done


def complete(tmp_path: Path, *words: str) -> set[str]:
    """Words that bash offers after these; the last one is what was typed of the next."""
    script = tmp_path / "completion.bash"
    if not script.exists():
        made = subprocess.run([sys.executable, "-m", "stream_gw.cli", "completion", "bash"], capture_output=True)
        assert made.returncode == 0, made.stderr
        script.write_bytes(made.stdout)
    code = f'. {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stream_gw; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code, "bash", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_verbs_flags_and_values(tmp_path: Path) -> None:
    assert complete(tmp_path, "stream-gw", "tr") == {"traces"}
    assert complete(tmp_path, "stream-gw", "traces", "w") == {"why"}
    assert complete(tmp_path, "stream-gw", "replicas", "drain", "--wait") == {"--wait-s"}
    assert complete(tmp_path, "stream-gw", "up", "--engine", "") == {"sim", "openai", "vllm"}
    assert complete(tmp_path, "stream-gw", "up", "--engine", "sim", "--gat") == {"--gateways"}
    assert complete(tmp_path, "stream-gw", "capacity", "--trace", "completion") == {"completion.bash"}, "a file"


@pytest.mark.parametrize(("shell", "says"), [("zsh", "#compdef stream-gw\n"), ("fish", "complete -c stream-gw -f\n")])
def test_other_shells_get_a_script(capsys: pytest.CaptureFixture[str], shell: str, says: str) -> None:
    code, out, _ = run(capsys, "completion", shell)
    assert code == 0
    assert out.startswith(says) and "telemetry-url" in out
