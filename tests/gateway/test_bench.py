"""``stream-gw bench`` on the platform: every answer that it disturbs comes whole, through both gateways."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.gateway.processes import CLI, INTERRUPTIBLE, Running, clean_env, run_cli
from tests.gateway.wire import MODEL


@pytest.mark.parametrize("transport", ["sse", "ws"])
def test_cut_cancelled_and_slow_answers_come_exactly(platform: Running, tmp_path: Path, transport: str) -> None:
    urls, out = [gate.url for gate in platform.gates], tmp_path / "out.json"
    chaos = ("--cut", "0.5", "--cancel", "0.3", "--cancel-at", "3", "--slow", "0.05", "--seed", "3")
    load = ("--concurrency", "12", "--requests", "60", "--duration", "60s", "--profile", "agent", "--exact-length")
    flags = ("--key", platform.key, "--model", MODEL, "--transport", transport, "--json", str(out), "--quiet")
    ended = run_cli("bench", *urls, *load, *chaos, *flags, timeout_s=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_bytes())
    seen, (stage,) = found["disturbances"], found["stages"]
    assert found["target"]["is_gateway"] and stage["requests"] == 60 and stage["failed"] == 0
    assert seen["cut"] == seen["resumed"] == seen["exact"] > 15
    assert seen["cancelled"] == seen["exact_cancels"] > 5
    assert stage["ttft"]["count"] > 50 and stage["output_tokens"] > 1000
    assert stage["cached_tokens"] > 1000, "turns repeat their history"
    assert "byte for byte" in ended.stdout


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_what_it_has(platform: Running, by: signal.Signals) -> None:
    url = platform.gates[0].url
    flags = ("--key", platform.key, "--model", MODEL, "--concurrency", "4", "--duration", "10m")
    command = [*INTERRUPTIBLE, *CLI, "bench", url, *flags]
    with subprocess.Popen(
        command, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert "running" in process.stderr.readline(), "the first line of progress"
            process.send_signal(by)
            began = time.monotonic()
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 1 and time.monotonic() - began < 30
        finally:
            process.kill()  # else its ten minutes of load disturb the tests that come after
    assert "was interrupted" in out and "4 at once" in out
    assert re.search(r"[1-4] requests had not ended", out)
