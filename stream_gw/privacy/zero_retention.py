"""Deletes streams of plans that keep nothing, as soon as they were read to their end."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from stream_fabric.stream.ids import GatewayId, StreamId, TenantId
from stream_gw.auth import KeyStore


class DeletesStreams(Protocol):
    """The part of the log that deletes content."""

    async def forget(self, stream: StreamId, gateway: GatewayId) -> bool:
        """Delete the content of an ended stream, if its plan keeps nothing and no other gateway reads it."""


class ZeroRetention:
    """Has the log delete what this gateway's readers have read.

    A stream that nobody reads to its end, or whose deletion fails, expires ``ZERO_RETENTION_S`` after its end.
    """

    def __init__(self, keys: KeyStore, log: DeletesStreams, gateway: GatewayId) -> None:
        self._keys = keys
        self._log = log
        self._gateway = gateway

    def deletion(self, stream: StreamId, tenant: TenantId) -> Coroutine[Any, Any, None] | None:
        """Return the deletion of a stream whose last reader here has left, at its end; None: its plan keeps it."""
        return self._delete(stream) if self._keys.plan(tenant).retention_s == 0 else None

    async def _delete(self, stream: StreamId) -> None:
        await self._log.forget(stream, self._gateway)
