"""Cost of a token, and its time from the engine to its reader, beside nginx and a direct connection.

    python -m bench.tokens [--json FILE]

One gateway process has a core to itself, nginx's one worker the same core in its turn; Redis, agent, fake engine and
reader share the rest. CPU is the kernel's clock of each process, over the tokens that the reader took meanwhile.

    saturated    closed loop: a stream's next token is written when its reader has the last one; the gateway's from
                 the fabric (bench.fabric), because agent and engine on the other core cannot make as many
    closed loop  the same through agent and engine
    in step      every stream's token at the same instants
    out of step  every stream at a phase of its own, so that nearly every token is a wake-up of its own
    arrivals     a stream begins each 25 ms while about 100 run out of step: TTFT under load
    crowds       out of step with 1,000 and 5,000 streams that make as many tokens a second together

Exit code 1: a bound is exceeded, or a stream was not whole. Bounds of CPU are ratios to nginx, so that they hold on any
machine; bounds of time are milliseconds more than on a direct connection.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import (
    Cores,
    EngineSource,
    Figure,
    Held,
    LoadFailed,
    Nginx,
    Source,
    Target,
    build,
    describe,
    load,
    memory,
    start,
    table,
    temporary_folder,
)
from bench.platform import PARTITIONS, Platform


@dataclass(frozen=True)
class Phase:
    name: str
    mode: str


PHASES = (Phase("saturated", "closed"), Phase("in step", "step"), Phase("out of step", "phase"))
THROUGH_AGENT = "closed loop"
"""Closed loop through the whole platform, limited by engine and agent; see ``bench.fabric`` for the gateway."""
ARRIVALS = "arrivals"
"""A stream begins each 25 ms and has 125 tokens, so that about 100 run, out of step."""
ARRIVAL_US = 25_000
ARRIVAL_TOKENS = 125
MEMORY_FIGURES = ("rss_kib", "private_kib", "idle_rss_mib")
STALLED = ["--engine", "sim", "--sim", "stall_after_tokens=1,max_num_seqs=2000,block_size=1024,num_blocks=4000000"]
Starter = Callable[[], tuple[Target, Callable[[], None]]]
"""Starts a server; returns it and how to stop it."""
Samples = dict[tuple[str, str, str], list[float]]
"""(who, phase, what) → one value a repetition."""

WHOLE_PATH = ("gateway_us", "redis_us", "agent_us")
CPU_BOUNDS: Sequence[tuple[str, str, str, tuple[str, ...], float]] = (
    ("saturated gateway", "sse", "saturated", ("gateway_us",), 0.9),
    ("in step gateway", "sse", "in step", ("gateway_us",), 1.1),
    ("out of step gateway", "sse", "out of step", ("gateway_us",), 1.3),
    ("in step agent", "sse", "in step", ("agent_us",), 1.5),
    ("out of step agent", "sse", "out of step", ("agent_us",), 1.85),
    ("out of step path", "sse", "out of step", WHOLE_PATH, 4.0),
    ("short gateway", "sse", "short", ("gateway_ms",), 4.2),
    ("short agent", "sse", "short", ("agent_ms",), 4.8),
    ("short redis", "sse", "short", ("redis_ms",), 1.8),
)
"""(name, who, phase, processes, bound): their CPU a token or a short request, over nginx's in the same phase."""

TIME_BOUNDS: Sequence[tuple[str, str, float]] = (
    ("delay p50", "added_delay_us_p50", 2.0),
    ("delay p99", "added_delay_us_p99", 6.0),
    ("itl p99", "added_itl_us_p99", 3.0),
    ("ttft p50", "added_ttft_us_p50", 2.0),
    ("ttft p99", "added_ttft_us_p99", 6.0),
)
"""(name, what, bound): milliseconds more than direct, SSE, out of step. TTFT: 500 begin within a second."""

WS_MAX = 1.5
"""Gateway's CPU for a token on a WebSocket, over a token by SSE; in each phase."""
MEMORY_BOUNDS = (("sse KiB", "sse", 12.0), ("ws KiB", "ws", 20.0))
"""(name, kind, bound): KiB of RSS an open stream."""


@dataclass(frozen=True)
class Check:
    what: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound


def record(samples: Samples, who: str, phase: str, result: dict[str, Any], watch: Target) -> None:
    """Add the figures per token of one run of the reader."""
    tokens, seconds = result["tokens"], result["seconds"]
    for process in watch.watch:
        samples[who, phase, f"{process}_us"].append(result["cpu"][process]["ns"] / 1000 / tokens)
    if "gateway" in result["cpu"]:
        cpu = result["cpu"]["gateway"]
        ticks = cpu["user_ticks"] + cpu["kernel_ticks"]
        samples[who, phase, "busy"].append(cpu["ns"] / 1e9 / seconds)
        samples[who, phase, "kernel"].append(cpu["kernel_ticks"] / ticks if ticks else 0.0)
    samples[who, phase, "tokens_per_s"].append(tokens / seconds)
    samples[who, phase, "tokens_per_read"].append(tokens / result["reads"])
    samples[who, phase, "reader_busy"].append(result["load_cpu_s"] / seconds)
    for name in ("delay_us", "itl_us", "ttft_us"):
        for part, value in zip(("p50", "p99"), result[name], strict=True):
            samples[who, phase, f"{name}_{part}"].append(value)
            if who != "direct":  # it is measured first in every repetition
                measured = PHASES[0].name if phase == THROUGH_AGENT else phase
                through_nothing = samples["direct", measured, f"{name}_{part}"][-1]
                samples[who, phase, f"added_{name}_{part}"].append(value - through_nothing)


def measure_phases(
    args: argparse.Namespace,
    targets: list[tuple[str, Target]],
    stalled: Callable[[], contextlib.AbstractContextManager[Platform]],
    source: Source,
    cores: Cores,
) -> Samples:
    """``stalled`` runs a platform whose engine stops after a token, to be saturated from the fabric."""
    samples: Samples = defaultdict(list)
    # Targets take turns within a repetition, so that a drift of the machine falls on all of them
    for repetition in range(args.repetitions):
        for phase in PHASES:
            streams = args.saturated_streams if phase.mode == "closed" else args.streams
            for who, target in targets:
                print(f"  {repetition + 1}/{args.repetitions} {phase.name}: {who}", file=sys.stderr)
                result = load(
                    target, source, cores, mode=phase.mode, streams=streams, rate=args.rate, window=args.window,
                    seconds=args.seconds, settle=args.settle, per_socket=args.per_socket,
                )  # fmt: skip
                ours = who in ("sse", "ws")
                record(samples, who, THROUGH_AGENT if ours and phase.mode == "closed" else phase.name, result, target)
            kinds = [target.kind for who, target in targets if who in ("sse", "ws")]
            if kinds and phase.mode == "closed":
                print(f"  {repetition + 1}/{args.repetitions} {phase.name}: from the fabric", file=sys.stderr)
                with stalled() as platform:  # only now: an idle platform's upkeep would disturb the other phases
                    for kind in kinds:
                        values = saturate(platform.target(kind), cores, args.fabric_streams, args.seconds)
                        for what, value in values.items():
                            samples[kind, phase.name, what].append(value)
        for who, target in targets:
            print(f"  {repetition + 1}/{args.repetitions} {ARRIVALS}: {who}", file=sys.stderr)
            result = load(
                target, source, cores, mode="phase", streams=args.streams, rate=args.rate, tokens=ARRIVAL_TOKENS,
                total=args.streams + int(args.seconds * 1e6 / ARRIVAL_US), open_every_us=ARRIVAL_US,
            )  # fmt: skip
            record(samples, who, ARRIVALS, result, target)
        for crowd in args.crowd:
            for who, target in targets:
                print(f"  {repetition + 1}/{args.repetitions} crowd of {crowd}: {who}", file=sys.stderr)
                rate = args.streams * args.rate / crowd
                result = load(
                    target, source, cores, mode="phase", streams=crowd, rate=rate, seconds=args.seconds,
                    settle=args.settle + 1 / rate, per_socket=args.per_socket, open_every_us=1000,
                )  # fmt: skip
                record(samples, who, f"crowd of {crowd}", result, target)
        for who, target in targets:
            print(f"  {repetition + 1}/{args.repetitions} short streams: {who}", file=sys.stderr)
            result = load(
                target, source, cores, mode="backlog", streams=8, total=args.short_streams, tokens=8,
                per_connection=100_000, open_every_us=500,
            )  # fmt: skip
            samples[who, "short", "per_s"].append(result["completed"] / result["seconds"])
            for process in target.watch:
                samples[who, "short", f"{process}_ms"].append(result["cpu"][process]["ns"] / 1e6 / result["completed"])
            for part, value in zip(("p50", "p99"), result["ttft_us"], strict=True):
                samples[who, "short", f"ttft_us_{part}"].append(value)
    return samples


def saturate(target: Target, cores: Cores, streams: int, seconds: float) -> dict[str, float]:
    """Saturate the gateway from the fabric; figures a token."""
    words = [sys.executable, "-m", "bench.fabric", target.port, target.watch["gateway"], target.watch["redis"],
             target.redis_url, PARTITIONS, target.key, target.kind, streams, seconds]  # fmt: skip
    process = start([str(word) for word in words], cores.rest, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate(timeout=120 + seconds)
    if process.returncode:
        raise LoadFailed(f"{target.name} from the fabric: {error[-500:]}")
    result: dict[str, float] = json.loads(out)
    return result


def measure_memory(
    args: argparse.Namespace, start: Starter, kind: str, source: Source, cores: Cores
) -> dict[str, float]:
    """KiB a held stream. In a process of its own: what an earlier phase freed would hide the growth."""
    target, stop = start()
    try:
        target = Target(target.name, target.port, {"gateway": target.watch["gateway"]}, kind, target.key)
        pid = target.watch["gateway"]
        # The first streams load code and tables once; that memory is not a stream's
        load(target, source, cores, mode="backlog", streams=4, total=200, tokens=8, per_connection=10)
        time.sleep(1)
        before = memory(pid)
        with Held(target, source, cores, args.held):
            time.sleep(1)
            after = memory(pid)
        return {
            "rss_kib": (after.rss_kib - before.rss_kib) / args.held,
            "private_kib": (after.private_kib - before.private_kib) / args.held,
            "idle_rss_mib": before.rss_kib / 1024,
        }
    finally:
        stop()


Column = tuple[str, str, float, int]
TOKEN_COLUMNS: Sequence[Column] = (
    ("us/token", "gateway_us", 1, 2),
    ("kernel %", "kernel", 100, 0),
    ("redis us", "redis_us", 1, 2),
    ("agent us", "agent_us", 1, 2),
    ("k tokens/s", "tokens_per_s", 1e-3, 1),
    ("core busy %", "busy", 100, 0),
    ("tokens/read", "tokens_per_read", 1, 2),
)
DELAY_COLUMNS: Sequence[Column] = (
    ("token p50, ms", "delay_us_p50", 1e-3, 2),
    ("p99", "delay_us_p99", 1e-3, 2),
    ("ITL p50, ms", "itl_us_p50", 1e-3, 2),
    ("p99", "itl_us_p99", 1e-3, 2),
    ("TTFT p50, ms", "ttft_us_p50", 1e-3, 2),
    ("p99", "ttft_us_p99", 1e-3, 2),
    ("TTFT added p50, ms", "added_ttft_us_p50", 1e-3, 2),
    ("p99", "added_ttft_us_p99", 1e-3, 2),
)
SHORT_COLUMNS: Sequence[Column] = (
    ("streams/s", "per_s", 1, 0),
    ("gateway ms each", "gateway_ms", 1, 3),
    ("redis ms", "redis_ms", 1, 3),
    ("agent ms", "agent_ms", 1, 3),
    ("TTFT p50, ms", "ttft_us_p50", 1e-3, 2),
    ("p99", "ttft_us_p99", 1e-3, 2),
)


# --- report --------------------------------------------------------------------------------------------------


class Report:
    """The tables. A column is (heading, what, scale, digits)."""

    def __init__(self, samples: Samples, whos: list[str], crowds: Sequence[int]) -> None:
        self._samples = samples
        self._whos = whos
        self._crowds = [f"crowd of {crowd}" for crowd in crowds]

    def _cell(self, who: str, phase: str, column: Column) -> str:
        _, what, scale, digits = column
        values = self._samples.get((who, phase, what))
        return Figure(tuple(value * scale for value in values)).spell(digits) if values else "-"

    def _table(self, phases: Sequence[str], whos: list[str], columns: Sequence[Column]) -> str:
        rows = [
            [phase, who, *(self._cell(who, phase, column) for column in columns)] for phase in phases for who in whos
        ]
        return table(["phase", "gateway", *(column[0] for column in columns)], rows)

    def show(self) -> None:
        phases = [PHASES[0].name, THROUGH_AGENT, *(phase.name for phase in PHASES[1:]), ARRIVALS, *self._crowds]
        print("\nCPU us per delivered token, median (minimum-maximum)\n")
        print(self._table(phases, [who for who in self._whos if who != "direct"], TOKEN_COLUMNS))
        print("\nDelay of a token, from the engine's write to the reader, and of the first token, from the request\n")
        print(self._table(phases[2:], self._whos, DELAY_COLUMNS))
        print("\nStreams of 8 tokens, 8 at a time\n")
        print(self._table(["short"], self._whos, SHORT_COLUMNS))


def median(samples: Samples, who: str, phase: str, what: str) -> float:
    return Figure(tuple(samples[who, phase, what])).median


def checks_of(samples: Samples, held: dict[str, dict[str, float]], bounds: dict[str, float]) -> list[Check]:
    """Compare what was measured with its bounds."""
    checks = []
    for name, who, phase, processes, _ in CPU_BOUNDS:
        own = [median(samples, who, phase, what) for what in processes if (who, phase, what) in samples]
        if own:
            yardstick = median(samples, "nginx", phase, "gateway_ms" if phase == "short" else "gateway_us")
            checks.append(Check(f"{name}, x nginx", sum(own) / yardstick, bounds[name]))
    for phase in (phase.name for phase in PHASES):
        if ("ws", phase, "gateway_us") in samples:
            value = median(samples, "ws", phase, "gateway_us") / median(samples, "sse", phase, "gateway_us")
            checks.append(Check(f"{phase}: WebSocket / SSE", value, bounds["ws"]))
    for name, what, _ in TIME_BOUNDS:
        if ("sse", "out of step", what) in samples:
            checks.append(Check(f"{name} added, ms", median(samples, "sse", "out of step", what) / 1e3, bounds[name]))
    for name, kind, _ in MEMORY_BOUNDS:
        if kind in held:
            checks.append(Check(f"{name} an open stream", held[kind]["rss_kib"], bounds[name]))
    return checks


# --- command -------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, float]]:
    bounds = {bound[0]: bound[-1] for bound in (*CPU_BOUNDS, *TIME_BOUNDS, *MEMORY_BOUNDS)} | {"ws": WS_MAX}
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.tokens", description=__doc__, formatter_class=raw)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between the last stream's start and it")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--crowd", type=int, nargs="*", default=[1000, 5000], help="streams of each crowd")
    parser.add_argument("--saturated-streams", type=int, default=200)
    parser.add_argument("--fabric-streams", type=int, default=200, help="streams that saturate the gateway")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of a stream, in and out of step")
    parser.add_argument("--window", type=int, default=1, help="tokens of a stream on their way at once when saturated")
    parser.add_argument("--per-socket", type=int, default=1, help="streams of a WebSocket")
    parser.add_argument("--short-streams", type=int, default=2000)
    parser.add_argument("--held", type=int, default=2000, help="streams open at once for the memory figure; 0: skip it")
    parser.add_argument("--nginx-only", action="store_true", help="without the platform: tries the harness itself")
    parser.add_argument("--platform", metavar="COMMAND", help="starts the platform instead of `stream-gw up`")
    parser.add_argument(
        "--upstream",
        choices=["steps", "http"],
        default="steps",
        help="how tokens come to the agent: as from a vLLM with our plug-in, or as from any OpenAI-compatible server",
    )
    parser.add_argument("--bound", action="append", default=[], metavar="NAME=VALUE", help=f"of {', '.join(bounds)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there")
    args = parser.parse_args(argv)
    for item in args.bound:
        name, _, value = item.rpartition("=")
        if name not in bounds:
            parser.error(f"--bound {item}: the bounds are {', '.join(bounds)}")
        bounds[name] = float(value)
    return args, bounds


def run(args: argparse.Namespace) -> tuple[Samples, dict[str, dict[str, float]], list[str]]:
    cores = Cores.pick()
    held: dict[str, dict[str, float]] = {}
    with temporary_folder() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        source = EngineSource(cores, folder)
        stack.callback(source.stop)
        steps = source.steps if args.upstream == "steps" else ""

        def nginx() -> tuple[Target, Callable[[], None]]:
            server = Nginx(cores, folder, source.port)
            return server.target(), server.stop

        def platform(kind: str) -> tuple[Target, Callable[[], None]]:
            server = Platform(cores, folder, source.port, command=args.platform, steps=steps)
            return server.target(kind), server.stop

        @contextlib.contextmanager
        def stalled() -> Iterator[Platform]:
            server = Platform(cores, folder, source.port, command=args.platform, engine=STALLED)
            try:
                yield server
            finally:
                server.stop()

        kinds = [] if args.nginx_only else ["sse", "ws"]
        if args.held:
            print(f"  memory of {args.held} held streams", file=sys.stderr)
            held["nginx"] = measure_memory(args, nginx, "sse", source, cores)
            for kind in kinds:
                held[kind] = measure_memory(args, partial(platform, kind), kind, source, cores)
        targets = [("direct", Target("direct", source.port, {}))]
        target, stop_nginx = nginx()
        stack.callback(stop_nginx)
        targets.append(("nginx", target))
        if kinds:
            running = Platform(cores, folder, source.port, command=args.platform, steps=steps)
            stack.callback(running.stop)
            targets += [(kind, running.target(kind)) for kind in kinds]
        samples = measure_phases(args, targets, stalled, source, cores)
    return samples, held, [who for who, _ in targets]


def main(argv: list[str] | None = None) -> int:
    args, bounds = parse(argv)
    build()
    facts = describe()
    try:
        samples, held, whos = run(args)
    except LoadFailed as error:
        print(f"FAILED: {error}")
        return 1
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print(
        f"{args.repetitions} repetitions of {args.seconds:g} s; {args.streams} streams at {args.rate:g} tokens/s "
        f"({args.saturated_streams} when saturated, {args.window} of its tokens on their way); every stream checked"
    )
    Report(samples, whos, args.crowd).show()
    if held:
        print(f"\nMemory, {args.held} streams open at once\n")
        head = ("gateway", "KiB of RSS a stream", "private KiB a stream", "MiB before")
        rows = [(who, *(f"{kib[what]:.1f}" for what in MEMORY_FIGURES)) for who, kib in held.items()]
        print(table(head, rows))
    checks = checks_of(samples, held, bounds)
    if checks:
        print("\nBounds (ratios are of the medians)\n")
        rows = [(c.what, f"{c.value:.2f}", f"{c.bound:g}", "ok" if c.ok else "EXCEEDED") for c in checks]
        print(table(("what", "value", "bound", ""), rows))
    if args.json:
        document = {
            "machine": facts,
            "settings": {name: str(value) for name, value in vars(args).items()},
            "samples": {" / ".join(key): values for key, values in samples.items()},
            "memory": held,
            "bounds": [{"what": c.what, "value": c.value, "bound": c.bound, "ok": c.ok} for c in checks],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
