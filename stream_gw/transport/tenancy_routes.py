"""HTTP handlers of ``/v1/admin`` that change tenants, users, keys, plans and prices.

Operators call them; no stream waits for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, TypeVar

import msgspec
from starlette.types import Send

from stream_fabric.accounts.records import Price
from stream_fabric.limits import ADMIN_BODY_BYTES_MAX
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
from stream_gw.transport.http import Request, parse, query_as

if TYPE_CHECKING:
    from stream_gw.tenancy import Session, Tenancy

USER_ROUTE = "/v1/admin/users/{tenant}/{id:path}"
PRICE_ROUTE = "/v1/admin/prices/{model:path}"
_NO_STORE = [(b"cache-control", b"no-store")]
Path: TypeAlias = Mapping[str, str]
"""Parameters of a path by name."""


class _Paged(Protocol):
    @property
    def limit(self) -> int: ...


_Q = TypeVar("_Q", bound=_Paged)
_B = TypeVar("_B")


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
    after: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """``last_id`` of the page before; the database counts in 64 bits."""
    since: float = 0.0
    """Unix time in seconds."""
    subject: str | None = None
    who: str | None = None
    tenant: str | None = None
    """Changes of the tenant, its keys and its users."""


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
        return {**self._callers(), **self._terms()}

    def _callers(self) -> dict[str, dict[str, Handler]]:
        """Tenants, users and keys."""
        return {
            "/v1/admin/tenants": {
                "get": self._lists(PageQuery, lambda session, page: session.tenants.page(page.after, page.limit + 1)),
                "post": self._creates(TenantCreate, lambda session, asked: session.tenants.create(asked)),
            },
            "/v1/admin/tenants/{id}": {
                "get": self._finds(lambda session, path: session.tenants.find(path["id"])),
                "patch": self._changes(
                    TenantChange, lambda session, path, change: session.tenants.change(path["id"], change)
                ),
                "delete": self._deletes(lambda session, path: session.tenants.delete(path["id"])),
            },
            "/v1/admin/users": {
                "get": self._lists(
                    UserQuery, lambda session, page: session.users.page(page.tenant, page.after, page.limit + 1)
                ),
                "post": self._creates(UserCreate, lambda session, asked: session.users.create(asked)),
            },
            USER_ROUTE: {
                "get": self._finds(lambda session, path: session.users.find(path["tenant"], path["id"])),
                "patch": self._changes(
                    UserChange, lambda session, path, change: session.users.change(path["tenant"], path["id"], change)
                ),
                "delete": self._deletes(lambda session, path: session.users.delete(path["tenant"], path["id"])),
            },
            "/v1/admin/keys": {
                "get": self._lists(
                    KeyQuery,
                    lambda session, page: session.keys.page(
                        page.tenant, page.after, page.limit + 1, revoked=page.revoked
                    ),
                ),
                "post": self._creates(KeyCreate, lambda session, asked: session.keys.create(asked)),
            },
            "/v1/admin/keys/{id}": {
                "patch": self._changes(
                    KeyChange, lambda session, path, change: session.keys.change(path["id"], change)
                ),
                "delete": self.revoke_key,
            },
            "/v1/admin/keys/{id}/rotate": {"post": self.rotate_key},
        }

    def _terms(self) -> dict[str, dict[str, Handler]]:
        """Plans, prices and who has changed what."""
        return {
            "/v1/admin/plans": {
                "get": self._lists(
                    PageQuery, lambda session, page: session.plans.page(page.after, page.limit + 1), id_="name"
                ),
                "post": self._creates(Plan, lambda session, asked: session.plans.create(asked)),
            },
            "/v1/admin/plans/{name}": {
                "get": self._finds(lambda session, path: session.plans.find(path["name"])),
                "patch": self._changes(
                    PlanChange, lambda session, path, change: session.plans.change(path["name"], change)
                ),
                "delete": self._deletes(lambda session, path: session.plans.delete(path["name"])),
            },
            "/v1/admin/prices": {"get": self._lists(PageQuery, _prices_after, id_="model")},
            PRICE_ROUTE: {
                "get": self._finds(_price_of),
                "put": self._changes(Price, _set_price),
                "delete": self._deletes(_delete_price),
            },
            "/v1/admin/audit": {
                "get": self._lists(
                    AuditQuery,
                    lambda session, page: session.audit.page(
                        AuditFilter(page.since, page.subject, page.who, page.tenant), page.after, page.limit + 1
                    ),
                )
            },
        }

    def _open(self, request: Request) -> tuple[Tenancy, str]:
        """Return the database and the actor. Raises Unauthenticated, Forbidden or NoDatabase."""
        who = self._gateway.authenticate(bearer(request.scope["headers"]))
        check_operator(who)
        if self._tenancy is None:
            raise NoDatabase("this gateway has no database of tenants; set STREAM_GW_DATABASE_URL, or ask another one")
        return self._tenancy, _actor(who)

    def _lists(
        self, query: type[_Q], rows: Callable[[Session, _Q], Awaitable[Sequence[Any]]], *, id_: str = "id"
    ) -> Handler:
        """Answer with one page. ``rows`` gives one row more than its limit when there is another page."""

        async def handler(request: Request, send: Send) -> None:
            tenancy, _ = self._open(request)
            page = query_as(request, query)
            async with tenancy.read() as session:
                found = await rows(session, page)
            data = found[: page.limit]
            last = getattr(data[-1], id_) if data else None
            body = {"object": "list", "data": data, "has_more": len(found) > page.limit, "last_id": last}
            await request.json(200, body, _NO_STORE)

        return handler

    def _creates(self, body: type[_B], create: Callable[[Session, _B], Awaitable[object]]) -> Handler:
        async def handler(request: Request, send: Send) -> None:
            tenancy, who = self._open(request)
            asked = parse(await request.body(bytes_max=ADMIN_BODY_BYTES_MAX), body)
            async with tenancy.change(who) as session:
                made = await create(session, asked)
            await request.json(201, made, _NO_STORE)

        return handler

    def _finds(self, find: Callable[[Session, Path], Awaitable[object]]) -> Handler:
        async def handler(request: Request, send: Send) -> None:
            tenancy, _ = self._open(request)
            async with tenancy.read() as session:
                found = await find(session, request.path_params)
            await request.json(200, found, _NO_STORE)

        return handler

    def _changes(self, body: type[_B], change: Callable[[Session, Path, _B], Awaitable[object]]) -> Handler:
        async def handler(request: Request, send: Send) -> None:
            tenancy, who = self._open(request)
            asked = parse(await request.body(bytes_max=ADMIN_BODY_BYTES_MAX), body)
            async with tenancy.change(who) as session:
                changed = await change(session, request.path_params, asked)
            await request.json(200, changed, _NO_STORE)

        return handler

    def _deletes(self, delete: Callable[[Session, Path], Awaitable[None]]) -> Handler:
        async def handler(request: Request, send: Send) -> None:
            tenancy, who = self._open(request)
            async with tenancy.change(who) as session:
                await delete(session, request.path_params)
            await request.answer(204, headers=_NO_STORE)

        return handler

    async def rotate_key(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        asked = parse(await request.body(bytes_max=ADMIN_BODY_BYTES_MAX) or b"{}", KeyRotate)
        async with tenancy.change(who) as session:
            key = await session.keys.rotate(request.path_params["id"], asked.grace_s)
        await request.json(201, key, _NO_STORE)

    async def revoke_key(self, request: Request, send: Send) -> None:
        tenancy, who = self._open(request)
        tokens_only, id_ = query_as(request, RevokeQuery).tokens_only, request.path_params["id"]
        async with tenancy.change(who) as session:
            key = await (session.keys.end_tokens(id_) if tokens_only else session.keys.revoke(id_))
        await request.json(200, key, _NO_STORE)


async def _prices_after(session: Session, page: PageQuery) -> list[ModelPrice]:
    prices = await session.prices.read()
    found = [_model_price(model, price) for model, price in sorted(prices.items()) if model > page.after]
    return found[: page.limit + 1]


async def _price_of(session: Session, path: Path) -> ModelPrice:
    return _model_price(path["model"], await session.prices.find(path["model"]))


async def _set_price(session: Session, path: Path, price: Price) -> ModelPrice:
    priced = checked(_model_price(path["model"], price))
    await session.prices.set(priced.model, price)
    return priced


async def _delete_price(session: Session, path: Path) -> None:
    await session.prices.find(path["model"])
    await session.prices.set(path["model"], None)


def _actor(who: Principal) -> str:
    """Return the name of the caller in audit events."""
    return f"tenant:{who.tenant}" if who.key is None else who.key.id


def _model_price(model: str, price: Price) -> ModelPrice:
    return ModelPrice(price.prompt, price.output, price.cached, model=model)
