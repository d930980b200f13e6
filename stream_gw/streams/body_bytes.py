"""Bounds the memory of request bodies at one gateway that no stream was created for yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stream_fabric.errors import GatewayFull, TooMany
from stream_fabric.limits import BODIES_BYTES_MAX, TENANT_BODIES_BYTES_MAX
from stream_fabric.stream.ids import TenantId


class BodyBytes:
    """Bytes of HTTP bodies that are not complete yet, of WebSocket messages that wait or run, and of stored items that
    new responses build on: of all, and of each tenant's."""

    def __init__(self, bytes_max: int = BODIES_BYTES_MAX, tenant_bytes_max: int = TENANT_BODIES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._tenant_bytes_max = tenant_bytes_max
        self.total = 0
        self._by_tenant: dict[TenantId, int] = {}

    def add(self, tenant: TenantId, size: int) -> None:
        """Count received bytes. Raises TooMany or GatewayFull, and counts nothing, when they exceed a limit."""
        mine = self._by_tenant.get(tenant, 0)
        if mine + size > self._tenant_bytes_max:
            raise TooMany(
                f"your requests that this gateway is reading hold {mine} bytes, and the limit is "
                f"{self._tenant_bytes_max}; send fewer large bodies at once, and retry after 1 s"
            )
        if self.total + size > self._bytes_max:
            raise GatewayFull(
                f"the requests that this gateway is reading hold {self.total} bytes, and the limit is "
                f"{self._bytes_max}; retry after 1 s"
            )
        self.total += size
        self._by_tenant[tenant] = mine + size

    @contextmanager
    def adding(self, tenant: TenantId) -> Iterator[Callable[[int], None]]:
        """Return a function that adds bytes; they are removed at the end."""
        counted = 0

        def add(size: int) -> None:
            nonlocal counted
            self.add(tenant, size)
            counted += size

        try:
            yield add
        finally:
            self.remove(tenant, counted)

    def remove(self, tenant: TenantId, size: int) -> None:
        """Forget the bytes of a body that is complete or given up."""
        self.total -= size
        left = self._by_tenant.pop(tenant, 0) - size
        if left > 0:
            self._by_tenant[tenant] = left
