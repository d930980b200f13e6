"""The shell of an answer that is not streamed: frames are gathered and spelled once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stream_fabric.cursor import Cursor
from stream_fabric.errors import EngineFailed, StreamGwError, from_info
from stream_fabric.frames import End, ErrorInfo, Status, decode, is_end
from stream_fabric.ids import StreamId
from stream_fabric.reader import Gap, Reset
from stream_gw.dialects.accumulate import Accumulator
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.whole import WHOLE, Document
from stream_gw.server import EdgeHttp


class CollectOutlet:
    """``done`` gives the body, or the error to answer, or neither when the client has gone."""

    full = False

    def __init__(self, connection: EdgeHttp, stream: StreamId, facts: StreamFacts) -> None:
        self.stream = stream
        self._gathered: Accumulator | Document = Document() if facts.kind in WHOLE else Accumulator(facts)
        self.done: asyncio.Future[tuple[bytes | None, StreamGwError | None]] = (
            asyncio.get_running_loop().create_future()
        )
        self.close: Callable[[], None] = _nothing
        self._end: End | None = None
        connection.listener = self
        if connection.transport.is_closing():  # the client left while its stream was being found
            self.connection_lost()

    def write(self, epoch: int, first: int, lines: list[bytes]) -> None:
        for line in lines:
            self._gathered.add(line)
        if is_end(lines[-1]):
            end = decode(lines[-1])
            assert isinstance(end, End)
            self._end = end

    def gap(self, gap: Gap) -> bool:
        return False

    def reset(self, reset: Reset) -> bool:
        return False

    def rise(self, epoch: str, head: int) -> None:
        pass

    def waits(self, position: int, of: int, warming_s: float | None) -> None:
        pass

    def end(self, status: Status) -> None:
        if status == "completed":
            try:
                self._settle(self._gathered.result(), None)
            except StreamGwError as error:
                self._settle(None, error)
            return
        assert self._end is not None
        info = self._end.error or ErrorInfo(status, f"the stream ended {status}", EngineFailed.type, 502)
        self._settle(None, from_info(info))

    def fail(self, error: StreamGwError, cursor: Cursor) -> None:
        self._settle(None, error)

    def _settle(self, body: bytes | None, error: StreamGwError | None) -> None:
        if not self.done.done():
            self.done.set_result((body, error))

    def connection_paused(self) -> None:
        pass

    def connection_resumed(self) -> None:
        pass

    def connection_lost(self) -> None:
        self._settle(None, None)


def _nothing() -> None:
    pass
