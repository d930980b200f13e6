"""Repetition of a stream whose producer died in reasoning, a tool call or a guided format. No I/O.

No server can be asked to continue those, nor a completion whose prompt is token ids or that echoes its prompt. A
request that fixes its output, by temperature 0 or a seed, is asked again from its beginning. The output that the log
already has is compared and dropped, and the stream goes on where it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inference.agent.continuation import (
    CannotContinue,
    PriorOutput,
    check_continuable,
    check_template,
    is_finished,
    prior_output,
)
from inference.agent.running import RunningStream
from inference.engines.upstream.logprobs import drop_tokens
from stream_fabric.errors import ReplicaLost
from stream_fabric.limits import REPEATED_TOKENS_MAX
from stream_fabric.pool.records import EngineRequest, Loaded
from stream_fabric.ports import Engine
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    ErrorInfo,
    Frame,
    Note,
    Open,
    TerminalStatus,
    Usage,
    decode,
)


@dataclass(slots=True)
class PriorBlock:
    """A block of the log. ``left`` and ``tokens`` count down while the engine repeats it."""

    begin: Open
    left: str = ""
    tokens: int = 0
    closed: bool = False


@dataclass(slots=True)
class PriorAnswer:
    """The output of a stream that its log holds, block by block."""

    choices: int
    blocks: list[PriorBlock] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int | None = None
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    """Ends of the choices that have ended, the last one last."""

    @property
    def end(self) -> ChoiceEnd | None:
        """The last end, if all choices have ended: only the stream's terminal is missing."""
        return list(self.ends.values())[-1] if len(self.ends) == self.choices else None

    @property
    def left_open(self) -> list[int]:
        """Numbers of the open blocks."""
        return [block.begin.block for block in self.blocks if not block.closed]

    @property
    def ended(self) -> list[int]:
        """Choices that have ended."""
        return list(self.ends)


def can_repeat(request: EngineRequest, tokens: int) -> bool:
    """Whether the request fixes its output, of which the log has so many tokens."""
    if request.kind not in ("chat", "completions") or tokens > REPEATED_TOKENS_MAX:
        return False
    body: dict[str, Any] = msgspec.json.decode(request.body)
    return body.get("temperature") == 0 or type(body.get("seed")) is int


def read_prior(request: EngineRequest, lines: Sequence[bytes], loaded: Loaded) -> PriorOutput | PriorAnswer:
    """Read from a stream's frames what can be continued, or else repeated. Raises CannotContinue."""
    try:
        before = prior_output(lines, request.choices)
        if not before.empty and not all(is_finished(request, choice) for choice in before.choices):
            check_continuable(request)
            check_template(request, loaded)
        return before
    except CannotContinue as reason:
        return prior_answer(request, lines, reason)


def prior_answer(request: EngineRequest, lines: Sequence[bytes], reason: CannotContinue) -> PriorAnswer:
    """Read the output to repeat from a stream's frames. Raises ``reason`` if it is not whole and cannot be repeated."""
    found = PriorAnswer(request.choices)
    texts: list[list[str]] = []
    for line in lines:
        match decode(line):
            case Note(kind="prompt", prompt_tokens=prompt_tokens):
                found.prompt_tokens = prompt_tokens
            case Open() as begin:
                found.blocks.append(PriorBlock(begin))
                texts.append([])
            case Delta(block=number, text=text, tokens=tokens):
                texts[number].append(text)
                found.blocks[number].tokens += tokens
                found.tokens += tokens
            case Close(block=number):
                found.blocks[number].closed = True
            case ChoiceEnd() as end:
                found.ends[end.choice] = end
    if found.end is None and not can_repeat(request, found.tokens):
        raise reason
    for block, parts in zip(found.blocks, texts, strict=True):
        block.left = "".join(parts)
    return found


class RepeatingSink:
    """Passes on what is new in the output of a repeated request. Another output than that of the log is an error."""

    def __init__(self, stream: RunningStream, before: PriorAnswer, engine: Engine) -> None:
        self._stream = stream
        self._before = before
        self._engine = engine
        self._next = len(before.blocks)
        self._left: list[list[PriorBlock]] = [[] for _ in range(before.choices)]
        """Blocks of each choice that the engine has not begun to repeat."""
        for block in before.blocks:
            self._left[block.begin.choice].append(block)
        self._blocks: dict[int, tuple[int, PriorBlock | None]] = {}
        """For each block of the engine its number in the stream, and what of it is left to compare."""

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self._text(block, text, tokens, None)

    def _text(self, block: int, text: str, tokens: int, logprobs: msgspec.Raw | None) -> None:
        number, prior = self._blocks[block]
        if prior is not None:
            if self._stream.first_at is None:  # the prompt is computed
                self._stream.owner.on_first_token(self._stream)
            same = min(len(text), len(prior.left))
            if text[:same] != prior.left[:same]:
                self._fail()
                return
            prior.left, prior.tokens, text = prior.left[same:], prior.tokens - tokens, text[same:]
            if not text:
                return
            if prior.closed:
                self._fail()
                return
            new = max(-prior.tokens, 0)
            if logprobs is not None:
                logprobs = drop_tokens(logprobs, tokens - new)
            tokens = new
            self._blocks[block] = number, None
        if logprobs is None:
            self._stream.text(number, text, tokens)
        else:
            self._stream.frame(Delta(number, text, tokens, logprobs))

    def frame(self, frame: Frame) -> None:
        match frame:
            case Note(kind="prompt"):
                return  # the first producer has written it
            case Open():
                self._open(frame)
            case Delta(block=block, text=text, tokens=tokens, logprobs=logprobs):
                self._text(block, text, tokens, logprobs)
            case Close(block=block):
                number, prior = self._blocks[block]
                if prior is not None and prior.left:
                    self._fail()
                elif prior is None or not prior.closed:
                    self._stream.frame(msgspec.structs.replace(frame, block=number))
            case ChoiceEnd(choice=choice):
                if self._left[choice]:
                    self._fail()
                elif choice not in self._before.ends:
                    self._stream.frame(frame)
            case _:
                self._stream.frame(frame)

    def _open(self, frame: Open) -> None:
        """Compare a block with that of the log, whose call keeps its id, or begin a new one."""
        left = self._left[frame.choice]
        if not left:
            self._blocks[frame.block] = self._next, None
            if frame.choice in self._before.ends:
                self._fail()
            self._stream.frame(msgspec.structs.replace(frame, block=self._next))
            self._next += 1
            return
        prior = left.pop(0)
        known = prior.begin
        if (frame.kind, frame.form, frame.name) != (known.kind, known.form, known.name):
            self._fail()
        self._blocks[frame.block] = known.block, prior

    def _fail(self) -> None:
        """End the stream: the engine has not repeated the output of the log."""
        message = "the replica that produced this stream died, and its output came out differently; retry the request"
        self._stream.fail(ReplicaLost(message))
        self._stream.abort(self._engine)

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self._stream.usage(prompt, cached, written, reasoning)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self._stream.computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        self._stream.end(status, error, usage)
