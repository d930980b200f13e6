"""The streams of this replica: those that run, and those that ended recently and may have to be repaired."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from inference.agent.lease import Lease
from inference.agent.observe.attempt_events import AttemptEvents
from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.running import RunningStream
from stream_fabric.events import AttemptEnd
from stream_fabric.limits import ENDED_KEPT_S, UNCHECKED_KEPT_S
from stream_fabric.stream.ids import StreamId

_ENDED_BYTES_MAX = 64 << 20
_NO_BODY = msgspec.Raw(b"{}")


@dataclass(slots=True)
class _Ended:
    stream: RunningStream
    size: int
    """Bytes of its frames as they were counted, with those of earlier producers."""
    at_s: float
    """Time of its end, on the loop's clock."""
    checked: bool = False
    """Its end was found in the log."""


class Streams:
    """Running and recently ended streams. ``running`` is the list that the lease reports to the pool."""

    def __init__(
        self, running: dict[StreamId, RunningStream], lease: Lease, load: LoadTracker, attempts: AttemptEvents
    ) -> None:
        self.running = running
        self._lease = lease
        self._load = load
        self._attempts = attempts
        self._ended: OrderedDict[StreamId, _Ended] = OrderedDict()
        self._ended_bytes = 0
        self._loop = asyncio.get_running_loop()

    def add(self, stream: RunningStream) -> None:
        self.running[stream.name] = stream
        self._lease.receive_start(stream.name)
        self._load.receive_start(stream)

    def get(self, name: StreamId) -> RunningStream | None:
        """Return the stream if it runs here or ended recently."""
        found = self.running.get(name)
        if found is None and (ended := self._ended.get(name)) is not None:
            return ended.stream
        return found

    def is_running(self, stream: RunningStream) -> bool:
        """Whether this object runs. False also when the stream came back in a newer epoch, as another object."""
        return self.running.get(stream.name) is stream

    def report(self, stream: RunningStream) -> None:
        """Emit the event of the stream's attempt, once."""
        stream.timing.receive_end()
        gpu_s = self._load.end_gpu_time(stream)
        if not stream.reported:
            stream.reported = True
            self._attempts.report(stream, _attempt_end(stream), self._load.decode_concurrency(stream), gpu_s)

    def remove(self, stream: RunningStream, *, keep: bool, listed: bool = True) -> None:
        """Take a stream off the list and report its attempt.

        ``keep``: its terminal is in the log; its frames are kept for a while, because a failover may lose them.
        ``listed``: the pool may have the stream on this replica's list.
        """
        for timer in (stream.deadline, stream.unwatched):  # a timer would keep the stream in memory for hours
            if timer is not None:
                timer.cancel()
        if not self.is_running(stream):
            return
        self.report(stream)
        del self.running[stream.name]
        self._load.receive_end(stream, whole=keep)
        if listed:
            self._lease.report_end(stream.name)
        else:
            self._lease.report_soon()
        if not keep:
            return
        if stream.name in self._ended:  # it came back after a failover that lost its end
            self._drop(stream.name)
        # Nothing that repairs an end needs the prompt, which is often far longer than the answer
        request = msgspec.structs.replace(stream.work.request, body=_NO_BODY)
        stream.work = msgspec.structs.replace(stream.work, request=request)
        size = stream.producer.bytes_held + sum(map(len, stream.prior))
        self._ended[stream.name] = _Ended(stream, size, self._loop.time())
        self._ended_bytes += size
        while self._ended_bytes > _ENDED_BYTES_MAX:
            self._drop(next(iter(self._ended)))

    def drop_expired(self) -> None:
        """Drop the streams that ended long enough ago. Those that could not be checked since are kept longer."""
        now = self._loop.time()
        old = list(takewhile(lambda ended: ended.at_s < now - ENDED_KEPT_S, self._ended.values()))
        for ended in old:
            if ended.checked or ended.at_s < now - UNCHECKED_KEPT_S:
                self._drop(ended.stream.name)

    def _drop(self, name: StreamId) -> None:
        self._ended_bytes -= self._ended.pop(name).size

    def ended(self) -> list[RunningStream]:
        """Streams that ended recently, oldest first."""
        return [ended.stream for ended in self._ended.values()]

    def unchecked(self, least_age_s: float) -> list[RunningStream]:
        """Streams that ended at least so long ago, and whose end was not looked for in the log since."""
        until_s = self._loop.time() - least_age_s
        settled = takewhile(lambda ended: ended.at_s <= until_s, self._ended.values())
        return [ended.stream for ended in settled if not ended.checked]

    def note_checked(self, streams: Iterable[RunningStream]) -> None:
        """Take streams whose end was looked for in the log."""
        for stream in streams:
            ended = self._ended.get(stream.name)
            if ended is not None and ended.stream is stream:
                ended.checked = True


def _attempt_end(stream: RunningStream) -> AttemptEnd:
    producer = stream.producer
    if producer.ended and producer.status:
        return producer.status
    if stream.yielded:
        return "yielded"
    return "handed_over" if stream.handed_over else "lost"
