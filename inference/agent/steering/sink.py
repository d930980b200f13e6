"""A ``FrameSink`` between the engine and its stream, for an answer after the first one."""

from __future__ import annotations

import msgspec

from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import Close, Delta, ErrorInfo, Frame, Open, TerminalStatus, Usage


class SteeredSink:
    """Numbers the answer's blocks from ``first_block`` on, and adds the usage of the answers before."""

    def __init__(self, sink: FrameSink, first_block: int, before: Usage) -> None:
        self._sink = sink
        self._first_block = first_block
        self._before = before
        self._dropped = False

    def drop(self) -> None:
        """Take nothing more of this answer."""
        self._dropped = True

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        if not self._dropped:
            self._sink.text(block + self._first_block, text, tokens)

    def frame(self, frame: Frame) -> None:
        if self._dropped:
            return
        if isinstance(frame, Open | Delta | Close):
            frame = msgspec.structs.replace(frame, block=frame.block + self._first_block)
        self._sink.frame(frame)

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        if not self._dropped:
            b = self._before
            self._sink.usage(b.prompt + prompt, b.cached + cached, b.written + written, b.reasoning + reasoning)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        """Take nothing: an attempt's times are those of its first answer."""

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if not self._dropped:
            self._sink.end(status, error, None if usage is None else self._before.plus(usage))
