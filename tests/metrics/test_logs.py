"""Logs are one JSON object per line with the request id, without secrets, prompts or completions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from inference.agent.settings import AgentSettings
from inference.control.settings import ControllerSettings
from stream_fabric.process.logs import without_secrets
from stream_fabric.process.settings import FabricSettings
from stream_gw.settings import GatewaySettings
from telemetry.ask.settings import AskSettings
from telemetry.settings import TelemetrySettings
from tests.gateway.processes import clean_env
from tests.gateway.wire import Gate, chat
from tests.metrics.conftest import Observed
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

PROMPT = "The heron stands where nobody has looked"
SAYS = """
import logging, sys
from stream_fabric.process.logs import configure
configure(*sys.argv[1:])
log = logging.getLogger("stream_gw.a.module")
log.warning("redis://user:%s@host is away", "hunter2", extra={"stream": "resp_1", "status": 503})
log.debug("detail")
try:
    raise ValueError("with sk-abcdefgh1234")
except ValueError:
    log.exception("it failed")
"""


SAYS_MUCH = """
import logging, sys
from stream_fabric.process.logs import configure
configure(*sys.argv[1:])
try:
    raise ValueError("a\\n" * 5000 + "the end")
except ValueError:
    field = "y" * 3990 + "/sk-" + "a" * 40 + "/" + "z" * 9000
    logging.getLogger("stream_gw.a").exception("x" * 100_000, extra={"field": field})
"""
LEVELS = """
import logging, sys
from stream_fabric.process.logs import configure
configure("text", *sys.argv[1:])
for name in ("stream_fabric.x", "stream_gw.x", "inference.x", "telemetry.x", "aiokafka.x", "asyncio", "aiohttp.access"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)(level)
"""


def run(program: str, *args: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *args], env=clean_env(), capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stdout
    assert "hunter2" not in done.stderr and "abcdefgh" not in done.stderr
    return done.stderr.splitlines()


def says(form: str) -> list[str]:
    return run(SAYS, form)


@pytest.mark.parametrize("form", ["json", "auto"])
def test_a_line_is_an_object(form: str) -> None:
    """``auto``: a pipe is no terminal."""
    first, second = map(json.loads, says(form))
    assert first.pop("at").endswith("Z")
    assert first == {
        "event": "redis://user:…@host is away", "level": "warning", "logger": "stream_gw.a.module", "stream": "resp_1",
        "status": 503,
    }  # fmt: skip
    assert second["event"] == "it failed" and "ValueError: with sk-…" in second["exception"]


def test_text_says_the_same() -> None:
    first, second, *trace = says("text")
    assert first.endswith(" WARNING stream_gw.a.module: redis://user:…@host is away stream=resp_1 status=503")
    assert second.endswith(" ERROR stream_gw.a.module: it failed")
    assert trace[-1] == "ValueError: with sk-…"


def logged(*level: str) -> dict[str, set[str]]:
    """Levels that were logged, by top-level logger."""
    found: dict[str, set[str]] = {}
    for line in run(LEVELS, *level):
        name, text = line.split(" ", 2)[2].split(": ")
        found.setdefault(name.partition(".")[0], set()).add(text)
    return found


OURS, OTHERS = ("stream_fabric", "stream_gw", "inference", "telemetry"), ("aiokafka", "asyncio", "aiohttp")


def test_info_is_logged_by_default_and_libraries_log_warnings_only() -> None:
    found = logged()
    assert found == {name: {"info", "warning", "error"} for name in OURS} | {
        name: {"warning", "error"} for name in OTHERS
    }


def test_the_log_level_bounds_what_is_logged() -> None:
    everything = {"debug", "info", "warning", "error"}
    assert logged("debug") == dict.fromkeys(OURS, everything) | {name: {"warning", "error"} for name in OTHERS}
    assert logged("error") == {name: {"error"} for name in (*OURS, *OTHERS)}


@pytest.mark.parametrize("role", [GatewaySettings, AgentSettings, ControllerSettings, TelemetrySettings, AskSettings])
def test_every_role_has_a_log_level(role: type[FabricSettings]) -> None:
    assert role.model_fields["log_level"].default == "info"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer …"),
        ("subprotocol bearer.eyJhbGciOi", "subprotocol bearer …"),
        ("rediss://:pw@h:1/0?ca=x", "rediss://:…@h:1/0?ca=x"),
        ('{"api_key": "abcd1234", "tokens": 12}', '{"api_key": "…", "tokens": 12}'),
        ("password=hunter2&user=x", "password=…&user=x"),
        ("db_password = 'hunter2'", "db_password = '…'"),
        ("x" * 100 + "-secret=hunter2", "x" * 100 + "-secret=…"),
        ("key sgw_0a1b2c_dGhl-c2Vj_cmV0 of acme", "key sgw_0a1b2c_… of acme"),
        ("of key sgw_0a1b2c", "of key sgw_0a1b2c"),
        ("sent cap_eyJhbGciOiJIUzI1NiJ9.eyJ0ZW5hbnQiOiJhIn0.c2ln-X_0", "sent cap_…"),
        ("without cap_net_bind_service", "without cap_net_bind_service"),
        ("http://a/b redis://u:pa:ss/w@h", "http://a/b redis://u:…@h"),
        ("the next token came after 12345 ms", "the next token came after 12345 ms"),
        ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080/v1"),
    ],
)
def test_secrets_are_taken_out(text: str, clean: str) -> None:
    assert without_secrets(text) == clean


@pytest.mark.parametrize(
    "piece",
    ["a", "a-", "://", "://a:", "://a:b@", "password", "token ", "token=", "token = ", "api_", "sk-", "sgw_", "sgw_a_",
     "cap_", "cap_a.", "bearer ", "bearer.", ".", " ", "token" + 50 * " ", "\n"],
)  # fmt: skip
def test_the_search_for_secrets_takes_linear_time(piece: str) -> None:
    """A log is written on the event loop, and clients get text into it: 4,000 characters took 0.5 s."""

    def process_time_s(text: str) -> float:
        begun = time.process_time()
        without_secrets(text)
        return time.process_time() - begun

    plain = min(process_time_s("the cat sat on the mat, " * 4000) for _ in range(3))
    hostile = min(process_time_s((piece * 100_000)[:100_000]) for _ in range(3))
    assert hostile < 20 * plain


def test_a_long_line_is_cut_and_a_traceback_keeps_its_end() -> None:
    (line,) = map(json.loads, run(SAYS_MUCH, "json"))
    assert line["event"] == "x" * 4000 + "…"
    assert line["field"] == "y" * 3990 + "/sk-…/zzzz…", "redacted before it is cut"
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("a\nthe end")


async def test_a_gateway_logs_its_requests_and_not_what_they_say(observed: Observed) -> None:
    """All that fail, with their ids; of the others here every one."""
    flags = ("--gateway", "logs", "--access-log-one-in", "1")
    platform = observed.platform
    with await asyncio.to_thread(platform.gateway, *flags) as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        body = chat(8) | {"messages": [{"role": "user", "content": PROMPT}]}
        async with gate.create(body) as exchange:
            stream, request = exchange.headers["x-stream-id"], exchange.headers["x-request-id"]
            await exchange.rest()
        unknown = await gate.ask("POST", "/v1/chat/completions", body | {"model": "nobody-serves-it"})
        wrong_key = Gate(process.facts["url"], process.pid, "sk-wrong-1234567890")
        refused = await wrong_key.ask("POST", "/v1/chat/completions", body)
        assert (unknown.status, refused.status) == (404, 401)

        def records() -> list[dict[str, Any]] | None:
            found = [json.loads(line) for line in process.log.splitlines()]
            found = [record for record in found if record["logger"] == "stream_gw.observe.access"]
            return found if len(found) >= 3 else None

        found = {record["request"]: record for record in await eventually(records, "three records")}
        log = process.log
    assert len(found) == 3, "each once"
    served = found[request]
    assert (served["stream"], served["tenant"], served["status"], served["ended"]) == (stream, "dev", 200, "completed")
    assert served["tokens"] == 8 and served["wall_ms"] >= served["ttft_ms"] > 0
    missing = found[unknown.headers["x-request-id"]]
    assert (missing["status"], missing["error"], missing["tenant"]) == (404, "model_not_found", "dev")
    denied = found[refused.headers["x-request-id"]]
    assert (denied["status"], denied["error"], denied["tenant"]) == (401, "invalid_api_key", "")
    for secret in (PROMPT, "heron", platform.key, "sk-wrong", "1234567890", platform.redis_url):
        assert secret not in log


async def test_of_what_goes_well_a_sample_is_logged(observed: Observed) -> None:
    with await asyncio.to_thread(observed.platform.gateway, "--access-log-one-in", "0") as process:
        gate = Gate(process.facts["url"], process.pid, observed.platform.key)
        await gate.finished(3)
        await gate.ask("POST", "/v1/chat/completions", chat(3) | {"model": "nobody-serves-it"})
        await eventually(lambda: "model_not_found" in process.log, "the one that failed")
        assert len(process.log.splitlines()) == 1
