"""Bounds the memory of a gateway that holds what clients have asked for and do not read."""

from __future__ import annotations

from stream_fabric.errors import GatewayFull, TooMany
from stream_fabric.limits import TENANT_UNSENT_BYTES_MAX, UNSENT_BYTES_MAX
from stream_fabric.stream.ids import TenantId


class UnsentBytes:
    """Bytes that were written to connections and not taken: of all tenants, and of each.

    An ordinary stream is not among them: its outbox holds less than ``UNSENT_COUNTED_BYTES``. Whole answers, snapshots
    and the last events of a response are not limited by the outbox.
    """

    def __init__(self, bytes_max: int = UNSENT_BYTES_MAX, tenant_bytes_max: int = TENANT_UNSENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._tenant_bytes_max = tenant_bytes_max
        self._by_tenant: dict[TenantId, int] = {}
        self.total = 0

    def check_room(self, tenant: TenantId) -> None:
        """Check that one more connection of the tenant may hold a large answer. Raises TooMany or GatewayFull."""
        mine = self._by_tenant.get(tenant, 0)
        if mine >= self._tenant_bytes_max:
            raise TooMany(
                f"{mine} bytes of answers wait at this gateway for your clients to read them, and the limit is "
                f"{self._tenant_bytes_max}; read those first, and retry after 1 s"
            )
        if self.total >= self._bytes_max:
            raise GatewayFull(
                f"{self.total} bytes of answers wait at this gateway for clients to read them, and the limit is "
                f"{self._bytes_max}; retry after 1 s"
            )

    def add(self, tenant: TenantId, size: int) -> None:
        """Count bytes of one connection; a negative ``size``: so many were taken."""
        self.total += size
        mine = self._by_tenant.pop(tenant, 0) + size
        if mine:
            self._by_tenant[tenant] = mine
