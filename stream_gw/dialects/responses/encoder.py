"""Encodes frames as the events of the Responses API.

Each event has a number, from 0 without gaps. The number of a text's event is its frame's seq plus a shift, which only
frames that open and close blocks change; deltas that were joined for a slow reader leave out the numbers between. The
last event repeats the whole answer, so an encoder keeps it, and a reader that starts in the middle observes every
frame before.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from stream_fabric.errors import StreamGwError, from_info
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Open,
    Usage,
    decode,
    is_end,
    is_text,
    json_string,
)
from stream_gw.dialects.base import ENDED, Encoder, ends_cleanly
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.errors import error_object, open_error_object
from stream_gw.dialects.responses.items import Event, Item, compaction_items, shape_of
from stream_gw.dialects.responses.resource import Resource, completed_at, cut_reason

_json = msgspec.json.Encoder().encode
_DONE: Final = b"data: [DONE]\n\n"


class ResponsesEncoder(Encoder):
    object_name = "response"
    id_prefix = "resp_"
    needs_history: ClassVar[bool] = True
    is_open: ClassVar[bool] = False
    """Whether the events are those of the Open Responses specification."""
    __slots__ = (
        "_before", "_ended", "_finish", "_given", "_hot", "_items", "_live", "_number", "_resource", "_seq", "_shift",
        "_shown", "_silent", "_unclosed",
    )  # fmt: skip

    def __init__(self, facts: StreamFacts) -> None:
        super().__init__(facts)
        self._resource = Resource(facts)
        self._live: dict[bytes, Item] = {}
        """Open items whose text leaves as it comes, by the number of their block in digits."""
        self._hot: dict[bytes, tuple[tuple[bytes, bytes], bytearray]] = {}
        """Constants around a text in the server-sent event of each such item, and where the text gathers."""
        self._silent: dict[bytes, Item | None] = {}
        """Blocks whose text is no event, by number; None: the dialect cannot express the block."""
        self._before = [] if self.is_open else compaction_items(facts)
        """Output items that no frame holds."""
        self._items: list[Item] = []
        self._unclosed: Item | None = None
        """Item whose block has closed last. Only the next frame tells whether it is complete or was cut."""
        self._finish: ChoiceEnd | None = None
        self._seq = 0
        """Last frame."""
        self._shift = -1
        """Number of the next event, less the seq of the next frame."""
        self._number = 0
        """Number of the next event of the frame that is being encoded."""
        self._given = -1
        """Number of the last event that the reader has."""
        self._shown = b""
        """The response as the last event shows it."""
        self._ended = False

    # --- what surrounds the frames ---------------------------------------------------------------------------

    def opening(self) -> bytes:
        bodies = self.begin()
        return self._spell(bodies, b"") if bodies else b""

    def begin(self) -> list[bytes]:
        """Return the bodies of the events before the first frame, once."""
        if self._opened:
            return []
        self._number = 0
        bodies = self._opening_chunks()
        self._shift = self._number - 1
        return bodies

    def failure(self, error: StreamGwError, request_id: str, cursor: Cursor) -> bytes:
        body = self._error(error, {"request_id": request_id, "stream_id": self.facts.stream, "cursor": str(cursor)})
        return b"event: error\ndata: %b%d}\n\n" % (body, self._seq + 1 + self._shift)

    def skip(self, number: int) -> None:
        """Leave out the events up to ``number``, which the reader has."""
        self._given = number

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._seq + 1 + self._shift if self._opened else 0

    # --- out -----------------------------------------------------------------------------------------------

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        if len(lines) == 1:
            number, _, text = lines[0].partition(b'"')
            hot = self._hot.get(number)
            if hot is not None:
                self._seq = first
                around, said = hot
                said += text
                return b"%b%d}\nid: %d-%d\n\n" % (text.join(around), first + self._shift, epoch, first)
        return b"".join([self._event(line, epoch, seq) for seq, line in enumerate(lines, first)])

    def _event(self, line: bytes, epoch: int, seq: int) -> bytes:
        bodies = self._encode_line(line, seq)
        written = self._spell(bodies, b"" if self.is_open else b"id: %d-%d\n" % (epoch, seq))
        return written + _DONE if self.is_open and self._ended else written

    def _spell(self, bodies: list[bytes], id_line: bytes) -> bytes:
        """Write the events that the reader does not have yet; the last one with the line of its cursor."""
        if self._given >= 0:
            first = self._number - len(bodies)
            bodies = bodies[max(0, self._given + 1 - first) :]
        if not bodies:
            return b""
        events = [b"event: %b\ndata: %b\n" % (body[9 : body.index(b'"', 9)], body) for body in bodies]
        return b"%b%b\n" % (b"\n".join(events), id_line)

    def chunks(self, lines: list[bytes], first: int = 0) -> list[bytes]:
        at = first or self._seq + 1
        if len(lines) == 1:
            number, _, text = lines[0].partition(b'"')
            live = self._live.get(number)
            if live is not None:  # the hot frame
                self._seq = at
                live.text += text
                return [b"%b%d}" % (text.join(live.around), at + self._shift)]
        return [chunk for seq, line in enumerate(lines, at) for chunk in self._encode_line(line, seq)]

    def encode(self, line: bytes) -> list[bytes]:
        return self._encode_line(line, self._seq + 1)

    def observe(self, line: bytes) -> None:
        self._encode_line(line, self._seq + 1)

    def _encode_line(self, line: bytes, seq: int) -> list[bytes]:
        """Encode one frame, which stands for all text frames since the last one if these were joined."""
        number, _, text = line.partition(b'"')
        live = self._live.get(number)
        if live is None and is_text(line):
            number = number.partition(b":")[0]  # the frame has a token count
            live = self._live.get(number)
            if live is None:
                return self._pass(number, text, seq)
        self._number = seq + self._shift
        if live is not None:
            self._seq = seq
            live.text += text
            body = b"%b%d}" % (text.join(live.around), self._number)
            self._number += 1
            return [body]
        bodies = self._encode_structure(line)
        self._shift = self._number - seq - 1
        self._seq = seq
        return bodies

    def _pass(self, number: bytes, text: bytes, seq: int) -> list[bytes]:
        """Take text that is no event of its own. Raises KeyError for a block that is not open."""
        item = self._silent[number]
        if item is not None:
            item.text += text
        self._shift -= seq - self._seq
        self._seq = seq
        self._number = seq + 1 + self._shift
        return []

    def _encode_structure(self, line: bytes) -> list[bytes]:
        bodies = self._opening_chunks()
        if not self._seq:
            self._shown = self._resource.encode("in_progress")
            bodies.append(self._say((b"response.in_progress", b'"response":' + self._shown)))
            for index, item in enumerate(self._before):
                fields = b'"output_index":%d,"item":%b' % (index, item)
                bodies += [self._say((b"response.output_item." + event, fields)) for event in (b"added", b"done")]
        if is_end(line):
            frame = decode(line)
            assert isinstance(frame, End)
            return bodies + self._end(frame)
        match decode(line):
            case Open() as opened:
                return bodies + self._close_last(b"completed") + self._open(opened)
            case Delta() as delta:
                return bodies + self._take_measured(delta)
            case Close(block, opaque):
                return bodies + self._close(b"%d" % block, opaque)
            case ChoiceEnd() as finish:
                self._finish = finish
                return bodies + self._close_all(b"completed" if cut_reason(finish) is None else b"incomplete")
        return bodies

    def _say(self, event: Event) -> bytes:
        """Encode an event with its number."""
        type_, fields = event
        body = b'{"type":"%b",%b,"sequence_number":%d}' % (type_, fields, self._number)
        self._number += 1
        return body

    # --- items ---------------------------------------------------------------------------------------------

    def open_stream(self) -> list[bytes]:
        waits = self._resource.is_background
        self._shown = self._resource.encode("queued" if waits else "in_progress")
        fields = b'"response":' + self._shown
        bodies = [self._say((b"response.created", fields))]
        if waits:
            bodies.append(self._say((b"response.queued", fields)))
        return bodies

    def _open(self, frame: Open) -> list[bytes]:
        name = b"%d" % frame.block
        called = None if self.is_open else self._resource.tools.get(frame.name or "")
        shape = shape_of(frame, self.is_open, called)
        if shape is None:
            self._silent[name] = None
            return []
        item = Item(frame, shape, len(self._before) + len(self._items), self.facts, called)
        item.carries_thoughts = self._resource.carries_thoughts
        self._items.append(item)
        if shape.events:
            head, tail = item.around
            self._live[name] = item
            self._hot[name] = (b"event: %b.delta\ndata: %b" % (shape.events, head), tail), item.text
        else:
            self._silent[name] = item
        return [self._say(event) for event in item.opening()]

    def _take_measured(self, delta: Delta) -> list[bytes]:
        """Encode a text with its logprobs."""
        name, text = b"%d" % delta.block, json_string(delta.text)[1:]
        item = self._live.get(name)
        if item is None:
            hidden = self._silent[name]
            if hidden is not None:
                hidden.text += text
            return []
        item.text += text
        head, tail = item.around
        if delta.logprobs is not None and item.kind == "text":
            logprobs = bytes(delta.logprobs).strip()
            if inner := logprobs[1:-1].strip():
                item.logprobs.append(inner)
            tail = b',"logprobs":%b,"sequence_number":' % logprobs
        body = b"%b%b%b%d}" % (head, text, tail, self._number)
        self._number += 1
        return [body]

    def _close(self, name: bytes, opaque: str | None) -> list[bytes]:
        bodies = self._close_last(b"completed")
        self._hot.pop(name, None)
        item = self._live.pop(name, None) or self._silent.pop(name, None)
        if item is not None:
            item.opaque = opaque
            self._unclosed = item
        return bodies

    def _close_last(self, status: bytes) -> list[bytes]:
        """End the item whose block closed before this frame."""
        item, self._unclosed = self._unclosed, None
        return [] if item is None else [self._say(event) for event in item.closing(status)]

    def _close_all(self, status: bytes) -> list[bytes]:
        """End the items that are open."""
        self._unclosed = None
        self._hot.clear()
        self._live.clear()
        self._silent.clear()
        return [self._say(event) for item in self._items if item.json is None for event in item.closing(status)]

    # --- the end -------------------------------------------------------------------------------------------

    def _end(self, end: End) -> list[bytes]:
        is_clean = ends_cleanly(end, self._finish is not None)
        reason = cut_reason(self._finish) if is_clean else None
        bodies = self._close_all(b"completed" if is_clean and reason is None else b"incomplete")
        self._ended = True
        if is_clean and reason is None:
            return [*bodies, self._last(b"completed", "completed", end)]
        if is_clean:
            return [*bodies, self._last(b"incomplete", "incomplete", end, reason=reason)]
        if end.status == "cancelled":  # the API has no event of its own for it
            status = "incomplete" if self.is_open else "cancelled"
            return [*bodies, self._last(b"incomplete", status, end)]
        info = end.error or ErrorInfo(end.status, ENDED[end.status])
        told = b"%b%d}" % (self._error(from_info(info), {"stream_id": self.facts.stream}), self._number)
        self._number += 1
        return [*bodies, told, self._last(b"failed", "failed", end, error=info)]

    def _last(self, type_: bytes, status: str, end: End, **why: Any) -> bytes:
        self._shown = self._resource.encode(
            status,
            self._output(),
            completed=completed_at(end) if status == "completed" else None,
            usage=end.usage or Usage(),
            **why,
        )
        return self._say((b"response." + type_, b'"response":' + self._shown))

    def _output(self) -> bytes:
        made = [item.encode(b"in_progress") if item.json is None else item.json for item in self._items]
        return b",".join([*self._before, *made])

    def _error(self, error: StreamGwError, more: dict[str, Any]) -> bytes:
        """Encode an error's event up to its number."""
        inner = open_error_object(error) if self.is_open else error_object(error) | more
        return b'{"type":"error","error":%b,"sequence_number":' % _json(inner)

    def response(self) -> bytes:
        """Return the response as it is now."""
        if self._ended:
            return self._shown
        return self._resource.encode("in_progress" if self._seq else "queued", self._output())


class OpenResponsesEncoder(ResponsesEncoder):
    is_open: ClassVar[bool] = True
    __slots__ = ()

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        if len(lines) == 1:
            number, _, text = lines[0].partition(b'"')
            hot = self._hot.get(number)
            if hot is not None:
                self._seq = first
                around, said = hot
                said += text
                return b"%b%d}\n\n" % (text.join(around), first + self._shift)
        return super().sse(lines, epoch, first)
