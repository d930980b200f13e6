"""``stream-gw users``: users that differ from their tenant's other users."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from msgspec import UNSET

from stream_gw.cli.tenancy.session import (
    Verb,
    actor,
    add_database_flags,
    add_limit_flags,
    checked,
    limits_text,
    moment_text,
    own_limits,
    run_verb,
    show,
    table,
)
from stream_gw.tenancy.models import TenantUser, UserChange, UserCreate

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

_PAGE = 1000


def add_flags(parser: argparse.ArgumentParser) -> None:
    common = add_database_flags(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in (("add", "give a user settings of its own"), ("set", "change a user; what is not given stays")):
        verb = verbs.add_parser(name, help=text, parents=[common])
        _add_user(verb)
        verb.add_argument("--label", help="text for people")
        verb.add_argument(
            "--suspended",
            action=argparse.BooleanOptionalAction,
            help="refuse the user's requests and end what it runs (default: not suspended)",
        )
        add_limit_flags(verb, "", "this user instead of the plan's")
        if name == "set":
            verb.add_argument("--plan-limits", action="store_true", help="use the limits of the plan again")
    verbs.add_parser("list", help="list users that have settings of their own", parents=[common]).add_argument(
        "--tenant", required=True, help="id of the tenant"
    )
    for name, text in (("show", "show a user"), ("delete", "delete a user's settings: it is like any other then")):
        _add_user(verbs.add_parser(name, help=text, parents=[common]))


def _add_user(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("user", help="user that requests name")
    verb.add_argument("--tenant", required=True, help="id of the tenant")


def run(args: argparse.Namespace) -> int:
    return run_verb(args, _VERBS, reads=frozenset({"list", "show"}))


async def _add(tenancy: Tenancy, args: argparse.Namespace) -> None:
    limits = own_limits(args, None)
    asked = UserCreate(
        args.tenant, args.user, args.label or "", bool(args.suspended), None if limits is UNSET else limits
    )  # fmt: skip
    async with tenancy.change(actor()) as session:
        user = await session.users.create(checked(asked))
    show(args, user, f"added user {_text(user)}")


async def _set(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.change(actor()) as session:
        limits = own_limits(args, (await session.users.find(args.tenant, args.user)).limits)
        change = UserChange(
            UNSET if args.label is None else args.label,
            UNSET if args.suspended is None else args.suspended,
            None if args.plan_limits else limits,
        )
        user = await session.users.change(args.tenant, args.user, checked(change))
    show(args, user, f"changed user {_text(user)}")


async def _list(tenancy: Tenancy, args: argparse.Namespace) -> None:
    found: list[TenantUser] = []
    async with tenancy.read() as session:
        while page := await session.users.page(args.tenant, found[-1].id if found else "", _PAGE):
            found += page
    rows = [(user.id, _state(user), _limits(user), moment_text(user.created_at), user.label) for user in found]
    text = table(("user", "state", "limits", "created", "label"), rows)
    show(args, found, text if rows else "no user has settings of its own; add some with stream-gw users add")


async def _show(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.read() as session:
        user = await session.users.find(args.tenant, args.user)
    show(args, user, f"user {_text(user)}")


async def _delete(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.change(actor()) as session:
        await session.users.delete(args.tenant, args.user)
    show(args, {"deleted": args.user}, f"deleted the settings of user {args.user} of tenant {args.tenant}")


def _text(user: TenantUser) -> str:
    label = f"; label: {user.label}" if user.label else ""
    return f"{user.id} of tenant {user.tenant}: {_state(user)}; limits: {_limits(user)}{label}"


def _state(user: TenantUser) -> str:
    return "suspended" if user.suspended else "active"


def _limits(user: TenantUser) -> str:
    return "of the plan" if user.limits is None else limits_text(user.limits)


_VERBS: dict[str, Verb] = {"add": _add, "set": _set, "list": _list, "show": _show, "delete": _delete}
