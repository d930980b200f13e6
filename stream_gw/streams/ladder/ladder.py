"""The models of a plan's ladder, tried one after another. A refused request takes the first that starts it at once."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stream_fabric.errors import ContextLengthExceeded
from stream_fabric.events import Prices
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, Fallback
from stream_fabric.pool.placement import TIERS, Refused
from stream_fabric.pool.plan import route_key
from stream_fabric.pool.prefix import block_hashes
from stream_fabric.pool.records import Candidate, Work
from stream_fabric.stream.log import CreateCode
from stream_gw.dialects.context import check_context
from stream_gw.dialects.facts import encoded_meta
from stream_gw.dialects.prompt import estimated_tokens
from stream_gw.privacy.kv_isolation import prefix_scope
from stream_gw.routing.place_request import Outcome, place, place_at_host
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.parts import GatewayParts


def ladder_of(parts: GatewayParts, call: CreateCall, work: Work, user: str | None, salt: str) -> Ladder | None:
    """Return the ladder of a request; None: only its own model may answer it."""
    who, request, keys = call.who, call.request, parts.authenticator.keys
    smaller = keys.plan(who.tenant).fallbacks.get(request.model, ()) if request.fallback else ()
    if not smaller:
        return None
    allowed = keys.allowed_models(who.tenant, who.models)
    models = [model for model in smaller if model != request.model and (allowed is None or model in allowed)]
    return Ladder(parts, call, work, user, salt, models) if models else None


@dataclass(frozen=True)
class Ladder:
    """Places one request: in its home pool at once, else with a smaller model at once, else in the home's queue."""

    parts: GatewayParts
    call: CreateCall
    work: Work
    user: str | None
    salt: str
    models: Sequence[str]

    async def place(
        self,
        creating: asyncio.Future[CreateCode],
        cell: str,
        candidates: Sequence[Candidate],
        hashes: Sequence[int],
        wait_s: float,
    ) -> Outcome:
        """``creating`` makes the stream, whose facts name the model that answers. Raises FabricUnavailable."""
        parts, work, jitter = self.parts, self.work, self.parts.random.random()
        outcome = await place(
            parts.pools, parts.directory, work, cell, candidates, hashes, wait_s, jitter, at_once=True,
            retried=self.call.retried,
        )  # fmt: skip
        refused = outcome.placed
        if not isinstance(refused, Refused) or refused.why in ("bytes", "tenant_bytes"):
            return outcome
        if await creating is CreateCode.CANCELLED:
            return outcome
        found = await self._place_smaller(cell, jitter)
        if found is not None:
            return found
        if refused.why != "busy":
            return outcome
        queue = NO_OVERLOAD_TERMS._replace(moved=True)  # the marks have admitted it, and it counts as demand
        return Outcome(
            await parts.pools.place(cell, work, candidates, wait_s=wait_s, jitter=jitter, terms=queue), outcome.cell
        )

    async def _place_smaller(self, home: str, jitter: float) -> Outcome | None:
        """Place the request with the first smaller model that starts it at once; None: none does."""
        parts, asked, restated = self.parts, self.work.request.model, False
        for model in self.models:
            pool = parts.directory.fallback_pool(model, self.work.regions)
            if pool is None or not await self._fits(parts.directory.context(pool, model, self.work.regions)):
                continue
            work = await self._as_of(model, pool)
            if work.grant and _is_dearer(work.prices, self.work.prices):
                continue  # the budgets have reserved the price of the model that was asked
            await self._restate(work)
            restated = True
            terms = parts.directory.fallback_terms(pool, work.rank)
            prefix = array("I", work.prefix)
            taken = await place_at_host(parts.pools, parts.directory, work, pool, prefix, jitter, terms)
            if taken is not None:
                if work.grant:
                    parts.hub.spawn(parts.accounts.reprice(work.tenant, work.request.stream, work.prices or Prices()))
                return Outcome(*taken, Fallback(pool_of(home), pool, model, asked), work)
        if restated:
            await self._restate(self.work)
        return None

    async def _restate(self, work: Work) -> None:
        request = work.request
        await self.parts.log.restate(request.stream, work.tenant, work.facts, request.model)

    async def _fits(self, context: int) -> bool:
        request = self.call.request
        try:
            await off_loop(request.prompt_bytes, lambda: check_context(request, context) if context else None)
        except ContextLengthExceeded:
            return False
        return True

    async def _as_of(self, model: str, pool: str) -> Work:
        """Return the request as it is for this model: its body, facts, estimates and price."""
        parts, work, request = self.parts, self.work, self.call.request
        scope = prefix_scope(model, self.salt)
        hashes = await off_loop(request.prompt_bytes, lambda: block_hashes(scope, request.prompt))
        cell = parts.directory.choose_cell(pool, model, work.session, hashes, work.regions)
        route = route_key(model, request.own_dialect, TIERS[work.rank])
        estimates = parts.directory.estimates(cell, route)
        facts = self.call.trace.facts
        assert facts is not None
        facts = msgspec.structs.replace(facts, model=model)
        limit = work.output_limit // request.n
        made = msgspec.structs.replace(
            work,
            request=msgspec.structs.replace(work.request, model=model, body=with_model(work.request.body, model)),
            # The budgets have reserved this prompt
            prompt_tokens=work.prompt_tokens
            if work.grant
            else estimated_tokens(request.prompt, request.input_bytes, estimates.bytes_per_token),
            output_tokens=max(1, int(min(limit, estimates.output_tokens))) * request.n,
            prefix=array("I", hashes).tobytes(),
            prices=parts.authenticator.keys.prices(work.tenant, model, work.rank),
        )
        return msgspec.structs.replace(made, facts=encoded_meta(facts, self.user, made, pool_of(pool)))


def _is_dearer(prices: Prices | None, than: Prices | None) -> bool:
    """True if any token costs more."""
    mine, other = prices or Prices(), than or Prices()
    return mine.prompt > other.prompt or mine.cached > other.cached or mine.output > other.output


def with_model(body: msgspec.Raw, model: str) -> msgspec.Raw:
    """Return the engine's body with another model; all else stays as the client wrote it."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.Raw(msgspec.json.encode(fields))
