"""``stream-gw traces``: answers questions about requests from telemetry."""

from __future__ import annotations

import argparse
import asyncio

from stream_gw.cli.flags import read_settings, wrong_arguments
from telemetry.ask import flags
from telemetry.ask.settings import AskSettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_traces(parser)


def run(args: argparse.Namespace) -> int:
    from telemetry.ask import command

    try:
        with wrong_arguments():
            return asyncio.run(command.run(read_settings(AskSettings, args), args, print))
    except KeyboardInterrupt:
        if args.verb != "tail":  # which has no other end
            raise
        return 0
