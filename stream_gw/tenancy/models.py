"""Requests to the database of tenants and its answers, as types. No SQL library is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from stream_fabric.accounts.records import Budgets, Limits, Moderation, PlanRecord, Price, Region, Scope, TierName
from stream_fabric.errors import BadRequest
from stream_fabric.limits import (
    CONTENT_BYTES_MAX,
    REPAIRS_MAX,
    RESPONSE_DAYS_MAX,
    RETENTION_S_MAX,
    TENANT_LIST_MAX,
    TRACE_RETENTION_DAYS_MAX,
    USER_CHARS_MAX,
)

_T = TypeVar("_T", bound=msgspec.Struct)

DEFAULT_PLAN = "default"
"""Plan of the first migration: every model, no limits."""
TENANT_SCOPES: tuple[Scope, ...] = ("cancel", "create", "input", "read")
GRACE_S_MAX = 90 * 86_400
_EXPIRES_S_MAX = 20 * 366 * 86_400

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""Id of a tenant, or name of a plan."""
Model = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{1,200}\Z")]
Label = Annotated[str, msgspec.Meta(pattern=r"^[^\x00-\x1f\x7f]{0,200}\Z")]
User = Annotated[str, msgspec.Meta(pattern=rf"^[^\x00-\x1f\x7f]{{1,{USER_CHARS_MAX}}}\Z")]
_Share = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_Repairs = Annotated[int, msgspec.Meta(ge=0, le=REPAIRS_MAX)]
_RetentionS = Annotated[int, msgspec.Meta(ge=0, le=RETENTION_S_MAX)]
_RetentionDays = Annotated[int, msgspec.Meta(ge=0, le=TRACE_RETENTION_DAYS_MAX)]
_ResponseDays = Annotated[int, msgspec.Meta(ge=0, le=RESPONSE_DAYS_MAX)]
_ExpiresInS = Annotated[int, msgspec.Meta(ge=1, le=_EXPIRES_S_MAX)]
_ContentBytes = Annotated[int, msgspec.Meta(ge=0, le=CONTENT_BYTES_MAX)]
PageLimit = Annotated[int, msgspec.Meta(ge=1, le=TENANT_LIST_MAX)]


class Plan(PlanRecord, frozen=True, omit_defaults=False, forbid_unknown_fields=True):
    """A plan, as callers write and read it."""

    name: Name
    models: tuple[Model, ...] | None = None
    model: dict[Model, Limits] = msgspec.field(default_factory=dict)
    fallbacks: dict[Model, tuple[Model, ...]] = msgspec.field(default_factory=dict)
    regions: tuple[Region, ...] | None = None


class PlanChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changed fields of a plan; the others stay."""

    tier: TierName | UnsetType = UNSET
    models: tuple[Model, ...] | UnsetType | None = UNSET
    tenant: Limits | UnsetType = UNSET
    key: Limits | UnsetType = UNSET
    user: Limits | UnsetType = UNSET
    model: dict[Model, Limits] | UnsetType = UNSET
    finish_revoked: bool | UnsetType = UNSET
    trace_content_bytes: _ContentBytes | UnsetType = UNSET
    kv_isolation: bool | UnsetType = UNSET
    budgets: Budgets | UnsetType = UNSET
    share: _Share | UnsetType = UNSET
    fallbacks: dict[Model, tuple[Model, ...]] | UnsetType = UNSET
    regions: tuple[Region, ...] | UnsetType | None = UNSET
    retention_s: _RetentionS | UnsetType | None = UNSET
    trace_retention_days: _RetentionDays | UnsetType | None = UNSET
    redact: bool | UnsetType = UNSET
    moderation: Moderation | UnsetType = UNSET
    repairs: _Repairs | UnsetType = UNSET
    response_days: _ResponseDays | UnsetType | None = UNSET


class TenantCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: Name
    label: Label = ""
    plan: Name = DEFAULT_PLAN
    prices: dict[Model, Price] = {}
    """Prices by model before those of all tenants; ``*``: each model that is not named; ``<model>@<tier>``: its
    requests of one tier."""


class TenantChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changed fields of a tenant; the others stay."""

    label: Label | UnsetType = UNSET
    plan: Name | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET
    prices: dict[Model, Price] | UnsetType = UNSET


class Tenant(msgspec.Struct, frozen=True):
    id: str
    label: str
    plan: str
    suspended: bool
    prices: dict[str, Price]
    created_at: float
    created_by: str


class KeyCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: Name
    label: Label = ""
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1)] = TENANT_SCOPES
    models: tuple[Model, ...] | None = None
    """Models that the key may use; None: those of the plan."""
    user: User | None = None
    """User that all requests of the key belong to; None: the request names its user."""
    expires_in_s: _ExpiresInS | None = None
    """None: the key does not expire."""
    limits: Limits | None = None
    """Limits of this key instead of the plan's; None: the plan's."""
    regions: tuple[Region, ...] | None = None
    """Regions where requests of the key may be served; None: those of the plan."""


class KeyChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changed fields of a key; the others stay. Its user never changes: its streams belong to that user."""

    label: Label | UnsetType = UNSET
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1)] | UnsetType = UNSET
    models: tuple[Model, ...] | UnsetType | None = UNSET
    expires_in_s: _ExpiresInS | UnsetType | None = UNSET
    """Seconds from now; None: the key does not expire."""
    limits: Limits | UnsetType | None = UNSET
    regions: tuple[Region, ...] | UnsetType | None = UNSET


class KeyRotate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    grace_s: Annotated[int, msgspec.Meta(ge=0, le=GRACE_S_MAX)] = 86_400
    """Seconds that the old key stays valid."""


Pepper = Literal["current", "previous", "lost", "unknown"]
"""Pepper with which a key was hashed. ``lost``: neither of this process's peppers, so that nobody can use the key.
``unknown``: this process has no pepper."""


class Key(msgspec.Struct, frozen=True):
    """One API key, without the key itself and its digest."""

    id: str
    tenant: str
    label: str
    shown: str
    """Beginning of the key; of an imported key the beginning of its digest."""
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] | None
    user: str | None
    expires_at: float | None
    generation: int
    limits: Limits | None
    regions: tuple[str, ...] | None
    created_at: float
    created_by: str
    revoked_at: float | None
    pepper: Pepper | None = None
    """None: a key of a keys file, which needs no pepper. One with another pepper than ``current`` must be rotated."""


class NewKey(Key, frozen=True, kw_only=True):
    """A key that was just made. It is shown once, because the database has only its digest."""

    key: str


class UserCreate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenant: Name
    id: User
    """The user that requests name."""
    label: Label = ""
    suspended: bool = False
    limits: Limits | None = None
    """Limits of this user instead of the plan's; None: the plan's."""


class UserChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changed fields of a user; the others stay."""

    label: Label | UnsetType = UNSET
    suspended: bool | UnsetType = UNSET
    limits: Limits | UnsetType | None = UNSET


class TenantUser(msgspec.Struct, frozen=True):
    """One user of a tenant that differs from the tenant's other users."""

    tenant: str
    id: str
    label: str
    suspended: bool
    limits: Limits | None
    created_at: float
    created_by: str


class ModelPrice(Price, frozen=True, kw_only=True):
    """Price of one model for all tenants. ``model`` ``*``: each model that is not named; ``<model>@<tier>``: its
    requests of one tier."""

    model: Model


class AuditEvent(msgspec.Struct, frozen=True):
    """One change. ``before``, ``after``: the subject's fields; None: it did not exist."""

    id: int
    at: float
    who: str
    """Id of the key that asked for the change, or ``cli:<user>``."""
    action: str
    subject: str
    before: Any
    after: Any


class AuditFilter(msgspec.Struct, frozen=True):
    since: float = 0.0
    """Unix time in seconds."""
    subject: str | None = None
    who: str | None = None
    tenant: str | None = None
    """Changes of the tenant, its keys and its users."""


def checked(asked: _T) -> _T:
    """Apply the constraints of the fields to what did not come as JSON. Raises BadRequest."""
    try:
        return msgspec.convert(msgspec.to_builtins(asked), type(asked))
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}; a name has 1 to 64 letters, digits, '.', '_' or '-'") from error


def merged_plan(plan: Plan, change: PlanChange) -> Plan:
    """Return the plan with the changed fields."""
    return msgspec.structs.replace(plan, **given(change))


def merged_tenant(tenant: Tenant, change: TenantChange) -> Tenant:
    """Return the tenant with the changed fields."""
    return msgspec.structs.replace(tenant, **given(change))


def merged_user(user: TenantUser, change: UserChange) -> TenantUser:
    """Return the user with the changed fields."""
    return msgspec.structs.replace(user, **given(change))


def given(change: PlanChange | TenantChange | KeyChange | UserChange) -> dict[str, Any]:
    """Return the changed fields."""
    return {name: value for name, value in msgspec.structs.asdict(change).items() if value is not UNSET}
