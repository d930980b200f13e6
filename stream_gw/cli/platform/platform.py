"""The platform on one machine: Redis, agents, a controller, telemetry and gateways, which start and end together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from stream_fabric.process.http_client import open_session
from stream_gw.cli.platform.child import START_S, STOP_S, Children, free_port
from stream_gw.cli.platform.redis_server import redis_server
from stream_gw.cli.platform.state_folder import StateFolder, open_state_folder
from stream_gw.cli.variables import unknown_variables

_VLLM_STOP_S = 20.0
"""Longer than vLLM takes to end, because what is left when its agent is killed would outlive the platform."""
_PARTITIONS = 4
"""More slots bring nothing on one Redis, and fewer let more streams share a script call."""
_DRAIN_S = 0.2
"""Time for open streams at the end: on one machine there is no other gateway or replica to go to."""
_MODELS_S = 10.0
_LOOK_S = 0.05
_OWN_SETTINGS = ("PORT", "HOST", "ENGINE", "SIM", "UPSTREAM", "REPLICA", "GATEWAY", "KEYS_FILE", "METRICS_PORT")
"""Settings of one process, which children must not inherit from the environment that all share."""

Start: TypeAlias = Coroutine[Any, Any, tuple[asyncio.subprocess.Process, dict[str, Any]]]


def log_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
    """vLLM's own flags, quoted as for a shell."""
    port: int = 8080
    host: str = "127.0.0.1"
    redis_url: str = ""
    dev_key: str = "sk-dev"
    telemetry: bool | None = None
    """None: where ClickHouse's client and engine are installed."""
    database: bool | None = None
    """Whether to keep an SQLite database of stored responses, conversations and tenants. None: where SQL is installed,
    the platform starts its own Redis, and STREAM_GW_DATABASE_URL names no database."""
    state_folder: str = ""
    """Folder of traces, undelivered events and the database, or ``fresh``; empty: the default folder."""
    json: bool = False


@dataclass
class Platform:
    """A running platform."""

    options: UpOptions
    redis_url: str
    redis_pid: int | None
    gateways: list[dict[str, Any]] = field(default_factory=list)
    agents: list[dict[str, Any]] = field(default_factory=list)
    controller: dict[str, Any] = field(default_factory=dict)
    telemetry: dict[str, Any] | None = None
    state_folder: StateFolder | None = None
    database: Path | None = None
    """The SQLite file of this run. None: STREAM_GW_DATABASE_URL names the database, or there is none."""
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    children: list[Children] = field(default_factory=list)

    @property
    def alive(self) -> list[str]:
        """Names of the child processes that have not ended."""
        return [name for group in self.children for name in group.alive]

    async def last_words(self, pid: int) -> str:
        """Return the name of an ended process, and the line in which it said why."""
        told = [await group.last_words(pid) for group in self.children]
        return "".join(told) or "redis"

    def kill(self) -> None:
        """Kill every child process, when the user does not want to wait."""
        for group in self.children:
            group.kill()

    def facts(self) -> dict[str, Any]:
        """Addresses and process ids of all processes, and the API key, for ``--json``."""
        return {
            "gateways": self.gateways,
            "agents": self.agents,
            "controller": self.controller,
            "telemetry": self.telemetry,
            "state_folder": str(self.state_folder.path) if self.state_folder else None,
            "database": str(self.database) if self.database else None,
            "redis_url": self.redis_url,
            "redis_pid": self.redis_pid,
            "key": self.options.dev_key,
        }

    def add(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        """Add a child that has printed its ready line."""
        self.processes.append(process)
        match facts["ready"]:
            case "agent":
                self.agents.append({"replica": facts["replica"], "pid": process.pid, "metrics": facts["metrics"]})
            case "controller":
                self.controller = {"pid": process.pid, "metrics": facts["metrics"]}
            case "telemetry":
                self.telemetry = {"url": facts["url"], "pid": process.pid}
            case "gateway":
                self.gateways.append({"url": facts["url"], "pid": process.pid})


@contextlib.asynccontextmanager
async def platform(options: UpOptions, log: Callable[[str], None] = log_to_stderr) -> AsyncIterator[Platform]:
    """Start everything, yield when all processes are ready and the gateways list a model, end every child.

    ``log`` takes each line that a child process writes to stderr.
    Raises ValueError for options that cannot work, OSError or StreamGwError when a process cannot start.
    """
    async with contextlib.AsyncExitStack() as stack:
        redis_url, redis = options.redis_url, None
        if not redis_url:
            redis_url, redis = await stack.enter_async_context(redis_server())
        running = Platform(options, redis_url, redis.pid if redis else None)
        if redis:
            running.processes.append(redis)
        not_inherited = _variables_not_inherited()
        env = {name: value for name, value in os.environ.items() if name not in not_inherited}
        env["STREAM_GW_REDIS_URL"] = redis_url
        env.setdefault("STREAM_GW_PARTITIONS", str(_PARTITIONS))
        env.setdefault("STREAM_GW_DRAIN_S", str(_DRAIN_S))
        if sys.stderr.isatty():  # the children write to a pipe
            env.setdefault("STREAM_GW_LOG_FORMAT", "text")
        with_telemetry = _with_telemetry(options)
        with_events, with_database = with_telemetry or env.get("STREAM_GW_EVENTS") == "kafka", _with_database(options)
        if with_events or with_database:
            running.state_folder = stack.enter_context(open_state_folder(options.state_folder))
        if with_events and running.state_folder:
            env.setdefault("STREAM_GW_EVENTS_SPOOL", str(running.state_folder.path / "spool"))
        if with_database and running.state_folder:
            running.database = running.state_folder.path / "database.sqlite"
            running.database.touch(0o600)  # it holds content; the gateways make its tables
        elif options.database is False:
            env.pop("STREAM_GW_DATABASE_URL", None)
        # The consumers end last, because gateways and agents send events to the end, and the folder goes after them
        for _ in range(2):
            running.children.append(group := Children(log))
            stack.push_async_callback(group.end)
        consumers, others = running.children
        starts: list[Start] = []
        token = os.environ.get("STREAM_GW_TELEMETRY_TOKEN") or secrets.token_hex(16)
        consumer: dict[str, str] = {}
        if with_telemetry and running.state_folder:
            # Gateways start at the same time and need its address, so the port is chosen here
            port = os.environ.get("STREAM_GW_TELEMETRY_PORT") or str(free_port())
            consumer = {"STREAM_GW_TELEMETRY_URL": f"http://127.0.0.1:{port}", "STREAM_GW_TELEMETRY_TOKEN": token}
            own = {"STREAM_GW_TELEMETRY_TOKEN": token, "STREAM_GW_TELEMETRY_PORT": port}
            if not env.get("STREAM_GW_CLICKHOUSE"):
                own["STREAM_GW_CLICKHOUSE"] = f"chdb://{running.state_folder.path / 'telemetry'}"
            starts.append(consumers.start(["telemetry"], env | own))
        else:
            # Events that nobody consumes would only fill Redis
            env.setdefault("STREAM_GW_EVENTS", "off")
        starts += _agent_starts(others, options, env)
        starts.append(others.start(["controller", "--metrics-port", "0"], env))
        starts += _gateway_starts(others, options, env | consumer | _gateway_secrets(running))
        for process, facts in await asyncio.gather(*starts):
            running.add(process, facts)
        if running.telemetry:
            running.telemetry["token"] = token
        if options.replicas:
            # A gateway that dies here is reported with the other children; one that stays without a model still serves
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(_MODELS_S):
                    await _models_are_listed(running)
        yield running


async def _models_are_listed(running: Platform) -> None:
    """Return when each gateway has seen a replica; until then it lists no model, and a client may give up."""
    headers = {"authorization": f"Bearer {running.options.dev_key}"}
    async with open_session(total_s=_MODELS_S, connect_s=_MODELS_S, headers=headers) as session:
        for gateway in running.gateways:
            while True:
                async with session.get(f"{gateway['url']}/v1/models") as response:
                    if response.status != 200 or (await response.json())["data"]:
                        break  # an error is not this function's to tell
                await asyncio.sleep(_LOOK_S)


def _variables_not_inherited() -> set[str]:
    """Environment variables that children must not inherit; of unknown ones, the parent has warned once."""
    return {f"STREAM_GW_{name}" for name in _OWN_SETTINGS} | unknown_variables(os.environ).keys()


def _agent_starts(children: Children, options: UpOptions, env: dict[str, str]) -> list[Start]:
    """Coroutines that each start one agent."""
    flags = ["agent", "--engine", options.engine, "--metrics-port", "0"]
    for name in ("sim", "upstream", "model", "vllm_python", "vllm_flags"):
        value = getattr(options, name)
        flags += [f"--{name.replace('_', '-')}={value}"] if value else []
    # A model loads for minutes, and the agent bounds its engine's start itself
    start_s, stop_s = (None, _VLLM_STOP_S) if options.engine == "vllm" else (START_S, STOP_S)
    names = [f"replica{k}" for k in range(options.replicas)]
    return [children.start([*flags, "--replica", name], env, start_s, stop_s, name) for name in names]


def _gateway_starts(children: Children, options: UpOptions, env: dict[str, str]) -> list[Start]:
    """Coroutines that each start one gateway."""
    own = {"STREAM_GW_DEV_KEY": options.dev_key}
    starts = []
    for k in range(options.gateways):
        port = str(options.port + k if options.port else 0)
        flags = ["gateway", "--host", options.host, "--port", port, "--gateway", f"gateway{k}"]
        starts.append(children.start(flags, env | own, name=f"gateway{k}"))
    return starts


def _gateway_secrets(running: Platform) -> dict[str, str]:
    """Variables of the gateways' database and secrets. What the database holds outlives a run, so the secret that seals
    compactions and the pepper of the keys lie beside it."""
    if running.database is None or running.state_folder is None:
        return {"STREAM_GW_TOKEN_SECRET": secrets.token_hex(32)}
    return {
        "STREAM_GW_DATABASE_URL": f"sqlite:///{running.database}",
        "STREAM_GW_TOKEN_SECRET": running.state_folder.secret("token-secret"),
        "STREAM_GW_KEY_PEPPER": os.environ.get("STREAM_GW_KEY_PEPPER") or running.state_folder.secret("key-pepper"),
    }


def _with_database(options: UpOptions) -> bool:
    """Return whether to keep an SQLite file. Raises ValueError when it is asked for and its packages are missing.

    Gateways on a Redis of the user's may serve a fleet with a database of its own, and two databases would share its
    responses out between them.
    """
    if options.database is False or os.environ.get("STREAM_GW_DATABASE_URL"):
        return False
    installed = all(find_spec(module) is not None for module in ("sqlalchemy", "alembic", "aiosqlite"))
    if options.database and not installed:
        raise ValueError("--database needs an SQL library: pip install 'stream-gw[tenants]'")
    return bool(options.database) or (installed and not options.redis_url)


def _with_telemetry(options: UpOptions) -> bool:
    """Return whether to run telemetry. Raises ValueError when it is asked for and its packages are missing."""
    if os.environ.get("STREAM_GW_EVENTS") == "off":
        return bool(options.telemetry)
    modules = ["clickhouse_connect", "pyarrow"] + ([] if os.environ.get("STREAM_GW_CLICKHOUSE") else ["chdb"])
    installed = all(find_spec(module) is not None for module in modules)
    if options.telemetry and not installed:
        raise ValueError("--telemetry needs ClickHouse's client and engine: pip install 'stream-gw[chdb]'")
    return installed if options.telemetry is None else options.telemetry
