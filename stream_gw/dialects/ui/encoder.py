"""Encodes frames as chunks of the UI message stream.

Parts of a message may interleave, as blocks of a stream do, so a text leaves with its frame. A tool call is told again
as a whole when it ends: the state depends on all of its text, and a reader that starts in the middle observes the log.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from stream_fabric.errors import StreamGwError, StreamLost
from stream_fabric.json_bounds import decode_text
from stream_fabric.native import text_event
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    End,
    Note,
    Open,
    Usage,
    decode,
    is_end,
    is_text,
    json_string,
)
from stream_fabric.stream.ids import derived_id
from stream_gw.dialects.base import ENDED, Encoder, ends_cleanly, finish_of
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.ui.parts import finish_reason, usage_json
from stream_gw.dialects.ui.replay import Before

_json = msgspec.json.Encoder().encode
_KINDS = {"text": b"text", "refusal": b"text", "reasoning": b"reasoning"}
_QUOTE = b'\\"'
"""Quote around the text of a custom tool, whose input is a JSON string, as it is written within a JSON string."""
_DONE = b"[DONE]"


class _Call:
    """A tool call that is open. ``text``: JSON-escaped, without quotes."""

    __slots__ = ("id", "is_custom", "name", "text")

    def __init__(self, id_: str, name: str, is_custom: bool) -> None:
        self.id = id_
        self.name = name
        self.is_custom = is_custom
        self.text = bytearray()

    def input(self) -> bytes | None:
        """Return the input as JSON in one line; None: the text is no JSON."""
        if self.is_custom:
            return b'"%b"' % bytes(self.text)
        text = msgspec.json.decode(b'"%b"' % bytes(self.text), type=str)
        if not text.strip():
            return b"{}"
        try:
            decode_text(text)  # ``format`` does not look into strings
            return msgspec.json.format(text.encode(), indent=-1)
        except msgspec.DecodeError:
            return None


class UiEncoder(Encoder):
    object_name = "ui.message"
    id_prefix = "msg_"
    needs_history: ClassVar[bool] = True
    headers: ClassVar[tuple[tuple[bytes, bytes], ...]] = ((b"x-vercel-ai-ui-message-stream", b"v1"),)
    __slots__ = ("_before", "_calls", "_finish", "_ids", "_parts", "_passed", "_refused", "has_ended")

    def __init__(self, facts: StreamFacts) -> None:
        super().__init__(facts)
        self._parts: dict[bytes, bytes] = {}
        """Kind of each open text or reasoning part, by its block's number in digits."""
        self._calls: dict[bytes, _Call] = {}
        self._ids: set[str] | None = None
        """Ids of all tool calls so far."""
        self._passed: set[bytes] | None = None
        """Blocks that have ended or that the dialect cannot express."""
        self._before: Before | None = None
        self._finish: ChoiceEnd | None = None
        self._refused = False
        self.has_ended = False
        """True once the reader has got the stream's end."""

    def replay(self, before: Before | None) -> None:
        """Make this the encoder of a reader that has nothing of the message yet.

        ``before``: what the message held before this stream continued it; None: it is not known, and what the stream
        adds becomes a message of its own, so that the reader loses nothing that it may have.
        """
        self._before = before or Before()

    # --- what surrounds the frames ---------------------------------------------------------------------------

    def failure(self, error: StreamGwError, request_id: str, cursor: Cursor) -> bytes:
        if is_cured_by_resume(error):
            return b""
        return b"data: %b\n\ndata: [DONE]\n\n" % _error(error.message)

    # --- out -----------------------------------------------------------------------------------------------

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        if len(lines) == 1:
            event = text_event(b"data: ", self._blocks, lines[0], epoch, first)
            if event is not None:  # the hot frame
                return event
        return b"".join([self._event(line, epoch, seq) for seq, line in enumerate(lines, first)])

    def _event(self, line: bytes, epoch: int, seq: int) -> bytes:
        bodies = self.encode(line)
        if is_end(line):
            bodies = [*bodies, _DONE]
        return b"data: %b\nid: %d-%d\n\n" % (b"\n\ndata: ".join(bodies), epoch, seq) if bodies else b""

    def encode(self, line: bytes) -> list[bytes]:
        number, _, text = line.partition(b'"')
        around = self._blocks.get(number)
        if around is not None:
            return [text.join(around)]
        if is_text(line):
            return self._take_text(number.partition(b":")[0], text[:-1])
        match decode(line):
            case Open() as frame:
                return [*self._opening_chunks(), *self._open(frame)]
            case Delta(block, text_, _, _):
                return self._take_text(b"%d" % block, json_string(text_)[1:-1])
            case Close(block, opaque):
                return self._close(b"%d" % block, opaque)
            case ChoiceEnd() as frame:
                self._finish = frame
                return [*self._opening_chunks(), *self._close_all()]
            case Note("prompt"):
                return self._opening_chunks()
            case Note("input", body=body) if body is not None:
                return [*self._opening_chunks(), b'{"type":"data-input","data":%b}' % bytes(body)]
            case End() as end:
                return self._end(end)
        return []

    def observe(self, line: bytes) -> None:
        if not is_end(line):
            self.encode(line)

    # --- parts ---------------------------------------------------------------------------------------------

    def open_stream(self) -> list[bytes]:
        facts, before = self.facts, self._before
        metadata: dict[str, Any] = {
            "streamId": facts.stream, "model": facts.model, "createdAt": facts.created * 1000
        }  # fmt: skip
        if before is not None:
            metadata = before.metadata | metadata
        name = facts.message_id if before is None else before.message_id
        start = {
            "type": "start",
            "messageId": name or derived_id(self.id_prefix, facts.stream),
            "messageMetadata": metadata,
        }
        return [_json(start), *(() if before is None else before.chunks), b'{"type":"start-step"}']

    def _open(self, frame: Open) -> list[bytes]:
        name = b"%d" % frame.block
        if name in self._parts or name in self._calls:  # another producer goes on with it
            return []
        kind = _KINDS.get(frame.kind)
        if kind is not None:
            self._refused = self._refused or frame.kind == "refusal"
            self._parts[name] = kind
            self._blocks[name] = (b'{"type":"%b-delta","id":"%b","delta":"' % (kind, name), b"}")
            return [b'{"type":"%b-start","id":"%b"}' % (kind, name)]
        if frame.kind != "tool" or frame.form == "server":  # the engine's server runs that tool, the client must not
            self._passed = self._passed or set()
            self._passed.add(name)
            return []
        return self._open_call(name, frame)

    def _open_call(self, name: bytes, frame: Open) -> list[bytes]:
        derived = derived_id("call_", self.facts.stream, frame.block + 1)
        id_ = frame.id or derived
        if id_ in (self._ids or ()):  # some engines repeat ids, and a part is found by its own
            id_ = derived
        self._ids = self._ids or set()
        self._ids.add(id_)
        call = self._calls[name] = _Call(id_, frame.name or "", frame.form == "custom")
        start = {"type": "tool-input-start", "toolCallId": call.id, "toolName": call.name}
        return [_json(start), *([_tool_delta(call, _QUOTE)] if call.is_custom else ())]

    def _take_text(self, name: bytes, text: bytes) -> list[bytes]:
        """Take an escaped text of a block that is not in ``_blocks`` under this name."""
        around = self._blocks.get(name)
        if around is not None:  # the frame has a token count, or logprobs
            return [b'%b%b"%b' % (around[0], text, around[1])]
        call = self._calls.get(name)
        if call is not None:
            call.text += text
            return [_tool_delta(call, json_string(text.decode())[1:-1] if call.is_custom else text)]
        if name not in (self._passed or ()):
            raise KeyError(name)
        return []

    def _close(self, name: bytes, opaque: str | None) -> list[bytes]:
        kind = self._parts.pop(name, None)
        if kind is not None:
            del self._blocks[name]
            self._passed = self._passed or set()
            self._passed.add(name)
            signed = b"" if opaque is None else b',"providerMetadata":{"streamGw":{"signature":%b}}' % _json(opaque)
            return [b'{"type":"%b-end","id":"%b"%b}' % (kind, name, signed)]
        call = self._calls.pop(name, None)
        if call is None:
            return []
        self._passed = self._passed or set()
        self._passed.add(name)
        return _call_end(call)

    def _close_all(self) -> list[bytes]:
        return [chunk for name in [*self._parts, *self._calls] for chunk in self._close(name, None)]

    # --- the end -------------------------------------------------------------------------------------------

    def _end(self, end: End) -> list[bytes]:
        self.has_ended = True
        if not ends_cleanly(end, self._finish is not None):
            self._calls.clear()  # a call that was cut stays without its input, and no client runs it
            chunks = [*self._opening_chunks(), *self._close_all()]
            if end.status == "cancelled" and end.error is None:
                return [*chunks, b'{"type":"abort","reason":"cancelled"}']
            return [*chunks, _error(end.error.message if end.error else ENDED[end.status])]
        chunks = [*self._opening_chunks(), *self._close_all()]
        metadata: dict[str, Any] = {"usage": usage_json(end.usage or Usage())}
        detail = None if self._finish is None else finish_of(self._finish)[1]
        if detail is not None:
            metadata["stopReason"] = detail
        reason = finish_reason(self._finish, refused=self._refused)
        finish = {"type": "finish", "finishReason": reason, "messageMetadata": metadata}
        return [*chunks, b'{"type":"finish-step"}', _json(finish)]


def is_cured_by_resume(error: StreamGwError) -> bool:
    """Whether a page that resumes gets the whole answer. Then the connection is cut: ``useChat`` takes an error chunk
    for the model's, and resumes after a network error.

    No gateway has frames that are lost: such a page would resume without end, or get nothing and take half an answer
    for all of it.
    """
    return error.retriable and type(error) is not StreamLost


def _error(message: str) -> bytes:
    return b'{"type":"error","errorText":%b}' % json_string(message)


def _tool_delta(call: _Call, text: bytes) -> bytes:
    """Return a delta of an escaped text."""
    return b'{"type":"tool-input-delta","toolCallId":%b,"inputTextDelta":"%b"}' % (json_string(call.id), text)


def _call_end(call: _Call) -> list[bytes]:
    """Return the chunks that end a call: its whole input, or that it is no JSON because the answer was cut."""
    head = b'"toolCallId":%b,"toolName":%b' % (json_string(call.id), json_string(call.name))
    told = call.input()
    if told is None:
        why = json_string("the input of the tool call is not valid JSON; the answer may have been cut")
        return [b'{"type":"tool-input-error",%b,"input":"%b","errorText":%b}' % (head, bytes(call.text), why)]
    quote = [_tool_delta(call, _QUOTE)] if call.is_custom else []
    return [*quote, b'{"type":"tool-input-available",%b,"input":%b}' % (head, told)]
