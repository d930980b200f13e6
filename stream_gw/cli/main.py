"""The command line ``stream-gw``: picks one command, reads its flags, runs it.

Only the chosen command's module is imported, so that ``stream-gw key`` starts without any server's code. This module
imports nothing but the standard library, so that Ctrl-C in the first tenths of a second ends the command without a
traceback.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from stream_gw.cli.parser import Parser

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
    "export": "write the Helm chart, the compose file or the dashboards to a folder",
    "completion": "print the completion script of a shell",
}
"""Help text by command. The command ``name`` is the module ``stream_gw.cli.commands.name``."""
_FOLDERS = {
    **dict.fromkeys(("tenants", "users", "keys", "plans", "prices", "audit"), "tenancy"),
    **dict.fromkeys(("export", "completion"), "package"),
}
"""Folder in ``stream_gw.cli`` of a command's module, where it is not ``commands``."""

_WITH_VLLM_FLAGS = ("agent", "up")
_INTERRUPTED = 130
_READER_LEFT = 141
"""As a shell tells of a program that SIGPIPE ended."""


class Command(Protocol):
    """The module of one command."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return its exit code.

        Raises StreamGwError, OSError or ValueError with a message for the user, UsageError for wrong flags.
        """


def main(argv: Sequence[str] | None = None) -> int:
    _open_closed_streams()
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the caller has closed, as ``2>&-`` does.

    Else each message fails, and the next socket gets the stream's number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _main(argv: list[str]) -> int:
    flags, vllm_flags = _split_vllm_flags(argv)
    name = next((flag for flag in flags if not flag.startswith("-")), "")
    parser, parsers = make_parsers()
    if name not in parsers:
        parser.check_flags(flags)
        parser.parse_args(flags)  # prints the help, the version or the error, and exits
    parser.check_flags(flags[: flags.index(name)])
    command = load_command(name)
    command.add_flags(parsers[name])
    parsers[name].check_flags(flags[flags.index(name) :])
    args, rest = parser.parse_known_args(flags)
    if rest:
        parsers[name].error(f"unrecognized arguments: {' '.join(rest)}")
    if vllm_flags:
        import shlex

        args.vllm_flags = shlex.join(vllm_flags)
    from stream_gw.cli.terminal import plain_output

    with plain_output():
        return _run(command, name, args, parsers[name])


def make_parsers() -> tuple[Parser, Mapping[str, Parser]]:
    """Make the parser of the command line, and those of the commands by name; the latter have no flags yet."""
    from stream_gw.cli.parser import Parser

    parser = Parser(
        prog="stream-gw", description="Streams LLM tokens from GPU replicas to readers, through any gateway."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    return parser, {each: commands.add_parser(each, help=text) for each, text in _COMMANDS.items()}


def load_command(name: str) -> Command:
    """Import the module of one command.

    The cycle collector rests meanwhile and never looks at the modules' objects: that is a seventh of the time.
    """
    gc.disable()
    try:
        return cast(Command, importlib.import_module(f"stream_gw.cli.{_FOLDERS.get(name, 'commands')}.{name}"))
    finally:
        gc.freeze()
        gc.enable()


class _Version(argparse.Action):
    """Prints the version of the installed package; the import that finds it is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object, **options: object) -> None:
        from stream_gw.version import version

        print(f"stream-gw {version()}")
        parser.exit()


def _run(command: Command, name: str, args: argparse.Namespace, parser: Parser) -> int:
    """Run the command; print an error that is meant for the user as one line, and return the exit code."""
    from stream_fabric.errors import StreamGwError
    from stream_fabric.process.logs import configure
    from stream_gw.cli.flags import UsageError

    configure()
    try:
        code = command.run(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        parser.error(str(error))
    except ExceptionGroup as group:
        expected, rest = group.split((StreamGwError, OSError, ValueError))
        if rest is not None or expected is None:
            raise
        for leaf in _leaf_errors(expected):
            _print_error(name, leaf, args, parser)
    except (StreamGwError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError) and _reader_left():
            return _READER_LEFT
        _print_error(name, error, args, parser)
    return 1


def _reader_left() -> bool:
    """Whether the reader of stdout has gone, as ``head`` does. The output that is left is then dropped."""
    import select

    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)  # the end of a pipe is told unasked
    if not watch.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


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


def _print_error(command: str, error: BaseException, args: argparse.Namespace, parser: Parser) -> None:
    print(f"stream-gw {command}: {_error_text(error, args, parser)}", file=sys.stderr)


def _error_text(error: BaseException, args: argparse.Namespace, parser: Parser) -> str:
    """Return the error's text; for a file that cannot be used, with the flag or the variable that names the file."""
    from stream_fabric.errors import FabricUnavailable

    if type(error) is FabricUnavailable and error.__cause__ is not None:
        return f"{error}; --redis-url (STREAM_GW_REDIS_URL) names it"
    if not isinstance(error, OSError) or error.strerror is None or not isinstance(error.filename, str | os.PathLike):
        return str(error)
    from stream_fabric.system_errors import reason
    from stream_gw.cli.parser import flag_of

    file = os.fspath(error.filename)
    dest = next((name for name, value in vars(args).items() if _names_file(value, file)), "")
    variable = next((name for name, value in os.environ.items() if name.startswith("STREAM_GW_") and value == file), "")
    where = flag_of(parser, dest) or variable
    return f"{where + ': ' if where else ''}{file}: {reason(error)}"


def _names_file(value: object, file: str) -> bool:
    return any(str(each) == file for each in value) if isinstance(value, list) else str(value) == file


if __name__ == "__main__":
    sys.exit(main())
