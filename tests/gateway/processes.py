"""Real processes of the platform for tests: started, found ready, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.streams import check_partitions
from stream_fabric.stream.ids import StreamId, partition_of
from stream_gw.cli.platform.redis_server import redis_binary
from tests.gateway.wire import Gate
from tests.support.missing import missing
from tests.support.redis import PATIENT_MS, RedisCluster
from tests.support.server import spawn

START_S = 60.0
STOP_S = 30.0
CLI = [sys.executable, "-m", "stream_gw.cli"]
INTERRUPTIBLE = ["env", "--default-signal=INT"]
"""Before a command: a shell's background job ignores the signal, and its children inherit that."""


def clean_env(**more: str) -> dict[str, str]:
    """The environment without settings of ours that the caller's shell may hold. Events go to Redis, also where nobody
    consumes them."""
    # With a bundle of certificates named, each process that imports aiohttp reads it twice: 0.1 s of its start
    others = (name for name in os.environ if not name.startswith("STREAM_GW_") and name != "SSL_CERT_FILE")
    kept = {name: os.environ[name] for name in others}
    return kept | {"STREAM_GW_EVENTS": "redis"} | more


def run_cli(*flags: str, timeout_s: float = 60.0, **env: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself."""
    return subprocess.run([*CLI, *flags], env=clean_env(**env), capture_output=True, text=True, timeout=timeout_s)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Process:
    """One process of ours that prints a JSON line when it is ready."""

    def __init__(self, *flags: str, tree: Path | None = None, **env: str) -> None:
        """``tree``: a source tree to run instead of this one."""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._popen = spawn(
            [*CLI, flags[0], "--json", *flags[1:]],
            cwd=tree,
            env=clean_env(**env | ({"PYTHONPATH": str(tree)} if tree else {})),
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        try:
            if not select.select([self._popen.stdout], [], [], START_S)[0]:
                raise TimeoutError(f"stream-gw {' '.join(flags)} was not ready within {START_S:g} s")
            line = self._popen.stdout.readline()
            if not line:
                code = self._popen.wait(STOP_S)
                raise RuntimeError(f"stream-gw {' '.join(flags)} ended with {code}:\n{self.log}")
        except BaseException:
            self._release()
            raise
        self.facts: dict[str, Any] = json.loads(line)

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_S) -> int:
        return self._popen.wait(timeout_s)

    def poll(self) -> int | None:
        return self._popen.poll()

    @property
    def log(self) -> str:
        """Output of the process and its children on stderr."""
        self._log.seek(0)
        return self._log.read()

    def rest_of_stdout(self) -> bytes:
        """Output on stdout after the first line, once the process has ended."""
        assert self._popen.stdout is not None
        return self._popen.stdout.read()

    def kill(self) -> None:
        """SIGKILL."""
        self._popen.kill()
        self._popen.wait()

    def _release(self) -> None:
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        self._log.close()

    def close(self) -> None:
        """End it. Fails where any process of it had an error that nothing expected."""
        if self._popen.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait()
        log = self.log
        self._release()
        # An engine's own lines may hold a traceback: its clients leave in the middle of answers
        own = "\n".join(line for line in log.splitlines() if '"event": "vLLM: ' not in line)
        assert "Traceback" not in own, log

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Running:
    """A whole platform."""

    gates: list[Gate]
    agents: list[int]
    redis_url: str
    redis_pid: int | None
    """None: a cluster's."""
    process: Process
    key: str = "sk-dev"
    secret: str = field(default="", repr=False)

    def gateway(self, *flags: str, **env: str) -> contextlib.closing[Process]:
        """One more gateway on the same Redis."""
        settings = {"STREAM_GW_REDIS_URL": self.redis_url, "STREAM_GW_PARTITIONS": "4", **env}
        if not settings.keys() & {"STREAM_GW_KEYS_FILE", "STREAM_GW_KEY_PEPPER"}:
            settings["STREAM_GW_DEV_KEY"] = self.key
        return contextlib.closing(Process("gateway", "--port", "0", *flags, **settings))

    def agent(self, name: str, *flags: str, **more: str) -> Process:
        """One more agent: a replica of its own pool and model, both of this name."""
        env = {"STREAM_GW_REDIS_URL": self.redis_url, "STREAM_GW_PARTITIONS": "4", **more}
        sim = f"model={name},itl_ms=20,ttft_ms=0"
        return Process("agent", "--replica", name, "--sim", sim, *flags, **env)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Output of ``stream-gw replicas --json``, by replica."""
        done = run_cli("replicas", "--json", STREAM_GW_REDIS_URL=self.redis_url)
        assert done.returncode == 0, done.stderr
        return {replica["replica"]: replica for pool in json.loads(done.stdout) for replica in pool["replicas"]}

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """No replica makes a token meanwhile. Shorter than a lease lives."""
        started = time.monotonic()
        _signal_all(self.agents, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal_all(self.agents, signal.SIGCONT)
        assert time.monotonic() - started < 2.5, "the replicas' leases may have run out: the test proves nothing"


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


@contextlib.contextmanager
def running(*flags: str, sim: str, gateways: int = 2, replicas: int = 2, **env: str) -> Iterator[Running]:
    """The platform, as ``stream-gw up`` starts it: on a Redis of its own, or where ``STREAM_GW_TEST_FABRIC=cluster`` is
    set on a Redis Cluster of three primaries."""
    need_redis()
    command = ["up", "--port", "0", "--gateways", str(gateways), "--replicas", str(replicas), "--sim", sim]
    command += ["--no-telemetry", "--no-database", *flags]
    with contextlib.ExitStack() as stack:
        if on_cluster():
            command += ["--redis-url", stack.enter_context(RedisCluster(node_timeout_ms=PATIENT_MS)).url]
        process = stack.enter_context(Process(*command, **env))
        facts = process.facts
        yield Running(
            [Gate(gateway["url"], gateway["pid"], facts["key"]) for gateway in facts["gateways"]],
            [agent["pid"] for agent in facts["agents"]],
            facts["redis_url"],
            facts["redis_pid"],
            process,
            facts["key"],
        )


async def delete_log(platform: Running, stream: str) -> None:
    """Delete all frames of a stream; what else the fabric knows of it stays."""
    client = RedisClient(platform.redis_url)
    await client.start()
    try:
        partitions = await check_partitions(client, 4)
        k = partition_of(StreamId(stream), 4)
        assert await client.execute(partitions.slots[k], "DEL", f"sg:{{p{k}}}:{stream}:l") == 1
    finally:
        await client.close()


def on_cluster() -> bool:
    """Whether the suite runs on a Redis Cluster, from ``STREAM_GW_TEST_FABRIC``."""
    fabric = os.environ.get("STREAM_GW_TEST_FABRIC", "single")
    if fabric not in ("single", "cluster"):
        pytest.fail(f"STREAM_GW_TEST_FABRIC is single or cluster, not {fabric!r}")
    return fabric == "cluster"


def need_redis() -> None:
    """Skip where no Redis server is installed; fail where ``CI`` is set."""
    if redis_binary() is None:
        missing("needs redis-server or valkey-server on PATH")
