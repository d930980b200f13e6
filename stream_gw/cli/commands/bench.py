"""``stream-gw bench URL``: measures an OpenAI-compatible server as its users feel it."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
from urllib.parse import urlsplit

from stream_gw.cli.flags import UsageError

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_PROFILES = ("chat", "rag", "agent", "batch")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "urls",
        nargs="+",
        type=_url,
        metavar="URL",
        help="base URL, with or without /v1; with several, requests take turns and a cut stream resumes at the next",
    )
    parser.add_argument(
        "--key", default="", help="API key (default: OPENAI_API_KEY); other users of the machine see it"
    )
    parser.add_argument("--model", default="", help="model to ask (default: the first that the server lists)")
    parser.add_argument(
        "--transport", choices=("sse", "ws"), default="sse", help="sse, or ws: our WebSocket (default sse)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, arrivals and chaos (default 0)")
    parser.add_argument(
        "--timeout",
        type=_some_time,
        default=300.0,
        metavar="TIME",
        help="for one answer, without the pauses of --slow (default 300s)",
    )

    load = parser.add_argument_group("load")
    load.add_argument("--profile", choices=_PROFILES, help="kind of traffic (default chat)")
    load.add_argument("--rate", type=_rates, metavar="R[,R…]", help="requests per second (Poisson); several: stages")
    load.add_argument(
        "--concurrency", type=_counts, metavar="N[,N…]", help="requests at once (default 8); several: stages"
    )
    load.add_argument("--duration", type=_some_time, metavar="TIME", help="of a stage: 30s, 5m, 1h (default 30s)")
    load.add_argument("--ramp", type=_duration, metavar="TIME", help="growth before each stage (default 0)")
    load.add_argument("--requests", type=_limit, default=0, help="at most this number a stage (default 0: no limit)")
    load.add_argument("--prompts", metavar="FILE", help="JSON lines with prompt or messages, and max_tokens")
    load.add_argument("--trace", metavar="FILE", help="replay a recorded trace: Azure's CSV or Mooncake's JSON lines")
    load.add_argument("--speed", type=_positive, default=1.0, help="replay it this number of times faster (default 1)")
    load.add_argument(
        "--exact-length", action="store_true", help="send ignore_eos, so that an answer has its full length"
    )

    chaos = parser.add_argument_group("chaos: shares of the requests, 0 to 1")
    chaos.add_argument("--cut", type=_share, default=0.0, help="drop the connection at a random token, then resume")
    chaos.add_argument("--cancel", type=_share, default=0.0, help="cancel at token --cancel-at")
    chaos.add_argument("--cancel-at", type=int, default=20, metavar="N", help="token of the cancel (default 20)")
    chaos.add_argument("--slow", type=_share, default=0.0, help="read slowly: four pieces a second")

    out = parser.add_argument_group("result")
    out.add_argument("--json", metavar="FILE", help="write everything as JSON; -: to stdout instead of the table")
    out.add_argument("--html", metavar="FILE", help="write one HTML page with plots")
    out.add_argument("--usd-input", type=_price, default=0.0, metavar="USD", help="price of a million input tokens")
    out.add_argument("--usd-output", type=_price, default=0.0, metavar="USD", help="price of a million output tokens")
    out.add_argument("--usd-hour", type=_price, default=0.0, metavar="USD", help="price of the whole fleet for an hour")
    out.add_argument("--quiet", action="store_true", help="show no progress")


_EPILOG = """\
exit code: 0 all requests were served, and each cut or cancelled answer is exact; 1 some were not, or none was sent;
2 wrong flags

  stream-gw bench http://localhost:8080 --key sk-dev --rate 2,4,8 --duration 1m --html bench.html
  stream-gw bench http://localhost:8080 http://localhost:8081 --key sk-dev --cut 0.2 --cancel 0.1 --slow 0.05
  stream-gw bench https://api.example.com/v1 --model m --profile rag --concurrency 4
"""


def run(args: argparse.Namespace) -> int:
    if args.rate and args.concurrency:
        raise UsageError("argument --rate: not allowed with --concurrency: the load is open or closed")
    if args.trace and (args.rate or args.concurrency):
        raise UsageError("argument --trace: not allowed with --rate or --concurrency: the trace has its own arrivals")
    if args.trace and (args.duration or args.ramp is not None):
        raise UsageError("argument --trace: not allowed with --duration or --ramp: --requests ends it early")
    if args.trace and (args.prompts or args.profile):
        raise UsageError("argument --trace: not allowed with --prompts or --profile: the trace has its own lengths")
    if args.prompts and args.profile:
        raise UsageError("argument --prompts: not allowed with --profile: the file has its own lengths")
    if args.cut + args.cancel + args.slow > 1:
        raise UsageError("arguments --cut, --cancel and --slow: their sum is above 1")
    if args.cancel_at < 1:
        raise UsageError("argument --cancel-at: must be at least 1")
    args.key = args.key or os.environ.get("OPENAI_API_KEY", "")
    from stream_gw.cli.bench.command import bench  # slow to import, and --help does without it

    return asyncio.run(bench(args))


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"must be a URL such as http://localhost:8080, got {text!r}")
    return text


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or not float(match[1]) * _UNITS_S[match[2]] <= 7 * 86_400:
        raise argparse.ArgumentTypeError(f"must be a time such as 30s, 5m or 1h, got {text!r}")
    return float(match[1]) * _UNITS_S[match[2]]


def _some_time(text: str) -> float:
    time_s = _duration(text)
    if not time_s:
        raise argparse.ArgumentTypeError(f"must be a time above 0, got {text!r}")
    return time_s


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 for no limit, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    if not all(part.isdecimal() and 1 <= int(part) <= 10_000 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1 to 10000, got {text!r}")
    return [int(part) for part in text.split(",")]


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share from 0 to 1, got {text!r}")
    return value


def _price(text: str) -> float:
    return 0.0 if text == "0" else _positive(text)
