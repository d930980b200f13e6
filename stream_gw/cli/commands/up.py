"""``stream-gw up``: runs the whole platform on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from stream_gw.cli.flags import VLLM_EPILOG, UsageError, count, load_settings, port
from stream_gw.cli.platform.platform import Platform, UpOptions, platform
from stream_gw.cli.variables import warn_of_unknown_variables

_INTERRUPTED = 130
_PATIENCE_S = 1.0
"""After this time, the user is told what the end waits for."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = VLLM_EPILOG
    parser.set_defaults(vllm_flags="")
    parser.add_argument(
        "--gateways", type=count, default=2, help="number of gateways, 1 to 64; gateway k has port + k (default 2)"
    )
    parser.add_argument(
        "--replicas",
        type=count,
        help="number of agents, each with an engine, 1 to 64 (default 2; with engine vllm 1, because several share "
        "the GPUs that this shell sees: give each its part with -- --gpu-memory-utilization)",
    )
    parser.add_argument(
        "--engine", choices=("sim", "openai", "vllm"), default="sim", help="sim: a simulated GPU (default)"
    )
    parser.add_argument("--upstream", default="", help="base URL of an OpenAI-compatible server, for engine openai")
    parser.add_argument(
        "--sim", default="", help="settings of engine sim, for example itl_ms=20,ttft_ms=100,max_num_seqs=64"
    )
    parser.add_argument("--model", default="", help="name or folder of the model, for engine vllm")
    parser.add_argument(
        "--vllm-python",
        default="",
        help="Python of vLLM's environment, for engine vllm (default: the vllm command beside ours, or on the PATH)",
    )
    parser.add_argument(
        "--port", type=port, default=8080, help="port of the first gateway; 0: free ones (default 8080)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--redis-url", default="", help="URL of a Redis to use (default: start one)")
    parser.add_argument("--dev-key", default="sk-dev", help="API key of tenant dev (default sk-dev)")
    parser.add_argument(
        "--telemetry",
        action=argparse.BooleanOptionalAction,
        help="keep a trace of every request in ClickHouse's engine (default: where it is installed, stream-gw[chdb])",
    )
    parser.add_argument(
        "--database",
        action=argparse.BooleanOptionalAction,
        help="keep stored responses, conversations and tenants in an SQLite file (default: where stream-gw[tenants] is "
        "installed, unless STREAM_GW_DATABASE_URL or --redis-url is given)",
    )
    parser.add_argument(
        "--state-folder",
        "--telemetry-folder",
        metavar="FOLDER",
        default="",
        help="folder of traces, undelivered events and the database; fresh: an empty one, deleted at the end. One run "
        "uses a folder at a time (default: $XDG_STATE_HOME/stream-gw, else ~/.local/state/stream-gw, shared by all "
        "runs). --telemetry-folder is its name before this release",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line when ready")


def run(args: argparse.Namespace) -> int:
    warn_of_unknown_variables()
    return asyncio.run(_serve(_read_options(args)))


def _read_options(args: argparse.Namespace) -> UpOptions:
    """Read the options from the flags. Raises UsageError or ValueError for an engine that cannot work."""
    if args.upstream and args.engine != "openai":
        raise UsageError(f"argument --upstream: is for --engine openai; the engine is {args.engine}")
    if args.vllm_flags and args.engine != "vllm":
        raise ValueError(f"flags after -- are vLLM's, and the engine is {args.engine}: remove them, or --engine vllm")
    if args.engine == "vllm":
        from inference.agent import main as agent_main
        from inference.agent.settings import AgentSettings

        names = ("engine", "model", "vllm_flags", "vllm_python")
        given = {name: value for name in names if (value := getattr(args, name))}
        settings = load_settings(AgentSettings, argparse.Namespace(**given))  # an agent reads the variables too
        agent_main.check(settings)
        for name in names:
            setattr(args, name, getattr(settings, name))
    if args.replicas is None:
        args.replicas = 1 if args.engine == "vllm" else 2
    return UpOptions(**{name: getattr(args, name) for name in UpOptions.__dataclass_fields__})


async def _serve(options: UpOptions) -> int:
    """Run the platform; return the exit code, also after an interrupt during the start."""
    stop = asyncio.Event()
    starting = asyncio.current_task()
    assert starting is not None
    try:
        return await _run_platform(options, stop, starting)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        print("stream-gw up: interrupted before it was up", file=sys.stderr)
        return _INTERRUPTED


async def _run_platform(options: UpOptions, stop: asyncio.Event, starting: asyncio.Task[Any]) -> int:
    """Start the platform and wait for a signal. A signal before all is ready cancels ``starting``."""
    up: Platform | None = None

    def on_signal() -> None:
        if stop.is_set():
            _say("killing what has not ended")
            if up is not None:
                up.kill()
        elif up is None:
            starting.cancel()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    if options.engine == "vllm":
        _say(f"vLLM loads {options.model}, which may take minutes")
    telling: asyncio.Task[None] | None = None
    async with platform(options) as running:
        up = running
        if running.state_folder:
            _say(_folder_text(running))
        if options.json:
            print(json.dumps(running.facts()), flush=True)
        else:
            print_addresses(running)
        await _watch(running, stop)
        _say("stopping")
        telling = asyncio.create_task(_tell_what_is_waited_for(running))
    telling.cancel()
    return 0


async def _watch(running: Platform, stop: asyncio.Event) -> None:
    """Wait for ``stop``. A process that dies is reported and not restarted: the rest survives it, and the user may want
    to see that."""
    stopping = asyncio.create_task(stop.wait())
    ended = {asyncio.create_task(process.wait()): process for process in running.processes}
    while not stop.is_set():
        await asyncio.wait([*ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in ended if task.done()]:
            pid = ended.pop(task).pid
            _say(f"process {pid} ended with {task.result()}: {await running.last_words(pid)}")
    stopping.cancel()
    for task in ended:
        task.cancel()


async def _tell_what_is_waited_for(running: Platform) -> None:
    while True:
        await asyncio.sleep(_PATIENCE_S)
        if running.alive:
            _say(f"waiting for {', '.join(running.alive)}; Ctrl-C again kills them")


def _say(text: str) -> None:
    print(f"stream-gw up: {text}", file=sys.stderr, flush=True)


def _folder_text(running: Platform) -> str:
    """Say what lies in the state folder, and whether it is kept."""
    assert running.state_folder is not None
    what = "traces and undelivered events" if running.telemetry else "undelivered events"
    if running.database:
        what = "traces, undelivered events and the database" if running.telemetry else "the database"
    verb = "is" if what == "the database" else "are"
    return f"{what} {verb} in {running.state_folder.path} ({running.state_folder.note})"


def _own_command() -> str:
    """Return what a shell calls this command by: its name, or its path where no folder of the ``PATH`` has it."""
    path = Path(sys.executable).parent / "stream-gw"
    if shutil.which("stream-gw") or not path.exists():
        return "stream-gw"
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def print_addresses(running: Platform) -> None:
    """Print the pages, the key and the commands that look at this platform, each ready to be pasted."""
    options, command = running.options, _own_command()
    engines = {"sim": "the simulator (no GPU, no real model)", "vllm": f"vLLM with {options.model}"}
    engine = engines.get(options.engine, options.upstream)
    parts = [(options.gateways, "gateway"), (options.replicas, "replica")]
    counted = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in parts)
    print(f"stream-gw is up: {counted} on {engine}\n")
    first = running.gateways[0]["url"]
    lines = [("gateway", gateway["url"]) for gateway in running.gateways]
    lines += [("key", options.dev_key), ("redis", running.redis_url), ("", "")]
    lines += [("chat", f"{first}/#key={options.dev_key}"), ("ops", f"{first}/ops#key={options.dev_key}")]
    lines += [("API", f"{first}/docs"), ("SDK", f"OPENAI_BASE_URL={first}/v1 OPENAI_API_KEY={options.dev_key}")]
    lines.append(("", ""))
    if running.telemetry:
        flags = f"--telemetry-url {running.telemetry['url']} --telemetry-token {running.telemetry['token']}"
        lines += [("traces", f"{command} traces list {flags}"), ("why", f"{command} traces why resp_… {flags}")]
    elif options.telemetry is None and os.environ.get("STREAM_GW_EVENTS") != "off":
        lines.append(("traces", "not kept: pip install 'stream-gw[chdb]'"))
    if running.database:
        lines.append(("database", f"{running.database} (stored responses, conversations, keys)"))
    elif options.database is not False and not os.environ.get("STREAM_GW_DATABASE_URL"):
        why = "set STREAM_GW_DATABASE_URL or --database" if options.redis_url else "pip install 'stream-gw[tenants]'"
        lines.append(("database", f"none, so no conversations: {why}"))
    lines.append(("replicas", f"{command} replicas --redis-url {running.redis_url}"))
    for name, text in lines:
        print(f"  {name:<8} {text}".rstrip())
    print("\nCtrl-C stops everything.", flush=True)
