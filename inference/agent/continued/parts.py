"""The parts of a continued completion of several prompts: requests whose outputs are joined to one. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from inference.agent.continuation import Part
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, ErrorInfo, Frame, Note, Open, TerminalStatus, Usage


class JoinedParts:
    """Joins the output of several requests to the engine to that of one. ``abort`` aborts all of them."""

    def __init__(self, sink: FrameSink, parts: Sequence[Part], abort: Callable[[], None]) -> None:
        self.sink = sink
        self._abort = abort
        self._counts = [Usage()] * len(parts)
        self._ends: list[Usage | None] = []
        self._blocks = 0
        self.ended = False
        self.sinks = [_PartSink(self, number, part.choice) for number, part in enumerate(parts)]

    def new_block(self) -> int:
        self._blocks += 1
        return self._blocks - 1

    def count(self, number: int, usage: Usage) -> None:
        """Take the token counts of one part until now."""
        self._counts[number] = usage
        total = _sum(self._counts)
        self.sink.usage(total.prompt, total.cached, total.written, total.reasoning)

    def end(self, status: TerminalStatus, error: ErrorInfo | None, usage: Usage | None) -> None:
        """Take the end of one part. The first failure ends all of them."""
        if self.ended:
            return
        self._ends.append(usage)
        if status == "completed" and len(self._ends) < len(self.sinks):
            return
        self.ended = True
        if status == "completed":
            known = [usage for usage in self._ends if usage is not None]
            self.sink.end("completed", usage=_sum(known) if len(known) == len(self._ends) else None)
        else:
            self.sink.end(status, error)
            self._abort()


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(*map(sum, zip(*map(msgspec.structs.astuple, usages), strict=True)))


class _PartSink:
    """The ``FrameSink`` of one part, whose only choice is ``choice`` of the stream."""

    def __init__(self, parts: JoinedParts, number: int, choice: int) -> None:
        self._parts = parts
        self._number = number
        self._choice = choice
        self._blocks: dict[int, int] = {}

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self._parts.sink.text(self._blocks[block], text, tokens)

    def frame(self, frame: Frame) -> None:
        match frame:
            case Note(kind="prompt"):
                return
            case Open(block=block):
                self._blocks[block] = self._parts.new_block()
                frame = msgspec.structs.replace(frame, block=self._blocks[block], choice=self._choice)
            case Delta(block=block) | Close(block=block):
                frame = msgspec.structs.replace(frame, block=self._blocks[block])
            case ChoiceEnd():
                frame = msgspec.structs.replace(frame, choice=self._choice)
        self._parts.sink.frame(frame)

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self._parts.count(self._number, Usage(prompt, cached, written, 0, reasoning))

    def computed(self, queue_s: float, prefill_s: float) -> None:
        """Drop the times of one part: they are not those of the stream."""

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        self._parts.end(status, error, usage)
