"""The flags of ``stream-gw traces`` and ``stream-gw usage``. Light: the command line reads it for every command."""

from __future__ import annotations

import argparse

_COHORT = ("model", "pool", "replica", "tenant", "region", "tier")
_MOMENT = "15m, 2h, 3d ago, or a moment as 2026-11-20T10:00:00Z"


def add_traces(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(json=False)
    common = _common()
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, parents=[common])

    why = verb("why", "why a request was as slow as it was: its time, its tries, what is usual, the likely cause")
    why.add_argument("id", help="of a stream, a request, a trace, or a completion")
    show = verb("show", "all that was told of a request")
    show.add_argument("id", help="as for why")
    _window(verb("list", "the newest requests"), "1h", "ended")
    _window(verb("slow", "the requests that spent most in a phase"), "1h", "phase")
    diff = verb("diff", "two cohorts side by side, and what explains their difference")
    for side in ("a", "b"):
        diff.add_argument(side, help="as since=2h,until=1h,model=NAME; also " + ", ".join(_COHORT[1:]))
    pool = verb("pool", "what happened to a pool, in order")
    pool.add_argument("pool")
    _window(pool, "1h", cohort=(), top="1000")
    tail = verb("tail", "follow the requests as they end")
    for name in _COHORT:
        tail.add_argument(f"--{name}")
    tail.add_argument("--ended", help="only those that ended so, as failed")
    verb("queries", "the saved queries, and what each tells")
    query = verb("query", "one saved query")
    query.add_argument("name")
    query.add_argument("parameters", nargs="*", metavar="NAME=VALUE", help="its parameters, and since=, until=")
    sql = verb("sql", "a SELECT of your own: read only, with a limit of rows and of time")
    sql.add_argument("statement", help="- reads it from stdin")
    sql.add_argument("--rows", type=_rows, default=1000, help="at most (default 1000, 10000 at most)")


def add_usage(parser: argparse.ArgumentParser) -> None:
    common = _common()
    _add_common(parser)
    _window(parser, "24h", cohort=("tenant", "model"))
    verbs = parser.add_subparsers(dest="verb", metavar="{reconcile}", title="without one, what is billed by hour")
    check = verbs.add_parser(
        "reconcile", help="settled in Redis, shown by gateways, made by engines: the same tokens?", parents=[common]
    )
    check.add_argument("--since", default="24h", help=f"{_MOMENT}; its whole hour (default 24h)")
    check.add_argument("--until", default="now", help="the same (default now)")
    check.add_argument("--tenant", default="", help="of one tenant")
    check.add_argument("--no-redis", action="store_true", help="compare gateways and engines only")


def _common() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_common(common)
    return common


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--telemetry-url", help="where stream-gw telemetry answers (STREAM_GW_TELEMETRY_URL)")
    parser.add_argument("--telemetry-token", help="its bearer token (STREAM_GW_TELEMETRY_TOKEN)")
    parser.add_argument("--clickhouse", help="in its place: ClickHouse itself (STREAM_GW_CLICKHOUSE)")
    parser.add_argument("--redis-url", help="the platform's Redis (STREAM_GW_REDIS_URL)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _window(
    parser: argparse.ArgumentParser, since: str, *more: str, cohort: tuple[str, ...] = _COHORT, top: str = "20"
) -> None:
    parser.add_argument("--since", default=since, help=f"{_MOMENT} (default {since})")
    parser.add_argument("--until", default="now", help="the same (default now)")
    parser.add_argument("--top", default=top, help=f"how many rows (default {top})")
    for name in cohort:
        parser.add_argument(f"--{name}")
    texts = {"ended": "only those that ended so, as failed", "phase": "wall (default), ttft, prefill, decode, …"}
    for name in more:
        parser.add_argument(f"--{name}", help=texts[name])


def _rows(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"must be 1 to 10000, got {text!r}")
    return int(text)
