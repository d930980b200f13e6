"""One stream on the engine: takes the engine's output and puts frames into the stream's producer."""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from inference.agent.budgets.allowance import NO_BUDGET, Allowance
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.steering.layers import Droppable
from inference.agent.steering.turns import Turn
from stream_fabric.errors import StreamGwError, StreamTooLarge
from stream_fabric.limits import (
    FLUSH_BYTES_MAX,
    FLUSH_FRAMES_MAX,
    FRAME_BYTES_MAX,
    STREAM_BYTES_MAX,
)
from stream_fabric.pool.records import Work
from stream_fabric.ports import Engine
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
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
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import Unwatched
from stream_fabric.stream.producer import Outcome, Producer

# A character takes at most 6 bytes in a JSON string
_TEXT_CHARS_MAX = FRAME_BYTES_MAX // 8
_CLOSING_REASONS = ("stop", "length")
"""Reasons after which an input that waits makes another answer follow."""


class Urgency(enum.Enum):
    """How long a frame may wait for others, to leave in the same append."""

    LOW = 0
    """For the next append of its partition, or a moment: a note, which no reader waits for."""
    NORMAL = 1
    """For the flush floor."""
    HIGH = 2
    """Not at all: a first token, an end."""


class StreamOwner(Protocol):
    """Reacts to what happens to a stream. The engine waits in these calls: they must return at once."""

    def on_first_token(self, stream: RunningStream) -> None: ...

    def on_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None:
        """Take the length of the prompt and how much of it was cached, as the engine reported."""

    def on_failure(self, stream: RunningStream, error: ErrorInfo) -> bool:
        """Handle an error of the engine. True: another replica continues the stream, so it does not end here."""

    def on_too_large(self, stream: RunningStream) -> None:
        """Abort the engine's request, because the output passed the maximum size and the stream has failed."""

    def on_budget_used(self, stream: RunningStream, question: tuple[int, int]) -> None:
        """Ask the tenant's account for more output tokens; ``receive_grant`` takes the reply."""

    def on_budget_spent(self, stream: RunningStream) -> None:
        """Abort the engine's request, because a budget has ended the stream."""

    def on_outcome(self, stream: RunningStream, outcome: Outcome) -> None:
        """Do what the log's reply asks for. ``outcome`` is not empty."""

    def on_unwatched(self, stream: RunningStream, why: Unwatched, for_s: float) -> None:
        """Cancel the stream when its grace period ends: nobody has watched it ``for_s`` seconds."""


class CurrentAnswer(NamedTuple):
    """The answer that is being made. A stream has one, and one more for each input that was applied."""

    turns: tuple[Turn, ...] = ()
    seen: frozenset[str] = frozenset()
    """Inputs that were applied or refused."""
    start: int = -1
    """Last frame of this producer before the answer; -1: all its frames belong to it."""
    earlier: tuple[bytes, ...] = ()
    """Frames of the answer that an earlier producer wrote."""
    next_block: int = 0
    """Number of the next block, if the answer opens none."""


NO_INPUTS = CurrentAnswer()


class RunningStream:
    """The ``FrameSink`` of one request. ``dirty(stream, urgency)`` tells the pump that there are frames to append."""

    __slots__ = (
        "_ask_at",
        "_dirty",
        "allowance",
        "answer",
        "believed_blocks",
        "closed",
        "deadline",
        "decode_seconds_before",
        "engine_names",
        "error_code",
        "finish_reason",
        "first_at",
        "handed_over",
        "hashes",
        "layers",
        "matched_tokens",
        "metered_tokens",
        "name",
        "owner",
        "partition",
        "prior",
        "producer",
        "reported",
        "started_at",
        "timing",
        "tokens",
        "unwatched",
        "waits_in_engine",
        "work",
        "yielded",
    )

    def __init__(
        self,
        work: Work,
        partition: int,
        dirty: Callable[[RunningStream, Urgency], None],
        owner: StreamOwner,
        started_at: float,
        timing: AttemptTiming,
    ) -> None:
        self.work = work
        self.name = work.request.stream
        self.engine_names: Sequence[StreamId] = (self.name,)
        """Names of its requests on the engine; a continued stream may have several."""
        self.timing = timing
        self.partition = partition
        self.producer = Producer(self.name, work.parsed_epoch(), work.base)
        self.prior: Sequence[bytes] = ()
        """Frames that earlier producers wrote, one JSON line each, in case Redis loses them."""
        self._dirty = dirty
        self.owner = owner
        self.tokens = 0
        """Output tokens of the whole stream, those of earlier producers included."""
        self.closed = False
        """True when the engine's output is no longer taken."""
        self.deadline: asyncio.TimerHandle | None = None
        self.unwatched: asyncio.TimerHandle | None = None
        """Cancels the stream at the end of its grace period, unless somebody watches it again."""
        self.answer = NO_INPUTS
        """The answer that is being made, and what came before it."""
        self.layers: tuple[Droppable, ...] = ()
        """Sinks between the engine and this one that hold output back, or change it."""
        self.started_at = started_at
        self.first_at: float | None = None
        """Time of the first token made on this replica, on the loop's clock."""
        self.hashes = array("I", work.prefix)
        self.believed_blocks = 0
        self.matched_tokens = 0
        self.metered_tokens = 0
        self.decode_seconds_before = 0.0
        """Sequence-seconds that this replica had decoded before the stream's first token."""
        self.waits_in_engine = False
        """Its prompt waited in the engine: for a slot when it started, or for room in the KV cache."""
        self.handed_over = False
        """Another replica continues the stream, or will."""
        self.yielded = False
        """The stream waits in the queue, or will, because higher tiers need its slot."""
        self.reported = False
        """The event of this attempt was emitted, with the stream's bill if the attempt ended it."""
        self.finish_reason = ""
        self.error_code = ""
        self.allowance: Allowance | None = None
        """Output that the stream's budgets allow; None: it has no budgets."""
        self._ask_at = NO_BUDGET
        """Output tokens above which the allowance sees each frame first."""

    def limit(self, allowance: Allowance) -> None:
        """Hold the stream to what its budgets allow. Must come before the first frame."""
        self.allowance, self._ask_at = allowance, allowance.ask_at

    def take_over(self, used: Usage, blocks: Iterable[int] = (), ended: Iterable[int] = (), before: int = 0) -> None:
        """Set the usage of the frames so far, the blocks that they left open, and the choices that have ended.

        ``before``: output tokens of the answers that inputs have cut. Comes before any frame, and after the usage that
        earlier producers have reported: that counts replies, too, which no frame tells.
        """
        self.tokens = used.output
        self.producer.usage = used
        if self.allowance is not None:
            self.allowance.begin_answer(before)
            self.allowance.take_over(blocks, ended)
            self._ask_at = self.allowance.ask_at

    @property
    def structure(self) -> list[bytes]:
        """Structural frames, after those that an earlier producer wrote of the answer."""
        return [*self.answer.earlier, *(line for _, line in self.producer.structure)]

    def abort(self, engine: Engine) -> None:
        """Stop the stream's requests on the engine."""
        for name in self.engine_names:
            engine.abort(name)

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        if self.closed:
            return
        if self.tokens + tokens > self._ask_at and self._is_held(Delta(block, text, tokens), len(text)):
            return
        if len(text) > _TEXT_CHARS_MAX:
            for at in range(0, len(text), _TEXT_CHARS_MAX):
                is_last = at + _TEXT_CHARS_MAX >= len(text)
                self.text(block, text[at : at + _TEXT_CHARS_MAX], tokens if is_last else 0)
            return
        first = self.first_at is None
        self.tokens += tokens
        self.timing.receive_tokens(tokens)
        producer = self.producer
        producer.push(encode_text(block, text, tokens), tokens)
        if first:
            self.owner.on_first_token(self)
        # Later tokens wait for the flush floor unless a batch is full
        self._dirty(self, Urgency.HIGH if first or producer.pending >= FLUSH_FRAMES_MAX else Urgency.NORMAL)
        if producer.bytes_held > STREAM_BYTES_MAX:
            self._fail_too_large()

    def frame(self, frame: Frame) -> None:
        if self.closed:
            return
        tokens = frame.tokens if isinstance(frame, Delta) else 0
        line = encode(frame)
        if self.tokens + tokens > self._ask_at and self._is_held(frame, len(line)):
            return
        if self.allowance is not None:
            self.allowance.observe(frame)
        if len(line) > FRAME_BYTES_MAX:
            self._fail_too_large()
            return
        first = self.first_at is None and tokens > 0
        self.tokens += tokens
        if tokens:
            self.timing.receive_tokens(tokens)
        elif isinstance(frame, ChoiceEnd):
            self.finish_reason = frame.finish_reason
        answers = isinstance(frame, Note) and frame.kind == "input"
        if answers:
            self.producer.push_answer(line, structural=False)
        else:
            structural = isinstance(frame, Open | ChoiceEnd) or (isinstance(frame, Note) and frame.kind == "prompt")
            closes = isinstance(frame, ChoiceEnd) and frame.finish_reason in _CLOSING_REASONS
            self.producer.push(line, tokens, structural=structural, closes=closes)
        if first:
            self.owner.on_first_token(self)
        if first or answers or len(line) > FLUSH_BYTES_MAX:
            urgency = Urgency.HIGH
        else:
            urgency = Urgency.LOW if isinstance(frame, Note) else Urgency.NORMAL
        self._dirty(self, urgency)
        if self.producer.bytes_held > STREAM_BYTES_MAX:
            self._fail_too_large()

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self.producer.usage = Usage(prompt, cached, written, self.tokens, reasoning)
        if not self.answer.turns:  # else it is the sum of several prompts
            self.owner.on_prompt(self, prompt, cached)
        if self.allowance is not None:
            self.allowance.receive_prompt(prompt)
            self._ask_for_more(self.allowance)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self.timing.receive_computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if self.closed:
            return
        if error is not None and self.owner.on_failure(self, error):
            return
        if self.allowance is not None and self.allowance.holds_all and self._is_held(End(status, usage, error), 0):
            return
        self._finish(status, error, self._used(usage))

    def _used(self, engine: Usage | None = None) -> Usage:
        """Return the engine's own counts, or the usage so far with the output tokens of the frames."""
        if engine is None:
            u = self.producer.usage
            return Usage(u.prompt, u.cached, u.written, self.tokens, u.reasoning)
        if self.allowance is not None:  # the engine counts tokens without text too
            return msgspec.structs.replace(engine, output=min(engine.output, self.allowance.granted))
        return engine

    def fail(self, error: StreamGwError) -> None:
        """End the stream with an error that did not come from the engine."""
        if not self.closed:
            self._finish("failed", ErrorInfo.of(error), self._used())

    # --- inputs --------------------------------------------------------------------------------------------

    def begin_answer(self, open_blocks: Sequence[int], notes: Sequence[Note], inputs: int) -> Usage:
        """Cut the answer here and let another one follow. Returns the usage until now.

        ``notes``: those of the inputs that are applied. ``inputs``: number of all inputs until now. What waits for a
        budget was not said, and is dropped.
        """
        has_ended = bool(self.producer.status)
        if self.producer.is_held:
            self.producer.take_back_end()
            self.closed, self.finish_reason, self.error_code = False, "", ""
        self.timing.receive_cut()
        self.producer.receive_inputs(inputs)
        used = self.producer.usage if has_ended else self._used()
        if self.allowance is not None:
            self.allowance.begin_answer(self.tokens)
            self._ask_at = self.allowance.ask_at
        for block in open_blocks:
            self.producer.push(encode(Close(block)))
        for note in notes:
            self.producer.push_answer(encode(note), structural=True)
        self._dirty(self, Urgency.HIGH)
        return used

    def append_end(self) -> None:
        """Append the end of the answer that the log has refused: no input is applied after all."""
        self._dirty(self, Urgency.HIGH)

    # --- budgets -------------------------------------------------------------------------------------------

    def _is_held(self, frame: Frame, size: int) -> bool:
        """Let the allowance keep a frame that has to wait, and ask for more. False: the frame need not wait."""
        allowance = self.allowance
        if allowance is None:
            return False
        held = allowance.hold(frame, self.tokens, size)
        self._ask_for_more(allowance)
        if held and allowance.held_bytes + self.producer.bytes_held > STREAM_BYTES_MAX:
            self._fail_too_large()
        return held

    def _ask_for_more(self, allowance: Allowance) -> None:
        question = allowance.question(self.tokens)
        if question is not None:
            self.owner.on_budget_used(self, question)
        self._ask_at = allowance.ask_at

    def receive_grant(self, question: tuple[int, int], granted: int) -> None:
        """Take the reply to a question: append what waited for it, or end the stream at its grant."""
        allowance = self.allowance
        if allowance is None:
            return
        allowance.receive_reply(question, granted)
        if self.closed:  # an input may take the end back
            return
        self._ask_at = NO_BUDGET  # for the frames that are released
        while not self.closed and (frame := allowance.release(self.tokens)) is not None:
            match frame:
                case End(status=status, usage=usage, error=error):
                    self._finish(status, error, self._used(usage))
                case Delta(block=block, text=text, tokens=tokens, logprobs=None):
                    self.text(block, text, tokens)
                case _:
                    self.frame(frame)
        if self.closed:
            return
        allowance.finish_release()
        if not allowance.denied:
            self._ask_for_more(allowance)
            return
        for closing in allowance.closing_frames():
            self.frame(closing)
        self._finish("incomplete", None, self._used())
        self.owner.on_budget_spent(self)

    def _finish(self, status: TerminalStatus, error: ErrorInfo | None, usage: Usage) -> None:
        self.closed = True
        if error is not None:
            self.error_code = error.code
        self.timing.receive_end()
        self.producer.finish(End(status, usage, error, self.timing.summary()))
        self._dirty(self, Urgency.HIGH)

    def _fail_too_large(self) -> None:
        self.fail(StreamTooLarge(f"the output exceeds {STREAM_BYTES_MAX >> 20} MiB, the maximum size of a stream"))
        self.owner.on_too_large(self)
