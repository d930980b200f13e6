"""Frames: engine output in a neutral form. Logs store frames; gateways encode them in a dialect.

On the wire a frame is one line of bytes without a newline; frames are joined by newlines. Two forms:

- the text delta, the hot one: ``<block>"<JSON string>"`` or, when it holds several tokens,
  ``<block>:<tokens>"<JSON string>"``. A dialect pastes the quoted part between two constants: no JSON is
  parsed or built per token.
- everything else: a JSON object tagged ``k``. A process passes over a kind that it does not know, because a newer
  release wrote it; ``passed_over`` counts them.

Both keep the control characters out (JSON escapes them), so the fabric may frame its messages with them.
A stream is: blocks opened, filled and closed in any interleaving; one ``ChoiceEnd`` a choice; one ``End``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from stream_fabric.errors import StreamGwError
from stream_fabric.events import Timing
from stream_fabric.native import text_frame

Status = Literal["live", "completed", "cancelled", "failed", "incomplete"]
TerminalStatus = Literal["completed", "cancelled", "failed", "incomplete"]
BlockKind = Literal["text", "reasoning", "refusal", "tool", "item", "unknown"]
"""``unknown``: a kind of a newer release; no dialect expresses it."""

# msgspec decodes nothing but null into ``Raw | None``; absent it is None all the same, by the default
if TYPE_CHECKING:
    MaybeRaw = msgspec.Raw | None
else:
    MaybeRaw = msgspec.Raw


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts. ``prompt`` includes ``cached`` and ``written``; ``output`` includes ``reasoning``."""

    prompt: int = 0
    cached: int = 0
    written: int = 0
    output: int = 0
    reasoning: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum of both."""
        return Usage(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.written + other.written,
            self.output + other.output,
            self.reasoning + other.reasoning,
        )


class ErrorInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Error of a failed stream, with the attributes of ``stream_fabric.errors``."""

    code: str
    message: str
    type: str = "server_error"
    http_status: int = 500
    retriable: bool = False
    param: str | None = None
    """Field of the request that the error is about."""

    @classmethod
    def of(cls, error: StreamGwError) -> ErrorInfo:
        """Copy the attributes of an error."""
        return cls(error.code, error.message, error.type, error.http_status, error.retriable, error.param)


class Open(msgspec.Struct, frozen=True, tag_field="k", tag="open", gc=False, omit_defaults=True):
    """A block begins. Blocks are numbered from 0 within the stream, in the order they open."""

    block: int
    choice: int
    kind: BlockKind
    form: Literal["raw", "summary", "redacted", "function", "custom", "server"] | None = None
    """Form of reasoning (raw, summary, redacted) or of a tool call (function, custom, server)."""
    id: str | None = None
    """A tool call's id, as the model's caller must repeat it. Other blocks' ids derive from the stream's."""
    name: str | None = None
    item: MaybeRaw = None
    """kind ``item``: an opaque item whole, as JSON."""


class Delta(msgspec.Struct, frozen=True, tag_field="k", tag="delta", gc=False, omit_defaults=True):
    """Text with token logprobs aligned to it. A delta without logprobs travels in the short form."""

    block: int
    text: str
    tokens: int = 1
    logprobs: MaybeRaw = None
    """The engine's own JSON list, one item a token (OpenAI's shape)."""


class Close(msgspec.Struct, frozen=True, tag_field="k", tag="close", gc=False, omit_defaults=True):
    """A block ends. ``opaque``: a reasoning signature or encrypted content, whole and byte-identical."""

    block: int
    opaque: str | None = None


class Check(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Result of the check of a reply against the JSON schema that the request asks for."""

    result: Literal["valid", "invalid", "unchecked"]
    """``unchecked``: the schema or the reply could not be checked; ``reason`` says why."""
    path: str = ""
    """JSON pointer to the value that does not fit; empty: the whole reply."""
    reason: str = ""
    repairs: int = 0
    """Replies that did not fit and were replaced by this one."""


class ChoiceEnd(msgspec.Struct, frozen=True, tag_field="k", tag="choice-end", gc=False, omit_defaults=True):
    """A choice is complete."""

    choice: int
    finish_reason: str
    """``stop``, ``length``, ``tool_calls``, ``content_filter`` or another of the engine's words."""
    detail: MaybeRaw = None
    """The raw stop detail: the stop string or token id that matched, what was too long, a refusal's category."""
    check: Check | None = None
    """None: the request asks for no schema, or the choice did not end by itself."""


class Note(msgspec.Struct, frozen=True, tag_field="k", tag="note", gc=False, omit_defaults=True):
    """Information for the client that is no output."""

    kind: Literal["started", "prompt", "input"]
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    body: MaybeRaw = None


class StoredInput(NamedTuple):
    """An input that the log holds for the stream's producer."""

    id: str
    item: bytes
    """The user's message, JSON."""
    at_us: int = 0
    """When a gateway received it, on the fabric's clock; 0: unknown."""


class InputNote(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Body of a note of kind ``input``: what became of an input of the client."""

    id: str
    result: Literal["applied", "refused"]
    """``applied``: the frames before the note are the answer so far, those after it take the input into account."""
    reason: str = ""
    """Why it was refused."""


class End(msgspec.Struct, frozen=True, tag_field="k", tag="end", gc=False, omit_defaults=True):
    """The stream's one terminal; nothing follows it."""

    status: TerminalStatus
    usage: Usage | None = None
    error: ErrorInfo | None = None
    timing: Timing | None = None
    """Times of the last producer, if it wrote the terminal and was not cancelled."""


class Unknown(msgspec.Struct, frozen=True, tag_field="k", tag="unknown", gc=False):
    """A frame of a kind that a newer release has added. It is passed over."""


Frame = Open | Delta | Close | ChoiceEnd | Note | End | Unknown


class PassedOver:
    """Count of the frames of unknown kinds that this process has passed over, for a metric."""

    count = 0


class _Tagged(msgspec.Struct):
    k: str
    block: int = -1
    choice: int = -1
    kind: str = ""


passed_over = PassedOver()
_KINDS = frozenset({"open", "delta", "close", "choice-end", "note", "end", "unknown"})
_NOTES = frozenset({"started", "prompt", "input"})

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Frame] = msgspec.json.Decoder(Frame)
_tagged_decoder = msgspec.json.Decoder(_Tagged)

_DELTA_PREFIX = b'{"k":"delta"'
_QUOTE = 0x22
END_PREFIX = b'{"k":"end"'
CHOICE_END_PREFIX = b'{"k":"choice-end"'
STARTED_PREFIX = b'{"k":"note","kind":"started"'
INPUT_PREFIX = b'{"k":"note","kind":"input"'


def json_string(text: str) -> bytes:
    """Encode ``text`` as a JSON string in UTF-8. Lone surrogates, which have no UTF-8, become U+FFFD."""
    try:
        return _encoder.encode(text)
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(text))


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode_text(block: int, text: str, tokens: int = 1) -> bytes:
    """Encode a text delta in the short form. Lone surrogates become U+FFFD, as in ``json_string``."""
    try:
        return text_frame(block, text, tokens)
    except UnicodeEncodeError:
        return text_frame(block, _without_surrogates(text), tokens)


def encode(frame: Frame) -> bytes:
    """Encode one frame as a line of bytes without a newline."""
    if isinstance(frame, Delta) and frame.logprobs is None:
        return encode_text(frame.block, frame.text, frame.tokens)
    line = _encoder.encode(frame)
    # Only a Raw value from outside can bring whitespace in; make it one line again
    return line if b"\n" not in line and b"\r" not in line else msgspec.json.format(line, indent=-1)


def is_text(line: bytes) -> bool:
    """True if the line is a text delta in the short form."""
    return line[0] != 0x7B


def text_parts(line: bytes) -> tuple[int, int, bytes]:
    """Split a text delta in the short form into block, number of tokens, and the quoted JSON string."""
    quote = line.index(b'"')
    block, _, tokens = line[:quote].partition(b":")
    return int(block), int(tokens or 1), line[quote:]


def decode(line: bytes) -> Frame:
    """Decode one line into a frame, of an unknown kind as ``Unknown``. Raises msgspec.MsgspecError if it is none."""
    if is_text(line):
        block, tokens, quoted = text_parts(line)
        return Delta(block, msgspec.json.decode(quoted, type=str), tokens)
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError:
        passed = _of_newer_release(_tagged_decoder.decode(line))
        if passed is None:
            raise
        passed_over.count += 1
        return passed


def _of_newer_release(tagged: _Tagged) -> Frame | None:
    """Return what stands for a frame that this release cannot decode; None: no release would write it so."""
    if tagged.k not in _KINDS or (tagged.k == "note" and tagged.kind not in _NOTES):
        return Unknown()
    if tagged.k == "open" and tagged.kind and tagged.block >= 0 and tagged.choice >= 0:
        return Open(tagged.block, tagged.choice, "unknown")  # deltas of this block follow
    return None


SCHEMA_MISMATCH = "schema_mismatch"
"""Error code in the traces of an answer that does not fit the schema that its request asks for."""


def schema_mismatch(check: Check | None) -> str:
    """Return ``SCHEMA_MISMATCH`` if a reply does not fit its schema, else an empty string."""
    return SCHEMA_MISMATCH if check is not None and check.result == "invalid" else ""


def worse_check(one: Check | None, other: Check | None) -> Check | None:
    """Return the check with the worse result: ``invalid``, then ``unchecked``, then ``valid``, then none."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda check: ("invalid", "unchecked", "valid").index(check.result))


def tokens_of(lines: Sequence[bytes]) -> int:
    """Return the number of output tokens in frames."""
    count = 0
    for line in lines:
        if is_text(line):
            # The hot frame is a one-digit block and a text of one token
            count += 1 if line[1] == _QUOTE else text_parts(line)[1]
        elif line.startswith(_DELTA_PREFIX):
            frame = decode(line)
            assert isinstance(frame, Delta)
            count += frame.tokens
    return count


def is_end(line: bytes) -> bool:
    return line.startswith(END_PREFIX)


def coalesce(lines: list[bytes]) -> list[bytes]:
    """Join adjacent text deltas of the same block into one frame."""
    return [line for _, line in coalesce_from(1, lines)]


def coalesce_from(first: int, lines: list[bytes]) -> list[tuple[int, bytes]]:
    """Do as ``coalesce``, for frames from seq ``first`` on; each result has the seq of its last original frame."""
    out: list[tuple[int, bytes]] = []
    block = -1
    tokens = 0
    parts: list[bytes] = []

    def flush_deltas(last: int) -> None:
        """Append the collected deltas as one frame with seq ``last``."""
        if parts:
            text = b'"' + b"".join(part[1:-1] for part in parts) + b'"'
            out.append((last, b"%d:%d%b" % (block, tokens, text) if tokens != 1 else b"%d%b" % (block, text)))
            parts.clear()

    for seq, line in enumerate(lines, first):
        if not is_text(line):
            flush_deltas(seq - 1)
            out.append((seq, line))
            continue
        line_block, line_tokens, quoted = text_parts(line)
        if line_block != block or not parts:
            flush_deltas(seq - 1)
            block, tokens = line_block, 0
        tokens += line_tokens
        parts.append(quoted)
    flush_deltas(first + len(lines) - 1)
    return out
