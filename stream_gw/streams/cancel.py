"""Commands to a running stream: cancel, input."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

import msgspec

from stream_fabric.errors import BadRequest
from stream_fabric.limits import IDEMPOTENCY_KEY_CHARS_MAX
from stream_fabric.stream.ids import StreamId, TenantId, UserId
from stream_fabric.stream.log import CancelReply
from stream_gw.auth import Principal, Revoked
from stream_gw.auth.keys import key_subject
from stream_gw.streams.follow import StreamReads, stream_id
from stream_gw.streams.parts import GatewayParts

log = logging.getLogger(__name__)

_CANCELS_MAX = 200
"""Concurrent cancels of one revocation; the process has others to serve."""
_REMEMBERED_MAX = 10_000
_REMEMBERED_S = 10.0


class StreamCommands:
    """Cancels streams and takes their inputs, from any gateway.

    Another tenant's stream is answered like one that does not exist: an input raises NotFound, a cancel is pending.
    """

    def __init__(self, parts: GatewayParts, reads: StreamReads) -> None:
        self._log = parts.log
        self._accounts = parts.accounts
        self._index = parts.index
        self._hub = parts.hub
        self._reads = reads
        self._recent: deque[tuple[float, TenantId, StreamId]] = deque(maxlen=_REMEMBERED_MAX)
        """Cancels of the last ``_REMEMBERED_S`` seconds: when, whose, which stream."""
        parts.hub.on_return = self._repeat_recent

    async def cancel(self, who: Principal, stream: str) -> CancelReply:
        who.require("cancel")
        name = stream_id(stream)
        if who.user is not None:
            await self._reads.read_head(who, stream, "cancel")
        reply = await self._log.cancel(name, who.tenant)
        if reply.result == "none":  # another tenant's: answered as a stream that does not exist
            return CancelReply("pending", None, "")
        self._recent.append((asyncio.get_running_loop().time(), who.tenant, name))
        return reply

    async def cancel_revoked(self, revoked: Revoked) -> None:
        """Cancel the running streams of revoked keys or of a suspended user. Every gateway does it; one suffices."""
        if revoked.user is not None:
            ending = await self._index.live(revoked.tenant, UserId(revoked.user))
        else:
            subjects = {key_subject(key) for key in revoked.keys}
            held = await self._accounts.reserved(revoked.tenant)
            ending = [stream for stream, names in held.items() if not subjects.isdisjoint(names)]
        for start in range(0, len(ending), _CANCELS_MAX):
            batch = ending[start : start + _CANCELS_MAX]
            await asyncio.gather(*(self._log.cancel(stream, revoked.tenant) for stream in batch))
        log.info("streams of revoked keys cancelled: tenant=%s streams=%d", revoked.tenant, len(ending))

    def _repeat_recent(self) -> None:
        """Send recent cancels again: a failover may have lost cancels that were acknowledged a moment before."""
        since = asyncio.get_running_loop().time() - _REMEMBERED_S
        for at, tenant, stream in self._recent:
            if at > since:
                self._hub.spawn(self._repeat_cancel(tenant, stream))

    async def _repeat_cancel(self, tenant: TenantId, stream: StreamId) -> None:
        await self._log.cancel(stream, tenant)

    async def input(self, who: Principal, stream: str, input_id: str, item: msgspec.Raw) -> str:
        """Add an item to the stream's durable inputs, once per ``input_id``."""
        if not 0 < len(input_id) <= IDEMPOTENCY_KEY_CHARS_MAX:
            raise BadRequest(f"an input's id has 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters", param="id")
        while True:
            await self._reads.read_head(who, stream, "input")
            result = await self._log.input(StreamId(stream), who.tenant, input_id, item)
            if result is not None:  # None: the stream was lost after the look
                return result


def cancel_json(reply: CancelReply) -> dict[str, Any]:
    """Return the API's answer to a cancel."""
    return {"result": reply.result, "at": None if reply.at is None else str(reply.at), "status": reply.status or None}
