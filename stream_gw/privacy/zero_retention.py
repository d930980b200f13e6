"""Deletes streams of plans that keep nothing, as soon as they were read to their end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from stream_fabric.stream.ids import GatewayId, StreamId, TenantId
from stream_gw.auth import KeyStore


class DeletesStreams(Protocol):
    """The part of the log that deletes content."""

    async def forget(self, stream: StreamId, gateway: GatewayId) -> bool:
        """Delete the content of an ended stream, if its plan keeps nothing and no other gateway reads it."""


class ZeroRetention:
    """Asks the log to delete what this gateway's readers have read. ``spawn`` runs background work.

    A stream that nobody reads to its end, or whose deletion fails, expires ``ZERO_RETENTION_S`` after its end.
    """

    def __init__(
        self,
        keys: KeyStore,
        log: DeletesStreams,
        gateway: GatewayId,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._keys = keys
        self._log = log
        self._gateway = gateway
        self._spawn = spawn

    def receive_read(self, stream: StreamId, tenant: TenantId) -> None:
        """Take that the last reader here has left a stream that was read to its end."""
        if self._keys.plan(tenant).retention_s == 0:
            self._spawn(self._forget(stream))

    async def _forget(self, stream: StreamId) -> None:
        await self._log.forget(stream, self._gateway)
