"""Changes that other processes make to this replica's streams: cancelled, steered, fenced, lost, not read.

The doorbell (a message on the replica's channels) and the replies to appends bring them at once. A doorbell may be
lost, and a failover may lose the end of a stream that appends no more: ``LogCheck`` compares the streams with their
logs when the doorbell is connected anew, the running ones every few seconds, and each once after its end.
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
from stream_fabric.limits import ENDED_KEPT_S, HEADS_MAX
from stream_fabric.pool.records import STATE_REQUESTED
from stream_fabric.ports import StreamLog
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import UNIT

log = logging.getLogger(__name__)

_CHECK_S = 5.0
_SETTLED_S = ENDED_KEPT_S - _CHECK_S - 1
"""Time after its end at which a stream may be checked. A second is left for a check that comes late."""
_RETRY_S = 0.5


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
    """Compares the streams with their logs' heads, and finds streams that nobody watches.

    Each partition is checked by itself: a shard of Redis that does not answer must not delay the checks of the others.
    """

    def __init__(self, log: StreamLog, streams: Streams, requests: Requests) -> None:
        self._log = log
        self._streams = streams
        self._requests = requests
        self._asked = asyncio.Event()
        self._checking: set[int] = set()
        """Partitions with a check that goes on, or is tried again."""
        self._missed: set[int] = set()
        """Partitions of which messages may be lost: all of their streams that are kept have to be checked."""

    def check_soon(self, channels: list[str]) -> None:
        """Check now: the doorbell is connected anew, so messages may be lost, and the logs' newest parts."""
        self._asked.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_S):
                        await self._asked.wait()
                self._streams.drop_expired()
                partitions = {stream.partition for stream in (*self._streams.running.values(), *self._streams.ended())}
                if self._asked.is_set():
                    self._missed.update(partitions)
                    self._asked.clear()
                for partition in partitions - self._checking:
                    self._checking.add(partition)
                    tasks.create_task(self._check(partition))

    async def _check(self, partition: int) -> None:
        """Check a partition until it answers, and once more if messages may be lost meanwhile."""
        again = True
        while again:
            everything = partition in self._missed
            self._missed.discard(partition)
            try:
                await self._check_once(partition, everything=everything)
                again = partition in self._missed
            except FabricError as error:
                log.warning("check of the streams' logs failed, retrying: partition=%d error=%s", partition, error)
                if everything:
                    self._missed.add(partition)
                await asyncio.sleep(_RETRY_S)
        self._checking.discard(partition)

    async def _check_once(self, partition: int, *, everything: bool) -> None:
        """Compare the streams that run and those not checked since their end; ``everything``: all that are kept.

        Whoever takes a stream over compares it, once it knows what earlier producers have used. Raises FabricError.
        """
        unchecked = self._streams.unchecked(_SETTLED_S)
        ended = self._streams.ended() if everything else unchecked
        running = [stream for stream in self._streams.running.values() if stream.producer.has_begun]
        streams = [each for each in (*running, *ended) if each.partition == partition]
        for start in range(0, len(streams), HEADS_MAX):
            await self._compare(partition, streams[start : start + HEADS_MAX])
        self._streams.note_checked(stream for stream in unchecked if stream.partition == partition)

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
