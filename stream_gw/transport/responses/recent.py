"""Memory of a Responses socket: the newest response of each lane, where no store has it."""

from __future__ import annotations

from typing import NamedTuple

from stream_fabric.errors import StreamGwError
from stream_fabric.limits import SOCKET_HISTORY_BYTES_MAX
from stream_fabric.stream.ids import TenantId
from stream_gw.streams.body_bytes import BodyBytes

Pieces = tuple[bytes, ...]
"""Items of a conversation in packed pieces, the oldest first. Forks share the pieces of their parent."""


class Recent(NamedTuple):
    """A response with all items up to its end."""

    id: str
    pieces: Pieces
    size: int
    """Bytes of the items as JSON."""

    @property
    def bytes(self) -> int:
        return sum(map(len, self.pieces))


class RecentResponses:
    """The newest response of each lane of one socket. Memory alone: it ends with the socket.

    ``shared``: counts the bytes of all sockets of the gateway.
    """

    __slots__ = ("_by_lane", "_bytes", "_shared", "_tenant")

    def __init__(self, shared: BodyBytes, tenant: TenantId) -> None:
        self._shared = shared
        self._tenant = tenant
        self._by_lane: dict[str | None, Recent] = {}
        """The lane whose response is the oldest comes first."""
        self._bytes = 0

    def find(self, response: str) -> Recent | None:
        return next((recent for recent in self._by_lane.values() if recent.id == response), None)

    def keep(self, lane: str | None, recent: Recent) -> None:
        """Remember a response in place of its lane's last one. One for which there is no room is not remembered."""
        self.forget(lane)
        if recent.bytes > SOCKET_HISTORY_BYTES_MAX:
            return
        while self._bytes + recent.bytes > SOCKET_HISTORY_BYTES_MAX:
            self.forget(next(iter(self._by_lane)))
        try:
            self._shared.add(self._tenant, recent.bytes)
        except StreamGwError:
            return
        self._by_lane[lane] = recent
        self._bytes += recent.bytes

    def forget(self, lane: str | None) -> None:
        """Forget the response of a lane."""
        recent = self._by_lane.pop(lane, None)
        if recent is not None:
            self._bytes -= recent.bytes
            self._shared.remove(self._tenant, recent.bytes)

    def evict(self, response: str, lane: str | None, *, everywhere: bool) -> None:
        """Forget a response whose continuation in ``lane`` failed. It stays where another lane has made it, unless
        ``everywhere``."""
        for owner in [name for name, recent in self._by_lane.items() if recent.id == response]:
            if everywhere or owner == lane:
                self.forget(owner)

    def clear(self) -> None:
        for lane in tuple(self._by_lane):
            self.forget(lane)
