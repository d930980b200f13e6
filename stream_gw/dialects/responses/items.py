"""Output items of a response: one for each block that the dialect can express, and the events of its life.

Each function returns the type of an event and the fields of its body as JSON without braces.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from stream_fabric.stream.frames import Open, json_string
from stream_fabric.stream.ids import derived_id
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.thoughts import carried
from stream_gw.dialects.responses.tools import Called, unwrapped, wrapped

Event = tuple[bytes, bytes]


class Shape(NamedTuple):
    """How a kind of item is written."""

    prefix: str
    """Beginning of the item's id."""
    events: bytes
    """Type of the events of its text, without ``.delta`` and ``.done``; empty: its text is hidden."""
    number: bytes
    """Field with the number of the part; empty: the item has no parts."""
    field: bytes
    """Field of the last text event with the whole text."""


TEXT: Final = Shape("msg_", b"response.output_text", b"content_index", b"text")
REFUSAL: Final = Shape("msg_", b"response.refusal", b"content_index", b"refusal")
REASONING: Final = Shape("rs_", b"response.reasoning_text", b"content_index", b"text")
OPEN_REASONING: Final = Shape("rs_", b"response.reasoning", b"content_index", b"text")
SUMMARY: Final = Shape("rs_", b"response.reasoning_summary_text", b"summary_index", b"text")
REDACTED: Final = Shape("rs_", b"", b"", b"")
FUNCTION: Final = Shape("fc_", b"response.function_call_arguments", b"", b"arguments")
CUSTOM: Final = Shape("ctc_", b"response.custom_tool_call_input", b"", b"input")
OPEN_CUSTOM: Final = Shape("fc_", b"", b"", b"arguments")
"""A custom tool for clients that know functions alone: its arguments are one object, told when the call is complete."""
WRAPPED: Final = Shape("ctc_", b"", b"", b"input")
"""A custom tool that the engine knows as a function: its input is told when the call is complete."""

_CONTENT: Final = ("text", "refusal")


def shape_of(frame: Open, is_open: bool, called: Called | None) -> Shape | None:
    """Return how a block is written; None: the dialect has no such item.

    ``is_open``: for Open Responses. ``called``: the request's tool that the block calls, if it is known.
    """
    match frame.kind:
        case "text":
            return TEXT
        case "refusal":
            return REFUSAL
        case "reasoning":
            if frame.form == "summary":
                return SUMMARY
            if frame.form == "redacted":
                return REDACTED
            return OPEN_REASONING if is_open else REASONING
        case "tool" if frame.form != "server":  # the engine's server runs that tool, so the client must not
            if frame.form == "custom":
                return OPEN_CUSTOM if is_open else CUSTOM
            return WRAPPED if called is not None and called.is_custom else FUNCTION
    return None


def compaction_items(facts: StreamFacts) -> list[bytes]:
    """Return the compaction that a response begins with, if it does."""
    if not facts.compaction:
        return []
    name, content = json_string(derived_id("cmp_", facts.stream)), json_string(facts.compaction)
    return [b'{"id":%b,"type":"compaction","encrypted_content":%b}' % (name, content)]


class Item:
    """An output item.

    ``text``: pieces, JSON-escaped, each with its closing quote, because that costs a token least.
    ``around``: constant parts around a piece in the event of its text, up to the event's number.
    """

    __slots__ = (
        "_call", "_id", "_is_function", "_name", "_place", "around", "carries_thoughts", "index", "json", "kind",
        "logprobs", "opaque", "shape", "text",
    )  # fmt: skip

    def __init__(self, frame: Open, shape: Shape, index: int, facts: StreamFacts, called: Called | None) -> None:
        self.shape = shape
        self.kind = frame.kind
        self.index = index
        self.text = bytearray()
        self.logprobs: list[bytes] = []
        self.opaque: str | None = None
        self.carries_thoughts = False
        """Whether reasoning that the engine did not encrypt has its text in ``encrypted_content`` too."""
        self.json: bytes | None = None
        """The item as it ended; None: it is open."""
        name = derived_id(shape.prefix, facts.stream, frame.block + 1)
        self._id = json_string(name)
        part = b',"%b":0' % shape.number if shape.number else b""
        self._place = b'"item_id":%b,"output_index":%d%b' % (self._id, index, part)
        logprobs = b',"logprobs":[]' if frame.kind == "text" else b""
        head = b'{"type":"%b.delta",%b,"delta":"' % (shape.events, self._place)
        self.around = (head, logprobs + b',"sequence_number":')
        self._call = self._name = b""
        self._is_function = shape.prefix == "fc_"
        if frame.kind == "tool":
            call = frame.id or derived_id("call_", facts.stream, frame.block + 1)
            self._name = json_string((frame.name or "") if called is None else called.name)
            self._call = b'"call_id":%b,"name":%b' % (json_string(call), self._name)
            if called is not None and called.namespace is not None:
                self._call += b',"namespace":' + json_string(called.namespace)

    # --- parts of the item -------------------------------------------------------------------------------------

    def _part(self, text: bytes) -> bytes:
        if self.kind == "refusal":
            return b'{"type":"refusal","refusal":"%b"}' % text
        if self.kind == "reasoning":
            type_ = b"summary_text" if self.shape is SUMMARY else b"reasoning_text"
            return b'{"type":"%b","text":"%b"}' % (type_, text)
        return b'{"type":"output_text","text":"%b","annotations":[],"logprobs":[%b]}' % (text, self._all_logprobs())

    def _all_logprobs(self) -> bytes:
        return b",".join(self.logprobs)

    def _said(self) -> bytes:
        """Return the whole text, JSON-escaped, without quotes."""
        # No regular expression: with a match for each token it held the loop up for 0.4 s per MB
        unpaired = [piece.split(b'\\"') for piece in self.text.split(b"\\\\")]
        return b"\\\\".join([b'\\"'.join([part.replace(b'"', b"") for part in parts]) for parts in unpaired])

    def encode(self, status: bytes) -> bytes:
        """Encode the item as it is now."""
        return self._encode_with(status, self._said())

    def _encode_with(self, status: bytes, text: bytes) -> bytes:
        return self._encode(status, [self._part(text)] if self.shape.number else [], text)

    def _encode(self, status: bytes, parts: list[bytes], text: bytes) -> bytes:
        head = b'"id":%b,"status":"%b"' % (self._id, status)
        if self.kind == "tool":
            type_, field = (b"function_call", b"arguments") if self._is_function else (b"custom_tool_call", b"input")
            if self.shape in (OPEN_CUSTOM, WRAPPED):
                text = b"" if status == b"in_progress" else self._converted(text)
            return b'{"type":"%b",%b,%b,"%b":"%b"}' % (type_, head, self._call, field, text)
        content = b",".join(parts)
        if self.kind != "reasoning":
            return b'{"type":"message",%b,"role":"assistant","content":[%b]}' % (head, content)
        opaque = self.opaque
        if opaque is None and self.carries_thoughts and self.shape.number and status != b"in_progress":
            opaque = carried(_plain(text))
        hidden = b"" if opaque is None else b',"encrypted_content":' + json_string(opaque)
        if self.shape is SUMMARY:
            return b'{"type":"reasoning",%b,"summary":[%b]%b}' % (head, content, hidden)
        return b'{"type":"reasoning",%b,"summary":[],"content":[%b]%b}' % (head, content, hidden)

    # --- events ------------------------------------------------------------------------------------------------

    def opening(self) -> list[Event]:
        item = self._encode(b"in_progress", [], b"")
        events = [(b"response.output_item.added", b'"output_index":%d,"item":%b' % (self.index, item))]
        if self.shape.number:
            events.append((self._part_events() + b".added", b'%b,"part":%b' % (self._place, self._part(b""))))
        return events

    def closing(self, status: bytes) -> list[Event]:
        """End the item, and release its text."""
        text = self._said()
        shape = self.shape
        events: list[Event] = []
        self.json = self._encode_with(status, text)
        if self.shape in (OPEN_CUSTOM, WRAPPED):
            text, shape = self._converted(text), FUNCTION if self.shape is OPEN_CUSTOM else CUSTOM
            events.append((shape.events + b".delta", b'%b,"delta":"%b"' % (self._place, text)))
        if shape.events:
            more = b',"logprobs":[%b]' % self._all_logprobs() if self.kind == "text" else b""
            if shape is FUNCTION:
                more = b',"name":' + self._name
            events.append((shape.events + b".done", b'%b,"%b":"%b"%b' % (self._place, shape.field, text, more)))
        if shape.number:
            events.append((self._part_events() + b".done", b'%b,"part":%b' % (self._place, self._part(text))))
        events.append((b"response.output_item.done", b'"output_index":%d,"item":%b' % (self.index, self.json)))
        self.text.clear()
        self.logprobs.clear()
        return events

    def _part_events(self) -> bytes:
        return b"response.reasoning_summary_part" if self.shape is SUMMARY else b"response.content_part"

    def _converted(self, text: bytes) -> bytes:
        """Return an escaped text of a custom tool's call in the other form: as input, or as arguments."""
        plain = _plain(text)
        return json_string(wrapped(plain) if self.shape is OPEN_CUSTOM else unwrapped(plain))[1:-1]


def _plain(text: bytes) -> str:
    """Return a JSON-escaped text as it is."""
    return msgspec.json.decode(b'"%b"' % text, type=str)
