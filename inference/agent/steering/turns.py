"""The answers of a steered stream, and the request for its next one. No I/O.

An input cuts the answer that is being made. The note of the input in the log is the point from which the next answer
begins: its request has what was said before, and the input as the user's message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from inference.agent.continuation import CannotContinue, check_template, continuing_requests, prior_output
from stream_fabric.pool.records import EngineRequest, Loaded
from stream_fabric.stream.frames import (
    INPUT_PREFIX,
    ChoiceEnd,
    Close,
    Delta,
    InputNote,
    Note,
    Open,
    Usage,
    decode,
    is_text,
    json_string,
    text_parts,
)

Refusal = Literal["no_chat", "several_choices", "waits_for_tools", "no_text"]
"""Reason why a stream takes no input."""

_SAID = ("text", "refusal")
"""Kinds of blocks whose text the model sees again. Chat templates leave earlier reasoning out."""
_ZERO, _QUOTE = b'0"'
"""Beginning of the frame that comes most: a block of one digit, then the text of one token."""


class Turn(NamedTuple):
    """An answer that an input has cut, and the id of that input."""

    said: str
    input: str


class Answer(NamedTuple):
    """Contents of the frames of one answer."""

    said: str
    tokens: int
    open_blocks: tuple[int, ...]
    next_block: int
    """Number of the next block that opens; 0: no block has opened."""
    prompt: int
    """Tokens of its prompt; 0: unknown."""
    cached: int
    ended: bool
    kinds: frozenset[str]

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> Answer:
        said: list[bytes] = []
        opened: dict[int, str] = {}
        closed: set[int] = set()
        tokens = prompt = cached = 0
        ended = False
        for line in lines:
            if is_text(line):  # an answer may have many, and other streams wait for this loop
                block, count, quoted = (line[0] - _ZERO, 1, line[1:]) if line[1] == _QUOTE else text_parts(line)
                tokens += count
                if opened.get(block) in _SAID:
                    said.append(quoted[1:-1])
                continue
            match decode(line):
                case Open(block=block, kind=kind):
                    opened[block] = kind
                case Delta(block=block, text=text, tokens=count):  # with logprobs
                    tokens += count
                    if opened.get(block) in _SAID:
                        said.append(json_string(text)[1:-1])
                case Close(block=block):
                    closed.add(block)
                case Note(kind="prompt", prompt_tokens=known, cached_tokens=hit):
                    prompt, cached = known or 0, hit or 0
                case ChoiceEnd():
                    ended = True
        open_blocks = tuple(sorted(opened.keys() - closed))
        next_block = max(opened, default=-1) + 1
        text = msgspec.json.decode(b'"%b"' % b"".join(said), type=str)
        return cls(text, tokens, open_blocks, next_block, prompt, cached, ended, frozenset(opened.values()))


class Steered(NamedTuple):
    """The frames of a stream, split at its inputs."""

    turns: tuple[Turn, ...]
    rest: list[bytes]
    """Frames of the answer that no input has cut."""
    seen: frozenset[str]
    """Inputs that were applied or refused."""
    next_block: int
    """Number of the next block, if ``rest`` opens none."""
    used: Usage
    """Usage of the answers before ``rest``."""


def split_turns(lines: Sequence[bytes]) -> Steered:
    """Split a stream's frames at the inputs that were applied."""
    turns: list[Turn] = []
    seen: set[str] = set()
    start = next_block = 0
    used = Usage()
    for index, line in enumerate(lines):
        note = input_note(line)
        if note is None:
            continue
        seen.add(note.id)
        if note.result == "applied":
            answer = Answer.of(lines[start:index])
            turns.append(Turn(answer.said, note.id))
            used = used.plus(Usage(answer.prompt, answer.cached, 0, answer.tokens))
            start, next_block = index + 1, max(next_block, answer.next_block)
    return Steered(tuple(turns), list(lines[start:]), frozenset(seen), next_block, used)


def input_note(line: bytes) -> InputNote | None:
    """Return what a frame says about an input; None: it is another frame."""
    if not line.startswith(INPUT_PREFIX):
        return None
    frame = decode(line)
    return msgspec.json.decode(frame.body, type=InputNote) if isinstance(frame, Note) and frame.body else None


def refusal(request: EngineRequest, answer: Answer) -> Refusal | None:
    """Return why the stream takes no input now; None: it takes one."""
    if request.kind != "chat":
        return "no_chat"
    if request.choices != 1:
        return "several_choices"
    if "tool" in answer.kinds:  # a model expects the results of its calls next
        return "waits_for_tools"
    return None if answer.kinds <= {"text", "refusal", "reasoning"} else "no_text"


def can_continue(request: EngineRequest, structure: Sequence[bytes], loaded: Loaded) -> bool:
    """Whether another replica with the same engine could continue a stream with these structural frames."""
    try:
        check_template(request, loaded)
        continuing_requests(request, prior_output(split_turns(structure).rest, request.choices))
    except CannotContinue:
        return False
    return True


def steered_request(request: EngineRequest, turns: Iterable[Turn], items: Mapping[str, bytes]) -> EngineRequest:
    """Return the request for the answer after the last turn. ``items``: the inputs by their ids.

    Raises CannotContinue if an input is lost.
    """
    body: dict[str, Any] = msgspec.json.decode(request.body)
    messages: list[dict[str, Any]] = list(body["messages"])
    begun = bool(body.pop("continue_final_message", False))
    body.pop("add_generation_prompt", None)
    for turn in turns:
        if turn.input not in items:
            raise CannotContinue(f"the log no longer holds its input {turn.input!r}")
        if turn.said:
            _add(messages, {"role": "assistant", "content": turn.said}, joins=begun)
        _add(messages, msgspec.json.decode(items[turn.input], type=dict[str, Any]), joins=True)
        begun = False
    body["messages"] = messages
    # An input may hold media
    return msgspec.structs.replace(request, body=msgspec.Raw(msgspec.json.encode(body)), plain=False)


def _add(messages: list[dict[str, Any]], message: dict[str, Any], *, joins: bool) -> None:
    """Append a message. ``joins``: to the one before, if it has the same role, because many chat templates refuse two
    messages of one role in a row."""
    last = messages[-1] if messages else {}
    before, after = last.get("content"), message["content"]
    if not joins or last.get("role") != message["role"] or not isinstance(before, str | list):
        messages.append(message)
        return
    content: str | list[Any]
    if isinstance(before, str) and isinstance(after, str):
        content = f"{before}\n\n{after}" if message["role"] == "user" else before + after
    else:
        content = [*_parts(before), *_parts(after)]
    messages[-1] = {**last, "content": content}


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
