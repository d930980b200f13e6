"""Scaling and admission in a surge that nobody announced: five times the requests within 30 s, replicas that take five
minutes to start. Our policy knows nothing of the traffic before; other rows are for comparison.

    python -m bench.scaling

Replicas are simulated and run on virtual time. Exit code 1: a bar was missed. 2: no traces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.harness import table
from bench.scaling import runs
from bench.scaling.detection import RAMPS_S, detection, quantiles
from bench.scaling.runs import POLICIES, Found, Job
from bench.scaling.scenes import (
    COLD_START_S,
    OTHER_BURSTS,
    SETTINGS,
    SLO_ITL_S,
    SLO_TTFT_S,
    SLO_TTFT_S_PER_TOKEN,
    TRACES,
    scene,
)
from inference.simulate.traces import TraceAbsent, load, traces_folder

HEAD = (
    "policy", "SLO kept", "of the bound", "in the step's first 5 min", "rejected there", "of the admitted kept",
    "p99 TTFT, s", "GPU hours", "outside the step, of the oracle's",
)  # fmt: skip
ADMITTED_LEAST, GPU_OUTSIDE_MOST = 0.95, 1.15
OF_BOUND_LEAST = {runs.NOTHING: 0.85, runs.WARM_25: 0.90, runs.INTERACTIVE: 0.95}

Results = dict[str, list[Found]]


def bound(results: Results, policy: str, fluid: Callable[[Found], float] = lambda found: found.fluid.random) -> float:
    """Largest share that ``policy`` could keep: the smaller of a fluid bound with its replicas, and of what our policy
    keeps when five times the replicas are ready throughout."""
    interactive = policy in (runs.INTERACTIVE, runs.INTERACTIVE_RUNS_ON)
    plenty = runs.INTERACTIVE_FIVE_TIMES if interactive else runs.FIVE_TIMES
    return min(
        statistics.median(map(fluid, results[policy])),
        statistics.median(found.slo for found in results[plenty]),
    )


def hours_of_oracle(results: Results, policy: str) -> float:
    """GPU hours outside the step as a multiple of the oracle's in the same scene, the median of the seeds."""
    pairs = zip(results[policy], results[runs.ORACLE], strict=True)
    return statistics.median(one.gpu_h_outside / oracle.gpu_h_outside for one, oracle in pairs)


def spread(found: Sequence[Found], take: Callable[[Found], float]) -> str:
    """Median of the seeds with the range, as percentages."""
    values = sorted(map(take, found))
    return f"{statistics.median(values):.1%} ({values[0]:.1%}-{values[-1]:.1%})"


def row(policy: str, results: Results) -> tuple[str, ...]:
    found = results[policy]
    return (
        policy,
        spread(found, lambda one: one.slo),
        f"{statistics.median(one.slo for one in found) / bound(results, policy):.0%}",
        spread(found, lambda one: one.surge),
        f"{statistics.median(one.refused for one in found):.1%}",
        spread(found, lambda one: one.admitted),
        f"{statistics.median(one.ttft_p99_s for one in found):.2f}",
        f"{statistics.median(one.gpu_h for one in found):.1f}",
        f"{hours_of_oracle(results, policy):.0%}",
    )


def judge(trace: str, results: Results) -> bool:
    """Print each bar, and whether the rows where nothing is known reach it. Returns True if all are reached."""

    def median(policy: str, take: Callable[[Found], float]) -> float:
        return statistics.median(map(take, results[policy]))

    checks = [
        (f"{policy}: SLO of the bound", median(policy, lambda one: one.slo) / bound(results, policy), least, True)
        for policy, least in OF_BOUND_LEAST.items()
    ]
    checks += [
        (f"{policy}: of the admitted kept", median(policy, lambda one: one.admitted), ADMITTED_LEAST, True)
        for policy in (runs.NOTHING, runs.WARM_25)
    ]
    hours = hours_of_oracle(results, runs.NOTHING)
    checks.append((f"{runs.NOTHING}: GPU hours outside the step, of the oracle's", hours, GPU_OUTSIDE_MOST, False))
    reached = True
    for what, value, bar, at_least in checks:
        holds = value >= bar if at_least else value <= bar
        reached &= holds
        limit = "at least" if at_least else "at most"
        print(f"{'reached' if holds else 'MISSED '}  {trace}: {what}: {value:.1%}, {limit} {bar:.0%}")
    for policy in OF_BOUND_LEAST:
        share = median(policy, lambda one: one.slo) / bound(results, policy, lambda one: one.causal)
        print(f"{trace}: {policy}: {share:.1%} of what a fleet can keep that learns from its traffic alone")
    return reached


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.scaling", description=__doc__, formatter_class=raw)
    parser.add_argument("--seeds", type=int, default=3, help="scenes of each trace (default 3)")
    known = {**TRACES, **OTHER_BURSTS}
    parser.add_argument(
        "--traces", default=",".join(TRACES), help=f"of {', '.join(known)}; separated by commas (default %(default)s)"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first scene (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at once (default 2)")
    parser.add_argument(
        "--folder", type=Path, help="folder of the traces (default: STREAM_GW_TRACES, or ../shared/traces)"
    )
    args = parser.parse_args(argv)
    traces = args.traces.split(",")
    if unknown := [trace for trace in traces if trace not in known]:
        parser.error(f"no trace {unknown[0]!r}; there are {', '.join(known)}")
    folder = traces_folder(args.folder)
    try:
        for name in ("azure", "mooncake"):
            load(name, folder)
    except TraceAbsent as absent:
        print(absent, file=sys.stderr)
        return 2
    s = SETTINGS
    print(
        f"replica, simulated: prefill {s.prefill_tokens_per_s:,.0f} tokens/s, decode step {s.itl_ms:g} ms + "
        f"{s.batch_slope_us:g} us a sequence, {s.max_num_seqs} sequences; {COLD_START_S:g} s from asking for one until "
        "it takes requests, paid for from when it is asked for\n"
        f"SLO: TTFT at most {SLO_TTFT_S:g} s + 1 s for each {1 / SLO_TTFT_S_PER_TOKEN:,.0f} prompt tokens, mean ITL at "
        f"most {SLO_ITL_S * 1000:g} ms; a request not served misses it\n"
        "bound: the smaller of a fluid bound (the replicas of the step's beginning, always full, refusals at random, "
        "until a replica asked for then can be there) and of ours with five times the replicas throughout\n"
        f"median of {args.seeds} seeds (lowest-highest)"
    )
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    jobs = [Job(trace, policy, seed, folder) for trace in traces for policy in POLICIES for seed in seeds]
    with ProcessPoolExecutor(args.jobs) as pool:
        found = list(pool.map(runs.run, jobs))
    reached = True
    for trace in traces:
        results: Results = {}
        for job, one in zip(jobs, found, strict=True):
            if job.trace == trace:
                results.setdefault(job.policy, []).append(one)
        print(f"\n{trace}: {known[trace]}; five times the requests from half to three quarters of it")
        print(table(HEAD, [row(policy, results) for policy in POLICIES]), flush=True)
        best = statistics.median(one.fluid.omniscient for one in results[runs.NOTHING])
        print(f"fluid bound, cheapest requests first: {best:.1%}")
        reached &= judge(trace, results)
        predicted = statistics.median(one.predicted for one in results[runs.NOTHING])
        print(f"{runs.NOTHING}: first tokens within half a second of the prediction, in those 5 min: {predicted:.1%}")
        seen = detection(scene(trace, folder, 0).plain, 0)
        sudden, ramp = (quantiles(seen.delays_s[ramp_s]) for ramp_s in RAMPS_S)
        print(
            f"a step is seen after {sudden} (median / p90), one that rises within 30 s after {ramp}; "
            f"{seen.false_per_day:.0f} wishes a day without a step that nothing followed"
        )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
