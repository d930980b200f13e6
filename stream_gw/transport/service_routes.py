"""HTTP handlers beside streams: models, tokens, the cookie, the operator's pages, health and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Send

from stream_fabric.accounts.account import Subject
from stream_fabric.errors import Forbidden
from stream_fabric.limits import TOKEN_BODY_BYTES_MAX
from stream_gw.admin.feed import Ops
from stream_gw.admin.traces import Traces, check_operator
from stream_gw.admin.usage import AdminUsageQuery, Usage, UsageQuery
from stream_gw.admin.viewer import Viewer
from stream_gw.auth import Principal, TokenRequest, bearer, cookie_cleared, cookie_set
from stream_gw.dialects.anthropic.models import model_json, model_list
from stream_gw.observe.metrics import Metrics
from stream_gw.routing.directory import Served
from stream_gw.streams.budgets.claims import claims_of, session_key
from stream_gw.streams.gateway import Gateway
from stream_gw.transport import sse
from stream_gw.transport.connection import CONNECTION, RESPONSE, EdgeHttp, ResponseWriter
from stream_gw.transport.endpoint import Answering
from stream_gw.transport.http import JSON, Request, parse, query_as
from stream_gw.transport.pages import no_path

_NO_STORE = [(b"cache-control", b"no-store")]
_TEXT = (b"content-type", b"text/plain")


class OpenFeedResponse:
    """A response that delivers the operations feed; an ``OpenResponse``."""

    __slots__ = ("_metrics", "_ops", "outlet")

    def __init__(self, ops: Ops, metrics: Metrics, outlet: Viewer) -> None:
        self._ops = ops
        self._metrics = metrics
        self.outlet = outlet

    def close(self) -> None:
        self._ops.leave(self.outlet)
        if self.outlet.stalled:
            self._metrics.stalled.inc()


class ServiceRoutes:
    def __init__(
        self,
        gateway: Gateway,
        answering: Answering,
        metrics: Metrics,
        ops: Ops,
        traces: Traces,
        usage: Usage,
        measure: Callable[[], None],
    ) -> None:
        """``measure`` updates the gauges before a scrape."""
        self._gateway = gateway
        self._answering = answering
        self._metrics = metrics
        self._ops = ops
        self._traces = traces
        self._usage = usage
        self._measure = measure
        self._image_models = {name.strip() for name in gateway.parts.settings.image_models.split(",")}

    def _authenticate(self, request: Request) -> Principal:
        return request.from_caller(self._gateway.authenticate(bearer(request.scope["headers"])))

    async def models(self, request: Request, send: Send) -> None:
        who = self._authenticate(request)
        served = sorted(self._gateway.served(who).items())
        mine = [(model, each) for model, each in served if who.may_use(model)]
        if request.is_anthropic:
            await request.json(200, model_list(mine))
        else:
            listed = [self._model_json(model, each) for model, each in mine]
            await request.json(200, {"object": "list", "data": listed})

    def _model_json(self, model: str, served: Served) -> dict[str, Any]:
        """Return the API's description of a model, in OpenAI's shape."""
        known: dict[str, Any] = {"max_model_len": served.max_model_len} if served.max_model_len else {}
        if not self._image_models.isdisjoint((model, "*")):
            known["input_modalities"] = ["text", "image"]
        return {
            "id": model, "object": "model", "created": served.since_s, "owned_by": served.pool,
            "simulated": served.simulated, **known,
        }  # fmt: skip

    async def model(self, request: Request, send: Send) -> None:
        who, directory, model = self._authenticate(request), self._gateway.parts.directory, request.path_params["id"]
        if not model:
            raise no_path(request.scope)
        served = self._gateway.served(who).get(model)
        if served is None or not who.may_use(model):
            raise directory.model_not_found(model, who.models)
        shape = model_json if request.is_anthropic else self._model_json
        await request.json(200, shape(model, served))

    async def tokens(self, request: Request, send: Send) -> None:
        who, parts = self._authenticate(request), self._gateway.parts
        if not parts.settings.token_secret.get_secret_value():
            raise Forbidden("this fleet mints no capability tokens; its operator must set STREAM_GW_TOKEN_SECRET")
        parts.authenticator.check_minter(who)
        requested = parse(await request.body(who.tenant, TOKEN_BODY_BYTES_MAX) or b"{}", TokenRequest)
        link = await self._gateway.links.generation(requested.stream)
        token, expires_at = parts.authenticator.mint(who, requested, parts.unix_s(), link)
        await request.json(200, {"token": token, "expires_at": expires_at, "scopes": requested.scopes})

    async def limits(self, request: Request, send: Send) -> None:
        """Describe the caller's limits and budgets and what is used of them.

        ``?model=``, ``?user=``, ``?session=``: also those of a model, a user or a session.
        """
        who, keys = self._authenticate(request), self._gateway.parts.authenticator.keys
        plan, model = keys.plan(who.tenant), request.query.get("model")
        if model is not None and not who.may_use(model):
            raise self._gateway.parts.directory.model_not_found(model, who.models)
        user = who.user or request.query.get("user")
        subjects = [each for each in keys.subjects(who, user, model or "") if each.limits.any]
        if model is None:
            subjects = [each for each in subjects if not each.name.startswith("model:")]
            models = sorted(model for model in plan.model if who.may_use(model))
            subjects += [Subject(f"model:{model}", plan.model[model]) for model in models if model != "*"]
        admission, now_ms = self._gateway.admission, int(self._gateway.parts.unix_s() * 1000)
        described = await admission.describe(who.tenant, subjects)
        session = session_key(who.tenant, request.query.get("session"))
        claims = claims_of(plan.budgets, user, session, now_ms)
        body: dict[str, Any] = {
            "object": "limits", "plan": plan.name, "highest_tier": plan.tier, "data": described,
            "budgets": await admission.describe_budgets(who.tenant, claims),
        }  # fmt: skip
        await request.json(200, body, _NO_STORE)

    async def usage(self, request: Request, send: Send) -> None:
        who = self._authenticate(request)
        await request.json(200, await self._usage.of_tenant(who, query_as(request, UsageQuery)), _NO_STORE)

    async def admin_usage(self, request: Request, send: Send) -> None:
        who = self._authenticate(request)
        await request.json(200, await self._usage.of_fleet(who, query_as(request, AdminUsageQuery)), _NO_STORE)

    async def set_cookie(self, request: Request, send: Send) -> None:
        token = bearer(request.scope["headers"])
        who = self._authenticate(request)
        cookie = cookie_set(who, token or "", self._gateway.parts.unix_s(), request.headers)
        await request.answer(204, headers=[*_NO_STORE, cookie])

    async def clear_cookie(self, request: Request, send: Send) -> None:
        await request.answer(204, headers=[*_NO_STORE, cookie_cleared(request.headers)])

    async def traces(self, request: Request, send: Send) -> None:
        who = self._authenticate(request)
        rest, query = request.path_params["rest"], request.scope["query_string"]
        status, body = await self._traces.get(who, rest, query)
        await request.answer(status, body, [JSON, *_NO_STORE])

    async def ops(self, request: Request, send: Send) -> OpenFeedResponse | None:
        who = self._authenticate(request)
        check_operator(who)
        self._ops.check()
        start = {"type": "http.response.start", "status": 200}
        if request.scope["method"] == "HEAD":
            await send({**start, "headers": sse.HEADERS})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return None
        connection: EdgeHttp = request.scope["state"][CONNECTION]
        writer: ResponseWriter = request.scope["state"][RESPONSE]
        response = OpenFeedResponse(self._ops, self._metrics, Viewer(writer, who, request.id))
        self._ops.watch(response.outlet)
        writer.join_head()
        try:
            await send({**start, "headers": [*sse.HEADERS, (b"x-request-id", request.id.encode())]})
            connection.skip_body()
            response.outlet.open(self._answering.retry_ms(request))
        except BaseException:
            response.close()
            raise
        return response

    async def healthz(self, request: Request, send: Send) -> None:
        await request.answer(200, b"ok\n", [_TEXT])

    async def readyz(self, request: Request, send: Send) -> None:
        ready, reason = await self._gateway.readiness.check()
        await request.answer(200 if ready else 503, reason.encode() + b"\n", [_TEXT])

    async def metrics(self, request: Request, send: Send) -> None:
        self._measure()
        page = await self._metrics.scraped(request.header(b"accept") or "")
        await request.answer(200, page.body, [(b"content-type", page.content_type.encode())])

    async def unknown_path(self, request: Request, send: Send) -> None:
        """Answer 404 for a path that does not exist."""
        request.check_upgrade()
        raise no_path(request.scope)
