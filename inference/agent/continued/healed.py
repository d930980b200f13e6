"""Continuation from the last word's beginning, where a text may end within a token.

A server that looks for stop strings holds back as many characters as one may have begun with. The log's text then ends
anywhere, and a model that reads half a word goes on badly. So the engine repeats the last word, which is compared and
dropped. If the word comes out differently, the engine is asked to continue the whole text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from inference.agent.continuation import Part
from inference.agent.running import RunningStream
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import Engine, FrameSink
from stream_fabric.stream.frames import Delta, ErrorInfo, Frame, Note, Open, TerminalStatus, Usage

Ask = Callable[[RunningStream, EngineRequest, FrameSink], None]
"""Asks the engine of this replica; its failure ends the stream."""


def ask_for_rest(stream: RunningStream, part: Part, sink: FrameSink, engine: Engine, ask: Ask) -> None:
    """Ask the engine for the rest of one choice."""
    whole = part.whole
    if whole is None:
        ask(stream, part.request, sink)
        return

    def ask_for_whole() -> None:
        if not stream.closed:
            ask(stream, whole, sink)

    def otherwise() -> None:
        engine.abort(part.request.stream)
        asyncio.get_running_loop().call_soon(ask_for_whole)  # the engine is in the middle of its output

    ask(stream, part.request, HealedSink(sink, part.tail, part.tail_tokens, otherwise))


class HealedSink:
    """Drops the ``tail`` of the stream's text from an engine's output. ``otherwise``: called once for another output.

    Nothing but counts has been passed on until then.
    """

    def __init__(self, sink: FrameSink, tail: str, tail_tokens: int, otherwise: Callable[[], None]) -> None:
        self._sink = sink
        self._left = tail
        self._tail_tokens = tail_tokens
        self._otherwise = otherwise
        self._begun: Open | None = None
        """The text's block, until there is something to pass on."""
        self._dropped = 0
        """Tokens of the dropped text, which the earlier producer has counted."""
        self._differs = False

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        if self._differs:
            return
        same = min(len(text), len(self._left))
        if text[:same] != self._left[:same]:
            self._give_up()
            return
        self._left, text = self._left[same:], text[same:]
        if same and not text:
            self._dropped += tokens
            return
        if same:  # the end of the tail and new text came together
            again = min(max(self._tail_tokens - self._dropped, 0), tokens - 1)
            self._dropped += again
            tokens -= again
        self._pass_block()
        self._sink.text(block, text, tokens)

    def frame(self, frame: Frame) -> None:
        if self._differs:
            return
        if isinstance(frame, Open) and frame.kind == "text" and self._left:
            self._begun = frame
        elif isinstance(frame, Delta) and self._left:
            self.text(frame.block, frame.text, frame.tokens)
        elif self._left and not isinstance(frame, Note):
            self._give_up()
        else:
            self._pass_block()
            self._sink.frame(frame)

    def _pass_block(self) -> None:
        if self._begun is not None and not self._left:
            self._sink.frame(self._begun)
            self._begun = None

    def _give_up(self) -> None:
        self._differs = True
        self._otherwise()

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self._sink.usage(prompt, cached, written, reasoning)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self._sink.computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if self._differs:
            return
        if usage is not None:
            usage = msgspec.structs.replace(usage, output=max(usage.output - self._dropped, 0))
        self._sink.end(status, error, usage)
