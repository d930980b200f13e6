"""The encoder: frames in, a dialect's chunks out, a pure function of the stream's frames and facts.

The hot frame, a text delta, is pasted between two constants made when its block opened. A reader that starts in
the middle shows the encoder the structural frames before its cursor (``observe``); from there on the bytes are those of
a reader from the start.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from stream_fabric.frames import (
    ChoiceEnd,
    Delta,
    End,
    Note,
    Open,
    Usage,
    decode,
    is_text,
    text_parts,
)
from stream_gw.dialects.facts import StreamFacts

_json = msgspec.json.Encoder().encode
_NULL = b"null"


class Block:
    """An open block: where its text goes. ``prefix`` + quoted text + ``suffix`` is a whole chunk; ``twice``: the text
    goes in a second time after ``middle``."""

    __slots__ = ("choice", "kind", "middle", "prefix", "suffix")

    def __init__(self, choice: int, kind: str, prefix: bytes, suffix: bytes, middle: bytes | None = None) -> None:
        self.choice = choice
        self.kind = kind
        self.prefix = prefix
        self.suffix = suffix
        self.middle = middle


class Encoder:
    """Spells one stream for one reader."""

    object_name: ClassVar[str]
    id_prefix: ClassVar[str]

    __slots__ = ("_blocks", "_head", "_hot", "_opened", "_tools", "facts")

    def __init__(self, facts: StreamFacts) -> None:
        self.facts = facts
        self._blocks: dict[int, Block] = {}
        self._hot: dict[int, tuple[bytes, bytes]] = {}
        """By the digit's byte of a one-digit block: the SSE event up to the text, and from there to the id's number."""
        self._opened = False
        self._tools: dict[int, int] = {}
        self._head = b'{"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            _json(self.id_prefix + facts.stream[5:]),
            _json(self.object_name),
            facts.created,
            _json(facts.model),
        )

    @property
    def _tail(self) -> bytes:
        return b'],"usage":null}' if self.facts.include_usage else b"]}"

    # --- the dialect's own words ---------------------------------------------------------------------------

    def open_stream(self) -> list[bytes]:
        """Chunks before the first block."""
        return []

    def open_block(self, frame: Open) -> tuple[Block, list[bytes]]:
        raise NotImplementedError

    def logprobs(self, raw: msgspec.Raw, text: str, kind: str) -> bytes:
        raise NotImplementedError

    def finish(self, frame: ChoiceEnd) -> bytes:
        raise NotImplementedError

    # --- in ------------------------------------------------------------------------------------------------

    def observe(self, line: bytes) -> None:
        """Learn of a frame that the reader has already, without spelling it."""
        if not is_text(line):
            self._structural(decode(line))

    def encode(self, line: bytes) -> list[bytes]:
        """The chunks of one frame: none, one or several."""
        if is_text(line):
            number, _, quoted = text_parts(line)
            block = self._blocks[number]
            if block.middle is None:
                return [block.prefix + quoted + block.suffix] if block.prefix else []
            return [block.prefix + quoted + block.middle + quoted + block.suffix]
        frame = decode(line)
        match frame:
            case Delta(number, text, _, logprobs):
                assert logprobs is not None
                return self._delta(self._blocks[number], text, logprobs)
            case End():
                return self._end(frame, None)
        return self._structural(frame)

    def _structural(self, frame: Any) -> list[bytes]:
        match frame:
            case Open(number):
                chunks = self._begin()
                block, more = self.open_block(frame)
                self._blocks[number] = block
                if number < 10 and block.prefix and block.middle is None:
                    self._hot[48 + number] = (b"data: " + block.prefix, block.suffix + b"\nid: ")
                return chunks + more
            case ChoiceEnd():
                return [*self._begin(), self.finish(frame)]
            case Note():
                return []
        return []

    def _begin(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        return self.open_stream()

    def _delta(self, block: Block, text: str, logprobs: msgspec.Raw) -> list[bytes]:
        if not block.prefix:
            return []
        quoted = _json(text)
        whole = block.prefix + quoted + block.suffix
        if block.middle is not None:
            whole = block.prefix + quoted + block.middle + quoted + block.suffix
        before, _, after = whole.rpartition(b'"logprobs":null')
        return [before + b'"logprobs":' + self.logprobs(logprobs, text, block.kind) + after]

    def _end(self, frame: End, cursor: str | None) -> list[bytes]:
        if frame.status == "completed":
            if self.facts.include_usage and frame.usage is not None:
                return [self._head + b'],"usage":' + _json(usage_json(frame.usage)) + b"}"]
            return []
        error = frame.error
        body: dict[str, Any] = {
            "message": error.message if error else f"the stream was {frame.status} before its end",
            "type": error.type if error else frame.status,
            "code": error.code if error else frame.status,
            "param": None,
            "retriable": error.retriable if error else False,
            "stream_id": self.facts.stream,
        }
        if cursor is not None:
            body["cursor"] = cursor
        return [_json({"error": body})]

    # --- out -----------------------------------------------------------------------------------------------

    def chunks(self, lines: list[bytes]) -> list[bytes]:
        """Chunks as JSON, for a WebSocket."""
        if len(lines) == 1:
            return self.encode(lines[0])
        return [chunk for line in lines for chunk in self.encode(line)]

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        """Complete events of the frames ``first`` and on. Of a frame's events only the last carries its id, so no
        cursor names half a frame."""
        if len(lines) == 1:
            return self._event(lines[0], epoch, first)
        return b"".join([self._event(line, epoch, seq) for seq, line in enumerate(lines, first)])

    def _event(self, line: bytes, epoch: int, seq: int) -> bytes:
        hot = self._hot.get(line[0])
        if hot is not None and line[1] == 0x22:
            return b"%b%b%b%d-%d\n\n" % (hot[0], line[1:], hot[1], epoch, seq)
        if line.startswith(b'{"k":"end"'):
            end = decode(line)
            assert isinstance(end, End)
            chunks = self._end(end, f"{epoch}-{seq}")
            last = b"data: [DONE]\nid: %d-%d\n\n" % (epoch, seq) if end.status == "completed" else b""
            if last:
                return b"".join([b"data: %b\n\n" % chunk for chunk in chunks]) + last
        else:
            chunks = self.encode(line)
        if not chunks:
            return b""
        return b"".join([b"data: %b\n\n" % chunk for chunk in chunks[:-1]]) + b"data: %b\nid: %d-%d\n\n" % (
            chunks[-1],
            epoch,
            seq,
        )


def usage_json(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
