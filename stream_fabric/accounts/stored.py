"""The port of stored responses while the fabric holds them. Requests and responses are opaque bytes here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from stream_fabric.stream.ids import StreamId, TenantId

Queue = Literal["live", "unsaved"]
"""Queue of responses: until their stream has ended, or until the database has them."""


class NewResponse(NamedTuple):
    id: StreamId
    request: bytes
    conversation: str | None
    kept_s: int
    """Seconds that it is kept after its stream has ended."""
    unsaved_s: int
    """Seconds that it waits for the database; 0: it is not written there."""


class HeldResponse(NamedTuple):
    request: bytes
    response: bytes
    """Empty: its stream was not found ended yet."""


class DueResponse(NamedTuple):
    tenant: TenantId
    id: StreamId
    age_s: float
    """Seconds since it was begun, or deleted."""
    is_deleted: bool
    """True: it was deleted while a process may have been writing it to the database."""


class Begun(NamedTuple):
    """Result of a begin. ``blocked_by``: the response that runs in its conversation."""

    is_full: bool = False
    """The tenant's responses take as many bytes as they may."""
    blocked_by: StreamId | None = None


class HeldResponses(Protocol):
    """Responses of all tenants in the fabric. Calls raise ``FabricError``; all of them may be repeated."""

    shards: int
    """Shards that ``due`` is asked for, one after the other."""

    async def begin(self, tenant: TenantId, new: NewResponse) -> Begun:
        """Keep the request of a response until its stream has ended, and lock its conversation."""

    async def find(self, tenant: TenantId, response: StreamId) -> HeldResponse | Literal["deleted"] | None:
        """Read a response. Another tenant's is None."""

    async def complete(self, tenant: TenantId, response: StreamId, outcome: bytes) -> bool:
        """Keep what came of a response; False: there is none, or it was deleted. The first call counts."""

    async def saved(self, tenant: TenantId, response: StreamId) -> bool:
        """Note that the database has a response, and unlock its conversation. False: it was deleted meanwhile."""

    async def delete(self, tenant: TenantId, response: StreamId) -> bool:
        """Delete a response, and have the database's checked once more. False: the tenant has none."""

    async def drop(self, tenant: TenantId, response: StreamId) -> None:
        """Delete a response that no database has."""

    async def due(self, shard: int, queue: Queue) -> Sequence[DueResponse]:
        """Take responses of a shard whose time has come. Each comes again later, should the caller die."""

    async def unsaved(self) -> int:
        """Count the responses that wait for the database."""

    async def runs_in(self, tenant: TenantId, conversation: str) -> StreamId | None:
        """Return the response that locks a conversation."""

    async def mark_full(self, tenant: TenantId, seconds: float) -> None:
        """Refuse the tenant's new responses for a while: the database holds too much of it."""
