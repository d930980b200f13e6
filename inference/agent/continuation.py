"""Going on with a stream whose producer died: what it has said, whether it can go on, and how to ask for the rest.

Sans I/O. An engine is asked to continue a text (``continue_final_message`` of vLLM and SGLang, a longer prompt for
plain completions); what its output would spell a second time is taken out on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stream_fabric.frames import ChoiceEnd, Close, Delta, ErrorInfo, Frame, Note, Open, TerminalStatus, Usage, decode
from stream_fabric.ports import EngineRequest, FrameSink

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar", "regex")


class CannotContinue(Exception):
    """Says why."""


class Said(msgspec.Struct, frozen=True):
    """What a stream's log holds before a new producer's epoch."""

    text: str = ""
    tokens: int = 0
    block: int = -1
    """The open block of text; -1: nothing has been said."""
    prompt_tokens: int | None = None
    complete: bool = False
    """Every choice has ended; only the terminal is missing."""

    @property
    def nothing(self) -> bool:
        return self.block < 0 and not self.complete


def said(lines: Sequence[bytes], choices: int) -> Said:
    """Read the frames so far. Raises CannotContinue when more than one plain text has begun."""
    text: list[str] = []
    tokens, block, ended = 0, -1, 0
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
            case ChoiceEnd():
                ended += 1
            case Close() if not ended:
                pass
    complete = ended == choices
    if not complete and lines and _closed(lines):
        raise CannotContinue("its text had ended, but not why")
    return Said("".join(text), tokens, block, prompt_tokens, complete)


def _closed(lines: Sequence[bytes]) -> bool:
    return isinstance(decode(lines[-1]), Close)


def continued(request: EngineRequest, before: Said) -> EngineRequest:
    """The request for what is missing. Raises CannotContinue."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    _check(request, body)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if body.get(name):
            body[name] = max(body[name] - before.tokens, 0 if name == "min_tokens" else 1)
    if request.kind == "chat":
        body["messages"] = [*body["messages"], {"role": "assistant", "content": before.text}]
        body["continue_final_message"] = True
        body["add_generation_prompt"] = False
    else:
        prompt = body["prompt"]
        only = prompt if isinstance(prompt, str) else prompt[0]  # there is one, or it is a list of token ids
        if not isinstance(only, str):
            raise CannotContinue("its prompt is token ids")
        body["prompt"] = only + before.text
    return msgspec.structs.replace(request, body=msgspec.Raw(msgspec.json.encode(body)))


def may_continue(request: EngineRequest, structure: Sequence[bytes]) -> bool:
    """Whether a stream of which these structural frames are known could be continued."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    try:
        said(structure, body.get("n") or 1)
        _check(request, body)
    except CannotContinue:
        return False
    return True


def spent(request: EngineRequest, before: Said) -> bool:
    """Whether the stream had made all the tokens it may."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    return most is not None and before.tokens >= most


def _check(request: EngineRequest, body: dict[str, Any]) -> None:
    if request.kind not in ("chat", "completions"):
        raise CannotContinue(f"{request.kind} are made whole")
    if (body.get("n") or 1) != 1:
        raise CannotContinue("it has more than one choice")
    if body.get("logprobs") not in (None, False):
        raise CannotContinue("it carries logprobs")
    form = body.get("response_format") or {"type": "text"}  # the client's own words: it may be anything
    if not isinstance(form, dict) or form.get("type") != "text" or any(body.get(name) for name in _GUIDED):
        raise CannotContinue("its output is guided")
    if body.get("echo"):
        raise CannotContinue("it echoes its prompt")
    if request.kind == "chat" and body["messages"][-1].get("role") == "assistant":
        raise CannotContinue("it continues a message of the client's already")


class ContinuingSink:
    """In front of a stream's sink: the continuation's first text goes on in the block that was open."""

    def __init__(self, sink: FrameSink, before: Said) -> None:
        self._sink = sink
        self._before = before
        self._begun = False

    def _block(self, number: int) -> int:
        return self._before.block + number

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self._sink.text(self._block(block), text, tokens)

    def frame(self, frame: Frame) -> None:
        match frame:
            case Note(kind="prompt"):
                return  # told by the first producer
            case Open(block=0, kind="text") if not self._begun:
                self._begun = True
                return
            case Open(block=0):
                # It goes on with something else: the text ends here, and the numbers move up by one
                self._sink.frame(Close(self._before.block))
                self._before = msgspec.structs.replace(self._before, block=self._before.block + 1)
                self._begun = True
                frame = msgspec.structs.replace(frame, block=self._block(0))
            case Open(block=block) | Delta(block=block) | Close(block=block):
                frame = msgspec.structs.replace(frame, block=self._block(block))
            case ChoiceEnd() if not self._begun:
                self._begun = True
                self._sink.frame(Close(self._before.block))
        self._sink.frame(frame)

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        own = self._own_prompt(prompt)
        self._sink.usage(own, min(cached, own), written, reasoning)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self._sink.computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if usage is not None:
            own = self._own_prompt(usage.prompt)
            usage = msgspec.structs.replace(
                usage, prompt=own, cached=min(usage.cached, own), output=usage.output + self._before.tokens
            )
        self._sink.end(status, error, usage)

    def _own_prompt(self, prompt: int) -> int:
        """The client's prompt, without what was said of the answer."""
        known = self._before.prompt_tokens
        return max(prompt - self._before.tokens, 0) if known is None else known
