"""vLLM's command line and environment, made from the agent's options and the user's own flags."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from inference.engines import plugin
from inference.engines.plugin.stream_gw_budget import IN_FORCE, OBJECTIVE
from inference.engines.plugin.stream_gw_steps import ADDRESS, Steps
from inference.engines.sleep import SleepPolicy
from stream_fabric.limits import VLLM_START_S_MAX

log = logging.getLogger(__name__)

SLEEP_FLAG = "--enable-sleep-mode"
TIMES_FLAG = "--enable-per-request-metrics"
"""Makes vLLM send its queue and prefill times with each answer. Versions before 0.32 may not know the flag."""
PLUGIN = Steps.__module__.rpartition(".")[2]
"""Name under which vLLM imports the plug-in of the step socket."""
SCHEDULER = "stream_gw_scheduler"
"""Name under which vLLM imports the scheduler with a step budget."""
_RESERVED = {
    "host": "the agent sets it; vLLM listens on loopback",
    "port": "the agent sets it; vLLM listens on a free port",
    "uds": "the agent sets it; vLLM listens on loopback",
    "model": "use --model of stream-gw",
    "api-key": "use --upstream-api-key of stream-gw",
    "ssl-keyfile": "vLLM listens on loopback only",
    "ssl-certfile": "vLLM listens on loopback only",
    "root-path": "vLLM listens on loopback only",
    "headless": "vLLM has to run as a server",
}
"""Flags that the user cannot pass to vLLM, with the reason or the setting to use instead."""


class VllmOptions(msgspec.Struct, frozen=True):
    model: str
    flags: tuple[str, ...] = ()
    """vLLM's own flags, as on its command line; they override those that stream-gw passes."""
    python: str = ""
    """Interpreter of vLLM's environment; empty: the ``vllm`` command beside this interpreter, or on the PATH."""
    slots: int = 256
    """``max_num_seqs``, unless the flags set it. Always passed, because no endpoint of vLLM shows it."""
    api_key: str = ""
    kv_events: bool = False
    start_s: float = VLLM_START_S_MAX
    sleep: SleepPolicy = SleepPolicy()
    steps: str = "auto"
    """Path of the step socket; ``auto``: in a temporary folder; ``off``: vLLM gets no plug-in."""
    itl_objective_s: float = 0.0
    """Objective for the time between tokens, which limits vLLM's steps; 0: nothing limits them."""


class PlugIns(NamedTuple):
    """Parts of stream-gw that a vLLM loads."""

    steps: str = ""
    """Path of the step socket; empty: there is none."""
    itl_objective_s: float = 0.0
    """0: vLLM's own scheduler."""
    in_force: str = ""
    """Path of the file that the scheduler makes once it limits steps."""


def flags_of(options: VllmOptions) -> tuple[list[str], int]:
    """Return vLLM's flags without its address, and ``max_num_seqs``. Raises ValueError for flags that conflict."""
    given = dict(_parse_flags(options.flags))
    for name, instead in _RESERVED.items():
        if name in given:
            raise ValueError(f"--{name} cannot be passed to vLLM: {instead}")
    if options.flags and not options.flags[0].startswith("-"):
        raise ValueError(f"{options.flags[0]!r} after -- is not a flag; name the model with --model")
    if options.kv_events and "kv-events-config" in given:
        raise ValueError("--kv-events-config of vLLM conflicts with --kv-events of stream-gw; leave one out")
    if options.kv_events and given.get("data-parallel-size", given.get("dp", "1")) != "1":
        raise ValueError("--kv-events of stream-gw counts the cache of one engine; leave out --data-parallel-size")
    if options.itl_objective_s and "scheduler-cls" in given:
        raise ValueError("--scheduler-cls of vLLM conflicts with --itl-objective-ms of stream-gw; leave one out")
    slots = options.slots
    if "max-num-seqs" in given:
        text = given["max-num-seqs"] or ""
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"--max-num-seqs for vLLM must be a number from 1, got {text!r}")
        slots = int(text)
    flags = []
    for flag in ("--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"):
        if f"no-{flag[2:]}" in given:
            log.warning("vLLM flag of the user overrides stream-gw's default: flag=--no-%s default=%s", flag[2:], flag)
        elif flag[2:] not in given:
            flags.append(flag)
    if not {TIMES_FLAG[2:], f"no-{TIMES_FLAG[2:]}", "disable-log-stats"} & given.keys():
        flags.append(TIMES_FLAG)
    if "max-num-seqs" not in given:
        flags += ["--max-num-seqs", str(slots)]
    return [*flags, *options.flags], slots


def _parse_flags(flags: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each flag, as vLLM reads it, and its value."""
    for at, flag in enumerate(flags):
        if flag.startswith("-"):
            name, equals, value = flag.lstrip("-").partition("=")
            after = flags[at + 1] if at + 1 < len(flags) and not flags[at + 1].startswith("-") else None
            yield name.replace("_", "-"), value if equals else after


def command_of(python: str) -> list[str]:
    """Return the command that runs vLLM. Raises ValueError when vLLM is not installed."""
    if python:
        if shutil.which(python) is None:
            raise ValueError(f"--vllm-python (STREAM_GW_VLLM_PYTHON): {python!r} cannot be run")
        return [python, "-m", "vllm.entrypoints.cli.main"]
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm")
    if found is None:
        raise ValueError(
            "no vllm command beside this Python or on the PATH; install vLLM, or name the Python whose environment "
            "holds it with --vllm-python (STREAM_GW_VLLM_PYTHON)"
        )
    return [found]


def can_sleep(flags: Sequence[str]) -> bool:
    """Whether these flags let vLLM free its memory when it sleeps."""
    return SLEEP_FLAG[2:] in dict(_parse_flags(flags))


def compiles(flags: Sequence[str]) -> bool:
    """Whether these flags let vLLM compile at its start."""
    return "enforce-eager" not in dict(_parse_flags(flags))


def plugin_flags(plugins: PlugIns) -> list[str]:
    """Return the flags that load the plug-ins. They come last: the user's own middlewares see their requests too."""
    flags = ["--scheduler-cls", f"{SCHEDULER}.make"] if plugins.itl_objective_s else []
    return [*flags, "--middleware", f"{PLUGIN}.{Steps.__name__}"] if plugins.steps else flags


def environment(api_key: str, flags: Sequence[str], plugins: PlugIns) -> dict[str, str]:
    """Return vLLM's environment: this process's, without stream-gw's settings, which hold secrets."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("STREAM_GW_")}
    env.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")  # a host that the gateway allows may redirect to any other
    if can_sleep(flags):
        env["VLLM_SERVER_DEV_MODE"] = "1"  # without it vLLM has no sleep endpoints
    if api_key:
        env["VLLM_API_KEY"] = api_key
    if plugins.steps:
        env[ADDRESS] = plugins.steps
    if plugins.itl_objective_s:
        env |= {OBJECTIVE: str(plugins.itl_objective_s), IN_FORCE: plugins.in_force}
    if plugins != PlugIns():
        env["PYTHONPATH"] = os.pathsep.join([*plugin.__path__, *filter(None, [env.get("PYTHONPATH")])])
    return env
