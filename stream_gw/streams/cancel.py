"""Cancels of running streams."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from stream_fabric.errors import FabricError
from stream_fabric.process.backoff import Backoff, BackoffPolicy
from stream_fabric.stream.ids import StreamId, TenantId, UserId, partition_of
from stream_fabric.stream.log import CancelReply
from stream_gw.auth import Principal, Revoked
from stream_gw.auth.keys import key_subject
from stream_gw.auth.users import user_subject
from stream_gw.streams.follow import StreamReads, stream_id
from stream_gw.streams.parts import GatewayParts

log = logging.getLogger(__name__)

_CANCELS_MAX = 200
"""Concurrent cancels of one revocation; the process has others to serve."""
_REVOKE_RETRY = BackoffPolicy(0.5, 10.0)
_REVOKE_S_MAX = 300.0
"""Time in which what fails of a revocation is tried again: a shard may be away, or fail over."""
_REMEMBERED_MAX = 10_000
_REMEMBERED_S = 10.0


class StreamCommands:
    """Cancels streams, from any gateway. Another tenant's stream is answered like one that does not exist: pending."""

    def __init__(self, parts: GatewayParts, reads: StreamReads) -> None:
        self._log = parts.log
        self._accounts = parts.accounts
        self._index = parts.index
        self._hub = parts.hub
        self._reads = reads
        self._random = parts.random
        self._revoking: set[asyncio.Task[None]] = set()
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

    async def steer(self, who: Principal, stream: str) -> CancelReply:
        """Cut the answer of a stream for a successor. One that has ended, or that has begun a call of a tool, stays."""
        return await self._log.cancel(stream_id(stream), who.tenant, steers=True)

    def end_revoked(self, revoked: Revoked) -> None:
        """Cancel the running streams of revoked keys or of a suspended user, in the background. Every gateway does it.

        The tenant's account knows the streams. One that was admitted without its limits is in the index, or has
        readers here.
        """
        read_here = self._hub.streams_of(revoked.tenant, revoked.user) if revoked.user is not None else []
        task = self._hub.spawn(self._cancel_revoked(revoked, read_here))
        self._revoking.add(task)
        task.add_done_callback(self._revoking.discard)

    def stop_retries(self) -> None:
        """Leave unfinished revocations to the other gateways, because this process ends."""
        for task in self._revoking:
            task.cancel()

    async def _cancel_revoked(self, revoked: Revoked, read_here: list[StreamId]) -> None:
        """Find the streams and cancel them. What fails is tried again, for some minutes."""
        now = asyncio.get_running_loop().time
        until, backoff = now() + _REVOKE_S_MAX, Backoff(_REVOKE_RETRY, self._random)
        left: list[StreamId] | None = None
        found = 0
        while True:
            try:
                if left is None:
                    left = await self._revoked_streams(revoked, read_here)
                    found = len(left)
                left, error = await self._cancel_all(revoked.tenant, left)
            except FabricError as failure:
                error = failure
            if error is None:
                log.info("streams of revoked keys cancelled: tenant=%s streams=%d", revoked.tenant, found)
                return
            count = "unknown" if left is None else len(left)
            if now() >= until:
                log.error(
                    "streams of revoked keys not cancelled, they run to their end: tenant=%s streams=%s error=%s",
                    revoked.tenant,
                    count,
                    error,
                )
                return
            if not backoff.attempts:
                log.warning(
                    "streams of revoked keys not cancelled, retrying: tenant=%s streams=%s error=%s",
                    revoked.tenant,
                    count,
                    error,
                )
            await asyncio.sleep(backoff.next_s())

    async def _revoked_streams(self, revoked: Revoked, read_here: list[StreamId]) -> list[StreamId]:
        """Return the running streams of the revoked keys or user. Raises FabricError."""
        subjects = {key_subject(key) for key in revoked.keys}
        found = read_here
        if revoked.user is not None:
            subjects.add(user_subject(revoked.user))
            found = [*await self._index.live(revoked.tenant, UserId(revoked.user)), *read_here]
        held = await self._accounts.reserved(revoked.tenant)
        found = [*found, *(stream for stream, names in held.items() if not subjects.isdisjoint(names))]
        return list(dict.fromkeys(found))

    async def _cancel_all(self, tenant: TenantId, streams: list[StreamId]) -> tuple[list[StreamId], FabricError | None]:
        """Cancel the streams. Returns those that were not cancelled, and why one of them was not.

        Partitions do not wait for each other: a silent shard of Redis delays its own streams alone.
        """
        by_partition: dict[int, list[StreamId]] = {}
        for stream in streams:
            by_partition.setdefault(partition_of(stream, self._log.partitions), []).append(stream)
        failed: dict[StreamId, FabricError] = {}

        async def cancel(members: list[StreamId]) -> None:
            at_once = max(_CANCELS_MAX // len(by_partition), 1)
            for start in range(0, len(members), at_once):
                batch = members[start : start + at_once]
                replies = await asyncio.gather(
                    *(self._log.cancel(stream, tenant) for stream in batch), return_exceptions=True
                )
                for stream, reply in zip(batch, replies, strict=True):
                    if isinstance(reply, FabricError):
                        failed[stream] = reply
                    elif isinstance(reply, BaseException):
                        raise reply

        await asyncio.gather(*map(cancel, by_partition.values()))
        return [stream for stream in streams if stream in failed], next(iter(failed.values()), None)

    def _repeat_recent(self) -> None:
        """Send recent cancels again: a failover may have lost cancels that were acknowledged a moment before."""
        since = asyncio.get_running_loop().time() - _REMEMBERED_S
        for at, tenant, stream in self._recent:
            if at > since:
                self._hub.spawn(self._repeat_cancel(tenant, stream))

    async def _repeat_cancel(self, tenant: TenantId, stream: StreamId) -> None:
        await self._log.cancel(stream, tenant)


def cancel_json(reply: CancelReply) -> dict[str, Any]:
    """Return the API's answer to a cancel."""
    return {"result": reply.result, "at": None if reply.at is None else str(reply.at), "status": reply.status or None}
