"""Continuation of a stream whose producer died: its output so far, and the request for the rest. No I/O.

The engine is asked to continue a text: with ``continue_final_message`` of vLLM and SGLang, or with a longer prompt for
plain completions. Frames that the stream already has are removed from the engine's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import FrameSink
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

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "regex")


class CannotContinue(Exception):
    """No replica can continue the stream; the message is the reason, as the second half of a sentence."""


class PriorOutput(msgspec.Struct, frozen=True):
    """The output that a stream's log holds from earlier producers."""

    text: str = ""
    tokens: int = 0
    block: int = -1
    """Number of the open text block; -1: there is no output yet."""
    prompt_tokens: int | None = None
    complete: bool = False
    """Every choice has ended; only the terminal is missing."""
    finish_reason: str = ""
    """Finish reason of the choice that ended last."""

    @property
    def empty(self) -> bool:
        return self.block < 0 and not self.complete


def prior_output(lines: Sequence[bytes], choices: int) -> PriorOutput:
    """Read a stream's output so far from its frames. Raises CannotContinue when it is more than one plain text."""
    text: list[str] = []
    tokens, block, ended, finish_reason = 0, -1, 0, ""
    prompt_tokens: int | None = None
    for line in lines:
        match decode(line):
            case Note(kind="prompt", prompt_tokens=prompt_tokens):
                pass
            case Open(block=number, kind=kind) if block < 0 and kind == "text" and choices == 1:
                block = number
            case Open(kind=kind):
                raise CannotContinue(f"it has begun a block of kind {kind} beside or before its text")
            case Delta(logprobs=None, text=part, tokens=count):
                text.append(part)
                tokens += count
            case Delta():
                raise CannotContinue("it carries logprobs")
            case ChoiceEnd(finish_reason=finish_reason):
                ended += 1
            case Close() if not ended:
                pass
    complete = ended == choices
    if not complete and lines and _ends_with_close(lines):
        raise CannotContinue("its text had ended without a finish reason")
    return PriorOutput("".join(text), tokens, block, prompt_tokens, complete, finish_reason)


def _ends_with_close(lines: Sequence[bytes]) -> bool:
    """Whether the last frame closes a block."""
    return isinstance(decode(lines[-1]), Close)


def continuing_request(request: EngineRequest, before: PriorOutput) -> EngineRequest:
    """Return the request for the output that is still missing. Raises CannotContinue."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    _check_continuable(request, body)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if body.get(name):
            body[name] = max(body[name] - before.tokens, 0 if name == "min_tokens" else 1)
    if request.kind == "chat":
        body["messages"] = [*body["messages"], {"role": "assistant", "content": before.text}]
        body["continue_final_message"] = True
        body["add_generation_prompt"] = False
    else:
        prompt = body["prompt"]
        text = prompt if isinstance(prompt, str) else prompt[0]  # one prompt, or a list of token ids
        if not isinstance(text, str):
            raise CannotContinue("its prompt is token ids")
        body["prompt"] = text + before.text
    return msgspec.structs.replace(request, body=msgspec.Raw(msgspec.json.encode(body)))


def can_continue(request: EngineRequest, structure: Sequence[bytes]) -> bool:
    """Whether another replica could continue a stream with these structural frames."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    try:
        continuing_request(request, prior_output(structure, body.get("n") or 1))
    except CannotContinue:
        return False
    return True


def limit_reached(request: EngineRequest, before: PriorOutput) -> bool:
    """Whether the stream has all the output tokens that the request allows."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return limit is not None and before.tokens >= limit


def _check_continuable(request: EngineRequest, body: dict[str, Any]) -> None:
    """Raise CannotContinue for a request whose output no replica could continue."""
    if request.kind not in ("chat", "completions"):
        raise CannotContinue(f"responses of kind {request.kind} are produced at once")
    if (body.get("n") or 1) != 1:
        raise CannotContinue("it has more than one choice")
    if body.get("logprobs") not in (None, False):
        raise CannotContinue("it carries logprobs")
    form = body.get("response_format") or {"type": "text"}  # the client's JSON: it may be anything
    if not isinstance(form, dict) or form.get("type") != "text" or any(body.get(name) for name in _GUIDED):
        raise CannotContinue("it has a guided output format")
    if body.get("echo"):
        raise CannotContinue("it echoes its prompt")
    if request.kind == "chat" and body["messages"][-1].get("role") == "assistant":
        raise CannotContinue("its last message is an assistant's already")


class ContinuingSink:
    """Adapts the engine's output to a continued stream: the first text goes on in the open block."""

    def __init__(self, sink: FrameSink, before: PriorOutput) -> None:
        self._sink = sink
        self._before = before
        self._begun = False

    def _stream_block(self, number: int) -> int:
        """Return the block's number in the stream, from its ``number`` in the engine's output."""
        return self._before.block + number

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self._sink.text(self._stream_block(block), text, tokens)

    def frame(self, frame: Frame) -> None:
        match frame:
            case Note(kind="prompt"):
                return  # the first producer has written it
            case Open(block=0, kind="text") if not self._begun:
                self._begun = True
                return
            case Open(block=0):
                # The output goes on with another kind of block: close the text, and number the blocks after it
                self._sink.frame(Close(self._before.block))
                self._before = msgspec.structs.replace(self._before, block=self._before.block + 1)
                self._begun = True
                frame = msgspec.structs.replace(frame, block=self._stream_block(0))
            case Open(block=block) | Delta(block=block) | Close(block=block):
                frame = msgspec.structs.replace(frame, block=self._stream_block(block))
            case ChoiceEnd() if not self._begun:
                self._begun = True
                self._sink.frame(Close(self._before.block))
        self._sink.frame(frame)

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        own = self._client_prompt_tokens(prompt)
        self._sink.usage(own, min(cached, own), written, reasoning)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self._sink.computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if usage is not None:
            own = self._client_prompt_tokens(usage.prompt)
            usage = msgspec.structs.replace(
                usage, prompt=own, cached=min(usage.cached, own), output=usage.output + self._before.tokens
            )
        self._sink.end(status, error, usage)

    def _client_prompt_tokens(self, prompt: int) -> int:
        """Return the tokens of the client's prompt, without the output that was appended to the prompt."""
        known = self._before.prompt_tokens
        return max(prompt - self._before.tokens, 0) if known is None else known
