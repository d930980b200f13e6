"""HTTP handlers of ``/v1/admin`` that change tenants, users, keys, plans and prices.

Operators call them; no stream waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.types import Send

from stream_fabric.accounts.records import Price
from stream_fabric.errors import BadRequest
from stream_gw.admin.traces import check_operator
from stream_gw.auth import Principal, bearer
from stream_gw.streams.gateway import Gateway
from stream_gw.tenancy import NoDatabase
from stream_gw.tenancy.models import (
    AuditFilter,
    KeyChange,
    KeyCreate,
    KeyRotate,
    ModelPrice,
    PageLimit,
    Plan,
    PlanChange,
    TenantChange,
    TenantCreate,
    UserChange,
    UserCreate,
    checked,
)
from stream_gw.transport.endpoint import Handler
from stream_gw.transport.http import Request, parse

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

USER_ROUTE = "/v1/admin/users/{tenant}/{id:path}"
PRICE_ROUTE = "/v1/admin/prices/{model:path}"
_NO_STORE = [(b"cache-control", b"no-store")]
_T = TypeVar("_T")


class PageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query of a list. ``after``: ``last_id`` of the page before."""

    limit: PageLimit = 100
    after: str = ""


class KeyQuery(PageQuery, frozen=True):
    tenant: str | None = None
    revoked: bool = False
    """Also list revoked keys."""


class UserQuery(PageQuery, frozen=True, kw_only=True):
    tenant: str


class AuditQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    limit: PageLimit = 100
    after: int | None = None
    since: float = 0.0
    """Unix time in seconds."""
    subject: str | None = None
    who: str | None = None


class RevokeQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens_only: bool = False
    """End only the capability tokens that the key minted."""


class TenancyRoutes:
    """The admin API of tenants. Each call needs scope ``admin``."""

    def __init__(self, gateway: Gateway, tenancy: Tenancy | None) -> None:
        self._gateway = gateway
        self._tenancy = tenancy

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and method."""
        tenant: dict[str, Handler] = {"get": self.get_tenant, "patch": self.change_tenant, "delete": self.delete_tenant}
        user: dict[str, Handler] = {"get": self.get_user, "patch": self.change_user, "delete": self.delete_user}
        plan: dict[str, Handler] = {"get": self.get_plan, "patch": self.change_plan, "delete": self.delete_plan}
        return {
            "/v1/admin/tenants": {"get": self.list_tenants, "post": self.create_tenant},
            "/v1/admin/tenants/{id}": tenant,
            "/v1/admin/users": {"get": self.list_users, "post": self.create_user},
            USER_ROUTE: user,
            "/v1/admin/keys": {"get": self.list_keys, "post": self.create_key},
            "/v1/admin/keys/{id}": {"patch": self.change_key, "delete": self.revoke_key},
            "/v1/admin/keys/{id}/rotate": {"post": self.rotate_key},
            "/v1/admin/plans": {"get": self.list_plans, "post": self.create_plan},
            "/v1/admin/plans/{name}": plan,
            "/v1/admin/prices": {"get": self.list_prices},
            PRICE_ROUTE: {"get": self.get_price, "put": self.set_price, "delete": self.delete_price},
            "/v1/admin/audit": {"get": self.list_audit},
        }

    def _open(self, request: Request) -> tuple[Tenancy, str]:
        """Return the database and the actor. Raises Unauthenticated, Forbidden or NoDatabase."""
        who = self._gateway.authenticate(bearer(request.scope["headers"]))
        check_operator(who)
        if self._tenancy is None:
            raise NoDatabase("this gateway has no database of tenants; set STREAM_GW_DATABASE_URL, or ask another one")
        return self._tenancy, _actor(who)

    # --- tenants -------------------------------------------------------------------------------------------

    async def list_tenants(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        page = _query(request, PageQuery)
        async with tenancy.read() as session:
            found = await session.tenants.page(page.after, page.limit + 1)
        await _answer_page(request, found, page.limit, "id")

    async def create_tenant(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        asked = parse(await request.body(), TenantCreate)
        async with tenancy.change(who) as session:
            tenant = await session.tenants.create(asked)
        await request.json(201, tenant, _NO_STORE)

    async def get_tenant(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        async with tenancy.read() as session:
            tenant = await session.tenants.find(request.path_params["id"])
        await request.json(200, tenant, _NO_STORE)

    async def change_tenant(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        change = parse(await request.body(), TenantChange)
        async with tenancy.change(who) as session:
            tenant = await session.tenants.change(request.path_params["id"], change)
        await request.json(200, tenant, _NO_STORE)

    async def delete_tenant(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        async with tenancy.change(who) as session:
            await session.tenants.delete(request.path_params["id"])
        await request.answer(204, headers=_NO_STORE)

    # --- users ---------------------------------------------------------------------------------------------

    async def list_users(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        page = _query(request, UserQuery)
        async with tenancy.read() as session:
            found = await session.users.page(page.tenant, page.after, page.limit + 1)
        await _answer_page(request, found, page.limit, "id")

    async def create_user(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        asked = parse(await request.body(), UserCreate)
        async with tenancy.change(who) as session:
            user = await session.users.create(asked)
        await request.json(201, user, _NO_STORE)

    async def get_user(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        async with tenancy.read() as session:
            user = await session.users.find(*_user_of(request))
        await request.json(200, user, _NO_STORE)

    async def change_user(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        change = parse(await request.body(), UserChange)
        async with tenancy.change(who) as session:
            user = await session.users.change(*_user_of(request), change)
        await request.json(200, user, _NO_STORE)

    async def delete_user(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        async with tenancy.change(who) as session:
            await session.users.delete(*_user_of(request))
        await request.answer(204, headers=_NO_STORE)

    # --- keys ----------------------------------------------------------------------------------------------

    async def list_keys(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        page = _query(request, KeyQuery)
        async with tenancy.read() as session:
            found = await session.keys.page(page.tenant, page.after, page.limit + 1, revoked=page.revoked)
        await _answer_page(request, found, page.limit, "id")

    async def create_key(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        asked = parse(await request.body(), KeyCreate)
        async with tenancy.change(who) as session:
            key = await session.keys.create(asked)
        await request.json(201, key, _NO_STORE)

    async def change_key(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        change = parse(await request.body(), KeyChange)
        async with tenancy.change(who) as session:
            key = await session.keys.change(request.path_params["id"], change)
        await request.json(200, key, _NO_STORE)

    async def rotate_key(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        asked = parse(await request.body() or b"{}", KeyRotate)
        async with tenancy.change(who) as session:
            key = await session.keys.rotate(request.path_params["id"], asked.grace_s)
        await request.json(201, key, _NO_STORE)

    async def revoke_key(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        tokens_only, id_ = _query(request, RevokeQuery).tokens_only, request.path_params["id"]
        async with tenancy.change(who) as session:
            key = await (session.keys.end_tokens(id_) if tokens_only else session.keys.revoke(id_))
        await request.json(200, key, _NO_STORE)

    # --- prices --------------------------------------------------------------------------------------------

    async def list_prices(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        page = _query(request, PageQuery)
        async with tenancy.read() as session:
            prices = await session.prices.read()
        found = [_model_price(model, price) for model, price in sorted(prices.items()) if model > page.after]
        await _answer_page(request, found[: page.limit + 1], page.limit, "model")

    async def get_price(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        model = request.path_params["model"]
        async with tenancy.read() as session:
            price = await session.prices.find(model)
        await request.json(200, _model_price(model, price), _NO_STORE)

    async def set_price(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        price = parse(await request.body(), Price)
        priced = checked(_model_price(request.path_params["model"], price))
        async with tenancy.change(who) as session:
            await session.prices.set(priced.model, price)
        await request.json(200, priced, _NO_STORE)

    async def delete_price(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        model = request.path_params["model"]
        async with tenancy.change(who) as session:
            await session.prices.find(model)
            await session.prices.set(model, None)
        await request.answer(204, headers=_NO_STORE)

    # --- plans and the audit ---------------------------------------------------------------------------------

    async def list_plans(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        page = _query(request, PageQuery)
        async with tenancy.read() as session:
            found = await session.plans.page(page.after, page.limit + 1)
        await _answer_page(request, found, page.limit, "name")

    async def create_plan(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        asked = parse(await request.body(), Plan)
        async with tenancy.change(who) as session:
            plan = await session.plans.create(asked)
        await request.json(201, plan, _NO_STORE)

    async def get_plan(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        async with tenancy.read() as session:
            plan = await session.plans.find(request.path_params["name"])
        await request.json(200, plan, _NO_STORE)

    async def change_plan(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        change = parse(await request.body(), PlanChange)
        async with tenancy.change(who) as session:
            plan = await session.plans.change(request.path_params["name"], change)
        await request.json(200, plan, _NO_STORE)

    async def delete_plan(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        async with tenancy.change(who) as session:
            await session.plans.delete(request.path_params["name"])
        await request.answer(204, headers=_NO_STORE)

    async def list_audit(self, request: Request, send: Send) -> None:
        tenancy, _ = self._open(request)
        page = _query(request, AuditQuery)
        wanted = AuditFilter(page.since, page.subject, page.who)
        async with tenancy.read() as session:
            found = await session.audit.page(wanted, page.after, page.limit + 1)
        await _answer_page(request, found, page.limit, "id")


def _actor(who: Principal) -> str:
    """Return the name of the caller in audit events."""
    return f"tenant:{who.tenant}" if who.key is None else who.key.id


def _user_of(request: Request) -> tuple[str, str]:
    return request.path_params["tenant"], request.path_params["id"]


def _model_price(model: str, price: Price) -> ModelPrice:
    return ModelPrice(price.prompt, price.output, price.cached, model=model)


def _query(request: Request, type_: type[_T]) -> _T:
    """Decode the query string. Raises BadRequest."""
    try:
        return msgspec.convert(request.query, type_, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"query string: {error}") from error


async def _answer_page(request: Request, found: Sequence[Any], limit: int, id_: str) -> None:
    """Answer with one page. ``found`` has one row more when there is another page."""
    data = found[:limit]
    last = getattr(data[-1], id_) if data else None
    body = {"object": "list", "data": data, "has_more": len(found) > limit, "last_id": last}
    await request.json(200, body, _NO_STORE)
