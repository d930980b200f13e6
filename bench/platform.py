"""Starts the platform under test by its own command, ``stream-gw up``; only this module knows that command."""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.harness import Cores, Target, pin, start, stop

READY_S = 30.0
# The fake engine takes any number of streams at once; the agent must not be what refuses them
PARTITIONS = 16  # the default of every process
ENVIRONMENT = {"STREAM_GW_ROOM_RATIO": "64", "STREAM_GW_PARTITIONS": str(PARTITIONS)}


class Platform:
    """One Redis, agents beside the engine on ``upstream``, and gateways, the first one pinned to its own core."""

    def __init__(
        self,
        cores: Cores,
        folder: Path,
        upstream: int,
        *,
        gateways: int = 1,
        replicas: int = 1,
        command: str | None = None,
        environment: Mapping[str, str] = ENVIRONMENT,
        engine: Sequence[str] | None = None,
        steps: str = "",
        telemetry: bool = False,
    ) -> None:
        """``steps``: path of the socket at which the one agent listens for the engine; empty: it asks by HTTP."""
        if command:
            words = shlex.split(command)
        else:
            words = [str(Path(sys.executable).parent / "stream-gw"), "up"] + ["--no-telemetry"] * (not telemetry)
            words.append("--no-database")
        words += ["--json", "--gateways", str(gateways), "--replicas", str(replicas), "--port", "0"]
        words += engine or ["--engine", "openai", "--upstream", f"http://127.0.0.1:{upstream}"]
        number, name = tempfile.mkstemp(prefix="platform-", suffix=".log", dir=folder)
        self._log = Path(name)
        with open(number, "w") as log:
            try:
                self._process = start(
                    words,
                    cores.rest,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={
                        "STREAM_GW_EVENTS": "redis",
                        "STREAM_GW_UPSTREAM_STEPS": steps or "off",
                        **os.environ,
                        **environment,
                    },
                )
            except FileNotFoundError:
                raise SystemExit(f"the platform cannot be started: no {words[0]} (pip install -e .)") from None
        try:
            ready = self._wait_ready()
        except BaseException:
            stop(self._process)
            raise
        self.pid = self._process.pid
        self.key: str = ready["key"]
        self.gateway_urls: list[str] = [gateway["url"] for gateway in ready["gateways"]]
        self.gateway_pids: list[int] = [gateway["pid"] for gateway in ready["gateways"]]
        self.agent_pids: list[int] = [agent["pid"] for agent in ready["agents"]]
        self.metrics_urls = [
            *self.gateway_urls,
            *(part["metrics"] for part in (*ready["agents"], ready["controller"]) if "metrics" in part),
        ]
        self.redis_pid: int = ready["redis_pid"]
        self.redis_url: str = ready["redis_url"]
        pin(self.gateway_pids[0], cores.gateway)

    def _wait_ready(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], READY_S)[0]:
            raise SystemExit(f"the platform said nothing within {READY_S:g} s:\n{self.log_tail()}")
        line = self._process.stdout.readline()
        try:
            ready: dict[str, Any] = json.loads(line)
        except ValueError:
            raise SystemExit(f"the platform did not start: {line.strip()}\n{self.log_tail()}") from None
        return ready

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def log_tail(self) -> str:
        return self.log[-3000:]

    def watch(self) -> dict[str, int]:
        agents = {f"agent{i or ''}": pid for i, pid in enumerate(self.agent_pids)}
        return {"gateway": self.gateway_pids[0], "redis": self.redis_pid, **agents}

    def target(self, kind: str) -> Target:
        port = urlsplit(self.gateway_urls[0]).port
        assert port is not None
        return Target("gateway", port, self.watch(), kind, self.key, redis_url=self.redis_url)

    def stop(self) -> None:
        stop(self._process)
        assert self._process.stdout is not None
        self._process.stdout.close()
