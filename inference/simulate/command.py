"""``stream-gw capacity`` and ``stream-gw simulate``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec

from inference.control.policy.arrival_profile import DAY_S
from inference.control.policy.scale_policy import ScalePolicy, parse_policies
from inference.simulate import study
from inference.simulate.batch_host import HOST_MOST, HostPlan, tiered
from inference.simulate.capacity import Margins, capacity
from inference.simulate.elastic import Step, stepped
from inference.simulate.engine import full_batch_tokens_per_s
from inference.simulate.hardware import ASSUMED, Hardware, load
from inference.simulate.history import DAYS_KNOWN, history
from inference.simulate.output import report
from inference.simulate.output.page import page
from inference.simulate.reserve import reserve_curve
from inference.simulate.traces import Request, read
from inference.simulate.workload import Lengths, Workload, from_rates, from_trace, parse_lengths

Say = Callable[[str], None]
_DAYS_MAX = 366
"""Longest time that a trace lasts. One timestamp that is 0 among Unix times makes half a century."""


def run_capacity(args: argparse.Namespace, say: Say) -> None:
    """Run ``stream-gw capacity``. Raises OSError, and ValueError that names the mistake."""
    hardware = _hardware(args)
    margins = Margins(
        _require_above_0("--fill", args.fill), args.spare, args.warm_share, _require_above_0("--itl-ms", args.itl_ms)
    )
    requests = _recorded(args)
    answer = capacity(_workload(args, hardware, requests), hardware, margins)
    cold_start_s = 300.0 if args.cold_start_s is None else _require_above_0("--cold-start-s", args.cold_start_s)
    curve = reserve_curve(requests, answer, hardware, cold_start_s, ScalePolicy()) if requests else ()
    if args.json:
        say(msgspec.json.encode({**msgspec.to_builtins(answer), "reserve": curve}).decode())
        return
    say(report.capacity_text(answer, hardware.name))
    if requests:
        say("\n" + report.reserve_text(curve, cold_start_s))


def run_simulate(args: argparse.Namespace, say: Say) -> None:
    """Run ``stream-gw simulate``. Raises OSError, and ValueError that names the mistake."""
    policies = study.parse_policies(args.policy)
    _refuse_overwriting(
        {"--trace": args.trace, "--profile": args.profile, "--pools-file": args.pools_file},
        {"--csv": args.csv, "--timeline": args.timeline, "--html": args.html},
    )
    hardware, policy = _hardware(args), _policy(args)
    requests = _read_trace(args.trace, args.speed)
    span_s = requests[-1].at_s
    step = study.parse_step(args.step, span_s) if args.step else None
    kills_s = sorted(study.parse_moment(text, span_s) for given in args.kill for text in given.split(","))
    if not 0 < args.fill <= 1:
        raise ValueError(f"--fill must be more than 0 and at most 1, got {args.fill:g}")
    if not 0 <= args.begin <= study.REPLICAS_MOST:
        raise ValueError(f"--begin must be from 0 to {study.REPLICAS_MOST:,} replicas, got {args.begin}")
    host = _batch_host(args, hardware, span_s)
    arriving = stepped(requests, step, args.seed) if step else requests
    asked = study.Study(
        tiered(arriving, args.batch_share, args.seed) if args.batch_share else arriving,
        hardware,
        policy,
        study.Objective(
            policy.ttft_objective_s if args.ttft_s is None else _require_above_0("--ttft-s", args.ttft_s),
            _require_0_or_more("--ttft-s-per-1k", args.ttft_s_per_1k) / 1000,
            _require_above_0("--itl-ms", args.itl_ms) / 1000,
        ),
        args.fill,
        args.begin,
        kills_s,
        args.seed,
        history(requests, step) if "ours:known" in policies else None,
        host,
    )
    for path in filter(None, (args.csv, args.timeline, args.html)):
        _check_writable(path)
    compared = [replace(asked, host=None), asked] if host is not None else [asked]
    outcomes = [study.run(one, name) for name in policies for one in compared]
    facts = _setup_sentences(args, asked, step)
    if args.csv is not None:
        args.csv.write_text(report.summary_csv(outcomes), "utf-8")
    if args.timeline is not None:
        args.timeline.write_text(report.timeline_csv(outcomes), "utf-8")
    if args.html is not None:
        args.html.write_text(page(f"{args.trace.name}, simulated", facts, asked, step, outcomes), "utf-8")
    if args.json:
        say(msgspec.json.encode([report.outcome_json(outcome) for outcome in outcomes]).decode())
    else:
        say("\n".join([*report.wrapped(facts), "", report.table(report.summary(outcomes))]))


def _setup_sentences(args: argparse.Namespace, asked: study.Study, step: Step | None) -> Sequence[str]:
    """Sentences about the simulated setup, for the report."""
    s, objective = asked.hardware.settings, asked.objective
    speed = f" at {args.speed:g} x its speed" if args.speed != 1 else ""
    stepping = (
        f", {step.times:g} times as many from {step.at_s:,.0f} to {step.at_s + step.for_s:,.0f} s" if step else ""
    )
    longer = f" and {objective.ttft_s_per_token * 1000:g} s for each 1,000 prompt tokens" if args.ttft_s_per_1k else ""
    deaths = f"; the busiest dies at {', '.join(f'{at_s:,.0f}' for at_s in asked.kills_s)} s" if asked.kills_s else ""
    known = (f"known: {DAYS_KNOWN} other days with as much in each minute on average",) if asked.known else ()
    price = f", ${asked.hardware.gpu_hour:g} a GPU hour" if asked.hardware.gpu_hour else ""
    return (
        f"{args.trace.name}{speed}: {len(asked.requests):,} requests in {asked.span_s / 3600:.2f} h{stepping}",
        f"one replica, simulated: {asked.hardware.name}; prefill {s.prefill_tokens_per_s:,.0f} tokens/s, a decode step "
        f"{s.itl_ms:.1f} ms and {s.batch_slope_us:.0f} us for each further sequence, {s.max_num_seqs} slots (all of "
        f"them {full_batch_tokens_per_s(s):,.0f} tokens/s), {asked.hardware.kv_tokens:,} tokens of KV, "
        f"{asked.hardware.gpus} GPU{'s' if asked.hardware.gpus > 1 else ''}{price}",
        f"{asked.policy.cold_start_s:g} s from asking for a replica until it takes requests, paid for from then on"
        f"{deaths}",
        f"SLO: first token within {objective.ttft_s:g} s{longer}, then one every {objective.itl_s * 1000:g} ms on "
        f"average; what is not served misses it. Seed {asked.seed}",
        *known,
        *_host_sentences(args, asked),
    )


def _host_sentences(args: argparse.Namespace, asked: study.Study) -> Sequence[str]:
    """Sentences about batch requests and their host."""
    if not args.batch_share:
        return ()
    tiers = f"{args.batch_share:.0%} of the requests are of tier batch, the others interactive"
    if asked.host is None:
        return (tiers,)
    price = f", ${asked.host.gpu_hour:g} a GPU hour" if asked.host.gpu_hour else ""
    reclaims = [
        f"one is taken away at {at_s:,.0f} s" + (f" and may start again at {back_s:,.0f} s" if back_s else "")
        for at_s, back_s in asked.host.reclaims
    ]
    have = f"batch host: {asked.host.replicas} such replica{'s' if asked.host.replicas > 1 else ''}{price}"
    return (f"{tiers}; {'; '.join([have, *reclaims])}",)


def _batch_host(args: argparse.Namespace, hardware: Hardware, span_s: float) -> HostPlan | None:
    if not 0 <= args.batch_share <= 1:
        raise ValueError(f"--batch-share must be from 0 to 1, got {args.batch_share:g}")
    if not args.batch_host:
        _refuse_flags({"--reclaim": args.reclaim or None, "--host-gpu-hour": args.host_gpu_hour}, "--batch-host")
        return None
    if not 0 < args.batch_host <= HOST_MOST:
        raise ValueError(f"--batch-host must be from 0 to {HOST_MOST:,} replicas, got {args.batch_host}")
    if not args.batch_share:
        raise ValueError("--batch-host needs --batch-share: without it no request is of tier batch")
    price = args.host_gpu_hour
    return HostPlan(
        args.batch_host,
        [study.parse_reclaim(text, span_s) for given in args.reclaim for text in given.split(",")],
        hardware.gpu_hour if price is None else _require_0_or_more("--host-gpu-hour", price),
    )


def _recorded(args: argparse.Namespace) -> tuple[Request, ...]:
    """Return the requests of the trace, at the speed that is asked for; none without a trace."""
    if args.trace is None:
        return ()
    return _read_trace(args.trace, 1.0 if args.speed is None else args.speed)


def _workload(args: argparse.Namespace, hardware: Hardware, requests: Sequence[Request]) -> Workload:
    cached = args.cached_share
    if not 0 <= cached < 1:
        raise ValueError(f"--cached-share must be from 0 to less than 1, got {cached:g}")
    if args.trace is not None:
        lengths = {"--prompt-tokens": args.prompt_tokens, "--output-tokens": args.output_tokens}
        _refuse_flags({**lengths, "--peak-to-mean": args.peak_to_mean}, "--rate")
        window_s = 60.0 if args.window_s is None else _require_above_0("--window-s", args.window_s)
        return from_trace(args.trace.name, requests, hardware.settings, window_s, cached)
    needs_trace = {"--speed": args.speed, "--window-s": args.window_s, "--cold-start-s": args.cold_start_s}
    _refuse_flags(needs_trace, "--trace")
    prompt, output = _lengths("--prompt-tokens", args.prompt_tokens), _lengths("--output-tokens", args.output_tokens)
    peak_to_mean = 1.0 if args.peak_to_mean is None else args.peak_to_mean
    if not 1 <= peak_to_mean <= 1e6:
        raise ValueError(f"--peak-to-mean must be 1 or more, got {peak_to_mean:g}")
    if not 1e-9 <= args.rate <= 1e9:
        raise ValueError(f"--rate must be more than 0 and at most 1e9 requests/s, got {args.rate:g}")
    return from_rates(args.rate, prompt, output, peak_to_mean, cached)


def _lengths(flag: str, text: str | None) -> Lengths:
    if text is None:
        raise ValueError(f"--rate needs {flag}, as 800 or p50=600,p95=3000")
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


def _refuse_flags(given: dict[str, object], other: str) -> None:
    """Raise ValueError for a flag that was given but belongs to the flag ``other``."""
    for flag, value in given.items():
        if value is not None:
            raise ValueError(f"{flag} is for {other}")


def _hardware(args: argparse.Namespace) -> Hardware:
    found = ASSUMED if args.profile is None else load(args.profile)
    return found if args.gpu_hour is None else replace(found, gpu_hour=_require_0_or_more("--gpu-hour", args.gpu_hour))


def _policy(args: argparse.Namespace) -> ScalePolicy:
    policy = ScalePolicy()
    if args.pools_file is not None:
        policies = parse_policies(args.pools_file.read_bytes(), str(args.pools_file))
        name = args.pool or (next(iter(policies)) if len(policies) == 1 else "")
        if name not in policies:
            named = f"no pool {name!r}" if name else "several pools: name one with --pool"
            raise ValueError(f"{args.pools_file}: {named}; there are {', '.join(policies) or 'none'}")
        policy = policies[name]
    elif args.pool is not None:
        raise ValueError("--pool is for --pools-file")
    if args.cold_start_s is not None:
        policy = msgspec.structs.replace(policy, cold_start_s=_require_0_or_more("--cold-start-s", args.cold_start_s))
    return policy


def _read_trace(path: Path, speed: float) -> tuple[Request, ...]:
    """Return the requests of a trace, arriving ``speed`` times as fast."""
    factor = _require_above_0("--speed", speed)
    requests = tuple(replace(request, at_s=request.at_s / factor) for request in read(path))
    if requests[-1].at_s > _DAYS_MAX * DAY_S:  # each second of it is simulated, and each minute kept
        pause_s, before = max((two.at_s - one.at_s, one.number + 1) for one, two in pairwise(requests))
        raise ValueError(
            f"{path}: its requests last {requests[-1].at_s / DAY_S:,.0f} days, and may last {_DAYS_MAX}; correct its "
            f"timestamps: the longest pause, {pause_s / DAY_S:,.0f} days, is after request {before:,} in order of time"
        )
    return requests


def _require_above_0(flag: str, value: float) -> float:
    """Return the value. Raises ValueError that names the flag."""
    if not 0 < value < math.inf:
        raise ValueError(f"{flag} must be more than 0, got {value:g}")
    return value


def _require_0_or_more(flag: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{flag} must be 0 or more, got {value:g}")
    return value


def _refuse_overwriting(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """Raise ValueError for a file that is written although another flag names it. Both are paths by flag."""
    flags = {path.resolve(): flag for flag, path in read.items() if path is not None}
    for flag, path in written.items():
        if path is None or (path.exists() and not path.is_file()):  # /dev/null may be written twice
            continue
        if (first := flags.setdefault(path.resolve(), flag)) != flag:
            raise ValueError(f"{flag} would overwrite {path}, the file of {first}; name another file")


def _check_writable(path: Path) -> None:
    """Open the file for writing, before minutes are spent on the simulation. Raises OSError."""
    with path.open("a"):
        pass
