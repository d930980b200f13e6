"""``stream-gw keys``: API keys of the database's tenants."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from stream_fabric.arguments import whole
from stream_gw.cli.tenancy.session import (
    Verb,
    actor,
    add_database_flags,
    add_limit_flags,
    checked,
    limits_text,
    moment_text,
    names,
    own_limits,
    run_verb,
    show,
    table,
)
from stream_gw.cli.variables import ENV
from stream_gw.tenancy.models import GRACE_S_MAX, TENANT_SCOPES, Key, KeyChange, KeyCreate, KeyRotate, NewKey

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

_PAGE = 1000
_DAY_S = 86_400
_NEVER = math.inf


def add_flags(parser: argparse.ArgumentParser) -> None:
    common = add_database_flags(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add = verbs.add_parser("add", help="make a key, which is shown once", parents=[common])
    add.add_argument("--tenant", required=True, help="id of the tenant that owns the key")
    add.add_argument("--label", default="", help="text for people, for example where the key is used")
    _add_scopes(add, "right of the key, repeat for several (default: all of a tenant; admin is the operator's)")
    add.add_argument("--models", type=names, metavar="A,B", help="models that it may use (default: those of the plan)")
    add.add_argument("--user", help="user that all requests of the key belong to (default: the request names one)")
    add.add_argument("--expires-days", type=_days, metavar="DAYS", help="days until it expires (default: never)")
    add.add_argument(
        "--regions", type=names, metavar="A,B", help="regions where it may be served (default: those of the plan)"
    )
    add_limit_flags(add, "", "this key instead of the plan's")
    change = verbs.add_parser("set", help="change a key; what is not given stays", parents=[common])
    change.add_argument("key", help="id of the key, the part after sgw_")
    change.add_argument("--label", help="new text for people")
    _add_scopes(change, "right of the key, repeat for several; they replace the key's rights")
    change.add_argument(
        "--models", type=names, default=..., metavar="A,B", help="models that it may use; all: those of the plan"
    )
    change.add_argument(
        "--expires-days", type=_days_or_never, metavar="DAYS", help="days from now until it expires, or never"
    )
    change.add_argument(
        "--regions",
        type=names,
        default=...,
        metavar="A,B",
        help="regions where it may be served; all: those of the plan",
    )
    add_limit_flags(change, "", "this key instead of the plan's")
    change.add_argument("--plan-limits", action="store_true", help="use the limits of the plan again")
    listing = verbs.add_parser("list", help="list keys", parents=[common])
    listing.add_argument("--tenant", help="only keys of this tenant")
    listing.add_argument("--revoked", action="store_true", help="also list revoked keys")
    revoke = verbs.add_parser("revoke", help="revoke a key; gateways refuse it within seconds", parents=[common])
    revoke.add_argument("key", help="id of the key, the part after sgw_")
    revoke.add_argument(
        "--tokens-only", action="store_true", help="end only the capability tokens that it minted; the key stays"
    )
    rotate = verbs.add_parser(
        "rotate", help="make a key with the same rights and let the old one expire", parents=[common]
    )
    rotate.add_argument("key", help="id of the old key")
    rotate.add_argument(
        "--grace-s",
        type=whole(0, GRACE_S_MAX, "seconds"),
        default=_DAY_S,
        metavar="SECONDS",
        help=f"seconds that the old key stays valid, 0 to {GRACE_S_MAX} (default {_DAY_S}); 0: it ends at once",
    )


def _add_scopes(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--scope", action="append", choices=[*TENANT_SCOPES, "admin"], help=text)


def run(args: argparse.Namespace) -> int:
    return run_verb(args, _VERBS, reads=frozenset({"list"}))


async def _add(tenancy: Tenancy, args: argparse.Namespace) -> None:
    limits = own_limits(args, None)
    asked = KeyCreate(
        args.tenant,
        args.label,
        tuple(args.scope or TENANT_SCOPES),
        args.models,
        args.user,
        None if args.expires_days is None else int(args.expires_days * _DAY_S),
        None if limits is UNSET else limits,
        args.regions,
    )
    async with tenancy.change(actor()) as session:
        key = await session.keys.create(checked(asked))
        lost = (await session.keys.peppers())["lost"]
    _show_once(args, key, lost)


async def _set(tenancy: Tenancy, args: argparse.Namespace) -> None:
    id_ = _id_of(args.key)
    async with tenancy.change(actor()) as session:
        limits = own_limits(args, (await session.keys.find(id_)).limits)
        change = KeyChange(
            UNSET if args.label is None else args.label,
            UNSET if args.scope is None else tuple(args.scope),
            UNSET if args.models is ... else args.models,
            UNSET if args.expires_days is None else _seconds(args.expires_days),
            None if args.plan_limits else limits,
            UNSET if args.regions is ... else args.regions,
        )
        key = await session.keys.change(id_, checked(change))
    show(args, key, f"changed key {key.id} of tenant {key.tenant}\n{key_rows([key])}")


async def _rotate(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.change(actor()) as session:
        key = await session.keys.rotate(_id_of(args.key), checked(KeyRotate(args.grace_s)).grace_s)
        old = await session.keys.find(_id_of(args.key))
        lost = (await session.keys.peppers())["lost"]
    _show_once(args, key, lost, f"\nkey {old.id} is valid until {moment_text(old.expires_at)}")


async def _list(tenancy: Tenancy, args: argparse.Namespace) -> None:
    found: list[Key] = []
    async with tenancy.read() as session:
        if args.tenant is not None:
            await session.tenants.find(args.tenant)
        while page := await session.keys.page(args.tenant, found[-1].id if found else "", _PAGE, revoked=args.revoked):
            found += page
    found.sort(key=lambda key: (key.tenant, key.created_at))
    show(args, found, key_rows(found))


async def _revoke(tenancy: Tenancy, args: argparse.Namespace) -> None:
    id_ = _id_of(args.key)
    async with tenancy.change(actor()) as session:
        key = await (session.keys.end_tokens(id_) if args.tokens_only else session.keys.revoke(id_))
    done = "ended the capability tokens of key" if args.tokens_only else "revoked key"
    show(args, key, f"{done} {key.id} of tenant {key.tenant}")


def _show_once(args: argparse.Namespace, key: NewKey, lost: int, more: str = "") -> None:
    """Print a new key. ``lost``: number of valid keys that another pepper than this command's has hashed."""
    show(args, key, f"key, shown once: {key.key}\n\nid {key.id} of tenant {key.tenant}{more}")
    if lost:
        print(
            f"warning: {lost} valid keys have another pepper than {ENV}KEY_PEPPER and {ENV}KEY_PEPPER_PREVIOUS of this "
            f"command; gateways with that pepper refuse key {key.id}. If it is the fleet's, set it, revoke {key.id}, "
            "and make the key again",
            file=sys.stderr,
        )


def key_rows(keys: Sequence[Key]) -> str:
    """Format a table of keys."""
    if not keys:
        return "no key; make one with stream-gw keys add"
    rows = [
        (
            key.id,
            key.tenant,
            ",".join(key.scopes),
            "of the plan" if key.models is None else ",".join(key.models),
            key.user or "",
            "of the plan" if key.limits is None else limits_text(key.limits),
            f"revoked {moment_text(key.revoked_at)}" if key.revoked_at else moment_text(key.expires_at) or "never",
            key.pepper or "none",
            key.label,
        )
        for key in keys
    ]
    return table(("key", "tenant", "scopes", "models", "user", "limits", "expires", "pepper", "label"), rows)


def _id_of(text: str) -> str:
    """Return the id in ``sgw_<id>``, which tables of other tools may show."""
    return text.removeprefix("sgw_").partition("_")[0]


def _days_or_never(text: str) -> float:
    return _NEVER if text == "never" else _days(text)


def _seconds(days: float) -> int | None:
    return None if days == _NEVER else int(days * _DAY_S)


def _days(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 7300:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 7300 days, got {text!r}")
    return value


_VERBS: dict[str, Verb] = {"add": _add, "set": _set, "list": _list, "revoke": _revoke, "rotate": _rotate}
