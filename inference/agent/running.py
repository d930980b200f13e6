"""One stream on its engine: the sink the engine writes to, in front of the stream's producer."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Protocol

from inference.agent.times import Times
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
from stream_fabric.limits import (
    FLUSH_BYTES_MAX,
    FLUSH_FRAMES_MAX,
    FRAME_BYTES_MAX,
    STREAM_BYTES_MAX,
)
from stream_fabric.producer import Producer
from stream_fabric.redis.pool import Work

# A character takes at most 6 bytes in a JSON string
_TEXT_CHARS_MAX = FRAME_BYTES_MAX // 8


class Owner(Protocol):
    """Who hears of a stream. Calls come from within the engine's calls, so they only take note."""

    def on_first_token(self, stream: RunningStream) -> None: ...

    def on_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None:
        """The engine has told the prompt's length and how much of it was cached."""

    def on_failure(self, stream: RunningStream, error: ErrorInfo) -> bool:
        """The engine has failed it. True: it will be tried elsewhere, and this is not its end."""

    def on_too_large(self, stream: RunningStream) -> None: ...


class RunningStream:
    """``FrameSink`` of one request. ``dirty(self, urgent)`` tells the pump that there is something to append."""

    __slots__ = (
        "_dirty",
        "_owner",
        "believed_blocks",
        "closed",
        "company_s",
        "crowded",
        "deadline",
        "error_code",
        "finish_reason",
        "first_at",
        "handed_over",
        "hashes",
        "inputs_seen",
        "matched_tokens",
        "metered_tokens",
        "partition",
        "producer",
        "started_at",
        "times",
        "tokens",
        "work",
    )

    def __init__(
        self,
        work: Work,
        partition: int,
        dirty: Callable[[RunningStream, bool], None],
        owner: Owner,
        started_at: float,
        times: Times,
    ) -> None:
        self.work = work
        self.times = times
        self.partition = partition
        self.producer = Producer(work.request.stream, work.parsed_epoch(), work.base)
        self._dirty = dirty
        self._owner = owner
        self.tokens = 0
        """Output tokens of the whole stream."""
        self.closed = False
        self.deadline: asyncio.TimerHandle | None = None
        self.inputs_seen: set[str] = set()
        self.started_at = started_at
        self.first_at: float | None = None
        """When its first token came, on the loop's clock; here, not of an earlier producer."""
        self.hashes = array("I", work.prefix)
        self.believed_blocks = 0
        self.matched_tokens = 0
        self.metered_tokens = 0
        self.company_s = 0.0
        """What all sequences here had decoded by its first token, in seconds."""
        self.crowded = False
        """It came when the engine had no slot free."""
        self.handed_over = False
        """On its way to another replica."""
        self.finish_reason = ""
        self.error_code = ""

    def take_over(self, used: Usage) -> None:
        """Before any frame: what the producers before this one had used."""
        self.tokens = used.output
        self.producer.receive_used(used)

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        if self.closed:
            return
        if len(text) > _TEXT_CHARS_MAX:
            self.text(block, text[:_TEXT_CHARS_MAX], 0)
            self.text(block, text[_TEXT_CHARS_MAX:], tokens)
            return
        first = self.first_at is None
        self.tokens += tokens
        self.times.receive_tokens(tokens)
        producer = self.producer
        producer.push(encode_text(block, text, tokens), tokens)
        if first:
            self._owner.on_first_token(self)
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
        first = self.first_at is None and tokens > 0
        self.tokens += tokens
        if tokens:
            self.times.receive_tokens(tokens)
        elif isinstance(frame, ChoiceEnd):
            self.finish_reason = frame.finish_reason
        structural = isinstance(frame, Open | ChoiceEnd) or (isinstance(frame, Note) and frame.kind == "prompt")
        self.producer.push(line, tokens, structural=structural)
        if first:
            self._owner.on_first_token(self)
        self._dirty(self, first or len(line) > FLUSH_BYTES_MAX or isinstance(frame, Note))
        if self.producer.bytes_held > STREAM_BYTES_MAX:
            self._overflow()

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self.producer.usage = Usage(prompt, cached, written, self.tokens, reasoning)
        self._owner.on_prompt(self, prompt, cached)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self.times.receive_computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if self.closed:
            return
        if error is not None and self._owner.on_failure(self, error):
            return
        u = self.producer.usage
        self._finish(status, error, usage or Usage(u.prompt, u.cached, u.written, self.tokens, u.reasoning))

    def fail(self, error: StreamGwError) -> None:
        """End for a reason that is not the engine's to tell."""
        if not self.closed:
            u = self.producer.usage
            used = Usage(u.prompt, u.cached, u.written, self.tokens, u.reasoning)
            self._finish("failed", ErrorInfo.of(error), used)

    def _finish(self, status: TerminalStatus, error: ErrorInfo | None, usage: Usage) -> None:
        self.closed = True
        self.error_code = error.code if error is not None else ""
        self.times.receive_end()
        self.producer.finish(End(status, usage, error, self.times.timing()))
        self._dirty(self, True)

    def _overflow(self) -> None:
        self.fail(StreamTooLarge(f"the output passed {STREAM_BYTES_MAX >> 20} MiB, the most one stream may hold"))
        self._owner.on_too_large(self)
