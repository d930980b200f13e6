"""Changes that other processes make to this replica's streams: cancelled, steered, fenced, lost, not read.

The doorbell (a message on the replica's channels) and the replies to appends bring them at once. A doorbell may be
lost, and a failover may lose the end of a stream that appends no more: ``LogCheck`` compares the streams with their
logs when the doorbell is connected anew, and every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from inference.agent.handover import Handover
from inference.agent.lease import Lease
from inference.agent.requests import Requests
from inference.agent.running import RunningStream
from inference.agent.streams import Streams
from stream_fabric.errors import FabricError
from stream_fabric.pool.records import STATE_REQUESTED
from stream_fabric.ports import StreamLog
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import UNIT

log = logging.getLogger(__name__)

_CHECK_S = 5.0
"""Interval of the checks; less than ``ENDED_KEPT_S``, so that each stream is checked once more after its end."""
_RETRY_S = 0.5
_HEADS_MAX = 500
"""Maximum streams whose heads one script reads: Redis serves no other client during a script."""


class Doorbell:
    """Handles the messages on this replica's channels."""

    def __init__(
        self,
        lease: Lease,
        streams: Streams,
        handover: Handover,
        requests: Requests,
    ) -> None:
        self._lease = lease
        self._streams = streams
        self._handover = handover
        self._requests = requests

    def receive(self, payload: bytes) -> None:
        if payload == STATE_REQUESTED:
            self._lease.report_soon()
            return
        try:
            what, name, epoch, at = payload.split(UNIT)
            stream, cancelled_at = self._streams.running.get(StreamId(name.decode())), int(at or b"0")
        except ValueError:  # also UnicodeDecodeError; the check finds what the message meant
            log.warning("doorbell message cannot be decoded: payload=%r", payload[:200])
            return
        if stream is None or stream.producer.epoch.encode() != epoch:
            return
        match what:
            case b"cancel" | b"steer":
                stream.producer.receive_cancel(cancelled_at, steered=what == b"steer")
                self._requests.stop(stream)
            case b"fence":
                stream.producer.stopped = True
                self._handover.release(stream)
            case b"unwatched":
                self._requests.on_unwatched(stream, "L", 0.0)
            case b"input":
                self._requests.steering.read_soon(stream)


class LogCheck:
    """Compares the streams with their logs' heads, and finds streams that nobody watches."""

    def __init__(self, log: StreamLog, streams: Streams, requests: Requests) -> None:
        self._log = log
        self._streams = streams
        self._requests = requests
        self._asked = asyncio.Event()

    def check_soon(self, channels: list[str]) -> None:
        """Check now: the doorbell is connected anew, so messages may be lost, and the logs' newest parts."""
        self._asked.set()

    async def run(self) -> None:
        wait_s = _CHECK_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._asked.wait()
            self._asked.clear()
            try:
                await self.check()
                wait_s = _CHECK_S
            except FabricError as error:
                log.warning("check of the streams' logs failed, retrying: error=%s", error)
                wait_s = _RETRY_S

    async def check(self) -> None:
        self._streams.drop_expired()
        by_partition: dict[int, list[RunningStream]] = {}
        for stream in self._streams:
            by_partition.setdefault(stream.partition, []).append(stream)
        for partition, streams in by_partition.items():
            for start in range(0, len(streams), _HEADS_MAX):
                await self._compare(partition, streams[start : start + _HEADS_MAX])

    async def _compare(self, partition: int, streams: Sequence[RunningStream]) -> None:
        heads = await self._log.heads(partition, [stream.name for stream in streams], None)
        for stream, head in zip(streams, heads, strict=True):
            outcome = stream.producer.receive_head(head)
            if outcome:
                self._requests.on_outcome(stream, outcome)
            elif stream.producer.pending:
                self._requests.append_again(stream)
            if head is not None:
                self._requests.receive_watched(stream, head)
