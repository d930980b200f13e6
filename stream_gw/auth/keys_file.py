"""The TOML file of tenants, keys, plans and prices: the embedded default, without a database."""

from __future__ import annotations

import string
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from stream_fabric.accounts.records import (
    NO_BUDGETS,
    Budgets,
    KeyRecord,
    Limits,
    Moderation,
    PlanRecord,
    Price,
    PricesRecord,
    Record,
    Region,
    Scope,
    TenantRecord,
    TierName,
    contradiction,
)
from stream_fabric.limits import (
    CONTENT_BYTES,
    CONTENT_BYTES_MAX,
    REPAIRS_MAX,
    RESPONSE_DAYS_MAX,
    RETENTION_S_MAX,
    TRACE_RETENTION_DAYS_MAX,
)
from stream_gw.auth.peppered import SHA256_PREFIX
from stream_gw.auth.principal import ALL_SCOPES


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    scopes: list[Scope] = msgspec.field(default_factory=lambda: sorted(ALL_SCOPES))
    models: list[str] | None = None
    limits: Limits | None = None
    regions: list[Region] | None = None


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, msgspec.Meta(min_length=1)]
    """Never empty: in a query of usage or traces an empty tenant stands for all tenants."""
    key: list[_Key] = []
    price: dict[str, Price] = {}
    plan: str | None = None
    trace_content: bool = False
    trace_content_bytes: Annotated[int, msgspec.Meta(ge=1, le=CONTENT_BYTES_MAX)] = CONTENT_BYTES


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    tier: TierName = "interactive"
    models: tuple[str, ...] | None = None
    tenant: Limits = msgspec.field(default_factory=Limits)
    key: Limits = msgspec.field(default_factory=Limits)
    user: Limits = msgspec.field(default_factory=Limits)
    model: dict[str, Limits] = {}
    kv_isolation: bool = False
    budgets: Budgets = NO_BUDGETS
    share: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    fallbacks: dict[str, tuple[str, ...]] = {}
    regions: tuple[Region, ...] | None = None
    retention_s: Annotated[int, msgspec.Meta(ge=0, le=RETENTION_S_MAX)] | None = None
    trace_retention_days: Annotated[int, msgspec.Meta(ge=0, le=TRACE_RETENTION_DAYS_MAX)] | None = None
    redact: bool = False
    moderation: Moderation = "off"
    repairs: Annotated[int, msgspec.Meta(ge=0, le=REPAIRS_MAX)] = 1
    response_days: Annotated[int, msgspec.Meta(ge=0, le=RESPONSE_DAYS_MAX)] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenant: list[_Tenant]
    plan: dict[str, _Plan] = {}
    price: dict[str, Price] = {}


def read_keys_file(path: Path) -> list[Record]:
    """Read the file as records.

    Raises ValueError or OSError that names the file and what is wrong. The file::

    [[tenant]]
    id = "acme"
    # plan = "team"              # limits; default: no limits
    # trace_content = true       # (not with retention_s = 0) store its prompts and completions in traces; default false
    # trace_content_bytes = 16384 # at most this much of each
    [[tenant.key]]
    sha256 = "…"              # printed by stream-gw key
    scopes = ["create", "read", "cancel", "input"]
    models = ["llama-8b"]     # optional
    # scopes = ["admin"]      # an operator's key: the traces of all tenants

    [plan.team]               # all optional; tenant, key, user: limits of each; model: of each model
    tier = "standard"         # highest tier: interactive, standard or batch
    kv_isolation = true       # its tenants share no KV cache with others; default false
    tenant = { requests_per_min = 600, tokens_per_min = 200000, streams = 50 }
    model."llama-70b" = { tokens_per_min = 50000 }
    budgets.tenant_month = { tokens = 90000000, micro = 50000000 } # request, session, user_day, tenant_hour
    share = 200               # weight against other tenants; default 100
    fallbacks."llama-70b" = ["llama-8b"] # when the pool of llama-70b is saturated
    regions = ["eu-west"]
    retention_s = 0           # keep nothing once it was read
    trace_retention_days = 30
    redact = true             # remove secrets and personal data from stored prompts and completions
    moderation = "all"        # off, prompt or all
    repairs = 2               # highest repair of a request; default 1, 0: none
    # response_days = 30       # days that the database keeps responses (not with retention_s = 0)

    [price."llama-8b"]        # optional; "*": all other models; [tenant.price."…"]: one tenant's price
    prompt = 150000           # millionths of your currency per million tokens
    cached = 75000            # cached prompt tokens; default: the price of prompt
    output = 600000
    """
    try:
        parsed = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
    records: list[Record] = [PricesRecord({model: price.prices() for model, price in parsed.price.items()})]
    digests: set[str] = set()
    tenants: dict[str, list[_Tenant]] = {}
    for tenant in parsed.tenant:
        for key in tenant.key:
            _check_digest(path, tenant.id, key.sha256.lower(), digests)
        if tenant.plan is not None and tenant.plan not in parsed.plan:
            raise ValueError(
                f"{path}: tenant {tenant.id!r}: there is no plan {tenant.plan!r}; add [plan.{tenant.plan}]"
            )
        tenants.setdefault(tenant.id, []).append(tenant)
    records += [_plan_record(name, plan) for name, plan in parsed.plan.items()]
    for name, entries in tenants.items():
        try:
            records += _tenant_records(name, entries, parsed.plan)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return records


def _check_digest(path: Path, tenant: str, digest: str, seen: set[str]) -> None:
    if len(digest) != 64 or not set(digest) <= set(string.hexdigits):
        raise ValueError(f"{path}: tenant {tenant!r}: sha256 must be 64 hex digits, as stream-gw key prints")
    if digest in seen:
        raise ValueError(f"{path}: tenant {tenant!r}: the key {digest[:8]}… is in the file twice")
    seen.add(digest)


def _tenant_records(tenant: str, entries: list[_Tenant], plans: dict[str, _Plan]) -> list[Record]:
    """Return the records of a tenant, which may be in the file several times.

    A tenant whose content goes into traces has a plan of its own.
    """
    keys = tuple(
        KeyRecord(
            key.sha256.lower()[:12],
            SHA256_PREFIX + key.sha256.lower(),
            tuple(key.scopes),
            None if key.models is None else tuple(key.models),
            limits=key.limits,
            regions=None if key.regions is None else tuple(key.regions),
        )
        for entry in entries
        for key in entry.key
    )
    prices = {model: price.prices() for entry in entries for model, price in entry.price.items()}
    name = next((entry.plan for entry in entries if entry.plan is not None), "")
    # The smallest value counts
    content_bytes = min(entry.trace_content_bytes if entry.trace_content else 0 for entry in entries)
    if not content_bytes:
        return [TenantRecord(tenant, name, keys, prices=prices)]
    own = f"{name or 'default'} of {tenant}"
    plan = _plan_record(own, plans[name] if name else _Plan())
    plan = msgspec.structs.replace(plan, trace_content_bytes=content_bytes)
    if wrong := contradiction(plan):
        raise ValueError(wrong)
    return [plan, TenantRecord(tenant, own, keys, prices=prices)]


def _plan_record(name: str, plan: _Plan) -> PlanRecord:
    return PlanRecord(name, **msgspec.structs.asdict(plan))
