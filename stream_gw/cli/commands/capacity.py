"""``stream-gw capacity``: computes the replicas, GPUs and dollars that a workload needs."""

from __future__ import annotations

import argparse
import sys

from inference.simulate import flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_capacity(parser)


def run(args: argparse.Namespace) -> int:
    from inference.simulate import command  # slow to import, and --help does without it

    try:
        command.run_capacity(args, print)
    except ValueError as error:
        print(f"stream-gw capacity: {error}", file=sys.stderr)
        return 2
    return 0
