"""``stream-gw telemetry``: runs one consumer of events until SIGTERM; ``dlq`` lists or replays its dead letters."""

from __future__ import annotations

import argparse
import asyncio

from stream_fabric.arguments import whole
from stream_gw.cli.flags import add_setting_flags, print_ready, read_settings
from telemetry.settings import DeadLetterSettings, TelemetrySettings
from telemetry.store.errors import StoreUnavailable

_LIST_MAX = 100
_REPLAY_MAX = 1_000_000


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_setting_flags(parser, TelemetrySettings)
    parser.set_defaults(dlq=None)
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    add_setting_flags(common, DeadLetterSettings)
    what = parser.add_subparsers(dest="what", metavar="{dlq}", title="without a verb: consume events")
    letters = what.add_parser("dlq", help="dead letters: records that could not be decoded", parents=[common])
    verbs = letters.add_subparsers(dest="dlq", required=True, metavar="{list,replay}")
    listing = verbs.add_parser("list", help="list dead letters that were not replayed, oldest first", parents=[common])
    replay = verbs.add_parser(
        "replay", help="append dead letters to the log again, once their cause is repaired", parents=[common]
    )
    replay.add_argument("id", nargs="*", help="id as list prints it (default: all)")
    for verb, default in ((listing, _LIST_MAX), (replay, _REPLAY_MAX)):
        verb.add_argument(
            "--count",
            type=whole(1, _REPLAY_MAX),
            default=default,
            help=f"maximum number of records (default {default})",
        )


def run(args: argparse.Namespace) -> int:
    settings = read_settings(TelemetrySettings, args)
    try:
        from telemetry import main as telemetry_main
    except ImportError as error:
        raise StoreUnavailable(f"pip install 'stream-gw[chdb]', or [clickhouse] for a server ({error})") from None
    if args.dlq is None:
        telemetry_main.run(settings, lambda url: print_ready(args, {"url": url}, f"telemetry at {url}"))
    else:
        ids = getattr(args, "id", ())
        asyncio.run(telemetry_main.dlq(settings, args.dlq, args.count, ids, args.json, print))
    return 0
