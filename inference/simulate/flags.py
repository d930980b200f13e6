"""Flags of ``stream-gw capacity`` and ``simulate``. Imports little, because every command loads it."""

from __future__ import annotations

import argparse
from pathlib import Path

_TRACE = (
    "recorded traffic: CSV with TIMESTAMP, ContextTokens and GeneratedTokens, or JSON lines (.jsonl) with timestamp, "
    "input_length and output_length, and hash_ids of shared prompt blocks"
)
_PROFILE = "TOML profile of one replica: speed, memory, price (default: an 8B model on one large GPU)"
_LENGTHS = "mean, as 800, or quantiles, as p50=600,p95=3000"


def add_capacity(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rate", type=float, metavar="R", help="mean requests per second; needs the lengths below")
    what.add_argument("--trace", type=Path, metavar="FILE", help=_TRACE)
    parser.add_argument("--prompt-tokens", metavar="N", help=f"with --rate: {_LENGTHS}")
    parser.add_argument("--output-tokens", metavar="N", help=f"with --rate: {_LENGTHS}")
    parser.add_argument(
        "--peak-to-mean", type=float, metavar="X", help="with --rate: peak rate as a multiple of the mean (default 1)"
    )
    parser.add_argument(
        "--speed", type=float, metavar="X", help="with --trace: factor by which requests come faster (default 1)"
    )
    parser.add_argument(
        "--window-s", type=float, metavar="S", help="with --trace: length of the peak in seconds (default 60)"
    )
    parser.add_argument(
        "--cold-start-s",
        type=float,
        metavar="S",
        help="with --trace: seconds from asking for a replica until it takes requests, for the warm reserve "
        "(default 300)",
    )
    parser.add_argument(
        "--cached-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of prompt tokens found in a cache, 0 to 1 (default 0)",
    )
    _add_profile(parser)
    parser.add_argument(
        "--fill",
        type=float,
        default=0.6,
        metavar="X",
        help="utilisation of a replica at the peak, 0 to 1 (default 0.6)",
    )
    parser.add_argument(
        "--itl-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="longest gap between tokens at the peak in ms (default 100)",
    )
    parser.add_argument(
        "--spare", type=int, default=1, metavar="N", help="replicas that may be dead at the peak (default 1)"
    )
    parser.add_argument(
        "--warm-share",
        type=float,
        default=0.05,
        metavar="X",
        help="warm replicas as a share of serving ones (default 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help=_TRACE)
    parser.add_argument(
        "--policy",
        action="append",
        required=True,
        metavar="NAME",
        help="scaling policy: ours, ours:known (has learned from other days like this one), hpa (80 %% GPU "
        "utilisation), waiting (KEDA, 5 waiting requests a replica), oracle (knows the future), fixed:N replicas; "
        "separate several by commas, or repeat the flag, to compare them",
    )
    parser.add_argument("--pools-file", type=Path, metavar="FILE", help="pools file of the controllers, for ours")
    parser.add_argument("--pool", metavar="NAME", help="pool in that file (default: its only one)")
    _add_profile(parser)
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="factor by which requests come faster (default 1)"
    )
    parser.add_argument("--step", metavar="5x@50%-75%", help="multiple of the traffic between two times")
    parser.add_argument(
        "--cold-start-s",
        type=float,
        metavar="S",
        help="seconds from asking for a replica until it takes requests (default: the pool's)",
    )
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="TIME",
        help="time at which the busiest replica dies: 600, 10m or 50%%; separate several by commas, repeat one to kill "
        "two. Streams continue elsewhere, the process starts again",
    )
    _add_batch_host(parser)
    parser.add_argument(
        "--fill",
        type=float,
        default=0.6,
        metavar="X",
        help="utilisation to which the oracle fills a replica, 0 to 1 (default 0.6)",
    )
    parser.add_argument(
        "--begin", type=int, default=0, metavar="N", help="replicas at the start; 0: as many as needed (default 0)"
    )
    parser.add_argument("--ttft-s", type=float, metavar="S", help="TTFT objective in seconds (default: the pool's)")
    parser.add_argument(
        "--ttft-s-per-1k",
        type=float,
        default=0.0,
        metavar="S",
        help="additional TTFT per 1000 prompt tokens in seconds (default 0)",
    )
    parser.add_argument(
        "--itl-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="objective for a request's mean gap between tokens in ms (default 100)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a CSV row for each policy")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a CSV row for each policy and interval")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page with plots")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the randomness (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_batch_host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of the requests that are of tier batch, 0 to 1; the others are then interactive (default 0: all "
        "are standard)",
    )
    parser.add_argument(
        "--batch-host",
        type=int,
        default=0,
        metavar="N",
        help="replicas of a batch host, which batch requests try first: each policy runs without and with it; 0: none "
        "(default 0)",
    )
    parser.add_argument(
        "--reclaim",
        action="append",
        default=[],
        metavar="30%-60%",
        help="times at which the busiest replica of the batch host is taken away without a notice and at which it may "
        "start again, or the first alone; separate several by commas",
    )
    parser.add_argument(
        "--host-gpu-hour",
        type=float,
        metavar="DOLLARS",
        help="price of a GPU hour at the batch host in dollars (default: as at home)",
    )


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, metavar="FILE", help=_PROFILE)
    parser.add_argument(
        "--gpu-hour", type=float, metavar="DOLLARS", help="price of a GPU hour in dollars (default: the profile's)"
    )
