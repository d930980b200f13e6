"""Adds prompts and completions to traces, only for tenants whose plan allows it, redacted where the plan says so.

Nothing here is on the token path. A prompt is kept in memory from create to trace; the completion is read from the log
after the reader has ended. For other tenants the cost is one dictionary look-up per request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from stream_fabric.errors import FabricError
from stream_fabric.events import Event, RequestTrace, sampled
from stream_fabric.limits import CONTENT_PROMPTS_BYTES_MAX, CONTENT_READS_MAX
from stream_fabric.ports import EventSink, StreamLog
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import Delta, Open, decode, is_text, text_parts
from stream_fabric.stream.ids import StreamId, TenantId
from stream_gw.observe.trace import ReaderOutcome

log = logging.getLogger(__name__)

_PROMPT_FIELDS = (
    "messages", "prompt", "input", "query", "documents", "tools",
    "queries", "items", "data_1", "data_2", "text_1", "text_2",
)  # fmt: skip


class Redacts(Protocol):
    """Removes secrets and personal data."""

    margin_bytes: int
    """Bytes behind a text's maximum that it looks at."""

    @property
    def full(self) -> bool:
        """True while it takes nothing."""

    async def redact(
        self, body: bytes | msgspec.Raw | None, fields: tuple[str, ...], completion: str, bytes_max: int
    ) -> tuple[str, str]:
        """Return prompt and completion, each of at most ``bytes_max`` bytes."""


class Contents:
    """An ``EventSink`` that adds prompts and completions to traces, and passes all events on to ``sink``.

    ``bytes_of``: bytes of each prompt and completion that a tenant's traces store; 0: none. ``one_in``: the tracer's
    sampling rate. ``is_redacted``: True for tenants whose content goes through ``redactor`` first; without a redactor
    it is not stored.
    """

    def __init__(
        self,
        sink: EventSink,
        bytes_of: Callable[[TenantId], int],
        streams: StreamLog,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        one_in: int = 1,
        is_redacted: Callable[[TenantId], bool] = lambda tenant: False,
        redactor: Redacts | None = None,
    ) -> None:
        self._sink = sink
        self._stored_bytes = bytes_of
        self._is_redacted = is_redacted
        self._redactor = redactor
        self._has_warned = False
        self._streams = streams
        self._spawn = spawn
        self._one_in = one_in
        self._prompts: OrderedDict[str, str | bytes] = OrderedDict()
        """Prompts by stream; bodies of requests whose prompt is still to be redacted."""
        self.held_bytes = 0
        """Size of the kept prompts; above the limit the oldest is dropped."""
        self._reading = 0

    def receive_prompt(self, tenant: TenantId, stream: StreamId, body: bytes | msgspec.Raw) -> None:
        """Keep the prompt of a request that is about to create the stream."""
        bytes_max = self._bytes_of(tenant)
        if not bytes_max:
            return
        self._take_prompt(stream)
        prompt = bytes(body) if self._is_redacted(tenant) else prompt_of(body, bytes_max)
        self._prompts[stream] = prompt
        self.held_bytes += _size(prompt)
        while self.held_bytes > CONTENT_PROMPTS_BYTES_MAX:
            self._take_prompt(next(iter(self._prompts)))

    def _bytes_of(self, tenant: TenantId) -> int:
        """Return how many bytes of each prompt and completion are stored; 0: none."""
        stored = self._stored_bytes(tenant)
        if stored and self._redactor is None and self._is_redacted(tenant):
            if not self._has_warned:
                log.warning("content is not stored, install stream-gw[privacy] to redact it: tenant=%s", tenant)
            self._has_warned = True
            return 0
        return stored

    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Drop the prompt of a reader that leaves no trace, because it is not in the sample."""
        if outcome.is_sampled and self._prompts and not sampled(outcome.stream, self._one_in):
            self._take_prompt(outcome.stream)

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestTrace) and event.stream:
            # The plan may have changed since the prompt came
            prompt = self._take_prompt(event.stream) if event.role in ("created", "refused") else ""
            bytes_max = self._bytes_of(event.tenant)
            if bytes_max and (isinstance(prompt, bytes) or self._is_redacted(event.tenant)):
                self._emit_redacted(event, prompt, bytes_max)
                return
            if bytes_max and isinstance(prompt, str):
                event = msgspec.structs.replace(event, prompt=prompt)
                if event.streamed_tokens and self._reading < CONTENT_READS_MAX:
                    self._reading += 1
                    self._spawn(self._emit_with_completion(event, bytes_max))
                    return
        self._sink.emit(event)

    def _take_prompt(self, stream: str) -> str | bytes:
        """Remove the kept prompt of a stream and return it; empty: there is none."""
        prompt = self._prompts.pop(stream, "")
        self.held_bytes -= _size(prompt)
        return prompt

    def _emit_redacted(self, event: RequestTrace, body: str | bytes, bytes_max: int) -> None:
        """Emit the event with redacted content, or without any where it cannot be redacted."""
        redactor = self._redactor
        # A part of an answer may end in half a secret, which no pattern recognizes
        is_whole = event.role == "created" and event.ended in ("completed", "incomplete")
        if redactor is None or redactor.full or not isinstance(body, bytes):
            self._sink.emit(event)
        else:
            self._spawn(self._emit_when_redacted(event, body, bytes_max, redactor, is_whole=is_whole))

    async def _emit_when_redacted(
        self, event: RequestTrace, body: bytes, bytes_max: int, redactor: Redacts, *, is_whole: bool
    ) -> None:
        found = event
        try:
            completion = await self._read_completion(event, bytes_max + redactor.margin_bytes) if is_whole else ""
            prompt, completion = await redactor.redact(body, _PROMPT_FIELDS, completion, bytes_max)
            found = msgspec.structs.replace(event, prompt=prompt, completion=completion)
        except (FabricError, ValueError, RecursionError) as error:
            log.warning("content not redacted, trace goes without it: stream=%s error=%s", event.stream, error)
        finally:
            self._sink.emit(found)

    async def _emit_with_completion(self, event: RequestTrace, bytes_max: int) -> None:
        """Add the completion from the log to the trace, and pass the trace on."""
        try:
            event = msgspec.structs.replace(event, completion=await self._read_completion(event, bytes_max))
        except FabricError as error:
            log.warning("completion not read, trace goes without it: stream=%s error=%s", event.stream, error)
        finally:
            self._reading -= 1
            self._sink.emit(event)  # also when the log cannot be read or the process ends

    async def _read_completion(self, event: RequestTrace, bytes_max: int) -> str:
        assert event.stream
        text = Text(bytes_max)
        after = Cursor(1, event.first_seq - 1)
        first = True
        while not text.full:
            page = await self._streams.watch(event.stream, event.tenant, None, after)
            if page is None or not page.entries:
                break
            if first:
                for number, _, line in (item.partition(b" ") for item in page.structure.splitlines()):
                    if int(number) < event.first_seq:
                        text.note(line)
                first = False
            for entry in page.entries:
                for seq, line in enumerate(entry.frames.split(b"\n"), entry.first):
                    if event.first_seq <= seq <= event.last_seq:
                        text.add(line)
            if page.entries[-1].last >= event.last_seq:
                break
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)
        return text.whole()


class Text:
    """Joins frames to one text of at most ``bytes_max`` bytes.

    Blocks other than text of the first choice begin with a line that names them.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._names: dict[int, str | None] = {}
        """Name of each block; None: an item, which is left out."""
        self._block = -1
        self._parts: list[str] = []
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self._bytes >= self._bytes_max

    def note(self, line: bytes) -> None:
        """Receive a frame before the first shown one: only a block that it opens counts."""
        frame = decode(line)
        if isinstance(frame, Open):
            self._names[frame.block] = _block_name(frame)

    def add(self, line: bytes) -> None:
        if self.full:
            return
        if is_text(line):
            block, _, quoted = text_parts(line)
            self._append(block, msgspec.json.decode(quoted, type=str))
            return
        frame = decode(line)
        if isinstance(frame, Open):
            self._names[frame.block] = _block_name(frame)
        elif isinstance(frame, Delta):
            self._append(frame.block, frame.text)

    def _append(self, block: int, text: str) -> None:
        name = self._names.get(block, "")
        if name is None:
            return
        if block != self._block:
            self._block = block
            if name or self._parts:
                text = ("\n" if self._parts else "") + (f"[{name}]\n" if name else "") + text
        self._parts.append(text)
        self._bytes += _utf8_bytes(text)

    def whole(self) -> str:
        """Return the text, cut to ``bytes_max``."""
        return cut("".join(self._parts).encode(), self._bytes_max)


def prompt_of(body: bytes | msgspec.Raw, bytes_max: int) -> str:
    """Return the fields that make up a request's prompt as JSON, as the client wrote them, cut to ``bytes_max``."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    parts = [b'"%b":%b' % (name.encode(), bytes(fields[name])) for name in _PROMPT_FIELDS if name in fields]
    return cut(b"{" + b",".join(parts) + b"}", bytes_max)


def cut(text: bytes, bytes_max: int) -> str:
    """Return at most ``bytes_max`` bytes of the text, without a broken character at the end."""
    return text[:bytes_max].decode("utf-8", "ignore")


def _block_name(frame: Open) -> str | None:
    """Name of a block in the text; empty: text of the first choice. None: an item, which is left out."""
    match frame.kind:
        case "item":
            return None
        case "text":
            name = ""
        case "tool":
            name = f"tool {frame.name or ''}".strip()
        case _:
            name = frame.kind
    return f"choice {frame.choice}{' ' if name else ''}{name}" if frame.choice else name


def _size(text: str | bytes) -> int:
    return len(text) if isinstance(text, bytes) else _utf8_bytes(text)


def _utf8_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
