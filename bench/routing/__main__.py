"""Placement against other policies: production traces on simulated replicas, on virtual time.

    python -m bench.routing

Exit code 1: a target was missed. 2: no traces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from bench.harness import table
from bench.routing import full, report
from bench.routing.hot import Compared, compare
from bench.routing.policies import OURS, POLICIES, policy
from bench.routing.scene import Scene, scene
from inference.simulate.agents import OUTPUT_LIMIT_TOKENS, ROOM_RATIO
from inference.simulate.engine import SETTINGS, full_batch_tokens_per_s
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, FILES, Trace, TraceAbsent, cut, load, traces_folder
from inference.simulate.world import GATEWAYS, HINTS_EVERY_S, World
from stream_fabric.limits import LEASE_RENEW_S

T = TypeVar("T")
HOT_REQUESTS_MOST = 6000
HOT_POLICIES = ("prefix", OURS)
PARTS = ("policies", "hot", "full")


def listed(convert: Callable[[str], T], allowed: Sequence[str] = ()) -> Callable[[str], list[T]]:
    """Option type for several values separated by commas."""

    def parse(text: str) -> list[T]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        for part in parts:
            if allowed and part not in allowed:
                raise argparse.ArgumentTypeError(f"no {part!r}; there are {', '.join(allowed)}")
        return [convert(part) for part in parts]

    return parse


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.routing", description=__doc__, formatter_class=raw)
    parser.add_argument("--traces", type=listed(str, tuple(FILES)), default=list(FILES))
    parser.add_argument("--replicas", type=listed(int), default=[8, 32], help="fleet sizes")
    parser.add_argument("--policies", type=listed(str, tuple(POLICIES)), default=list(POLICIES))
    parser.add_argument("--requests", type=int, default=1_000_000, help="of a trace, at most")
    parser.add_argument("--seeds", type=listed(int), default=[0], help="each starts a third of the trace later")
    parser.add_argument("--utilisation", type=float, default=0.7, help="of the fleet, if it hit all that is reachable")
    parser.add_argument("--parts", type=listed(str, PARTS), default=list(PARTS))
    parser.add_argument(
        "--folder", type=Path, help="where the traces are; else STREAM_GW_TRACES, else ../shared/traces"
    )
    return parser.parse_args(argv)


def conditions(args: argparse.Namespace) -> str:
    s = SETTINGS
    return (
        "replica, simulated, of the order of an 8B model on one H100: "
        f"prefill {s.prefill_tokens_per_s:,.0f} tokens/s, "
        f"decode step {s.itl_ms:g} ms + {s.batch_slope_us:g} us a sequence, {s.max_num_seqs} sequences, "
        f"{s.max_num_batched_tokens} tokens a step, KV {s.num_blocks * ENGINE_BLOCK_TOKENS:,} tokens in blocks of "
        f"{ENGINE_BLOCK_TOKENS}; full batch {full_batch_tokens_per_s(s):,.0f} tokens/s\n"
        f"{GATEWAYS} gateways, hints read every {HINTS_EVERY_S:g} s; agents report every {LEASE_RENEW_S:g} s and at "
        f"ends; room {ROOM_RATIO} x sequences; max_tokens {OUTPUT_LIMIT_TOKENS} for all, answers' lengths are unknown\n"
        f"arrivals as in the trace, scaled to {args.utilisation:.0%} of what the fleet can do with every step full and "
        "all reachable hits; the same for all policies\n"
        f"SLO: TTFT at most {report.SLO_TTFT_S:g} s + 1 s for each {1 / report.SLO_TTFT_S_PER_TOKEN:,.0f} prompt "
        f"tokens, mean ITL at most {report.SLO_ITL_S * 1000:g} ms"
    )


def run_policies(where: Scene, policies: Sequence[str], seed: int) -> list[report.Figures]:
    requests, replicas = where.trace.requests, where.replicas
    found = [report.figures(p, World(requests, replicas, policy(p, replicas, seed), seed).run()) for p in policies]
    print(
        f"\n{where.trace.name}, {where.replicas} replicas, seed {seed}: {len(where.trace.requests)} requests in "
        f"{where.duration_s:.0f} s; hit rate of one endless cache {where.infinite:.1%}, reachable with one LRU cache "
        f"of the fleet's size {where.reachable:.1%}"
    )
    print(table(report.HEAD, [report.row(figures, where) for figures in found]), flush=True)
    return found


def run_hot(traces: Sequence[Trace], args: argparse.Namespace) -> list[Compared]:
    rows = [
        row
        for trace in traces
        for seed in args.seeds
        for replicas in args.replicas
        for policy in HOT_POLICIES
        if policy in args.policies
        for row in compare(
            cut(trace, min(args.requests, HOT_REQUESTS_MOST), seed), replicas, policy, seed, args.utilisation
        )
    ]
    print(
        f"\nhot prefix: half of a trace's first {HOT_REQUESTS_MOST} requests get 8,192 tokens before their prompts, "
        "always the same; beside\n"
        "  distinct: the same arrivals and lengths, the 8,192 tokens always others\n"
        "  bare: the same arrivals without the 8,192 tokens, which is about the same work\n"
        "arrivals are scaled to the utilisation of the control"
    )
    print(table(report.HOT_HEAD, [report.hot_row(row) for row in rows]), flush=True)
    return rows


def run_full(trace: Trace, requests: int, seed: int) -> list[report.Target]:
    where = scene(cut(trace, min(requests, full.REQUESTS_MOST), seed), full.REPLICAS, full.UTILISATION)
    found = full.compare(where, seed)
    print(
        f"\nfull replicas: {trace.name}, {where.replicas} replicas of {full.SEQUENCES} sequences, room "
        f"{ROOM_RATIO:g} x sequences, at {full.UTILISATION:.0%}, {len(where.trace.requests)} requests; the pool's "
        "queue taken in turn, and by what replicas hold"
    )
    print(table(report.HEAD, [report.row(found.blind, where), report.row(found.ours, where)]), flush=True)
    return full.targets(where, found)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    started = time.process_time()
    folder = traces_folder(args.folder)
    try:
        traces = [load(name, folder) for name in args.traces]
    except TraceAbsent as absent:
        print(absent, file=sys.stderr)
        return 2
    print(conditions(args))
    for trace in traces:
        print(f"{trace.name}: {trace.rule}")
    targets: list[report.Target] = []
    if "policies" in args.parts:
        for trace in traces:
            for seed in args.seeds:
                part = cut(trace, args.requests, seed)
                for replicas in args.replicas:
                    where = scene(part, replicas, args.utilisation)
                    targets += report.targets(where, run_policies(where, args.policies, seed))
    if "hot" in args.parts:
        targets += report.hot_targets(run_hot(traces, args))
    if "full" in args.parts:
        for trace in traces:
            if any(request.ids for request in trace.requests):  # without shared prompts there is nothing to choose by
                for seed in args.seeds:
                    targets += run_full(trace, args.requests, seed)
    print(f"\n{time.process_time() - started:.0f} s of one core")
    for target in targets:
        print(f"{'reached' if target.reached else 'MISSED '}  {target.what}")
    return 0 if all(target.reached for target in targets) else 1


if __name__ == "__main__":
    sys.exit(main())
