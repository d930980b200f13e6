"""``GET /v1/usage`` and ``/v1/admin/usage``: sums of bills, which ``stream-gw telemetry`` answers."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import msgspec
from msgspec import Meta

from stream_fabric.errors import BadRequest, Forbidden, StreamGwError, TooMany
from stream_fabric.stream.ids import TenantId, hashed_user
from stream_gw.admin.traces import Traces, TracesUnavailable, check_operator
from stream_gw.auth import KeyStore, Principal

WITHIN_S = 35.0
"""Time limit of one answer; a query of telemetry ends after 30 s."""
AT_ONCE_MAX = 2
"""Queries of one tenant at a time."""
_Limit = Annotated[int, Meta(ge=1, le=1000)]
_Text = Annotated[str, Meta(max_length=256)]
_Cursor = Annotated[str, Meta(max_length=2048)]


class UsageUnavailable(StreamGwError):
    """Usage cannot be answered, because telemetry is not configured or does not answer. Streams are not affected."""

    code = "usage_unavailable"
    http_status = 503
    retriable = True


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    from_: _Text = ""
    """Start: a time as `2026-11-01T00:00:00Z`, an age as `7d`, or Unix seconds; rounded down to the hour. Default:
    start of the current month in UTC."""
    to: _Text = ""
    """End, as `from`; rounded up to the hour. Default: now."""
    group_by: _Text = "model"
    """One or two of `model`, `key`, `user`, `session`, `endpoint`, `tier`, separated by a comma; `none`: one sum."""
    bucket: Literal["none", "hour", "day", "month"] = "none"
    """Sums for each hour, day or month (UTC)."""
    model: _Text = ""
    """Only this model."""
    key: _Text = ""
    """Only the API key with this id, and its capability tokens."""
    user: _Text = ""
    """Only this user: the name as in requests. Answers show its hash."""
    limit: _Limit = 100
    after: _Cursor = ""
    """`last_id` of the page before."""


class AdminUsageQuery(UsageQuery, frozen=True, rename={"from_": "from"}):
    tenant: _Text = ""
    """Only this tenant; needed with `user`. `group_by` also takes `tenant`."""


class UsageRow(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sums of one group. Only the fields of the groups that were asked for are present."""

    begins: int = 0
    """Start of the hour, day or month, Unix time in seconds."""
    tenant: str | None = None
    model: str | None = None
    key: str | None = None
    """Id of the API key; empty: not known."""
    user: str | None = None
    """Hash of the user; empty: the request named none."""
    session: str | None = None
    """Hash of the session; empty: the request named none."""
    endpoint: str | None = None
    tier: str | None = None
    """`interactive`, `standard`, `batch` or `free`; empty: not known."""
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Part of `prompt_tokens` that the engine found in its cache."""
    output_tokens: int
    reasoning_tokens: int
    """Part of `output_tokens`."""
    price_micro: int
    """Price in micro-units of the operator's currency."""


class AdminUsageRow(UsageRow, kw_only=True):
    gpu_us: int
    """Share of the replicas' busy time, in microseconds."""
    gpu_cost_micro: int
    """Cost of that time. Idle replicas are not included."""
    margin_micro: int
    """`price_micro` less `gpu_cost_micro`."""


class _UsagePage(msgspec.Struct, rename={"from_": "from"}):
    from_: int
    """Start that was used, Unix time in seconds."""
    to: int
    complete_until: float
    """Unix time in seconds before which all delivered bills are counted; 0: not known."""
    group_by: list[str]
    bucket: Literal["none", "hour", "day", "month"]
    has_more: bool
    last_id: str | None


class UsageAnswer(_UsagePage, kw_only=True, rename={"from_": "from"}):
    object: Literal["usage"] = "usage"
    data: list[UsageRow]


class AdminUsageAnswer(_UsagePage, kw_only=True, rename={"from_": "from"}):
    object: Literal["usage"] = "usage"
    data: list[AdminUsageRow]


class _Page(_UsagePage, kw_only=True, rename={"from_": "from"}):
    """Answer of telemetry."""

    data: list[dict[str, Any]]


class _Message(msgspec.Struct):
    message: str = ""


class _Fault(msgspec.Struct):
    error: _Message


_decoder = msgspec.json.Decoder(_Page)


class Usage:
    """Answers usage queries of tenants and operators. An empty ``url`` means that telemetry is not configured."""

    def __init__(self, url: str, token: str, keys: KeyStore) -> None:
        self._keys = keys
        self._telemetry = Traces(url, token)  # turns of its own: operators' trace queries do not wait for tenants
        self._asking: Counter[TenantId] = Counter()

    async def of_tenant(self, who: Principal, query: UsageQuery) -> UsageAnswer:
        """Answer a tenant's query with what its credential may see. Raises StreamGwError."""
        who.require("read")
        if "tenant" in query.group_by.split(","):
            told = "group_by is none, or one or two of model, key, user, session, endpoint, tier"
            raise BadRequest(told, param="group_by")
        values = _values(query, who.tenant, _user_of(who, query.user), self._key_of(who, query.key))
        page = await self._ask(who.tenant, values)
        rows = [msgspec.convert(row, UsageRow) for row in page.data]  # without what it cost the operator
        return UsageAnswer(**_head(page), data=rows)

    async def of_fleet(self, who: Principal, query: AdminUsageQuery) -> AdminUsageAnswer:
        """Answer an operator's query. Raises StreamGwError."""
        check_operator(who)
        if query.user and not query.tenant:
            raise BadRequest("name the tenant of the user", param="tenant")
        page = await self._ask(who.tenant, _values(query, query.tenant, query.user, query.key))
        rows = [
            msgspec.convert(row | {"margin_micro": row["price_micro"] - row["gpu_cost_micro"]}, AdminUsageRow)
            for row in page.data
        ]
        return AdminUsageAnswer(**_head(page), data=rows)

    def _key_of(self, who: Principal, requested: str) -> str:
        """Return the key whose usage is asked for; empty: all keys.

        A capability token sees its key's usage only, and so does a key that is limited to models: other keys may use
        models that it must not know. Models of the plan limit all keys alike. Raises Forbidden or BadRequest.
        """
        if who.expires_at is None and not self._keys.limits_models(who):
            return requested
        if who.key is None:
            raise Forbidden("this token names no key; use a token that was minted by a newer release, or an API key")
        if requested not in ("", who.key.id):
            raise BadRequest(f"this credential sees the usage of key {who.key.id!r} only; leave key out", param="key")
        return who.key.id

    async def _ask(self, asker: TenantId, values: dict[str, str]) -> _Page:
        if not self._telemetry.configured:
            raise UsageUnavailable(
                "this gateway has no telemetry, which counts usage; its operator must set STREAM_GW_TELEMETRY_URL and "
                "STREAM_GW_TELEMETRY_TOKEN"
            )
        if self._asking[asker] >= AT_ONCE_MAX:
            told = f"{AT_ONCE_MAX} usage queries of this tenant are running, the limit; retry after 2 s"
            raise TooMany(told, retry_after_s=2)
        self._asking[asker] += 1
        try:
            status, body = await self._telemetry.fetch(f"/usage?{urlencode(values)}", WITHIN_S)
        except TracesUnavailable as error:
            raise UsageUnavailable(f"usage is not available: {error.message}; streams are not affected") from error
        finally:
            self._asking[asker] -= 1
            if not self._asking[asker]:
                del self._asking[asker]
        try:
            if status == 400:
                raise BadRequest(msgspec.json.decode(body, type=_Fault).error.message)
            if status != 200:
                raise UsageUnavailable(f"usage is not available: telemetry answered {status}; retry later")
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise UsageUnavailable("the answer of telemetry cannot be read; is its version older?") from error


def _head(page: _Page) -> dict[str, Any]:
    return {name: getattr(page, name) for name in _UsagePage.__struct_fields__}


def _values(query: UsageQuery, tenant: str, user: str, key: str) -> dict[str, str]:
    """Return the query string for telemetry."""
    given = {
        "from": query.from_, "to": query.to, "group_by": query.group_by, "bucket": query.bucket, "tenant": tenant,
        "model": query.model, "key": key, "user": hashed_user(TenantId(tenant), user), "limit": str(query.limit),
        "after": query.after,
    }  # fmt: skip
    return {name: value for name, value in given.items() if value}


def _user_of(who: Principal, requested: str) -> str:
    """Return the user whose usage is asked for; empty: all users. Raises BadRequest."""
    if who.user is not None and requested not in ("", who.user):
        raise BadRequest(f"this token belongs to user {who.user!r}; leave user out or name that user", param="user")
    return who.user if who.user is not None else requested
