"""``stream-gw controller``: runs one controller until SIGTERM."""

from __future__ import annotations

import argparse

from inference.control import main as controller_main
from inference.control.settings import ControllerSettings
from stream_gw.cli.flags import add_setting_flags, print_ready, read_settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_setting_flags(parser, ControllerSettings)


def run(args: argparse.Namespace) -> int:
    def on_ready(metrics_url: str) -> None:
        print_ready(args, {"metrics": metrics_url} if metrics_url else {}, "controller is ready")

    controller_main.run(read_settings(ControllerSettings, args), on_ready)
    return 0
