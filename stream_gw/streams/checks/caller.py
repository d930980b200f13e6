"""Checks that a caller may make a request here and now."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from stream_fabric.errors import Draining
from stream_fabric.pool.placement import TIERS
from stream_gw.auth import Principal, check_region, pinned_regions
from stream_gw.dialects.requests import CreateRequest
from stream_gw.streams.new_work import stream_user
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.readiness import Readiness


class Permitted(NamedTuple):
    """A request that its caller may make."""

    request: CreateRequest
    """The request with the tier that it gets."""
    user: str | None
    regions: tuple[str, ...]
    pool: str


async def permitted(parts: GatewayParts, readiness: Readiness, who: Principal, request: CreateRequest) -> Permitted:
    """Check scope, key, user, region and model. Raises StreamGwError."""
    if readiness.draining:
        raise Draining("this gateway is shutting down; retry, another gateway will answer", retry_after_s=1)
    who.require("create")
    ended = parts.authenticator.reason_to_end(who, parts.unix_s())
    if ended is not None:  # revoked while the body came in
        raise ended
    records = parts.authenticator.keys
    user = stream_user(who, request.user)
    parts.authenticator.check_user(who.tenant, user)
    # The plan of now: a socket's caller was authenticated long ago
    allowed = records.regions(who)
    check_region(parts.settings.region, allowed)
    regions = pinned_regions(allowed)
    pool = await parts.directory.pool_of(request.model, records.allowed_models(who.tenant, who.models), regions)
    highest = TIERS.index(records.plan(who.tenant).tier)
    if request.tier < highest:
        request = msgspec.structs.replace(request, tier=highest)
    return Permitted(request, user, regions, pool)
