"""Table of the operators' operations: the fleet's feed and traces, and the database of tenants."""

from __future__ import annotations

from typing import Any

from stream_fabric import errors as e
from stream_fabric.accounts.records import Price
from stream_gw.admin.traces import TracesUnavailable
from stream_gw.tenancy import Conflict, DatabaseUnavailable, NoDatabase, SchemaOutdated
from stream_gw.tenancy import models as m
from stream_gw.transport.reference.answers import FeedEvent, ListPage
from stream_gw.transport.reference.operation import EVENTS, JSON, Answer, Errors, Group, Method, Operation, Parameter
from stream_gw.transport.tenancy_routes import (
    PRICE_ROUTE,
    USER_ROUTE,
    AuditQuery,
    KeyQuery,
    PageQuery,
    RevokeQuery,
    UserQuery,
)

_TRACES_ROUTE = "/v1/admin/traces{rest:path}"
_TRACES_ABOUT = (
    "Passed on to `stream-gw telemetry`. Filters in the query string: `since`, `until`, `top`, `tenant`, `model`, "
    "`pool`, `replica` and others; `format=text` gives text for a terminal."
)
_DATABASE: Errors = (NoDatabase, DatabaseUnavailable, SchemaOutdated)
_TENANT = Parameter("id", "Id of the tenant.")
_KEY = Parameter("id", "Id of the key, not the key itself.")
_PLAN = Parameter("name", "Name of the plan.")
_USER = (Parameter("tenant", "Id of the tenant."), Parameter("id", "The user that requests name.", type=m.User))
_USER_PATH = "/users/{tenant}/{id}"
_PRICED = Parameter("model", "Name of the model; `*`: each model without a price of its own.", type=m.Model)
_PRICE_PATH = "/prices/{model}"


def _traces(below: str, summary: str, *parameters: Parameter) -> Operation:
    return Operation(
        "get", f"/v1/admin/traces{below}", "Fleet", summary,
        (Answer(200, "The rows.", {JSON: Any}),),
        "admin", _TRACES_ABOUT, parameters,
        errors=(e.NotFound, e.TooMany, TracesUnavailable), route=_TRACES_ROUTE,
    )  # fmt: skip


_TRACE = Parameter("id", "Id of a request, a stream, a trace or a completion.")
_FLEET = (
    Operation(
        "get", "/v1/admin/ops", "Fleet", "Follow the fleet's live figures",
        (Answer(200, "A snapshot at once, and another about every 2 s.", {EVENTS: FeedEvent}),),
        "admin", "The feed of the page `/ops`. Each event is one complete JSON object.",
        errors=(e.TooMany, e.Draining),
    ),
    _traces("", "List the newest requests"),
    _traces("/slow", "List the requests that spent the most time in a phase"),
    _traces("/diff", "Compare two cohorts of requests"),
    _traces("/pool", "List the events of a pool"),
    _traces("/usage", "List billed usage by hour"),
    _traces("/queries", "List the saved queries"),
    _traces("/queries/{name}", "Run a saved query", Parameter("name", "Name of the query.")),
    _traces("/{id}", "Show a request's events", _TRACE),
    _traces("/{id}/why", "Explain where a request's time went", _TRACE),
)  # fmt: skip


def _tenants(
    method: Method,
    path: str,
    summary: str,
    answer: Any,
    *parameters: Parameter,
    status: int = 200,
    body: Any = None,
    body_required: bool = True,
    query: Any = None,
    errors: Errors = (e.NotFound,),
    route: str = "",
) -> Operation:
    """Make an operation on the database of tenants. ``answer`` None: the answer has no body."""
    group: Group = "Tenants"
    about = "Gateways apply the change within 2 s." if method != "get" else ""
    told = (
        "One page of the list." if query in (PageQuery, UserQuery, KeyQuery, AuditQuery) else "The object as it is now."
    )
    answered = Answer(status, "It is deleted.") if answer is None else Answer(status, told, {JSON: answer})
    return Operation(
        method, f"/v1/admin{path}", group, summary, (answered,), "admin", about, parameters, query, body, body_required,
        (*errors, *_DATABASE), route=route,
    )  # fmt: skip


_BOTH: Errors = (e.NotFound, Conflict)
_TENANTS = (
    _tenants("get", "/tenants", "List tenants", ListPage[m.Tenant], query=PageQuery, errors=()),
    _tenants("post", "/tenants", "Create a tenant", m.Tenant, status=201, body=m.TenantCreate, errors=_BOTH),
    _tenants("get", "/tenants/{id}", "Show a tenant", m.Tenant, _TENANT),
    _tenants("patch", "/tenants/{id}", "Change a tenant", m.Tenant, _TENANT, body=m.TenantChange),
    _tenants("delete", "/tenants/{id}", "Delete a tenant", None, _TENANT, status=204, errors=_BOTH),
    _tenants("get", "/users", "List users of a tenant", ListPage[m.TenantUser], query=UserQuery),
    _tenants("post", "/users", "Create a user", m.TenantUser, status=201, body=m.UserCreate, errors=_BOTH),
    _tenants("get", _USER_PATH, "Show a user", m.TenantUser, *_USER, route=USER_ROUTE),
    _tenants("patch", _USER_PATH, "Change a user", m.TenantUser, *_USER, body=m.UserChange, route=USER_ROUTE),
    _tenants("delete", _USER_PATH, "Delete a user", None, *_USER, status=204, route=USER_ROUTE),
    _tenants("get", "/keys", "List keys", ListPage[m.Key], query=KeyQuery, errors=()),
    _tenants("post", "/keys", "Create a key", m.NewKey, status=201, body=m.KeyCreate, errors=_BOTH),
    _tenants("patch", "/keys/{id}", "Change a key", m.Key, _KEY, body=m.KeyChange, errors=_BOTH),
    _tenants("delete", "/keys/{id}", "Revoke a key or its tokens", m.Key, _KEY, query=RevokeQuery),
    _tenants("post", "/keys/{id}/rotate", "Replace a key", m.NewKey, _KEY, status=201, body=m.KeyRotate,
             body_required=False, errors=_BOTH),
    _tenants("get", "/plans", "List plans", ListPage[m.Plan], query=PageQuery, errors=()),
    _tenants("post", "/plans", "Create a plan", m.Plan, status=201, body=m.Plan, errors=_BOTH),
    _tenants("get", "/plans/{name}", "Show a plan", m.Plan, _PLAN),
    _tenants("patch", "/plans/{name}", "Change a plan", m.Plan, _PLAN, body=m.PlanChange),
    _tenants("delete", "/plans/{name}", "Delete a plan", None, _PLAN, status=204, errors=_BOTH),
    _tenants("get", "/prices", "List prices", ListPage[m.ModelPrice], query=PageQuery, errors=()),
    _tenants("get", _PRICE_PATH, "Show a model's price", m.ModelPrice, _PRICED, route=PRICE_ROUTE),
    _tenants("put", _PRICE_PATH, "Set a model's price", m.ModelPrice, _PRICED, body=Price, errors=(),
             route=PRICE_ROUTE),
    _tenants("delete", _PRICE_PATH, "Delete a model's price", None, _PRICED, status=204, route=PRICE_ROUTE),
    _tenants("get", "/audit", "List changes of the database", ListPage[m.AuditEvent], query=AuditQuery,
             errors=()),
)  # fmt: skip

ADMIN: tuple[Operation, ...] = (*_FLEET, *_TENANTS)
