"""``stream-gw audit``: who changed tenants, keys, plans and prices, and how."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from stream_fabric.arguments import whole
from stream_fabric.process.host import HostClock
from stream_gw.cli.tenancy.session import add_database_flags, moment_text, run_verb, show
from stream_gw.tenancy.models import AuditEvent, AuditFilter
from telemetry.ask.flags import moment
from telemetry.ask.times import moment_us

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_database_flags(parser)
    parser.add_argument(
        "--since",
        type=moment,
        default="30d",
        help="start: an age such as 2h or 3d, or a time such as 2026-11-20T10:00:00Z (default 30d)",
    )
    parser.add_argument("--subject", help="only changes of this subject, such as tenant:acme, key:ID, plan:NAME")
    parser.add_argument("--tenant", help="only changes of this tenant, its keys and its users")
    parser.add_argument("--who", help="only changes by this key id or cli:USER")
    parser.add_argument("--limit", type=whole(1, 10_000), default=100, help="maximum events, 1 to 10000 (default 100)")


def run(args: argparse.Namespace) -> int:
    args.verb = "list"
    return run_verb(args, {"list": _list}, reads=frozenset({"list"}))


async def _list(tenancy: Tenancy, args: argparse.Namespace) -> None:
    since = moment_us(args.since, HostClock().now_us()) / 1e6
    async with tenancy.read() as session:
        found = await session.audit.page(AuditFilter(since, args.subject, args.who, args.tenant), limit=args.limit)
    show(args, found, "\n".join(map(_text, found)) or "no change in this time")


def _text(event: AuditEvent) -> str:
    head = f"{moment_text(event.at)} {event.who}: {event.action} {event.subject}"
    before, after = dict(_leaves(event.before or {})), dict(_leaves(event.after or {}))
    names = {**before, **after}
    changed = [name for name in names if before.get(name) != after.get(name)]
    changed = [name for name in changed if not any(each.startswith(f"{name}.") for each in names)]  # {} and its values
    lines = [f"  {name}: {_value(before, name)} -> {_value(after, name)}" for name in changed]
    return "\n".join([head, *lines])


def _leaves(fields: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value within nested objects, with its path. One limit of ten that changes is one line of text."""
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{name}.")
        elif value is not None:
            yield path + name, value


def _value(leaves: dict[str, Any], name: str) -> str:
    value = leaves.get(name)
    if value is None:
        return "none"
    return moment_text(value) if name.endswith("_at") else msgspec.json.encode(value).decode()
