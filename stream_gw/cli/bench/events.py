"""Server-sent events of an OpenAI-compatible server, with the cursors that a gateway of ours gives them. Sans I/O."""

from __future__ import annotations

from typing import Any, Final

import msgspec

_LINE_BYTES_MAX: Final = 1 << 24
DONE: Final = b"[DONE]"


class BadAnswer(Exception):
    """The server's answer is not what the API promises."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class ChunkError(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    cursor: str | None = None


class Chunk(msgspec.Struct):
    """One chunk of ``/v1/chat/completions`` or ``/v1/completions``, as far as it is measured."""

    choices: list[_Choice] | None = None
    usage: ChunkUsage | None = None
    error: ChunkError | None = None

    @property
    def output(self) -> str:
        """Everything that a reader can see in the chunk; empty for a role, a finish or the usage."""
        parts: list[str | None] = []
        for choice in self.choices or ():
            delta = choice.delta
            if delta is None:
                parts.append(choice.text)
                continue
            parts += [delta.content, delta.reasoning_content or delta.reasoning, delta.refusal]
            if delta.tool_calls:
                parts.append(msgspec.json.encode(delta.tool_calls).decode())
        return "".join(part for part in parts if part)

    @property
    def said(self) -> str:
        """The answer itself, which a chat's next turn repeats: no reasoning, refusal or tool call."""
        parts = [choice.delta.content if choice.delta else choice.text for choice in self.choices or ()]
        return "".join(part for part in parts if part)

    @property
    def is_last(self) -> bool:
        """Whether a choice ends with the chunk. Only the usage may follow."""
        return any(choice.finish_reason for choice in self.choices or ())


class Event(msgspec.Struct, frozen=True):
    """An event of a stream. ``cursor``: its place in the stream; empty: the server gave none, or a later event has it.

    ``chunk`` is None for an event that carries only the cursor. ``reset``: what came after the cursor is void.
    """

    chunk: Chunk | None
    cursor: str = ""
    reset: bool = False


_decoder = msgspec.json.Decoder(Chunk)


def decode_chunk(data: bytes) -> Chunk:
    """Raises BadAnswer."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise BadAnswer(f"an event is no chunk: {wrong}: {data[:120]!r}") from wrong


class EventReader:
    """Reads events from bytes in pieces of any size. ``done``: ``[DONE]`` has come."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        self._data: list[bytes] = []
        self._cursor = ""

    def receive(self, piece: bytes) -> list[Event]:
        """Return the events that this piece completes. Raises BadAnswer."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LINE_BYTES_MAX:
            raise BadAnswer(f"a line is longer than {_LINE_BYTES_MAX >> 20} MiB")
        events: list[Event] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                self._cursor = line[3:].strip().decode("latin-1")
            elif not line:
                self._end_event(events)
        return events

    def _end_event(self, events: list[Event]) -> None:
        data, cursor = b"\n".join(self._data), self._cursor
        self._data, self._cursor = [], ""
        if data == DONE:
            self.done = True
            if cursor:
                events.append(Event(None, cursor))
        elif data:
            events.append(Event(decode_chunk(data), cursor))
