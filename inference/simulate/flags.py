"""The flags of ``stream-gw capacity`` and ``simulate``. Light: the command line reads it for every command."""

from __future__ import annotations

import argparse
from pathlib import Path

_TRACE = (
    "recorded traffic: CSV with TIMESTAMP, ContextTokens and GeneratedTokens, or JSON lines (.jsonl) with timestamp, "
    "input_length and output_length, and hash_ids for what prompts share"
)
_PROFILE = "TOML: what one replica does and costs; without it an 8B model on one large GPU is assumed"
_LENGTHS = "a mean, as 800, or quantiles, as p50=600,p95=3000"


def add_capacity(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rate", type=float, metavar="R", help="requests a second on average, with the lengths below")
    what.add_argument("--trace", type=Path, metavar="FILE", help=_TRACE)
    parser.add_argument("--prompt-tokens", metavar="N", help=f"with --rate: {_LENGTHS}")
    parser.add_argument("--output-tokens", metavar="N", help=f"with --rate: {_LENGTHS}")
    parser.add_argument("--peak-to-mean", type=float, metavar="X", help="with --rate: the peak's rate (default 1)")
    parser.add_argument("--speed", type=float, metavar="X", help="with --trace: its requests come so much faster")
    parser.add_argument("--window-s", type=float, metavar="S", help="with --trace: how long a peak lasts (default 60)")
    parser.add_argument(
        "--cached-share", type=float, default=0.0, metavar="X", help="of prompts' tokens, found in a cache (default 0)"
    )
    _add_profile(parser)
    parser.add_argument(
        "--fill", type=float, default=0.6, metavar="X", help="of 1, what the peak fills a replica to (default 0.6)"
    )
    parser.add_argument(
        "--itl-ms", type=float, default=100.0, metavar="MS", help="between tokens at the peak, at most (default 100)"
    )
    parser.add_argument("--spare", type=int, default=1, metavar="N", help="replicas that may be dead (default 1)")
    parser.add_argument(
        "--warm-share", type=float, default=0.05, metavar="X", help="so many more are kept warm (default 0.05)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help=_TRACE)
    parser.add_argument(
        "--policy",
        action="append",
        required=True,
        metavar="NAME",
        help="who decides how many replicas there are: ours, ours:known (other days like this one have taught it), "
        "hpa (80 %% of GPU time), waiting (KEDA, 5 that wait a replica), oracle (knows what comes), fixed:N; several, "
        "with commas or again, are compared",
    )
    parser.add_argument("--pools-file", type=Path, metavar="FILE", help="the controllers' TOML, for ours")
    parser.add_argument("--pool", metavar="NAME", help="which of its pools; may be left out where there is one")
    _add_profile(parser)
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="requests come so much faster (default 1)"
    )
    parser.add_argument("--step", metavar="5x@50%-75%", help="so many times the traffic, from when to when")
    parser.add_argument(
        "--cold-start-s", type=float, metavar="S", help="from asking for a replica until it takes requests (the pool's)"
    )
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="TIME",
        help="the busiest replica dies, as at 600, 10m or 50%%; several with commas, the same one again kills two. Its "
        "streams go on elsewhere, its process starts again",
    )
    parser.add_argument(
        "--fill", type=float, default=0.6, metavar="X", help="of 1, what the oracle fills a replica to (default 0.6)"
    )
    parser.add_argument("--begin", type=int, default=0, metavar="N", help="replicas at the start; else as needed then")
    parser.add_argument("--ttft-s", type=float, metavar="S", help="the objective (default: the pool's)")
    parser.add_argument(
        "--ttft-s-per-1k",
        type=float,
        default=0.0,
        metavar="S",
        help="and so much for each 1000 of the prompt (default 0)",
    )
    parser.add_argument(
        "--itl-ms", type=float, default=100.0, metavar="MS", help="a request's mean gap between tokens (default 100)"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each policy")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a row for each policy and time, as CSV")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another one, other chances (default 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", type=Path, metavar="FILE", help=_PROFILE)
    parser.add_argument("--gpu-hour", type=float, metavar="DOLLARS", help="what a GPU costs (else the profile's)")
