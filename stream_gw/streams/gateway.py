"""The services of one gateway, as its transports use them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from stream_fabric.limits import HISTORY_BYTES_MAX, TENANT_HISTORY_BYTES_MAX
from stream_fabric.stream.ids import new_stream_id
from stream_gw.auth import Principal, UnknownKey, check_region
from stream_gw.routing.directory import Served
from stream_gw.routing.regions import served_in
from stream_gw.streams.admission import Admission
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.streams.cancel import StreamCommands
from stream_gw.streams.checks.early import EarlyChecks
from stream_gw.streams.create import StreamCreation
from stream_gw.streams.follow import StreamReads
from stream_gw.streams.links.links import StreamLinks
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.placements import PlacementRecords
from stream_gw.streams.readiness import Readiness
from stream_gw.streams.steering.inputs import StreamInputs


class Gateway:
    """Owns the services. They know no transport: neither HTTP, SSE nor WebSocket."""

    def __init__(self, parts: GatewayParts) -> None:
        self.parts = parts
        self.bodies = BodyBytes()
        self.histories = BodyBytes(HISTORY_BYTES_MAX, TENANT_HISTORY_BYTES_MAX)
        """Conversations that sockets remember because no store has them."""
        self.public_id = "gw_" + hashlib.sha256(parts.name.encode()).hexdigest()[:8]
        """Id that clients may see: it tells gateways apart and names no host."""
        self.readiness = Readiness(parts.pools, parts.log, parts.settings.ready_without_redis_s)
        placements = PlacementRecords(parts.log, parts.hub)
        self.reads = StreamReads(parts, placements)
        self.admission = Admission(
            parts.accounts,
            parts.log,
            parts.hub.spawn,
            parts.on_limited,
            parts.on_failed_open,
            parts.on_crossed,
            parts.clock.now_us,
            parts.directory.holder_of,
        )
        self.checks = EarlyChecks(parts, self.readiness, self.admission)
        self.streams = StreamCreation(parts, self.reads, self.readiness, placements, self.admission)
        self.commands = StreamCommands(parts, self.reads)
        self.inputs = StreamInputs(parts, self.reads, parts.on_input)
        self.links = StreamLinks(parts.links, self.reads)

    def authenticate(self, credential: str | None) -> Principal:
        """Return the owner of an API key or capability token.

        Raises Unauthenticated, UserSuspended, WrongRegion, or Forbidden for a token that is limited to one stream.
        """
        who = self.authenticate_reader(credential)
        who.require_any_stream()
        return who

    def authenticate_reader(self, credential: str | None) -> Principal:
        """Do the same for a caller that follows a stream, which a token that is limited to that stream may too.

        ``StreamReads`` holds it to its stream.
        """
        return self._checked(self.parts.authenticator.authenticate(credential, self.parts.unix_s()))

    def authenticate_cookie(self, token: str) -> Principal:
        """Return the owner of a cookie's token. Raises Unauthenticated, UserSuspended or WrongRegion."""
        return self._checked(self.parts.authenticator.authenticate_cookie(token, self.parts.unix_s()))

    async def authenticate_newly(self, authenticate: Callable[[], Principal]) -> Principal:
        """Authenticate a caller whose key may have been made a moment ago. Raises as ``authenticate`` does."""
        try:
            return authenticate()
        except UnknownKey:
            if not await self.parts.authenticator.catch_up():
                raise
            return authenticate()

    async def count_stored(self, who: Principal) -> None:
        """Count a call for stored responses or conversations against the caller's limits. Raises RateLimited."""
        parts = self.parts
        subjects = parts.authenticator.keys.subjects(who, who.user, "")
        if subjects:
            call = new_stream_id(parts.clock.now_us() // 1000, parts.random.token_bytes(10))
            fail_open = parts.settings.limits_fail_open
            await self.admission.count_stored(who.tenant, call, subjects, fail_open=fail_open)

    def served(self, who: Principal) -> dict[str, Served]:
        """Return the models that the caller's regions serve, also those that the caller may not use."""
        directory, regions = self.parts.directory, self.parts.authenticator.keys.regions(who)
        models = directory.models()
        return models if regions is None else dict(served_in(directory, models, regions) if regions else ())

    def _checked(self, who: Principal) -> Principal:
        check_region(self.parts.settings.region, self.parts.authenticator.keys.regions(who))
        return who
