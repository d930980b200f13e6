"""A whole benchmark: learn about the target, load it, show the progress, write the report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import resource
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from inference.simulate import traces
from stream_gw.cli.bench import text
from stream_gw.cli.bench.arrivals import Stage, stages_of
from stream_gw.cli.bench.measures import quantile
from stream_gw.cli.bench.page import page
from stream_gw.cli.bench.results import Prices, Record, Report
from stream_gw.cli.bench.run import Chaos, Limits, Run
from stream_gw.cli.bench.socket_target import SocketTarget
from stream_gw.cli.bench.target import Facts, HttpTarget, Transport
from stream_gw.cli.bench.workload import PROFILES, Listed, Replay, Sessions, Turn, Workload
from stream_gw.cli.flags import UsageError

_CONCURRENCY, _DURATION_S, _PROFILE = 8, 30.0, "chat"
_PROGRESS_S, _PROGRESS_FILE_S = 0.5, 10.0
"""Time between two lines of progress: on a terminal, in a file."""
_RECENT = 1000
"""Requests whose TTFT the progress shows."""


async def bench(args: argparse.Namespace) -> int:
    """Run the benchmark that the flags ask for; return the exit code. Raises ValueError with a remedy."""
    requests, listed = _prepare(args)
    async with contextlib.AsyncExitStack() as stack:
        target = HttpTarget(args.urls, args.key)
        stack.push_async_callback(target.close)
        facts = await target.probe(args.model)
        if not facts.is_gateway and args.transport == "ws":
            raise UsageError("argument --transport: ws is our WebSocket, and this server is no stream-gw gateway")
        if not facts.is_gateway and args.cut:
            raise UsageError("argument --cut: this server is no stream-gw gateway and cannot resume an answer")
        transport: Transport = target
        if args.transport == "ws":
            transport = SocketTarget(target.urls, args.key)
            stack.push_async_callback(transport.close)
        stages = _stages(args, requests)
        record = Record(stages, Prices(args.usd_input, args.usd_output, args.usd_hour))
        run = Run(
            transport,
            facts,
            listed or _workload(args, requests, facts),
            record,
            seed=args.seed,
            chaos=Chaos(args.cut, args.cancel, args.slow, args.cancel_at),
            limits=Limits(args.timeout, args.requests),
            exact_lengths=args.exact_length,
            dressed=_in_session(args.seed) if facts.is_gateway else lambda body, turn: body,
        )
        started_at = datetime.now(UTC)
        is_whole = await _load(run, stages, requests, args)
    report = _report(args, run, facts, started_at, is_whole=is_whole)
    _write(report, args)
    has_figures = all(stage.requests for stage in report.stages)
    return 0 if has_figures and report.is_whole and not report.failed and not report.inexact else 1


def _prepare(args: argparse.Namespace) -> tuple[Sequence[traces.Request], Listed | None]:
    """Read the files and raise the limit of open connections. Returns the trace's requests and the listed prompts.

    Raises ValueError for a file that cannot be read or written: before the run, not after it.
    """
    for out in (args.json, args.html):
        if out and out != "-":
            _check_writable(out, Path(out))
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names no limit here, and refuses it
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    requests = traces.read(Path(args.trace)) if args.trace else ()
    return requests[: args.requests or None], Listed(Path(args.prompts)) if args.prompts else None


def _check_writable(out: str, path: Path) -> None:
    """Raises ValueError for a report that could not be written after the run."""
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{out}: its folder does not exist")
    if path.is_dir():
        raise ValueError(f"{out} is a folder; name a file")
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise ValueError(f"{out}: no permission to write it")


def _stages(args: argparse.Namespace, requests: Sequence[traces.Request]) -> list[Stage]:
    if requests:
        length_s = max(requests[-1].at_s / args.speed, 1e-3)
        return [Stage(len(requests) / length_s, 0, 0.0, length_s)]
    rates, counts = args.rate or [], args.concurrency or ([] if args.rate else [_CONCURRENCY])
    return stages_of(rates, counts, args.ramp or 0.0, args.duration or _DURATION_S)


def _workload(args: argparse.Namespace, requests: Sequence[traces.Request], facts: Facts) -> Workload:
    if requests:
        return Replay(requests, args.seed, facts.words_per_token)
    return Sessions(PROFILES[args.profile or _PROFILE], args.seed, facts.words_per_token)


def _in_session(seed: int) -> Any:
    """Return what adds our own ``session_id`` to a body: turns stay with the replica that has their KV cache."""

    def dress(body: dict[str, Any], turn: Turn) -> dict[str, Any]:
        return body | {"session_id": f"bench-{seed}-{turn.session}"}

    return dress


async def _load(
    run: Run, stages: Sequence[Stage], requests: Sequence[traces.Request], args: argparse.Namespace
) -> bool:
    """Run the load with its progress shown. Returns False when Ctrl-C or SIGTERM interrupted it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)  # asyncio.run does the same for Ctrl-C
    progress = asyncio.create_task(_show_progress(run, stages)) if not args.quiet else None
    try:
        await (run.replay(requests, args.speed) if requests else run.stages(stages))
        return True
    except asyncio.CancelledError:
        if not task.uncancel():
            return False
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        if progress is not None:
            progress.cancel()
            await asyncio.wait([progress])
            _erase_line(sys.stderr.isatty())


async def _show_progress(run: Run, stages: Sequence[Stage]) -> None:
    """Print how far the run is: one line that changes on a terminal, a line each ten seconds in a file."""
    is_terminal = sys.stderr.isatty()
    wanted_s = sum(stage.length_s for stage in stages)
    while True:
        await asyncio.sleep(_PROGRESS_S if is_terminal else _PROGRESS_FILE_S)
        line = f"{run.now_s():.0f} of {wanted_s:.0f} s, {stages[run.stage].name}: {run.running} running, "
        line += progress(run.record)
        _erase_line(is_terminal)
        print(line, end="" if is_terminal else "\n", file=sys.stderr, flush=True)


def _erase_line(is_terminal: bool) -> None:
    if is_terminal:
        print("\r\x1b[K", end="", file=sys.__stderr__, flush=True)


def progress(record: Record) -> str:
    recent = sorted(record.ttft_s[-_RECENT:])
    line = f"{len(record.outcomes)} ended, {record.failed} failed"
    if recent:
        line += f", TTFT p50 {text.format_time(quantile(recent, 0.5))} p99 {text.format_time(quantile(recent, 0.99))}"
    return line


def _report(args: argparse.Namespace, run: Run, facts: Facts, started_at: datetime, *, is_whole: bool) -> Report:
    record = run.record
    command = shlex.join(["stream-gw", *sys.argv[1:]])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # macOS has no first
    return Report(
        version=version("stream-gw"),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}, {cores} cores",
        started_at=started_at.isoformat(timespec="seconds"),
        command=command.replace(args.key, "KEY") if args.key else command,
        target=facts,
        profile=_profile(args),
        transport=args.transport,
        seed=args.seed,
        prompts_sha256=run.prompts_sha256,
        first_prompt=run.first_prompt,
        wanted_s=sum(stage.length_s for stage in record.stages),
        took_s=run.took_s,
        is_whole=is_whole,
        unfinished=run.begun - len(record.outcomes),
        client_lag_p99_s=run.lag.quantile_s(0.99) if run.lag.count else 0.0,
        client_cpu_share=run.cpu_s / max(run.took_s, 1e-9),
        stages=record.figures(),
        disturbances=record.disturbances(),
        bin_s=record.bin_s,
        bins=record.bins(),
        requests=record.outcomes,
    )


def _profile(args: argparse.Namespace) -> str:
    if args.trace:
        return f"trace {Path(args.trace).name}"
    return f"prompts of {Path(args.prompts).name}" if args.prompts else args.profile or _PROFILE


def _write(report: Report, args: argparse.Namespace) -> None:
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    if args.json == "-":
        print(encoded.decode())
    else:
        print(text.text(report))
        if args.json:
            Path(args.json).write_bytes(encoded + b"\n")
    if args.html:
        Path(args.html).write_text(page(report), encoding="utf-8")
