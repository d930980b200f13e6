"""``stream-gw export``: writes the Helm chart, the compose file or the dashboards to a folder."""

from __future__ import annotations

import argparse


def add_flags(parser: argparse.ArgumentParser) -> None: ...


def run(args: argparse.Namespace) -> int:
    return 0
