"""The services of one gateway, as its transports use them."""

from __future__ import annotations

from stream_gw.auth import Principal
from stream_gw.streams.admission import Admission
from stream_gw.streams.cancel import StreamCommands
from stream_gw.streams.create import StreamCreation
from stream_gw.streams.follow import StreamReads
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.placements import PlacementRecords
from stream_gw.streams.readiness import Readiness


class Gateway:
    """Owns the services. They know no transport: neither HTTP, SSE nor WebSocket."""

    def __init__(self, parts: GatewayParts) -> None:
        self.parts = parts
        self.readiness = Readiness(parts.pools, parts.settings.ready_without_redis_s)
        placements = PlacementRecords(parts.log, parts.hub)
        self.reads = StreamReads(parts, placements)
        self.admission = Admission(parts.accounts, parts.log, parts.hub.spawn, parts.on_limited, parts.on_failed_open)
        self.streams = StreamCreation(parts, self.reads, self.readiness, placements, self.admission)
        self.commands = StreamCommands(parts, self.reads)

    def authenticate(self, credential: str | None) -> Principal:
        """Return the owner of an API key or capability token. Raises Unauthenticated or UserSuspended."""
        return self.parts.authenticator.authenticate(credential, self.parts.unix_s())
