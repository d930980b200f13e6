"""Shared by these commands: flags, the open database, and the publication of a change."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.accounts.records import NO_LIMITS, Limits
from stream_fabric.errors import FabricError
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.tenants import RedisTenants
from stream_gw.cli.flags import read_settings, wrong_arguments
from stream_gw.cli.variables import ENV
from stream_gw.settings import DatabaseSettings
from stream_gw.tenancy import models, open_tenancy

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

_REDIS_S_MAX = 3.0
"""Time for Redis to answer; over: the change is published later."""
NO_LIMIT = -1
"""Value of a limit's flag that removes the limit."""
_WHO_CHARS_MAX = 200

T = TypeVar("T", bound=msgspec.Struct)
Verb = Callable[["Tenancy", argparse.Namespace], Awaitable[None]]


def add_database_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of every verb. Returns a parent parser with the same, for the verbs."""
    parser.set_defaults(json=False)
    verb = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for each in (verb, parser):
        each.add_argument("--database-url", help=f"URL of the database of tenants [env: {ENV}DATABASE_URL]")
        each.add_argument("--redis-url", help=f"URL of the platform's Redis [env: {ENV}REDIS_URL]")
        each.add_argument("--json", action="store_true", help="print JSON")
    return verb


def run_verb(args: argparse.Namespace, verbs: Mapping[str, Verb], *, reads: frozenset[str]) -> int:
    """Run the verb; one of ``reads`` needs no Redis. Raises StreamGwError or ValueError."""
    asyncio.run(_run(args, verbs[args.verb], needs_redis=args.verb not in reads))
    return 0


async def _run(args: argparse.Namespace, verb: Verb, *, needs_redis: bool) -> None:
    settings = read_settings(DatabaseSettings, args)
    if not settings.database_url:
        raise ValueError(
            f"no database: set {ENV}DATABASE_URL (--database-url) to postgresql://user:password@host/name "
            "or sqlite:////path"
        )
    pepper, previous = settings.key_pepper.get_secret_value(), settings.key_pepper_previous.get_secret_value()
    async with (
        _records(settings.redis_url if needs_redis else "") as (records, error),
        open_tenancy(settings.database_url, records, HostClock(), HostRandom(), pepper, previous) as tenancy,
    ):
        await verb(tenancy, args)
        if unpublished := error or tenancy.unpublished:
            print(f"committed, not published: {unpublished}", file=sys.stderr)
            print(
                f"gateways with {ENV}DATABASE_URL publish it once Redis is back; so does any next change",
                file=sys.stderr,
            )


@asynccontextmanager
async def _records(redis_url: str) -> AsyncIterator[tuple[TenantRecords | None, FabricError | None]]:
    """Connect to Redis. Yields no records when that fails, with the error, or when no URL is given."""
    if not redis_url:
        yield None, None
        return
    client = RedisClient(redis_url, timeout_s=_REDIS_S_MAX)
    try:
        try:
            await client.start()
        except FabricError as error:
            yield None, error
        else:
            yield RedisTenants(client), None
    finally:
        await client.close()


def actor() -> str:
    """Return the name of the command's user in audit events."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"cli:{user}"[:_WHO_CHARS_MAX]


def checked(asked: T) -> T:
    """Apply the constraints of the fields to what the flags gave. Raises UsageError."""
    with wrong_arguments():
        return models.checked(asked)


def show(args: argparse.Namespace, value: object, text: str) -> None:
    """Print the value as JSON, or the text."""
    print(msgspec.json.encode(value).decode() if args.json else text)


# --- flags of limits ---------------------------------------------------------------------------------------------

_LIMITS = {
    "requests_per_min": "requests per minute",
    "tokens_per_min": "tokens per minute, prompt and output together",
    "streams": "streams at the same time",
}


def add_limit_flags(parser: argparse.ArgumentParser, prefix: str, subject: str) -> None:
    """Add ``--<prefix>requests-per-min`` and so on."""
    for name, text in _LIMITS.items():
        parser.add_argument(
            f"--{prefix}{name.replace('_', '-')}",
            type=_limit,
            metavar="N",
            help=f"limit of {subject}: {text}; 0: none are allowed, none: no limit",
        )


def merged_limits(args: argparse.Namespace, prefix: str, limits: Limits) -> Limits:
    """Return the limits with those that were given as flags."""
    given = {name: getattr(args, f"{prefix.replace('-', '_')}{name}") for name in _LIMITS}
    changed = {name: None if value == NO_LIMIT else value for name, value in given.items() if value is not None}
    return msgspec.structs.replace(limits, **changed)


def own_limits(args: argparse.Namespace, held: Limits | None) -> Limits | UnsetType:
    """Return the limits of a key or user with those that were given as flags; UNSET: no flag was given."""
    if all(getattr(args, name) is None for name in _LIMITS):
        return UNSET
    return merged_limits(args, "", held or NO_LIMITS)


def _limit(text: str) -> int:
    if text == "none":
        return NO_LIMIT
    if not text.isdecimal() or int(text) > 1 << 40:
        raise argparse.ArgumentTypeError(f"must be a number or none, got {text!r}")
    return int(text)


def model_limits(text: str) -> tuple[str, Limits]:
    """Parse ``MODEL:streams=4,tokens_per_min=1000``, an argument's value."""
    model, colon, rest = text.rpartition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not colon or not model or any(name not in _LIMITS or not value.isdecimal() for name, _, value in pairs):
        raise argparse.ArgumentTypeError(
            f"must be MODEL:NAME=N,… with the names {', '.join(_LIMITS)}, got {text!r}; MODEL: removes its limits"
        )
    return model, Limits(**{name: int(value) for name, _, value in pairs})


def limits_text(limits: Limits) -> str:
    """Format limits in one line."""
    given = {name: getattr(limits, name) for name in _LIMITS}
    parts = [
        f"{value} {name.replace('_', ' ').replace(' per ', '/')}" for name, value in given.items() if value is not None
    ]
    return ", ".join(parts) or "none"


# --- text ----------------------------------------------------------------------------------------------------------


def names(text: str) -> tuple[str, ...] | None:
    """Parse a list of names, an argument's value. None: all."""
    return None if text == "all" else tuple(part.strip() for part in text.split(",") if part.strip())


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Format aligned columns."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows))


def moment_text(unix_s: float | None) -> str:
    """Format a moment in UTC; empty: there is none."""
    return "" if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
