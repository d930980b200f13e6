"""Encodes frames as the events of Anthropic's Messages API.

Content blocks of this API come one after the other, while blocks of a stream may interleave. A block that opens beside
another one waits, with its text, until that one has ended. The next state therefore depends on every frame before it,
and a reader that starts in the middle observes them all.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any, ClassVar

import msgspec

from stream_fabric.errors import StreamCancelled, StreamGwError, from_info
from stream_fabric.json_bounds import decode_text
from stream_fabric.native import text_event
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Note,
    Open,
    Usage,
    decode,
    is_end,
    is_text,
    json_string,
)
from stream_fabric.stream.ids import derived_id
from stream_gw.dialects.anthropic.errors import error_body
from stream_gw.dialects.anthropic.messages import stop_reason, usage_json
from stream_gw.dialects.base import ENDED, HEARTBEAT, Encoder, check_json, ends_cleanly
from stream_gw.dialects.facts import StreamFacts

_json = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DELTAS = {
    "text": b'"text_delta","text":"',
    "thinking": b'"thinking_delta","thinking":"',
    "tool_use": b'"input_json_delta","partial_json":"',
}
_UNSIGNED = b'"dW5zaWduZWQ="'
"""Signature of thoughts that the engine did not sign: "unsigned" in Base64. Many clients send back signed thoughts
alone, and models that think between calls of tools lose their thread."""
_CUSTOM_BEGIN, _CUSTOM_END = b'{\\"input\\":\\"', b'\\"}'
"""JSON around the text of a custom tool, whose input here is an object, as it is written within a JSON string."""

_STRUCTURE = re.compile(r'\\.|\\\Z|["{}\[\]]', re.DOTALL)
"""Matches the parts of JSON on which its nesting depends: escaped characters, quotes and brackets."""


class _Block:
    """A block that the dialect can express.

    ``text``: of a block that waits, or of a tool call; JSON-escaped, without quotes. ``type``: of the content block.
    """

    __slots__ = ("_depth", "_escaped", "_quoted", "_scanned", "closed", "name", "opaque", "opened", "text", "type")

    def __init__(self, opened: Open, type_: str) -> None:
        self.opened = opened
        self.type = type_
        self.name = b"%d" % opened.block
        self.text = bytearray()
        self.closed = False
        self.opaque: str | None = None
        # Where the scan of a tool call's text is: each text is scanned once, and the whole is decoded once
        self._scanned = self._depth = 0
        self._quoted = self._escaped = False

    def has_arguments(self) -> bool:
        """Whether the text of a tool call is complete JSON, so that nothing can follow."""
        if self.type != "tool_use" or self.opened.form == "custom":
            return False
        try:
            if not self._scan():
                return False
            self._depth = -1  # no longer scanned, whatever the text is
            decode_text(msgspec.json.decode(b'"%b"' % bytes(self.text), type=str))
        except msgspec.DecodeError:
            return False
        return True

    def _scan(self) -> bool:
        """Whether the scanned text has just closed its outermost bracket.

        Raises DecodeError for half of a surrogate pair; its text is scanned with the next one, which may have the rest.
        """
        if self._depth < 0 or self._scanned == len(self.text):  # then it has at least a character
            return False
        new = msgspec.json.decode(b'"%b"' % bytes(self.text[self._scanned :]), type=str)
        begin, self._scanned, self._escaped, has_bracket = int(self._escaped), len(self.text), False, False
        for found in _STRUCTURE.findall(new, begin):
            if found[0] == "\\":
                self._escaped = len(found) == 1  # the character that it escapes comes with the next text
            elif found == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if found in "{[" else -1
                has_bracket = True
        return has_bracket and self._depth <= 0


class MessagesEncoder(Encoder):
    object_name = "message"
    id_prefix = "msg_"
    needs_history: ClassVar[bool] = True
    __slots__ = ("_finish", "_index", "_live", "_passed", "_prompt", "_refused", "_used_tool", "_waiting")

    def __init__(self, facts: StreamFacts) -> None:
        super().__init__(facts)
        self._index = 0
        """Index of the content block that is open or comes next."""
        self._live: _Block | None = None
        """The open content block."""
        self._waiting: deque[_Block] | None = None
        """Blocks that have opened meanwhile, in order; None: there were none yet."""
        self._passed: set[bytes] | None = None
        """Blocks that have ended here or that the dialect cannot express. Only spaces can follow a call that ended."""
        self._prompt = Usage()
        self._finish: ChoiceEnd | None = None
        self._refused = self._used_tool = False

    # --- what surrounds the frames ---------------------------------------------------------------------------

    def heartbeat(self) -> bytes:
        return _PING if self._opened else HEARTBEAT  # SDKs expect nothing before the start of the message

    def failure(self, error: StreamGwError, request_id: str, cursor: Cursor) -> bytes:
        body = error_body(error, request_id, stream_id=self.facts.stream, cursor=str(cursor))
        return b"event: error\ndata: %b\n\n" % body

    # --- out -----------------------------------------------------------------------------------------------

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        if len(lines) == 1:
            event = text_event(b"event: content_block_delta\ndata: ", self._blocks, lines[0], epoch, first)
            if event is not None:  # the hot frame
                return event
        return b"".join([self._event(line, epoch, seq) for seq, line in enumerate(lines, first)])

    def _event(self, line: bytes, epoch: int, seq: int) -> bytes:
        bodies = self._end_bodies(line, f"{epoch}-{seq}") if is_end(line) else self.encode(line)
        if not bodies:
            return b""
        events = [b"event: %b\ndata: %b\n" % (body[9 : body.index(b'"', 9)], body) for body in bodies]
        return b"%bid: %d-%d\n\n" % (b"\n".join(events), epoch, seq)

    def encode(self, line: bytes) -> list[bytes]:
        number, _, text = line.partition(b'"')
        around = self._blocks.get(number)
        if around is not None:
            return [text.join(around)]
        if is_text(line):
            return self._take_text(number.partition(b":")[0], text[:-1])
        if is_end(line):
            return self._end_bodies(line, None)
        match decode(line):
            case Open() as frame:
                return [*self._opening_chunks(), *self._open(frame)]
            case Delta(block, text_, _, _):
                return self._take_text(b"%d" % block, json_string(text_)[1:-1])
            case Close(block, opaque):
                return self._close(b"%d" % block, opaque)
            case ChoiceEnd() as frame:
                self._finish = frame
                self._take_check(frame)
                return [*self._opening_chunks(), *self._close_all()]
            case Note("prompt", prompt, cached) if not self._opened:
                self._prompt = Usage(prompt=prompt or 0, cached=cached or 0)
                return self._opening_chunks()
            case Note("input", body=body) if body is not None and self._opened:  # SDKs pass over what a ping holds
                return [b'{"type":"ping","input":%b}' % bytes(body)]
        return []

    def observe(self, line: bytes) -> None:
        if not is_end(line):
            self.encode(line)

    # --- blocks --------------------------------------------------------------------------------------------

    def open_stream(self) -> list[bytes]:
        message: dict[str, Any] = {
            "id": derived_id(self.id_prefix, self.facts.stream),
            "type": "message",
            "role": "assistant",
            "model": self.facts.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(self._prompt),
        }
        return [_json({"type": "message_start", "message": message})]

    def _open(self, frame: Open) -> list[bytes]:
        type_ = None if self.facts.prompt_only else _content_type(frame)
        if type_ is None:
            self._passed = self._passed or set()
            self._passed.add(b"%d" % frame.block)
            return []
        self._refused = self._refused or frame.kind == "refusal"
        self._used_tool = self._used_tool or type_ == "tool_use"
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(_Block(frame, type_))
        return self._advance()

    def _advance(self) -> list[bytes]:
        """End the open content block if that is possible, and begin those that wait."""
        bodies: list[bytes] = []
        while True:
            live, waiting = self._live, self._waiting
            if live is not None:
                if not live.closed and not (waiting and live.has_arguments()):
                    return bodies
                bodies += self._stop(live)
            if not waiting:
                return bodies
            bodies += self._start(waiting.popleft())

    def _start(self, block: _Block) -> list[bytes]:
        self._live = block
        if block.type == "redacted_thinking":  # its data comes when it closes
            return []
        bodies = [self._block_start(_content(block, self.facts))]
        around = self._around(block)
        if block.opened.form == "custom":
            bodies.append(_delta(around, _CUSTOM_BEGIN))
        if block.text:
            bodies.append(_text_delta(block, around, bytes(block.text)))
        if block.type != "tool_use":
            block.text.clear()
            self._blocks[block.name] = around
        return bodies

    def _stop(self, block: _Block) -> list[bytes]:
        bodies: list[bytes] = []
        if block.type == "redacted_thinking":
            bodies.append(self._block_start({"type": block.type, "data": block.opaque or ""}))
        elif block.type == "thinking":
            signature = _UNSIGNED if block.opaque is None else json_string(block.opaque)
            bodies.append(
                b'{"type":"content_block_delta","index":%d,"delta":{"type":"signature_delta","signature":%b}}'
                % (self._index, signature)
            )
        elif block.opened.form == "custom":
            bodies.append(_delta(self._around(block), _CUSTOM_END))
        bodies.append(b'{"type":"content_block_stop","index":%d}' % self._index)
        self._blocks.pop(block.name, None)
        self._passed = self._passed or set()
        self._passed.add(block.name)
        self._live = None
        self._index += 1
        return bodies

    def _block_start(self, content: dict[str, Any]) -> bytes:
        return b'{"type":"content_block_start","index":%d,"content_block":%b}' % (self._index, _json(content))

    def _around(self, block: _Block) -> tuple[bytes, ...]:
        """Return the constant parts around a text of the open block."""
        head = b'{"type":"content_block_delta","index":%d,"delta":{"type":%b' % (self._index, _DELTAS[block.type])
        return head, b"}}"

    def _take_text(self, name: bytes, text: bytes) -> list[bytes]:
        """Take an escaped text of a block that is not in ``_blocks`` under this name."""
        around = self._blocks.get(name)
        if around is not None:  # the frame has a token count, or logprobs
            return [_delta(around, text)]
        live = self._live
        if live is not None and live.name == name:
            if live.type == "redacted_thinking":
                return []
            live.text += text
            bodies = [_text_delta(live, self._around(live), text)]
            return bodies + self._advance() if self._waiting else bodies
        for block in self._waiting or ():
            if block.name == name:
                block.text += text
                return []
        if name not in (self._passed or ()):
            raise KeyError(name)
        return []

    def _close(self, name: bytes, opaque: str | None) -> list[bytes]:
        for block in (self._live, *(self._waiting or ())):
            if block is not None and block.name == name:
                block.closed, block.opaque = True, opaque
        return self._advance()

    def _close_all(self) -> list[bytes]:
        for block in (self._live, *(self._waiting or ())):
            if block is not None:
                block.closed = True
        return self._advance()

    # --- the end -------------------------------------------------------------------------------------------

    def _end_bodies(self, line: bytes, cursor: str | None) -> list[bytes]:
        end = decode(line)
        assert isinstance(end, End)
        if not ends_cleanly(end, self._finish is not None):
            info = end.error or ErrorInfo(end.status, ENDED[end.status])
            if end.error is None and end.status == "cancelled":
                info = ErrorInfo.of(StreamCancelled(ENDED[end.status]))
            return [error_body(from_info(info), None, stream_id=self.facts.stream, cursor=cursor)]
        bodies = [*self._opening_chunks(), *self._close_all()]
        reason, sequence = stop_reason(self._finish, refused=self._refused, used_tool=self._used_tool)
        if self.facts.prompt_only:
            reason, sequence = "max_tokens", None
        delta: dict[str, Any] = {"stop_reason": reason, "stop_sequence": sequence}
        if reason == "refusal":
            delta["stop_details"] = {"type": "refusal", "category": None, "explanation": None}
        event = {"type": "message_delta", "delta": delta, "usage": usage_json(end.usage or Usage())}
        if self.checks:
            event["structured_output"] = check_json(self.checks[0][1])
        return [*bodies, _json(event), b'{"type":"message_stop"}']


def _content_type(frame: Open) -> str | None:
    """Return the type of content block that expresses a block; None: the dialect has none."""
    match frame.kind:
        case "text" | "refusal":
            return "text"
        case "reasoning":
            return "redacted_thinking" if frame.form == "redacted" else "thinking"
        case "tool" if frame.form != "server":  # the engine's server runs that tool, so the client must not
            return "tool_use"
    return None


_EMPTY_TEXT = {"type": "text", "text": ""}


def _content(block: _Block, facts: StreamFacts) -> dict[str, Any]:
    """Return the content block as it begins."""
    if block.type == "tool_use":
        opened = block.opened
        name = opened.id or derived_id("call_", facts.stream, opened.block + 1)
        return {"type": "tool_use", "id": name, "name": opened.name or "", "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""} if block.type == "thinking" else _EMPTY_TEXT


def _delta(around: tuple[bytes, ...], text: bytes) -> bytes:
    return b'%b%b"%b' % (around[0], text, around[1])


def _text_delta(block: _Block, around: tuple[bytes, ...], text: bytes) -> bytes:
    """Return a delta of an escaped text. The text of a custom tool is a string within the JSON that is the text."""
    return _delta(around, json_string(text.decode())[1:-1] if block.opened.form == "custom" else text)
