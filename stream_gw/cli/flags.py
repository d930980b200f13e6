"""Flags that several commands share: a role's settings as flags, and checked argument types."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource

from stream_fabric.arguments import whole
from stream_fabric.errors import BadRequest
from stream_fabric.process.logs import configure
from stream_fabric.process.settings import FabricSettings, SettingsConflict
from stream_gw.cli.variables import ENV, warn_of_unknown_variables

S = TypeVar("S", bound=FabricSettings)

VLLM_EPILOG = "With --engine vllm, flags after -- go to vLLM: --engine vllm --model NAME -- --max-model-len 8192"
_SECRET_WORDS = ("key", "secret", "url", "password", "clickhouse")
"""A setting with one of these in its name may hold a credential, and an error does not repeat its value."""


class UsageError(ValueError):
    """Flags that do not fit together. Printed with the command's usage; the exit code is 2."""


def add_setting_flags(parser: argparse.ArgumentParser, model: type[FabricSettings]) -> None:
    """Add one flag per setting of the role, and ``--json``."""
    CliSettingsSource[Any](
        model,
        root_parser=parser,
        add_argument_method=_add_argument,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_show_env_vars=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line when ready")


def _add_argument(parser: argparse.ArgumentParser, *names: str, **options: Any) -> None:
    """Add a flag without its empty default in the help, and with secrets shown as ``str``."""
    options["help"] = options["help"].replace(" (default: )", "").replace(" (default: null)", "")
    if options.get("metavar") == "SecretStr":
        options["metavar"] = "str"
    parser.add_argument(*names, **options)


def add_fabric_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of a command that only reads the fabric. Returns a parent parser with the same, for its verbs."""
    verb = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for each in (verb, parser):
        each.add_argument("--redis-url", help=f"URL of the platform's Redis [env: {ENV}REDIS_URL]")
        each.add_argument("--json", action="store_true", help="print JSON")
    return verb


def read_settings(model: type[S], args: argparse.Namespace) -> S:
    """Read the settings of this process as ``load_settings`` does, and warn of variables that nothing reads."""
    try:
        return load_settings(model, args)
    finally:  # also after an error: a setting may be missing because its variable is misspelt
        warn_of_unknown_variables()


def load_settings(model: type[S], args: argparse.Namespace) -> S:
    """Read the role's settings (flags before variables before defaults), and configure logs.

    Raises ValueError that names each wrong setting and what is allowed; UsageError, if a flag gave one of them.
    """
    given = {name: value for name in model.model_fields if (value := getattr(args, name, None)) is not None}
    try:
        settings = model(**given)
    except ValidationError as error:
        wrong = error.errors()
        flagged = any(not given.keys().isdisjoint(_settings_of(item)) for item in wrong)
        raise (UsageError if flagged else ValueError)("; ".join(map(_setting_error_text, wrong))) from None
    configure(settings.log_format, settings.log_level)
    return settings


def _settings_of(item: Any) -> set[str]:
    """Return the names of the settings that one of pydantic's errors concerns."""
    conflict = item.get("ctx", {}).get("error")
    return {*map(str, item["loc"][:1]), *(conflict.names if isinstance(conflict, SettingsConflict) else ())}


def _setting_error_text(item: Any) -> str:
    """Format one of pydantic's errors for the user, without values that may be secret."""
    if not item["loc"]:  # about several settings together: its input is all of them, passwords included
        return str(item["ctx"]["error"])
    name = str(item["loc"][0])
    message = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
    value = "" if any(word in name for word in _SECRET_WORDS) else f", got {item['input']!r}"
    return f"--{name.replace('_', '-')} ({ENV}{name.upper()}): {message}{value}"


@contextmanager
def wrong_arguments() -> Iterator[None]:
    """Turn the errors of a request that the arguments describe into UsageError."""
    try:
        yield
    except BadRequest as error:
        raise UsageError(error.message) from error


def print_ready(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    """Tell the user or the parent process that this process is ready."""
    print(json.dumps({"ready": args.command, **facts}) if args.json else text, flush=True)


# --- argument types ------------------------------------------------------------------------------------------------

count = whole(1, 64)
port = whole(0, 65535)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"must be 0 to 3600 seconds, got {text!r}")
    return value
