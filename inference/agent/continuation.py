"""Continuation of a stream whose producer died: its output so far, and the request for the rest. No I/O.

The engine is asked to continue a text: with ``continue_final_message`` of vLLM and SGLang, or with a longer prompt for
plain completions. Each choice of a request with several is a request of its own then (``continued/parts.py``). Frames
that the stream already has are removed from the engine's output. What no server continues may be repeated
(``continued/repeated.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from stream_fabric.errors import ModelNotFound, ReplicaLost, TooMany
from stream_fabric.pool.records import EngineRequest, Loaded
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
from stream_fabric.stream.ids import StreamId, derived_id

_GUIDED = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("grammar", "regex", "ebnf", "json_schema"),
)
"""Fields that ask for a guided output format: vLLM's, then those of llama.cpp and SGLang."""


_LAST_WORD = re.compile(r"\s+\S*\Z")
_WORD_CHARS_MAX = 64


class CannotContinue(Exception):
    """No replica can continue the stream; the message is the reason, as the second half of a sentence."""


class PriorChoice(msgspec.Struct, frozen=True):
    """The output that the log holds of one choice."""

    text: str = ""
    tokens: int = 0
    block: int = -1
    """Number of its open text block; -1: it has no output yet, or has ended."""
    ended: bool = False
    pieces: tuple[tuple[int, int], ...] = ()
    """Characters and tokens of its last deltas, the last one first."""

    def tokens_within(self, chars: int) -> int:
        """Return the tokens of the deltas that lie within the last ``chars`` characters of its text."""
        count = 0
        for size, tokens in self.pieces:
            chars -= size
            if chars < 0:
                break
            count += tokens
        return count


class PriorOutput(msgspec.Struct, frozen=True):
    """The output that a stream's log holds from earlier producers."""

    choices: tuple[PriorChoice, ...]
    prompt_tokens: int | None = None
    finish_reason: str = ""
    """Finish reason of the choice that ended last."""
    next_block: int = 0
    """Number of the next block that opens; 0: no block has opened."""

    @property
    def empty(self) -> bool:
        return not self.next_block and not any(choice.ended for choice in self.choices)

    @property
    def tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    @property
    def ended(self) -> list[int]:
        """Choices that have ended."""
        return [number for number, choice in enumerate(self.choices) if choice.ended]

    @property
    def left_open(self) -> list[int]:
        """Numbers of the open blocks."""
        return list(self.open_blocks.values())

    @property
    def open_blocks(self) -> dict[int, int]:
        """Number of the open block of each choice that has one."""
        return {number: choice.block for number, choice in enumerate(self.choices) if choice.block >= 0}


def prior_output(lines: Sequence[bytes], choices: int) -> PriorOutput:
    """Read a stream's output so far from its frames. Raises CannotContinue when it is more than plain texts."""
    blocks, texts, tokens = [-1] * choices, [list[str]() for _ in range(choices)], [list[int]() for _ in range(choices)]
    choice_of: dict[int, int] = {}
    closed: set[int] = set()
    ended: set[int] = set()
    finish_reason = ""
    prompt_tokens: int | None = None
    for line in lines:
        match decode(line):
            case Note(kind="prompt", prompt_tokens=prompt_tokens):
                pass
            case Open(block=block, choice=choice, kind="text") if blocks[choice] < 0:
                blocks[choice], choice_of[block] = block, choice
            case Open(kind=kind):
                raise CannotContinue(f"it has begun a block of kind {kind} beside or before its text")
            case Delta(block=block, text=part, tokens=count):
                texts[choice_of[block]].append(part)
                tokens[choice_of[block]].append(count)
            case Close(block=block):
                closed.add(choice_of[block])
            case ChoiceEnd(choice=choice, finish_reason=finish_reason):
                ended.add(choice)
    if closed - ended:
        raise CannotContinue("its text had ended without a finish reason")
    found = [
        PriorChoice(
            "".join(texts[k]), sum(tokens[k]), -1 if k in ended else blocks[k], k in ended, _pieces(texts[k], tokens[k])
        )
        for k in range(choices)
    ]
    return PriorOutput(tuple(found), prompt_tokens, finish_reason, max(choice_of, default=-1) + 1)


def _pieces(texts: Sequence[str], tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return characters and tokens of the last deltas, as many as a last word may have."""
    last = zip(reversed(texts[-_WORD_CHARS_MAX:]), reversed(tokens[-_WORD_CHARS_MAX:]), strict=True)
    return tuple((len(text), count) for text, count in last)


class Part(NamedTuple):
    """A request to the engine for the rest of one choice."""

    choice: int
    request: EngineRequest
    tail: str = ""
    """End of the log's text that the request asks for again (``continued/healed.py``)."""
    tail_tokens: int = 0
    """Tokens that the request has for the tail, beside those that are left: those of the deltas within it."""
    whole: EngineRequest | None = None
    """The request for the rest after the ``tail``."""


def continuing_requests(request: EngineRequest, before: PriorOutput) -> list[Part]:
    """Return the requests for the output that is still missing: one for each unfinished choice.

    A server takes one ``max_tokens`` for all prompts of a request, but each choice has its own tokens left.
    Raises CannotContinue.
    """
    body = check_continuable(request)
    left = [number for number, choice in enumerate(before.choices) if not is_finished(request, choice)]
    n = body.pop("n", None) or 1
    if before.prompt_tokens is None and n > 1:
        raise CannotContinue("it has several choices of a prompt that was not counted")
    if before.prompt_tokens is None and len(left) < len(before.choices):
        raise CannotContinue("one of its choices has ended before its prompts were counted")
    if len(before.choices) == 1:
        return [_part(0, request, body, body.get("prompt"), before.choices[0])]
    prompts: Any = body.get("prompt")
    parts = []
    for number in left:
        prompt = prompts[number // n] if request.prompts > 1 else prompts
        own = msgspec.structs.replace(request, stream=StreamId(derived_id("resp_", request.stream, number + 1)))
        asked = body | {"seed": body["seed"] + number % n} if type(body.get("seed")) is int else body  # as vLLM does
        parts.append(_part(number, own, asked, prompt, before.choices[number]))
    return parts


def _part(number: int, request: EngineRequest, asked: dict[str, Any], prompt: Any, before: PriorChoice) -> Part:
    """Return the request for the rest of one choice, from the last word on if the text may end within a token."""
    whole = _continuing_request(request, asked, prompt, before)
    word = _LAST_WORD.search(before.text[-_WORD_CHARS_MAX:]) if asked.get("stop") else None
    if word is None or not word.start() or asked.get("logprobs") is not None:  # logprobs are not compared
        return Part(number, whole)
    again = before.tokens_within(len(word[0]))
    begun = msgspec.structs.replace(before, text=before.text[: -len(word[0])], tokens=before.tokens - again)
    return Part(number, _continuing_request(request, asked, prompt, begun), word[0], again, whole)


def _continuing_request(
    request: EngineRequest, asked: dict[str, Any], prompt: Any, before: PriorChoice
) -> EngineRequest:
    """Return the request for the rest of one choice. ``prompt``: that of a completion."""
    body = dict(asked)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if body.get(name):
            if not isinstance(body[name], int):  # some servers take "5" for 5
                raise CannotContinue(f"its {name} is no integer")
            body[name] = max(body[name] - before.tokens, 0 if name == "min_tokens" else 1)
    if type(keep := body.get("truncate_prompt_tokens")) is int and keep > 0:
        body["truncate_prompt_tokens"] = keep + before.tokens  # the text so far stands beside what the client keeps
    if request.kind == "chat" and not before.text:
        pass  # one of several choices has not begun
    elif request.kind == "chat":
        *messages, last = body["messages"]
        if last.get("role") == "assistant":  # the client began the answer
            last = {**last, "content": last["content"] + before.text}
        else:
            messages, last = body["messages"], {"role": "assistant", "content": before.text}
        body["messages"] = [*messages, last]
        body["continue_final_message"] = True
        body["add_generation_prompt"] = False
    else:
        text = prompt[0] if isinstance(prompt, list) else prompt  # a list of one prompt
        body["prompt"] = text + before.text
    return msgspec.structs.replace(request, body=msgspec.Raw(msgspec.json.encode(body)), own_chars=len(before.text))


def is_finished(request: EngineRequest, choice: PriorChoice) -> bool:
    """Whether a choice has ended, or has all the output tokens that the request allows."""
    if choice.ended:
        return True
    body: dict[str, Any] = msgspec.json.decode(request.body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return limit is not None and choice.tokens >= limit


def check_continuable(request: EngineRequest) -> dict[str, Any]:
    """Return the request's body. Raises CannotContinue for one whose output no replica could continue."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    if request.kind not in ("chat", "completions"):
        raise CannotContinue(f"responses of kind {request.kind} are produced at once")
    if _is_guided(body):
        raise CannotContinue("it has a guided output format")
    if request.kind == "completions" and not _is_text(body.get("prompt")):
        raise CannotContinue("its prompt is token ids")
    if body.get("echo"):
        raise CannotContinue("it echoes its prompt")
    if body.get("truncate_prompt_tokens") and body.get("truncation_side") == "right":
        raise CannotContinue("its prompt is truncated on the right, where its text would stand")
    if body.get("include_reasoning") is False:  # the next engine would take the rest of the text for reasoning
        raise CannotContinue("its reasoning was left out")
    last = body["messages"][-1] if request.kind == "chat" else {}
    is_begun = body.get("continue_final_message") and isinstance(last.get("content"), str)
    if last.get("role") == "assistant" and not is_begun:
        raise CannotContinue("its last message is an assistant's already")
    return body


def check_template(request: EngineRequest, loaded: Loaded) -> None:
    """Raises CannotContinue for a chat where the engine's chat template would end the answer so far."""
    if request.kind == "chat" and not loaded.continues_chats:
        raise CannotContinue("the chat template of its model ends an answer that is to be continued")


def _is_text(prompt: Any) -> bool:
    """Whether a completion's prompt is a text or a list of texts, not token ids or embeddings."""
    return all(isinstance(each, str) for each in (prompt if isinstance(prompt, list) else [prompt]))


def _is_guided(body: dict[str, Any]) -> bool:
    """Whether the request asks for a guided output format."""
    form = body.get("response_format") or {"type": "text"}  # the client's JSON: it may be anything
    return not isinstance(form, dict) or form.get("type") != "text" or any(body.get(name) for name in _GUIDED)


def end_at_limit(sink: FrameSink, request: EngineRequest, before: PriorOutput) -> None:
    """End the choices that have all their output tokens, but no finish reason."""
    for number, choice in enumerate(before.choices):
        if not choice.ended and is_finished(request, choice):
            sink.frame(Close(choice.block))
            sink.frame(ChoiceEnd(number, "length"))


class ContinuingSink:
    """Adapts the engine's output to a continued stream: the first text of a choice goes on in its open block."""

    def __init__(self, sink: FrameSink, before: PriorOutput) -> None:
        self._sink = sink
        self._before = before
        self._open = before.open_blocks
        """Open block of each choice that has not gone on yet."""
        self._blocks: dict[int, int] = {}
        """Numbers in the stream of the blocks of the engine's output."""
        self._next = before.next_block
        self._said: dict[int, int] = {}
        """Characters of the text that a block of the engine's output goes on from."""

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self._sink.text(self._blocks[block], text, tokens)

    def frame(self, frame: Frame) -> None:
        match frame:
            case Note(kind="prompt"):
                return  # the first producer has written it
            case Open(block=block, choice=choice, kind="text") if choice in self._open:
                self._blocks[block] = self._open.pop(choice)
                self._said[block] = len(self._before.choices[choice].text)
                return
            case Open(block=block, choice=choice):
                self._close(choice)  # the output goes on with another kind of block
                self._blocks[block] = self._next
                self._next += 1
                frame = msgspec.structs.replace(frame, block=self._blocks[block])
            case Delta(block=block, logprobs=logprobs):
                moved = None if logprobs is None else _moved(logprobs, self._said.get(block, 0))
                frame = msgspec.structs.replace(frame, block=self._blocks[block], logprobs=moved)
            case Close(block=block):
                frame = msgspec.structs.replace(frame, block=self._blocks[block])
            case ChoiceEnd(choice=choice):
                if self._before.choices[choice].ended:
                    return  # moderation ends every choice that it has not seen end
                self._close(choice)
        self._sink.frame(frame)

    def _close(self, choice: int) -> None:
        """Close the block that the choice has left open, unless the choice has gone on in it."""
        if choice in self._open:
            self._sink.frame(Close(self._open.pop(choice)))

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
        # The client's own request was accepted. Another engine may have what this one lacks: room, or the adapter
        lacks = error is not None and (error.http_status == TooMany.http_status or error.code == ModelNotFound.code)
        if error is not None and 400 <= error.http_status < 500 and not lacks:
            error = ErrorInfo.of(_not_continued(error.message))
        self._sink.end(status, error, usage)

    def _client_prompt_tokens(self, prompt: int) -> int:
        """Return the tokens of the client's prompts, without the output that was appended to the prompts."""
        known = self._before.prompt_tokens
        return max(prompt - self._before.tokens, 0) if known is None else known


def _not_continued(reason: str) -> ReplicaLost:
    return ReplicaLost(
        f"the replica that produced this stream died, and the engine of another refuses to continue: {reason}; "
        "retry the request"
    )


def _moved(logprobs: msgspec.Raw, chars: int) -> msgspec.Raw:
    """Return a chunk's logprobs with the text offsets of the older shape counted from ``chars`` before its text."""
    if bytes(logprobs).startswith(b"["):
        return logprobs
    fields = msgspec.json.decode(logprobs, type=dict[str, msgspec.Raw])
    offsets = msgspec.json.decode(fields.get("text_offset", b"null"), type=list[int] | None)
    if offsets is None:
        return logprobs
    return msgspec.Raw(msgspec.json.encode(fields | {"text_offset": [chars + offset for offset in offsets]}))
