"""``stream-gw gateway``: runs one gateway until SIGTERM."""

from __future__ import annotations

import argparse

from stream_gw import main as gateway_main
from stream_gw.cli.flags import add_setting_flags, print_ready, read_settings
from stream_gw.settings import GatewaySettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_setting_flags(parser, GatewaySettings)


def run(args: argparse.Namespace) -> int:
    settings = read_settings(GatewaySettings, args)
    gateway_main.run(settings, lambda url: print_ready(args, {"url": url}, f"gateway at {url}"))
    return 0
