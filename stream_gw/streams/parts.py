"""The ports and helpers that a gateway's services share. ``main`` makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stream_fabric.accounts.budgets import Crossed
from stream_fabric.accounts.ports import Accounts
from stream_fabric.chats import Chats
from stream_fabric.links import Links
from stream_fabric.moderation.moderator import Moderator
from stream_fabric.ports import Clock, Index, Pools, Random, StreamLog
from stream_fabric.stream.ids import GatewayId, TenantId
from stream_gw.auth import Authenticator
from stream_gw.delivery.hub import Hub
from stream_gw.observe.content import Contents
from stream_gw.observe.trace import Tracer
from stream_gw.responses import ResponseStore
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
    on_limited: Callable[[str, str], None] = lambda subject, kind: None
    """Called with the kind of subject and of limit that refused a request."""
    on_failed_open: Callable[[], None] = lambda: None
    """Called for each request that was admitted without its limits."""
    on_crossed: Callable[[TenantId, Crossed, str], None] = lambda tenant, crossed, model: None
    """Called with a budget that has crossed a mark, and the model of the request that did it."""
    on_input: Callable[[str], None] = lambda result: None
    """Called with the result of each input of a running stream."""
    responses: ResponseStore | None = None
    """Stored responses; None: none are stored."""
    moderator: Moderator | None = None
    """Checks prompts of plans with moderation; None: such prompts are refused."""
    chats: Chats | None = None
    """Newest streams of chats. None in simulations."""
    links: Links | None = None
    """Ended links to streams. None in simulations."""

    def unix_s(self) -> float:
        """Unix time on the fabric's clock, in seconds."""
        return self.clock.now_us() / 1e6
