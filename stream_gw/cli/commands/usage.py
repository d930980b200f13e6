"""``stream-gw usage``: prints billed tokens, and compares the accounts of Redis, gateways and engines."""

from __future__ import annotations

import argparse
import asyncio

from stream_gw.cli.flags import read_settings, wrong_arguments
from telemetry.ask import flags
from telemetry.ask.settings import AskSettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_usage(parser)


def run(args: argparse.Namespace) -> int:
    from telemetry.ask import command

    with wrong_arguments():
        return asyncio.run(command.run(read_settings(AskSettings, args), args, print))
