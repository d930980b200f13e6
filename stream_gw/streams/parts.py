"""The ports and helpers that a gateway's services share. ``main`` makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stream_fabric.accounts.account import LimitKind
from stream_fabric.accounts.ports import Accounts
from stream_fabric.ports import Clock, Index, Pools, Random, StreamLog
from stream_fabric.stream.ids import GatewayId
from stream_gw.auth import Authenticator
from stream_gw.delivery.hub import Hub
from stream_gw.observe.content import Contents
from stream_gw.observe.trace import Tracer
from stream_gw.routing.directory import Directory
from stream_gw.routing.queue_positions import QueuePositions
from stream_gw.settings import GatewaySettings


@dataclass(frozen=True)
class GatewayParts:
    """The ports and helpers of one gateway."""

    name: GatewayId
    settings: GatewaySettings
    authenticator: Authenticator
    log: StreamLog
    pools: Pools
    index: Index
    accounts: Accounts
    clock: Clock
    random: Random
    hub: Hub
    directory: Directory
    queue_positions: QueuePositions
    tracer: Tracer
    contents: Contents | None = None
    """Collects prompts of tenants whose plan includes them in traces; None: no prompt is collected."""
    on_limited: Callable[[str, LimitKind], None] = lambda subject, kind: None
    """Called with the kind of subject and of limit that refused a request."""
    on_failed_open: Callable[[], None] = lambda: None
    """Called for each request that was admitted without its limits."""

    def unix_s(self) -> float:
        """Unix time on the fabric's clock, in seconds."""
        return self.clock.now_us() / 1e6
