"""Flags of ``stream-gw plans`` for everything that is no limit: budgets, regions, privacy, isolation."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, get_args

import msgspec

from stream_fabric.accounts.records import Budget, Budgets, Moderation
from stream_fabric.arguments import whole
from stream_fabric.limits import (
    CONTENT_BYTES_MAX,
    REPAIRS_MAX,
    RESPONSE_DAYS_MAX,
    RETENTION_S_MAX,
    TRACE_RETENTION_DAYS_MAX,
)
from stream_gw.cli.tenancy.session import names
from stream_gw.tenancy.models import Plan

_PERIODS = Budgets.__struct_fields__
_FIGURES = Budget.__struct_fields__
_DEFAULT = "default"


def add_term_flags(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--budget",
        type=_budget,
        action="append",
        default=[],
        metavar="PERIOD:NAME=N,…",
        help=f"budget of a period ({', '.join(_PERIODS)}), such as tenant_month:tokens=9000000,micro=50000000; micro: "
        "millionths of the currency; repeat for several; PERIOD: removes it",
    )
    verb.add_argument(
        "--share",
        type=whole(1, 10_000),
        metavar="N",
        help="weight of each tenant when tenants compete for a pool (default 100)",
    )
    verb.add_argument(
        "--fallback",
        type=_fallback,
        action="append",
        default=[],
        metavar="MODEL:A,B",
        help="smaller models that may answer when the model's pool is saturated, the first choice first; repeat for "
        "several; MODEL: removes them",
    )
    verb.add_argument(
        "--regions", type=names, default=..., metavar="A,B", help="regions where it may be served; all: all regions"
    )
    _add_privacy_flags(verb)
    verb.add_argument(
        "--repairs",
        type=whole(0, REPAIRS_MAX),
        metavar="N",
        help=f"highest repair of a request, up to {REPAIRS_MAX}: replies that are made again because they do not fit "
        "their JSON schema (default 1); 0: none",
    )
    verb.add_argument(
        "--kv-isolation",
        action=argparse.BooleanOptionalAction,
        help="each tenant has a KV cache of its own in the engines (default: tenants share it)",
    )


def _add_privacy_flags(verb: argparse.ArgumentParser) -> None:
    """Add the flags of what is kept, removed and checked."""
    verb.add_argument(
        "--retention-s",
        type=_whole_or_default(RETENTION_S_MAX),
        metavar="SECONDS",
        help=f"seconds that Redis keeps an ended stream, up to {RETENTION_S_MAX}; 0: until it was read, 60 s at most; "
        f"{_DEFAULT}: the platform's setting",
    )
    verb.add_argument(
        "--trace-retention-days",
        type=_whole_or_default(TRACE_RETENTION_DAYS_MAX),
        metavar="DAYS",
        help=f"days that ClickHouse keeps traces, up to {TRACE_RETENTION_DAYS_MAX}; {_DEFAULT}: the platform's setting",
    )
    verb.add_argument(
        "--response-days",
        type=_whole_or_default(RESPONSE_DAYS_MAX),
        metavar="DAYS",
        help=f"days that the database keeps responses and conversations, up to {RESPONSE_DAYS_MAX}; 0: none; "
        f"{_DEFAULT}: the platform's setting",
    )
    verb.add_argument(
        "--trace-content-bytes",
        type=whole(0, CONTENT_BYTES_MAX, "bytes"),
        metavar="BYTES",
        help=f"bytes of each prompt and completion that traces store, up to {CONTENT_BYTES_MAX}; 0: none",
    )
    verb.add_argument(
        "--redact",
        action=argparse.BooleanOptionalAction,
        help="remove secrets and personal data from prompts and completions before traces store them",
    )
    verb.add_argument(
        "--moderation",
        choices=get_args(Moderation),
        help="content that is checked: nothing, prompts, or prompts and answers",
    )


def given_terms(args: argparse.Namespace, held: Plan) -> dict[str, Any]:
    """Return the terms that the flags change."""
    given: dict[str, Any] = {}
    for name in ("share", "trace_content_bytes", "redact", "moderation", "kv_isolation", "repairs"):
        if (value := getattr(args, name)) is not None:
            given[name] = value
    for name in ("retention_s", "trace_retention_days", "response_days"):
        if (value := getattr(args, name)) is not None:
            given[name] = None if value == _DEFAULT else value
    if args.regions is not ...:
        given["regions"] = args.regions
    if args.budget:
        given["budgets"] = msgspec.structs.replace(held.budgets, **dict(args.budget))
    if args.fallback:
        merged = held.fallbacks | dict(args.fallback)
        given["fallbacks"] = {model: others for model, others in merged.items() if others}
    return given


def terms_text(plan: Plan) -> list[str]:
    """Format the terms, one a line."""
    lines = [
        f"  budget of each {period.replace('_', ' and ')}: {_budget_text(budget)}"
        for period in _PERIODS
        if (budget := getattr(plan.budgets, period)).any
    ]
    lines += [f"  instead of {model}: {', '.join(others)}" for model, others in sorted(plan.fallbacks.items())]
    if plan.regions is not None:
        lines.append(f"  regions: {', '.join(plan.regions) or 'none'}")
    lines.append(f"  share of a pool: {plan.share}")
    lines.append(f"  seconds that Redis keeps an ended stream: {_or_default(plan.retention_s)}")
    lines.append(f"  days that ClickHouse keeps traces: {_or_default(plan.trace_retention_days)}")
    lines.append(f"  days that the database keeps responses: {_or_default(plan.response_days)}")
    lines.append(
        f"  bytes of prompts and completions in traces: {plan.trace_content_bytes}{', redacted' * plan.redact}"
    )
    lines.append(f"  moderation: {plan.moderation}")
    lines.append(f"  repairs of a structured reply: {plan.repairs}")
    lines.append(f"  KV cache: {'of each tenant alone' if plan.kv_isolation else 'shared between tenants'}")
    return lines


def _budget(text: str) -> tuple[str, Budget]:
    period, colon, rest = text.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not colon or period not in _PERIODS or any(n not in _FIGURES or not v.isdecimal() for n, _, v in pairs):
        raise argparse.ArgumentTypeError(
            f"must be PERIOD:NAME=N,… with a period of {', '.join(_PERIODS)} and the names {', '.join(_FIGURES)}, "
            f"got {text!r}; PERIOD: removes it"
        )
    return period, Budget(**{name: int(value) for name, _, value in pairs})


def _fallback(text: str) -> tuple[str, tuple[str, ...]]:
    model, colon, rest = text.rpartition(":")
    if not colon or not model:
        raise argparse.ArgumentTypeError(f"must be MODEL:A,B, got {text!r}; MODEL: removes them")
    return model, tuple(part.strip() for part in rest.split(",") if part.strip())


def _whole_or_default(high: int) -> Callable[[str], int | str]:
    number = whole(0, high, f"or {_DEFAULT}")
    return lambda text: text if text == _DEFAULT else number(text)


def _budget_text(budget: Budget) -> str:
    parts = [] if budget.tokens is None else [f"{budget.tokens} tokens"]
    return ", ".join(parts if budget.micro is None else [*parts, f"{budget.micro} millionths of the currency"])


def _or_default(value: int | None) -> str:
    return "as set for the platform" if value is None else str(value)
