"""One stream on its engine: the sink the engine writes to, in front of the stream's producer."""

from __future__ import annotations

from collections.abc import Callable

from stream_fabric.errors import StreamGwError, StreamTooLarge
from stream_fabric.frames import (
    ChoiceEnd,
    Delta,
    End,
    ErrorInfo,
    Frame,
    Note,
    Open,
    TerminalStatus,
    Usage,
    encode,
    encode_text,
)
from stream_fabric.ids import StreamId
from stream_fabric.limits import FLUSH_BYTES_MAX, FLUSH_FRAMES_MAX, FRAME_BYTES_MAX, STREAM_BYTES_MAX
from stream_fabric.producer import Producer
from stream_fabric.redis.pool import Work

# A character takes at most 6 bytes in a JSON string
_TEXT_CHARS_MAX = FRAME_BYTES_MAX // 8


class RunningStream:
    """``FrameSink`` of one request. ``dirty(self, urgent)`` tells the pump that there is something to append."""

    __slots__ = ("_dirty", "_tokens", "_too_large", "closed", "inputs_seen", "partition", "producer", "work")

    def __init__(
        self,
        work: Work,
        partition: int,
        dirty: Callable[[RunningStream, bool], None],
        too_large: Callable[[StreamId], None],
    ) -> None:
        self.work = work
        self.partition = partition
        self.producer = Producer(work.request.stream, work.parsed_epoch())
        self._dirty = dirty
        self._too_large = too_large
        self._tokens = 0
        self.closed = False
        self.inputs_seen: set[str] = set()

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        if self.closed:
            return
        if len(text) > _TEXT_CHARS_MAX:
            self.text(block, text[:_TEXT_CHARS_MAX], 0)
            self.text(block, text[_TEXT_CHARS_MAX:], tokens)
            return
        first = self._tokens == 0
        self._tokens += tokens
        producer = self.producer
        producer.push(encode_text(block, text, tokens), tokens)
        # The first token leaves at once; later ones wait for the window unless a batch is full
        self._dirty(self, first or producer.pending >= FLUSH_FRAMES_MAX)
        if producer.bytes_held > STREAM_BYTES_MAX:
            self._overflow()

    def frame(self, frame: Frame) -> None:
        if self.closed:
            return
        tokens = frame.tokens if isinstance(frame, Delta) else 0
        line = encode(frame)
        if len(line) > FRAME_BYTES_MAX:
            self._overflow()
            return
        first = self._tokens == 0 and tokens > 0
        self._tokens += tokens
        structural = isinstance(frame, Open | ChoiceEnd) or (isinstance(frame, Note) and frame.kind == "prompt")
        self.producer.push(line, tokens, structural=structural)
        self._dirty(self, first or len(line) > FLUSH_BYTES_MAX or isinstance(frame, Note))
        if self.producer.bytes_held > STREAM_BYTES_MAX:
            self._overflow()

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self.producer.usage = Usage(prompt, cached, written, self._tokens, reasoning)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        u = self.producer.usage
        final = usage or Usage(u.prompt, u.cached, u.written, self._tokens, u.reasoning)
        self.producer.finish(End(status, final, error))
        self._dirty(self, True)

    def fail(self, error: StreamGwError) -> None:
        """End for a reason that is not the engine's to tell."""
        self.end("failed", ErrorInfo.of(error))

    def _overflow(self) -> None:
        self.fail(StreamTooLarge(f"the output passed {STREAM_BYTES_MAX >> 20} MiB, the most one stream may hold"))
        self._too_large(self.work.request.stream)
