"""The command line ``stream-gw``: picks one command, reads its flags, runs it.

Only the chosen command's module is imported, so that ``stream-gw key`` starts without any server's code.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Protocol, cast

from stream_fabric.errors import StreamGwError
from stream_fabric.process.logs import configure
from stream_gw.cli.flags import UsageError

_COMMANDS = {
    "up": "run the whole platform on this machine",
    "gateway": "run one gateway: HTTP, SSE and WebSocket",
    "agent": "run one agent beside an engine",
    "controller": "run one controller: failover, health and scaling",
    "telemetry": "run one consumer that writes events to ClickHouse; dlq: its dead letters",
    "bench": "measure an OpenAI-compatible server: latencies, errors, cost, resume and cancel under chaos",
    "doctor": "check what this environment configures, and print a remedy for each fault",
    "demo": "start the platform, show resume and cancel, stop; exit code 0: all held",
    "traces": "show why a request was slow, and what the fleet did",
    "usage": "print billed tokens by hour; reconcile: compare Redis, gateways and engines",
    "key": "make an API key and its entry for the keys file",
    "tenants": "add, change, suspend or delete tenants of the database; import a keys file; migrate",
    "users": "suspend single users of a tenant, or give them limits of their own",
    "keys": "make, change, list, rotate or revoke API keys of the database's tenants",
    "plans": "add or change plans: models, tiers and limits of tenants",
    "prices": "set or list the prices of tokens",
    "audit": "print who changed tenants, keys, plans and prices",
    "replicas": "list replicas; drain or activate one",
    "pools": "list pools with their plans; hold or release one",
    "capacity": "compute replicas, GPUs and dollars for a workload",
    "simulate": "replay recorded traffic against scaling policies",
}
"""Help text by command. The command ``name`` is the module ``stream_gw.cli.commands.name``."""
_OF_TENANCY = ("tenants", "users", "keys", "plans", "prices", "audit")
"""Commands whose modules are in ``stream_gw.cli.tenancy``."""

_WITH_VLLM_FLAGS = ("agent", "up")
_INTERRUPTED = 130


class Command(Protocol):
    """The module of one command."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return its exit code.

        Raises StreamGwError, OSError or ValueError with a message for the user, UsageError for wrong flags.
        """


def main(argv: Sequence[str] | None = None) -> int:
    flags, vllm_flags = _split_vllm_flags(list(sys.argv[1:] if argv is None else argv))
    name = next((flag for flag in flags if not flag.startswith("-")), "")
    parser = argparse.ArgumentParser(
        prog="stream-gw", description="Streams LLM tokens from GPU replicas to readers, through any gateway."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {each: commands.add_parser(each, help=text) for each, text in _COMMANDS.items()}
    if name not in parsers:
        parser.parse_args(flags)  # prints the help or the error, and exits
    room = "tenancy" if name in _OF_TENANCY else "commands"
    command = cast(Command, importlib.import_module(f"stream_gw.cli.{room}.{name}"))
    command.add_flags(parsers[name])
    args = parser.parse_args(flags)
    if vllm_flags:
        args.vllm_flags = shlex.join(vllm_flags)
    configure()
    try:
        return command.run(args)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except UsageError as error:
        parsers[name].error(str(error))
    except ExceptionGroup as group:
        expected, rest = group.split((StreamGwError, OSError, ValueError))
        if rest is not None or expected is None:
            raise
        for leaf in _leaf_errors(expected):
            _print_error(name, leaf)
    except (StreamGwError, OSError, ValueError) as error:
        _print_error(name, error)
    return 1


def _split_vllm_flags(flags: list[str]) -> tuple[list[str], list[str]]:
    """Split into the command's own flags and the flags for vLLM after ``--``."""
    if flags[:1] and flags[0] in _WITH_VLLM_FLAGS and "--" in flags:
        at = flags.index("--")
        return flags[:at], flags[at + 1 :]
    return flags, []


def _leaf_errors(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """List the errors of nested exception groups."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaf_errors(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _print_error(command: str, error: BaseException) -> None:
    print(f"stream-gw {command}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
