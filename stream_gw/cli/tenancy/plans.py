"""``stream-gw plans``: what tenants may use, and how much."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, get_args

from stream_fabric.accounts.records import NO_LIMITS, Limits, TierName
from stream_gw.cli.tenancy.plan_terms import add_term_flags, given_terms, terms_text
from stream_gw.cli.tenancy.session import (
    Verb,
    actor,
    add_database_flags,
    add_limit_flags,
    checked,
    limits_text,
    merged_limits,
    model_limits,
    names,
    run_verb,
    show,
    table,
)
from stream_gw.tenancy.models import Plan, PlanChange

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

_SUBJECTS = {"tenant": "each tenant", "key": "each key", "user": "each user of a tenant"}
_PAGE = 1000


def add_flags(parser: argparse.ArgumentParser) -> None:
    common = add_database_flags(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in (("add", "add a plan"), ("set", "change a plan; what is not given stays")):
        verb = verbs.add_parser(name, help=text, parents=[common])
        verb.add_argument("name", help="name of the plan")
        _add_terms(verb)
    verbs.add_parser("list", help="list all plans", parents=[common])
    for name, text in (("show", "show a plan"), ("delete", "delete a plan that no tenant is on")):
        verbs.add_parser(name, help=text, parents=[common]).add_argument("name", help="name of the plan")


def _add_terms(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--tier", choices=get_args(TierName), help="highest tier; a request for a higher one gets this one"
    )
    verb.add_argument("--models", type=names, default=..., metavar="A,B", help="models that it allows; all: all models")
    for prefix, subject in _SUBJECTS.items():
        add_limit_flags(verb, f"{prefix}-", subject)
    verb.add_argument(
        "--model-limits",
        type=model_limits,
        action="append",
        default=[],
        metavar="MODEL:NAME=N,…",
        help="limits of each tenant on a model, such as m:streams=4,tokens_per_min=9000; *: each other model; "
        "repeat for several; MODEL: removes them",
    )
    verb.add_argument(
        "--finish-revoked",
        action=argparse.BooleanOptionalAction,
        help="running streams of a revoked key run to their end (default: they are cancelled)",
    )
    add_term_flags(verb)


def run(args: argparse.Namespace) -> int:
    return run_verb(args, _VERBS, reads=frozenset({"list", "show"}))


async def _add(tenancy: Tenancy, args: argparse.Namespace) -> None:
    plan = checked(Plan(args.name, **_given(args, Plan(args.name))))
    async with tenancy.change(actor()) as session:
        await session.plans.create(plan)
    show(args, plan, f"added plan {_text(plan)}")


async def _set(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.change(actor()) as session:
        held = await session.plans.find(args.name)
        plan = await session.plans.change(args.name, checked(PlanChange(**_given(args, held))))
    show(args, plan, f"changed plan {_text(plan)}")


async def _list(tenancy: Tenancy, args: argparse.Namespace) -> None:
    found: list[Plan] = []
    async with tenancy.read() as session:
        while page := await session.plans.page(found[-1].name if found else "", _PAGE):
            found += page
    rows = [
        (plan.name, plan.tier, _models(plan), limits_text(plan.tenant), limits_text(plan.key), limits_text(plan.user))
        for plan in found
    ]
    show(args, found, table(("plan", "tier", "models", "tenant", "key", "user"), rows) if rows else "no plan")


async def _show(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.read() as session:
        plan = await session.plans.find(args.name)
    show(args, plan, f"plan {_text(plan)}")


async def _delete(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.change(actor()) as session:
        await session.plans.delete(args.name)
    show(args, {"deleted": args.name}, f"deleted plan {args.name}")


def _given(args: argparse.Namespace, held: Plan) -> dict[str, Any]:
    """Return the terms that the flags change."""
    given: dict[str, Any] = {}
    for name in ("tier", "finish_revoked"):
        if (value := getattr(args, name)) is not None:
            given[name] = value
    if args.models is not ...:
        given["models"] = args.models
    for name in _SUBJECTS:
        limits: Limits = merged_limits(args, f"{name}-", getattr(held, name))
        if limits != getattr(held, name):
            given[name] = limits
    if args.model_limits:
        merged = held.model | dict(args.model_limits)
        given["model"] = {model: limits for model, limits in merged.items() if limits != NO_LIMITS}
    return given | given_terms(args, held)


def _text(plan: Plan) -> str:
    lines = [f"{plan.name}: tier {plan.tier} at most; models: {_models(plan)}"]
    lines += [f"  limits of {subject}: {limits_text(getattr(plan, name))}" for name, subject in _SUBJECTS.items()]
    lines += [
        f"  limits of each tenant on {model}: {limits_text(limits)}" for model, limits in sorted(plan.model.items())
    ]
    lines.append(f"  streams of a revoked key: {'run to their end' if plan.finish_revoked else 'are cancelled'}")
    return "\n".join(lines + terms_text(plan))


def _models(plan: Plan) -> str:
    return "all" if plan.models is None else ",".join(plan.models) or "none"


_VERBS: dict[str, Verb] = {"add": _add, "set": _set, "list": _list, "show": _show, "delete": _delete}
