"""The encoder: frames in, a dialect's chunks out, a pure function of the stream's frames and facts.

The hot frame, a text delta, is pasted between constants made when its block opened. A reader that starts in the
middle shows the encoder the structural frames before its cursor (``observe``); from there on the bytes are those of
a reader from the start. An encoder belongs to one reader; only facts are shared.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from stream_fabric.frames import ChoiceEnd, Delta, End, Frame, Note, Open, Usage, decode, is_end, is_text, json_string
from stream_fabric.ids import derived_id
from stream_gw.dialects.facts import StreamFacts

_json = msgspec.json.Encoder().encode
NO_LOGPROBS = b'"logprobs":null'
"""Last in every chunk that may carry logprobs: found from the right, past any text that spells the same."""

_ENDED = {
    "cancelled": "the stream was cancelled",
    "failed": "the stream failed",
    "incomplete": "the stream ended before it was complete",
}


class Encoder:
    """Spells one stream for one reader. Raises KeyError for text of a block that was never opened."""

    object_name: ClassVar[str]
    id_prefix: ClassVar[str]

    __slots__ = ("_blocks", "_head", "_opened", "_refusals", "_tail", "_tools", "facts")

    def __init__(self, facts: StreamFacts) -> None:
        self.facts = facts
        self._blocks: dict[bytes, tuple[bytes, ...]] = {}
        """By a block's number in digits: what stands before, between and after its text, from behind the opening quote
        to behind the closing one. Empty: the dialect has no words for the block."""
        self._refusals: frozenset[int] = frozenset()  # most streams have neither, and an empty set is 216 bytes
        self._tools: frozenset[tuple[int, int]] = frozenset()
        """(choice, block) of each tool call."""
        self._opened = False
        self._head = b'{"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _json(derived_id(self.id_prefix, facts.stream)),
            _json(self.object_name),
            facts.created,
            json_string(facts.model),
        )
        self._tail = b'],"usage":null}' if facts.include_usage else b"]}"

    # --- the dialect's own words ---------------------------------------------------------------------------

    def open_stream(self) -> list[bytes]:
        """Chunks before anything else."""
        return []

    def open_block(self, frame: Open) -> tuple[tuple[bytes, ...], list[bytes]]:
        """What stands around the block's text, and chunks to send now."""
        raise NotImplementedError

    def logprobs(self, raw: msgspec.Raw, block: int) -> bytes:
        raise NotImplementedError

    def finish(self, frame: ChoiceEnd) -> bytes:
        raise NotImplementedError

    # --- out -----------------------------------------------------------------------------------------------

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        """Complete events of the frames ``first`` and on. Of a frame's events only the last carries its id, so no
        cursor names half a frame."""
        if len(lines) == 1:
            number, _, text = lines[0].partition(b'"')
            around = self._blocks.get(number)
            if around:  # the hot frame
                return b"data: %b\nid: %d-%d\n\n" % (text.join(around), epoch, first)
        return b"".join([self._event(line, epoch, seq) for seq, line in enumerate(lines, first)])

    def _event(self, line: bytes, epoch: int, seq: int) -> bytes:
        if is_text(line):
            number, _, text = line.partition(b'"')
            around = self._blocks.get(number)
            if around is None:  # with a count of tokens
                around = self._blocks[number.partition(b":")[0]]
            return b"data: %b\nid: %d-%d\n\n" % (text.join(around), epoch, seq) if around else b""
        if is_end(line):
            end = decode(line)
            assert isinstance(end, End)
            bodies = self._end(end, f"{epoch}-{seq}")
            if end.status == "completed":
                bodies.append(b"[DONE]")
        else:
            bodies = self.encode(line)
        if not bodies:
            return b""
        return b"data: %b\nid: %d-%d\n\n" % (b"\n\ndata: ".join(bodies), epoch, seq)

    def chunks(self, lines: list[bytes]) -> list[bytes]:
        """Chunks as JSON, for a WebSocket."""
        if len(lines) == 1:
            return self.encode(lines[0])
        return [chunk for line in lines for chunk in self.encode(line)]

    def encode(self, line: bytes) -> list[bytes]:
        """The chunks of one frame: none, one or several."""
        number, _, text = line.partition(b'"')
        around = self._blocks.get(number)
        if around:
            return [text.join(around)]
        if is_text(line):  # with a count of tokens, or of a block without words
            around = self._blocks[number.partition(b":")[0]]
            return [text.join(around)] if around else []
        return self._spell(decode(line))

    # --- in ------------------------------------------------------------------------------------------------

    def observe(self, line: bytes) -> None:
        """Learn of a frame that the reader has already, without spelling it."""
        if not is_text(line):
            frame = decode(line)
            if not isinstance(frame, Delta | End):
                self._spell(frame)

    def _spell(self, frame: Frame) -> list[bytes]:
        match frame:
            case Open():
                chunks = self._begin()
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
                spelled = self.logprobs(logprobs, number)
                return [b'%b"logprobs":%b%b' % (before, spelled, after)]
            case ChoiceEnd():
                return [*self._begin(), self.finish(frame)]
            case Note(kind):
                return self._begin() if kind == "prompt" else []
            case End():
                return self._end(frame, None)
            case _:
                return []

    def _begin(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        return self.open_stream()

    def _end(self, frame: End, cursor: str | None) -> list[bytes]:
        if frame.status == "completed":
            if not self.facts.include_usage:
                return []
            return [b'%b],"usage":%b}' % (self._head, _json(usage_json(frame.usage or Usage())))]
        error = frame.error
        body: dict[str, Any] = {
            "message": error.message if error else _ENDED[frame.status],
            "type": error.type if error else frame.status,
            "code": error.code if error else frame.status,
            "param": None,
            "retriable": error.retriable if error else False,
            "stream_id": self.facts.stream,
        }
        if cursor is not None:
            body["cursor"] = cursor
        return [_json({"error": body})]


def tool_words(frame: Open, facts: StreamFacts) -> tuple[str, str, dict[str, Any]] | None:
    """A tool call as (its type, the name of the field its text fills, what opens it); None: the engine's side runs it,
    so the caller must not."""
    if frame.form == "server":
        return None
    kind, field = ("custom", "input") if frame.form == "custom" else ("function", "arguments")
    name = frame.id or derived_id("call_", facts.stream, frame.block + 1)
    return kind, field, {"id": name, "type": kind, kind: {"name": frame.name or "", field: ""}}


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
