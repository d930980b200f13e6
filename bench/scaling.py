"""Scaling by our controller and by others: a production trace, with and without a step of five times the traffic.

Replicas are simulated, take five minutes to start, and run on virtual time.

    python -m bench.scaling

Exit code 1: a target was missed. 2: no trace.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.harness import table
from inference.control.policy.scale_policy import ScalePolicy
from inference.engines.sim.settings import SimSettings
from inference.simulate.elastic import Elastic, Scaler, Step, stepped
from inference.simulate.engine import full_batch_tokens_per_s
from inference.simulate.history import TODAY_S, history
from inference.simulate.scalers import ControllerScaler, GpuUtilisation, Oracle, Waiting
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, Request, TraceAbsent, load, traces_folder
from inference.simulate.world import RequestLife

SETTINGS = SimSettings(
    itl_ms=40.0,
    batch_slope_us=500.0,
    ttft_ms=0.0,
    prefill_tokens_per_s=2000.0,
    max_num_seqs=32,
    max_num_batched_tokens=1024,
    block_size=ENGINE_BLOCK_TOKENS,
    num_blocks=200_000 // ENGINE_BLOCK_TOKENS,
)
"""Slow on purpose: a trace of five requests per second needs a fleet."""
COLD_START_S = 300.0
ROOM_RATIO = 1.25
MOST = 300
SLO_TTFT_S, SLO_TTFT_S_PER_TOKEN, SLO_ITL_S = 2.0, 1e-3, 0.12
ORACLE_SLO_LEAST = 0.99
ORACLE_FILLED = (0.8, 0.7, 0.6, 0.5, 0.4)
SLO_SHARE_LEAST, GPU_SHARE_MOST = 0.95, 1.15
HEAD = ("policy", "SLO", "of the oracle's", "GPU hours", "of the oracle's", "most", "p50 TTFT s", "p99", "not served")


class Found(NamedTuple):
    name: str
    slo: float
    gpu_h: float
    most: int
    ttft_p50_s: float
    ttft_p99_s: float
    not_served: int


def within_slo(life: RequestLife) -> bool:
    allowed_s = SLO_TTFT_S + life.request.prompt_tokens * SLO_TTFT_S_PER_TOKEN
    return life.fate == "done" and life.ttft_s <= allowed_s and life.mean_itl_s <= SLO_ITL_S


def run(name: str, requests: Sequence[Request], scaler: Scaler, begin: int) -> Found:
    world = Elastic(requests, begin, scaler, 0, SETTINGS, cold_start_s=COLD_START_S, room_ratio=ROOM_RATIO)
    lives = world.run().lives
    ttft_s = sorted(life.ttft_s for life in lives)
    return Found(
        name,
        sum(map(within_slo, lives)) / len(lives),
        world.gpu_s() / 3600,
        max(count for _, _, count in world.counts),
        ttft_s[len(ttft_s) // 2],
        ttft_s[len(ttft_s) * 99 // 100],
        sum(life.fate != "done" for life in lives),
    )


def compare(requests: Sequence[Request], step: Step | None) -> list[Found]:
    traffic = stepped(requests, step, 0) if step else requests
    policy = ScalePolicy(replicas_max=MOST, cold_start_s=COLD_START_S, low_s=300.0, ttft_objective_s=SLO_TTFT_S)
    best: Found | None = None
    for filled in ORACLE_FILLED:  # the fullest that keeps the objective is the cheapest
        oracle = Oracle(traffic, SETTINGS, filled, COLD_START_S)
        best = run(f"oracle, {filled:.0%} filled", traffic, oracle, oracle.needed_at(0))
        if best.slo >= ORACLE_SLO_LEAST:
            break
    assert best is not None
    begin = Oracle(traffic, SETTINGS, 0.6, COLD_START_S).needed_at(0)
    return [
        best,
        run("ours, three days known", traffic, ControllerScaler(policy, history(requests, step), TODAY_S), begin),
        run("ours, nothing known", traffic, ControllerScaler(policy), begin),
        run("HPA, 80 % of GPU time", traffic, GpuUtilisation(1, MOST), begin),
        run("KEDA, 5 waiting a replica", traffic, Waiting(1, MOST), begin),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.scaling", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--speeds", default="0.5,1,2", help="speeds of the trace, separated by commas (default 0.5,1,2)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the trace (default: STREAM_GW_TRACES, or ../shared/traces)"
    )
    args = parser.parse_args(argv)
    started = time.process_time()
    try:
        trace = load("azure", traces_folder(args.folder))
    except TraceAbsent as absent:
        print(absent, file=sys.stderr)
        return 2
    s = SETTINGS
    print(
        f"replica, simulated: prefill {s.prefill_tokens_per_s:,.0f} tokens/s, decode step {s.itl_ms:g} ms + "
        f"{s.batch_slope_us:g} us a sequence, {s.max_num_seqs} sequences, full batch "
        f"{full_batch_tokens_per_s(s):,.0f} tokens/s; {COLD_START_S:g} s from asking for one until it takes requests, "
        "paid for from when it is asked for\n"
        f"SLO: TTFT at most {SLO_TTFT_S:g} s + 1 s for each {1 / SLO_TTFT_S_PER_TOKEN:,.0f} prompt tokens, mean ITL at "
        f"most {SLO_ITL_S * 1000:g} ms; a request not served misses it\n"
        f"oracle: knows all requests, and is as full as {ORACLE_SLO_LEAST:.0%} of the SLO lets it be\n"
        f"three days known: other days with as much in each minute on average (and the step at the same time)"
    )
    missed = False
    for speed in map(float, args.speeds.split(",")):
        requests = tuple(replace(request, at_s=request.at_s / speed) for request in trace.requests)
        whole_s = requests[-1].at_s
        for step in (None, Step(5.0, whole_s / 2, whole_s / 4)):
            found = compare(requests, step)
            oracle, ours, _, *others = found
            what = f"azure at {speed:g} x ({whole_s / 3600:.2f} h)" + (
                ", five times from half to three quarters" if step else ""
            )
            print(f"\n{what}")
            print(table(HEAD, [_row(one, oracle) for one in found]), flush=True)
            for text, reached in (
                (f"SLO at least {SLO_SHARE_LEAST:.0%} of the oracle's", ours.slo >= SLO_SHARE_LEAST * oracle.slo),
                (
                    f"GPU hours at most {GPU_SHARE_MOST:.0%} of the oracle's",
                    ours.gpu_h <= GPU_SHARE_MOST * oracle.gpu_h,
                ),
                ("SLO at least that of the HPA and of KEDA", ours.slo >= max(other.slo for other in others)),
            ):
                print(f"{'reached' if reached else 'MISSED '}  {what}: {text}")
                missed |= not reached
    print(f"\n{time.process_time() - started:.0f} s of one core")
    return 1 if missed else 0


def _row(found: Found, oracle: Found) -> tuple[str, ...]:
    return (
        found.name,
        f"{found.slo:.1%}",
        f"{found.slo / oracle.slo:.1%}",
        f"{found.gpu_h:.1f}",
        f"{found.gpu_h / oracle.gpu_h:.0%}",
        str(found.most),
        f"{found.ttft_p50_s:.2f}",
        f"{found.ttft_p99_s:.2f}",
        str(found.not_served),
    )


if __name__ == "__main__":
    sys.exit(main())
