"""Published records of tenants, keys and plans: everything a gateway needs to know of them. Pure.

A record is published under a name: ``tenant:<id>``, ``user:<tenant>:<id>``, ``plan:<name>`` or ``prices``. An empty
record means that the tenant, user or plan was deleted. Gateways keep all records in memory and never ask the database.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from stream_fabric.events import Prices
from stream_fabric.limits import (
    CONTENT_BYTES_MAX,
    REPAIRS_MAX,
    RESPONSE_DAYS_MAX,
    RETENTION_S_MAX,
    TRACE_RETENTION_DAYS_MAX,
)

Scope = Literal["create", "read", "cancel", "input", "admin"]
TierName = Literal["interactive", "standard", "batch", "free"]
Moderation = Literal["off", "prompt", "all"]
"""Content that is checked: nothing, prompts, or prompts and answers."""
REGION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Region = Annotated[str, msgspec.Meta(pattern=rf"^{REGION_PATTERN}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one subject. None: no limit; 0: nothing is allowed."""

    requests_per_min: _Count | None = None
    tokens_per_min: _Count | None = None
    """Prompt and output tokens together, cached ones included."""
    streams: _Count | None = None
    """Streams that run at the same time."""

    @property
    def any(self) -> bool:
        """True if there is a limit."""
        return self != NO_LIMITS


NO_LIMITS = Limits()


class Budget(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Maximum use of one period. None: no limit; 0: nothing is allowed."""

    tokens: _Count | None = None
    """Prompt and output tokens together, cached ones included."""
    micro: _Count | None = None
    """Price in millionths of the operator's currency."""

    @property
    def any(self) -> bool:
        """True if there is a limit."""
        return self != NO_BUDGET


NO_BUDGET = Budget()


class Budgets(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Budgets of a plan. Days and months are those of UTC."""

    request: Budget = NO_BUDGET
    """Budget of each request."""
    session: Budget = NO_BUDGET
    """Budget of each session of a tenant."""
    user_day: Budget = NO_BUDGET
    """Budget of each user of a tenant in a day."""
    tenant_hour: Budget = NO_BUDGET
    """Budget of each tenant in an hour: the spend velocity that trips a stop."""
    tenant_month: Budget = NO_BUDGET
    """Budget of each tenant in a month."""


NO_BUDGETS = Budgets()


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Price of one model as operators write it, in millionths of the currency per million tokens."""

    prompt: _Amount = 0
    output: _Amount = 0
    cached: _Amount | None = None
    """None: the price of prompt tokens."""

    def prices(self) -> Prices:
        return Prices(self.prompt, self.prompt if self.cached is None else self.cached, self.output)


class PlanRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rights and limits of each tenant on a plan."""

    name: str
    tier: TierName = "interactive"
    """Highest tier; a request for a higher one gets this one."""
    models: tuple[str, ...] | None = None
    """Models that its tenants may use; None: all."""
    tenant: Limits = NO_LIMITS
    """Limits of each tenant as a whole."""
    key: Limits = NO_LIMITS
    """Limits of each API key."""
    user: Limits = NO_LIMITS
    """Limits of each of a tenant's users."""
    model: dict[str, Limits] = {}
    """Limits of each tenant by model; ``*``: each model that is not named."""
    finish_revoked: bool = False
    """True: running streams of a revoked key run to their end. False: they are cancelled."""
    trace_content_bytes: Annotated[int, msgspec.Meta(ge=0, le=CONTENT_BYTES_MAX)] = 0
    """Bytes of each prompt and each completion that traces store; 0: none."""
    kv_isolation: bool = False
    """True: its tenants share no KV cache with other tenants, and no prefix hints."""
    budgets: Budgets = NO_BUDGETS
    share: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    """Weight of each tenant when tenants compete for a pool's slots."""
    fallbacks: dict[str, tuple[str, ...]] = {}
    """Smaller models that may answer instead of a model whose pool is saturated, the first choice first."""
    regions: tuple[str, ...] | None = None
    """Regions where requests may be served; None: all."""
    retention_s: Annotated[int, msgspec.Meta(ge=0, le=RETENTION_S_MAX)] | None = None
    """Seconds that Redis keeps an ended stream. 0: until it was read, 60 s at most. None: the platform's setting."""
    trace_retention_days: Annotated[int, msgspec.Meta(ge=0, le=TRACE_RETENTION_DAYS_MAX)] | None = None
    """Days that ClickHouse keeps the traces of its tenants; None: the platform's setting."""
    redact: bool = False
    """True: secrets and personal data are removed from prompts and completions before traces store them."""
    moderation: Moderation = "off"
    repairs: Annotated[int, msgspec.Meta(ge=0, le=REPAIRS_MAX)] = 1
    """Maximum of ``repair`` of its tenants' requests; a higher one gets this one. 0: nothing is repaired."""
    response_days: Annotated[int, msgspec.Meta(ge=0, le=RESPONSE_DAYS_MAX)] | None = None
    """Days that the database keeps stored responses and conversations; 0: none are written there, so that responses
    last as long as their streams. None: the platform's setting."""


def row_days(plan: PlanRecord) -> int:
    """Return the ``retention_days`` of events of the plan's tenants."""
    days = plan.trace_retention_days
    return 0 if days is None else days or -1


def contradiction(plan: PlanRecord) -> str | None:
    """Return what is wrong with terms that exclude each other; None: nothing."""
    if plan.retention_s == 0 and plan.trace_content_bytes:
        return (
            f"plan {plan.name!r} keeps nothing (retention_s is 0), so traces cannot store its prompts and completions; "
            "set trace_content_bytes to 0 or another retention_s"
        )
    if plan.retention_s == 0 and plan.response_days:
        return (
            f"plan {plan.name!r} keeps nothing (retention_s is 0), so no responses can be stored; set response_days to "
            "0 or another retention_s"
        )
    return None


class KeyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One API key. A key that is not in its tenant's record is revoked."""

    id: str
    digest: str
    """HMAC-SHA256 of the key with the fleet's pepper, in hex."""
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] | None = None
    """Models that the key may use; None: those of the plan."""
    user: str | None = None
    """User that all requests of the key belong to; None: the request names its user."""
    generation: int = 0
    """Rises when capability tokens that the key minted must end although the key stays."""
    expires_at: float | None = None
    """Unix time in seconds; None: never."""
    limits: Limits | None = None
    """Limits of this key instead of the plan's; None: the plan's."""
    regions: tuple[str, ...] | None = None
    """Regions where requests of the key may be served; None: those of the plan."""


class TenantRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tenant with its keys."""

    id: str
    plan: str
    keys: tuple[KeyRecord, ...] = ()
    suspended: bool = False
    """True: its keys are refused as if they were revoked."""
    prices: dict[str, Prices] = {}
    """Prices by model, before those of all tenants; ``*``: each model that is not named; ``<model>@<tier>``: its
    requests of one tier."""


class UserRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of one user that differ from its tenant's other users. Most users have no record.

    It is a record of its own: a change of one user must not publish its tenant's 100,000 others again.
    """

    tenant: str
    id: str
    """The user that requests name."""
    suspended: bool = False
    """True: its requests are refused, and its credentials as if their key was revoked."""
    limits: Limits | None = None
    """Limits of this user instead of the plan's; None: the plan's."""


class PricesRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prices by model for all tenants; ``*``: each model that is not named; ``<model>@<tier>``: its requests of one
    tier."""

    prices: dict[str, Prices] = {}


Record = TenantRecord | UserRecord | PlanRecord | PricesRecord
PRICES = "prices"

_encoder = msgspec.json.Encoder()


def record_name(record: Record) -> str:
    """Return the name that the record is published under."""
    match record:
        case TenantRecord(id=tenant):
            return f"tenant:{tenant}"
        case UserRecord(tenant=tenant, id=user):
            return f"user:{tenant}:{user}"
        case PlanRecord(name=plan):
            return f"plan:{plan}"
    return PRICES


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(name: str, data: bytes) -> Record:
    """Decode the record that was published under this name. Raises msgspec.MsgspecError."""
    kind = name.partition(":")[0]
    types: dict[str, type[Record]] = {
        "tenant": TenantRecord, "user": UserRecord, "plan": PlanRecord, PRICES: PricesRecord
    }  # fmt: skip
    if kind not in types:
        raise msgspec.ValidationError(f"unknown kind of record {kind!r}")
    return msgspec.json.decode(data, type=types[kind])
