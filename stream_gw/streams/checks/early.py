"""Checks a request before work that one that is refused must not cause, such as reading what it builds on."""

from __future__ import annotations

from stream_fabric.errors import RateLimited
from stream_gw.auth import Principal
from stream_gw.dialects.requests import CreateRequest
from stream_gw.streams.admission import Admission, Terms
from stream_gw.streams.budgets.claims import claims_of, session_key
from stream_gw.streams.checks.caller import permitted
from stream_gw.streams.create_call import scoped_key
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.readiness import Readiness


class EarlyChecks:
    """Checks requests whose prompt is not known yet."""

    def __init__(self, parts: GatewayParts, readiness: Readiness, admission: Admission) -> None:
        self._parts = parts
        self._readiness = readiness
        self._admission = admission

    async def check(
        self, who: Principal, request: CreateRequest, key: str | None = None, *, prepares: bool = False
    ) -> None:
        """Check the caller's rights, limits and budgets. Nothing is reserved: the create of the stream decides.

        ``request``: without its prompt. ``prepares``: it makes no stream. Raises like ``StreamCreation.create``.
        """
        parts = self._parts
        request, user, *_ = await permitted(parts, self._readiness, who, request)
        terms = terms_of(parts, who, request, user, parts.clock.now_us() // 1000)
        fail_open = parts.settings.limits_fail_open
        prices = parts.authenticator.keys.prices(who.tenant, request.model, request.tier)
        try:
            await self._admission.check(who.tenant, terms, prices, prepares=prepares, fail_open=fail_open)
        except RateLimited:  # a known key attaches to a stream, which no limit refuses
            if key is None or not await parts.index.is_claimed(who.tenant, scoped_key(who, key)):
                raise


def terms_of(parts: GatewayParts, who: Principal, request: CreateRequest, user: str | None, now_ms: int) -> Terms:
    """Return the limits and budgets that a request counts against."""
    records = parts.authenticator.keys
    session = session_key(who.tenant, request.affinity) if request.session_id else ""
    claims = claims_of(records.plan(who.tenant).budgets, user, session, now_ms)
    return Terms(records.subjects(who, user, request.model), claims)
