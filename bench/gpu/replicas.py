"""Agents with a real vLLM below them, as ``bench.gpu`` starts and looks at them."""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import below, start
from bench.platform import PARTITIONS, Platform

COMMAND = Path(sys.executable).parent / "stream-gw"
MODEL = "gpu"
START_S_MAX = 400.0


class Failed(Exception):
    """An answer was not whole, or did not come."""


@dataclass
class Replica:
    """An agent and its vLLM."""

    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    server: int = 0
    processes: dict[str, int] = field(default_factory=dict)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def start_agent(
    args: argparse.Namespace, platform: Platform, folder: Path, name: str, *, own: Sequence[str], vllm: Sequence[str]
) -> Replica:
    """Start one without waiting for it. ``own``: flags of the agent; ``vllm``: of its vLLM."""
    command = [str(COMMAND), "agent", "--json", "--log-format", "json", "--engine", "vllm", "--model"]
    command += [str(args.model), "--vllm-python", str(args.vllm / "bin" / "python"), "--pool", MODEL]
    command += ["--replica", name, "--upstream-slots", "256", *own, "--", "--served-model-name", MODEL, *vllm]
    env = {**os.environ, "STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_EVENTS": "off", "HF_HUB_OFFLINE": "1"}
    env |= {"STREAM_GW_PARTITIONS": str(PARTITIONS), "VLLM_SERVER_DEV_MODE": "1"}
    log = folder / f"{name}.log"
    with log.open("w") as file:
        process = start(command, range(os.cpu_count() or 1), stdout=subprocess.PIPE, stderr=file, env=env)
    return Replica(process, log)


def wait_ready(replica: Replica) -> float:
    """Return how long it still took. Raises Failed with its last lines."""
    began = time.monotonic()
    assert replica.process.stdout is not None
    if not select.select([replica.process.stdout], [], [], START_S_MAX)[0] or not replica.process.stdout.readline():
        raise Failed(f"an agent was not ready; it said last:\n{replica.tail()}")
    for pid in below(replica.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--port" in words and b"serve" in words and not any(b"guard.py" in word for word in words):
            replica.url = f"http://127.0.0.1:{words[words.index(b'--port') + 1].decode()}"
            replica.server = pid
    replica.processes = {"agent": replica.process.pid, "vLLM's API server": replica.server}
    return time.monotonic() - began
