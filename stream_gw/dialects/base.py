"""Base of the encoders: frames in, chunks out, as a pure function of the stream's frames and facts.

The hot frame is a text delta: its quoted text is joined with constants that were built when its block opened. For a
reader that starts in the middle, ``observe`` gets the structural frames before its cursor; from there on it receives
the same bytes as a reader from the start. An encoder belongs to one reader; only facts are shared.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from stream_fabric.errors import StreamGwError
from stream_fabric.native import text_event
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import (
    Check,
    ChoiceEnd,
    Delta,
    End,
    Frame,
    Note,
    Open,
    Usage,
    decode,
    is_end,
    is_text,
    json_string,
)
from stream_fabric.stream.ids import derived_id
from stream_fabric.stream.log import STEERED_REASON
from stream_gw.dialects.errors import error_body
from stream_gw.dialects.facts import StreamFacts

_json = msgspec.json.Encoder().encode
NO_LOGPROBS = b'"logprobs":null'
"""Follows the text in every chunk that may carry logprobs; searched from the right, because a text can contain it."""

_OWN_REASONS = {reason: msgspec.Raw(b'"%b"' % reason.encode()) for reason in ("budget", STEERED_REASON)}

_EMPTY: Final[frozenset[Any]] = frozenset()
"""The empty set of all encoders: each call of ``frozenset`` makes a new one of 216 bytes."""

HEARTBEAT = b": hb\n"
"""A comment, which every client ignores."""

ENDED = {
    "cancelled": "the stream was cancelled",
    "failed": "the stream failed",
    "incomplete": "the stream ended before it was complete",
}


class Encoder:
    """Encodes one stream for one reader. Raises KeyError for text of a block that was never opened."""

    object_name: ClassVar[str]
    id_prefix: ClassVar[str]
    empty_delta: ClassVar[bytes]
    """The delta of a chunk that ends a choice."""
    needs_history: ClassVar[bool] = False
    """Whether a reader that starts in the middle must ``observe`` every frame before; else structural ones suffice."""

    headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ()
    """Further headers of a response of events."""

    __slots__ = ("_blocks", "_finished", "_head", "_opened", "_refusals", "_tail", "_tools", "checks", "facts")

    def __init__(self, facts: StreamFacts) -> None:
        self.facts = facts
        self._blocks: dict[bytes, tuple[bytes, ...]] = {}
        """Constant parts around a block's text, by the block's number in digits. The text begins after its opening
        quote and includes the closing one. Empty: the dialect cannot express the block."""
        self._refusals: frozenset[int] = _EMPTY  # most streams have none
        self._tools: dict[int, list[int]] | None = None
        """Blocks of the tool calls by choice, in order; None: there were none yet."""
        self._finished: frozenset[int] = _EMPTY
        """Choices that have their finish reason."""
        self._opened = False
        self.checks: tuple[tuple[int, Check], ...] = ()
        """Choices whose reply was checked against a schema, with the results."""
        self._head = b'{"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _json(derived_id(self.id_prefix, facts.stream)),
            _json(self.object_name),
            facts.created,
            json_string(facts.model),
        )
        self._tail = b'],"usage":null}' if facts.include_usage else b"]}"

    # --- defined by each dialect -----------------------------------------------------------------------------

    def open_stream(self) -> list[bytes]:
        """Return the chunks before all others."""
        return []

    def open_block(self, frame: Open) -> tuple[tuple[bytes, ...], list[bytes]]:
        """Return the constant parts around the block's text, and chunks to send now."""
        raise NotImplementedError

    def logprobs(self, raw: msgspec.Raw, block: int) -> bytes:
        """Return the dialect's JSON of a delta's logprobs, from the engine's."""
        raise NotImplementedError

    # --- what surrounds the frames ---------------------------------------------------------------------------

    def heartbeat(self) -> bytes:
        """Return the bytes that show a silent reader that the stream lives."""
        return HEARTBEAT

    def opening(self) -> bytes:
        """Return the events before the first frame, for a reader from the beginning."""
        return b""

    def failure(self, error: StreamGwError, request_id: str, cursor: Cursor) -> bytes:
        """Return the event that tells that this gateway cannot deliver the stream beyond the cursor.

        Empty: the connection is cut instead.
        """
        return b"data: %b\n\n" % error_body(error, request_id, stream_id=self.facts.stream, cursor=cursor)

    # --- out -----------------------------------------------------------------------------------------------

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        """Encode frames as complete SSE events; ``first`` is the seq of the first frame.

        Only the last event of a frame carries an id, so that no cursor points into a frame.
        """
        if len(lines) == 1:
            return self._event(lines[0], epoch, first)
        return b"".join([self._event(line, epoch, seq) for seq, line in enumerate(lines, first)])

    def _event(self, line: bytes, epoch: int, seq: int) -> bytes:
        event = text_event(b"data: ", self._blocks, line, epoch, seq)
        if event is not None:  # the hot frame
            return event
        if is_text(line):  # it has a token count, or the dialect cannot express its block
            number, _, text = line.partition(b'"')
            around = self._blocks[number.partition(b":")[0]]
            return b"data: %b\nid: %d-%d\n\n" % (text.join(around), epoch, seq) if around else b""
        if is_end(line):
            end = decode(line)
            assert isinstance(end, End)
            bodies = self._end_chunks(end, f"{epoch}-{seq}")
            if ends_cleanly(end, len(self._finished) >= self.facts.n):
                bodies.append(b"[DONE]")
        else:
            bodies = self.encode(line)
        if not bodies:
            return b""
        return b"data: %b\nid: %d-%d\n\n" % (b"\n\ndata: ".join(bodies), epoch, seq)

    def chunks(self, lines: list[bytes], first: int = 0) -> list[bytes]:
        """Encode frames as JSON chunks, for a WebSocket. ``first``: seq of the first one; 0: they follow each other."""
        if len(lines) == 1:
            return self.encode(lines[0])
        return [chunk for line in lines for chunk in self.encode(line)]

    def encode(self, line: bytes) -> list[bytes]:
        """Encode one frame as zero or more chunks."""
        number, _, text = line.partition(b'"')
        around = self._blocks.get(number)
        if around:
            return [text.join(around)]
        if is_text(line):  # the frame has a token count, or the dialect cannot express its block
            around = self._blocks[number.partition(b":")[0]]
            return [text.join(around)] if around else []
        return self._encode_frame(decode(line))

    # --- in ------------------------------------------------------------------------------------------------

    def observe(self, line: bytes) -> None:
        """Take a frame that the reader has already received; it is not encoded."""
        if not is_text(line):
            frame = decode(line)
            if not isinstance(frame, Delta | End):
                self._encode_frame(frame)

    def _encode_frame(self, frame: Frame) -> list[bytes]:
        match frame:
            case Open():
                chunks = self._opening_chunks()
                around, more = self.open_block(frame)
                self._blocks[b"%d" % frame.block] = around
                if frame.kind == "refusal":
                    self._refusals |= {frame.block}
                return chunks + more
            case Delta(number, text, _, logprobs):
                around = self._blocks[b"%d" % number]
                if not around:
                    return []
                whole = json_string(text)[1:].join(around)
                if logprobs is None:
                    return [whole]
                before, _, after = whole.rpartition(NO_LOGPROBS)
                return [b'%b"logprobs":%b%b' % (before, self.logprobs(logprobs, number), after)]
            case ChoiceEnd(choice=choice):
                self._finished |= {choice}
                self._take_check(frame)
                return [*self._opening_chunks(), self._finish_chunk(frame)]
            case Note("input", body=body) if body is not None and self.facts.n == 1 and not self._finished:
                return [*self._opening_chunks(), self._input_chunk(body)]
            case Note(kind):
                return self._opening_chunks() if kind == "prompt" else []
            case End():
                return self._end_chunks(frame, None)
            case _:
                return []

    def _take_check(self, frame: ChoiceEnd) -> None:
        if frame.check is not None:
            self.checks = (*self.checks, (frame.choice, frame.check))

    def _finish_chunk(self, frame: ChoiceEnd) -> bytes:
        reason, detail = finish_of(frame)
        stop = b"" if detail is None else b',"stop_reason":' + bytes(detail)
        if frame.check is not None:
            stop += b',"structured_output":' + _json(check_json(frame.check))
        return b'%b{"index":%d,%b,%b,"finish_reason":%b%b}%b' % (
            self._head,
            frame.choice,
            self.empty_delta,
            NO_LOGPROBS,
            json_string(reason),
            stop,
            self._tail,
        )

    def _input_chunk(self, body: msgspec.Raw) -> bytes:
        """Return a chunk without text that says what became of an input: the text after it is the next answer's."""
        return b'%b{"index":0,%b,%b,"finish_reason":null}%b,"input":%b}' % (
            self._head,
            self.empty_delta,
            NO_LOGPROBS,
            self._tail[:-1],
            bytes(body),
        )

    def _opening_chunks(self) -> list[bytes]:
        """Return the chunks before all others, once."""
        if self._opened:
            return []
        self._opened = True
        return self.open_stream()

    def _end_chunks(self, frame: End, cursor: str | None) -> list[bytes]:
        if ends_cleanly(frame, len(self._finished) >= self.facts.n):
            if not self.facts.include_usage:
                return []
            return [b'%b],"usage":%b}' % (self._head, _json(usage_json(frame.usage or Usage())))]
        error = frame.error
        body: dict[str, Any] = {
            "message": error.message if error else ENDED[frame.status],
            "type": error.type if error else frame.status,
            "code": error.code if error else frame.status,
            "param": error.param if error else None,
            "retriable": error.retriable if error else False,
            "stream_id": self.facts.stream,
        }
        if cursor is not None:
            body["cursor"] = cursor
        return [_json({"error": body})]


def ends_cleanly(end: End, has_all_reasons: bool) -> bool:
    """True if the answer is complete, or was cut and every choice says why by its finish reason."""
    return end.status == "completed" or (end.status == "incomplete" and end.error is None and has_all_reasons)


def finish_of(frame: ChoiceEnd) -> tuple[str, msgspec.Raw | None]:
    """Return a choice's finish reason in OpenAI's words, and its stop reason as JSON.

    The end of a budget, or for a successor, is ``length``: some of OpenAI's clients fail at a reason that they do not
    know.
    """
    if frame.finish_reason in _OWN_REASONS:
        return "length", _OWN_REASONS[frame.finish_reason]
    return frame.finish_reason, frame.detail


def check_json(check: Check) -> dict[str, Any]:
    """Return the result of a reply's check, as every dialect tells it. ``valid`` null: it could not be checked."""
    body: dict[str, Any] = {"valid": None if check.result == "unchecked" else check.result == "valid"}
    if check.repairs:
        body["repairs"] = check.repairs
    if check.reason:
        body["error"] = {"path": check.path, "message": check.reason}
    return body


def tool_call_parts(frame: Open, facts: StreamFacts) -> tuple[str, str, dict[str, Any]] | None:
    """Return a tool call as (type, name of the field that its text fills, opening object).

    None: the engine's server runs the tool, so the client must not.
    """
    if frame.form == "server":
        return None
    kind, field = ("custom", "input") if frame.form == "custom" else ("function", "arguments")
    name = frame.id or derived_id("call_", facts.stream, frame.block + 1)
    return kind, field, {"id": name, "type": kind, kind: {"name": frame.name or "", field: ""}}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
