"""Whether a gateway's memory stays flat: many short streams, SSE and WebSocket in turns, and its RSS after each batch.

    python -m bench.memory [--streams 100000]

Exit code 1: RSS at the end exceeds that after the first batches by more than both bounds, or a stream was not whole.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from bench.harness import Cores, EngineSource, LoadFailed, build, describe, load, memory, table, temporary_folder
from bench.platform import Platform

MIB_MAX, SHARE_MAX = 2.0, 0.03


def measure(args: argparse.Namespace) -> list[tuple[int, float, float, float]]:
    """(streams so far, RSS in MiB, private MiB, streams/s of the batch)."""
    cores = Cores.pick()
    rows = []
    with temporary_folder() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        source = EngineSource(cores, folder)
        stack.callback(source.stop)
        # With a consumer: where nobody takes the events, Redis' share fills and then the gateway's own bounded queue
        running = Platform(cores, folder, source.port, command=args.platform, telemetry=True)
        stack.callback(running.stop)
        for done in range(args.batch, args.streams + 1, args.batch):
            speed = 0.0
            # Connections end too: a tenth as many as streams
            for kind, share in (("sse", args.batch // 2), ("ws", args.batch - args.batch // 2)):
                result = load(
                    running.target(kind),
                    source,
                    cores,
                    mode="backlog",
                    streams=args.at_once,
                    total=share,
                    tokens=args.tokens,
                    per_connection=10,
                )
                speed += result["completed"] / result["seconds"] / 2
            time.sleep(args.rest)
            held = memory(running.gateway_pids[0])
            rows.append((done, held.rss_kib / 1024, held.private_kib / 1024, speed))
            print(f"  {done} streams: {held.rss_kib / 1024:.1f} MiB", file=sys.stderr)
    return rows


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.memory", description=__doc__, formatter_class=raw)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--warm", type=int, default=50_000, help="the growth is counted from here")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds before RSS is read")
    parser.add_argument("--mib-max", type=float, default=MIB_MAX)
    parser.add_argument("--share-max", type=float, default=SHARE_MAX)
    parser.add_argument("--platform", metavar="COMMAND", help="starts the platform instead of `stream-gw up`")
    args = parser.parse_args(argv)
    if args.warm % args.batch or args.streams % args.batch or args.warm >= args.streams:
        parser.error("--warm and --streams must be multiples of --batch, and --warm less than --streams")
    build()
    facts = describe()
    try:
        rows = measure(args)
    except LoadFailed as error:
        print(f"FAILED: {error}")
        return 1
    print("; ".join(f"{name} {value}" for name, value in facts.items()))
    print(
        f"One gateway, streams of {args.tokens} tokens, {args.at_once} at a time, half SSE, half WebSocket; one run\n"
    )
    head = ("streams", "RSS MiB", "private MiB", "streams/s")
    print(table(head, [(done, f"{rss:.1f}", f"{own:.1f}", f"{speed:.0f}") for done, rss, own, speed in rows]))
    warm = next(rss for done, rss, _, _ in rows if done == args.warm)
    growth = rows[-1][1] - warm
    flat = growth <= args.mib_max or growth <= args.share_max * warm
    print(
        f"\nGrowth from {args.warm} to {args.streams} streams: {growth:.2f} MiB, {growth / warm:.1%} "
        f"(bound: {args.mib_max:g} MiB or {args.share_max:.0%}): {'ok' if flat else 'EXCEEDED'}"
    )
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
