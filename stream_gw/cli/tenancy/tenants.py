"""``stream-gw tenants``: the tenants of the database, its schema, and the import of a keys file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from stream_gw.cli.tenancy.keys import key_rows
from stream_gw.cli.tenancy.prices import price_lines
from stream_gw.cli.tenancy.session import (
    Verb,
    actor,
    add_database_flags,
    checked,
    limits_text,
    moment_text,
    run_verb,
    show,
    table,
)
from stream_gw.tenancy.models import DEFAULT_PLAN, Key, Tenant, TenantChange, TenantCreate

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

_PAGE = 1000


def add_flags(parser: argparse.ArgumentParser) -> None:
    common = add_database_flags(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add_verb(name: str, text: str, *, of_tenant: bool = True) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=text, parents=[common])
        if of_tenant:
            verb.add_argument("tenant", help="id of the tenant")
        return verb

    add = add_verb("add", "add a tenant, which has no key yet")
    add.add_argument("--plan", default=DEFAULT_PLAN, help=f"name of its plan (default {DEFAULT_PLAN})")
    add.add_argument("--label", default="", help="text for people, for example the company's name")
    add_verb("list", "list all tenants", of_tenant=False)
    add_verb("show", "show a tenant with its plan, prices and keys")
    change = add_verb("set", "change a tenant")
    change.add_argument("--plan", help="name of its new plan")
    change.add_argument("--label", help="new text for people")
    add_verb("suspend", "refuse all keys of a tenant until it is resumed")
    add_verb("resume", "accept the keys of a suspended tenant again")
    add_verb("delete", "delete a tenant and revoke its keys")
    add = add_verb("import", "add the tenants, keys and prices of a keys file", of_tenant=False)
    add.add_argument("file", type=Path, help="TOML keys file; its keys stay valid")
    add_verb("migrate", "bring the database's schema to this release's version", of_tenant=False)
    add_verb("republish", "replace all published records, after a restore of the database", of_tenant=False)


def run(args: argparse.Namespace) -> int:
    return run_verb(args, _VERBS, reads=frozenset({"list", "show", "migrate"}))


async def _add(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.change(actor()) as session:
        tenant = await session.tenants.create(checked(TenantCreate(args.tenant, args.label, args.plan)))
    show(args, tenant, f"added tenant {tenant.id}; make a key with stream-gw keys add --tenant {tenant.id}")


async def _list(tenancy: Tenancy, args: argparse.Namespace) -> None:
    found: list[Tenant] = []
    async with tenancy.read() as session:
        while page := await session.tenants.page(found[-1].id if found else "", _PAGE):
            found += page
    rows = [(each.id, each.plan, _state(each), moment_text(each.created_at), each.label) for each in found]
    text = table(("tenant", "plan", "state", "created", "label"), rows)
    show(args, found, text if rows else "no tenant; add one with stream-gw tenants add")


async def _show(tenancy: Tenancy, args: argparse.Namespace) -> None:
    keys: list[Key] = []
    async with tenancy.read() as session:
        tenant = await session.tenants.find(args.tenant)
        plan = await session.plans.find(tenant.plan)
        while page := await session.keys.page(tenant.id, keys[-1].id if keys else "", _PAGE):
            keys += page
    lines = [
        f"tenant {tenant.id}: {_state(tenant)}, created {moment_text(tenant.created_at)} by {tenant.created_by}",
        *([f"  label: {tenant.label}"] if tenant.label else []),
        f"  plan: {plan.name}; limits of the tenant: {limits_text(plan.tenant)}",
        *(f"  {line}" for line in price_lines(tenant.prices)),
        *(f"  {line}" for line in key_rows(keys).splitlines()),
    ]
    show(args, {"tenant": tenant, "plan": plan, "keys": keys}, "\n".join(lines))


async def _set(tenancy: Tenancy, args: argparse.Namespace) -> None:
    change = TenantChange(UNSET if args.label is None else args.label, UNSET if args.plan is None else args.plan)
    await _change(tenancy, args, change, "changed")


async def _suspend(tenancy: Tenancy, args: argparse.Namespace) -> None:
    await _change(tenancy, args, TenantChange(suspended=True), "suspended")


async def _resume(tenancy: Tenancy, args: argparse.Namespace) -> None:
    await _change(tenancy, args, TenantChange(suspended=False), "resumed")


async def _change(tenancy: Tenancy, args: argparse.Namespace, change: TenantChange, done: str) -> None:
    async with tenancy.change(actor()) as session:
        tenant = await session.tenants.change(args.tenant, checked(change))
    show(args, tenant, f"{done} tenant {tenant.id}: plan {tenant.plan}, {_state(tenant)}")


async def _delete(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.change(actor()) as session:
        await session.tenants.delete(args.tenant)
    show(args, {"deleted": args.tenant}, f"deleted tenant {args.tenant} and revoked its keys")


async def _import(tenancy: Tenancy, args: argparse.Namespace) -> None:
    added = await tenancy.import_file(args.file, actor())
    text = f"added {added.tenants} tenants, {added.keys} keys and {added.plans} plans; what was there already is kept"
    if added.differing:
        text += f"\nthe file has other terms for tenants that keep their plan: {', '.join(added.differing)}"
        text += "\nto apply them: stream-gw plans set, or stream-gw tenants set --plan"
    show(args, added._asdict(), text)


async def _migrate(tenancy: Tenancy, args: argparse.Namespace) -> None:
    before, known = await tenancy.database.migrate()
    after = max(before, known)
    text = f"schema of {tenancy.database.shown}: version {after}" + (f", was {before}" if before != after else "")
    show(args, {"before": before, "version": after}, text)


async def _republish(tenancy: Tenancy, args: argparse.Namespace) -> None:
    deleted = await tenancy.republish(actor())
    text = f"published all records; deleted {deleted} that the database does not have"
    show(args, {"deleted": deleted}, text)


def _state(tenant: Tenant) -> str:
    return "suspended" if tenant.suspended else "active"


_VERBS: dict[str, Verb] = {
    "add": _add,
    "list": _list,
    "show": _show,
    "set": _set,
    "suspend": _suspend,
    "resume": _resume,
    "delete": _delete,
    "import": _import,
    "migrate": _migrate,
    "republish": _republish,
}
