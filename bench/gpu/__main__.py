"""The platform on a real GPU: what it adds to vLLM's answers, and what its promises take there.

    python -m bench.gpu --vllm FOLDER --model FOLDER [--parts PART ...] [--json FILE] [-- FLAGS OF VLLM]

``--vllm``: an environment with ``bin/vllm``. ``--model``: ``infra/vllm-cpu/large_model.py`` makes one of
real size. Parts:

    path       the same prompts at vLLM and at a gateway in turns: TTFT, gaps, tokens a second, CPU of each process
    cancel     from a cancel at the gateway until vLLM runs one request less
    sleep      time to fall asleep and to wake, by level, and memory of the GPU meanwhile
    objective  gaps of running answers beside long prompts, with and without an objective for the time between tokens
    death      vLLM of one of two replicas is killed: the longest silence of its streams, which must end whole

The first three use one replica, the last two a second one beside it on the same GPU. Nothing is judged by a bound but
that each answer is whole: the exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from bench.gpu.parts import CANCEL_LEVELS, PATH_LEVELS, cancel, death, objective, path, path_table, sleep
from bench.gpu.replicas import Failed, start_agent, wait_ready
from bench.harness import Cores, describe, stop, temporary_folder
from bench.platform import Platform

PARTS = ("path", "cancel", "sleep", "objective", "death")
OBJECTIVE_MS = 25.0
INDENTED = partial(json.dumps, indent=1)


def run(args: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    """Add each part's figures to ``found``, or under ``failed`` why there are none. Raises Failed: no replica came."""
    parts = set(args.parts)
    failed: dict[str, str] = found["failed"]
    platform = Platform(Cores.pick(), folder, 0, engine=["--engine", "sim"], gateways=2)

    def measure(part: str, figures: Callable[[], Any], spell: Callable[[Any], str] = INDENTED) -> None:
        if part in parts:
            try:
                found[part] = figures()
                print(f"{part}\n{spell(found[part])}", flush=True)
            except* (Failed, OSError, aiohttp.ClientError) as errors:
                failed[part] = "; ".join(map(str, errors.exceptions))
                print(f"{part}: {failed[part]}", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        stack.callback(platform.stop)
        sleeps = ["--enable-sleep-mode"] if "sleep" in parts else []
        first = start_agent(args, platform, folder, "first", own=(), vllm=[*args.flags, *sleeps])
        stack.callback(stop, first.process)
        found["start_s"] = wait_ready(first)
        measure(
            "path", lambda: path(platform, first, folder, args.repetitions, args.at_once or PATH_LEVELS), path_table
        )
        measure("cancel", lambda: asyncio.run(cancel(platform, first, args.at_once or CANCEL_LEVELS)))
        measure("sleep", lambda: sleep(first))
        if not parts & {"objective", "death"}:
            return
        limited = ("--itl-objective-ms", str(OBJECTIVE_MS))
        second = start_agent(args, platform, folder, "second", own=limited, vllm=args.flags)
        stack.callback(stop, second.process)
        wait_ready(second)
        replicas = {"no objective": first, f"{OBJECTIVE_MS:g} ms": second}
        measure("objective", lambda: {name: asyncio.run(objective(one)) for name, one in replicas.items()})
        measure("death", lambda: asyncio.run(death(platform, first, second)))


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--vllm", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--at-once", type=int, nargs="+", metavar="N", help="requests at once in path and cancel")
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs="*", help="further flags of vLLM, after --")
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"machine": describe(), "failed": {}}
    with temporary_folder() as name:
        try:
            run(args, Path(name), found)
        except Failed as error:
            found["failed"]["start"] = str(error)
            print(f"bench.gpu: {error}", file=sys.stderr)
        finally:
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    return int(bool(found["failed"]))


if __name__ == "__main__":
    sys.exit(main())
