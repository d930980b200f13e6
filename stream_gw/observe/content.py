"""Prompts and completions in the traces of tenants whose plan says so, and of nobody else's.

Nothing of it is on a stream's path. A prompt is kept from its create until its trace is told; what a reader was shown
is read from the log once the reader is over. Who has no such plan costs a look into a dictionary a request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from stream_fabric.cursor import Cursor
from stream_fabric.errors import FabricUnavailable
from stream_fabric.events import Event, RequestTrace, sampled
from stream_fabric.frames import Delta, Open, decode, is_text, text_parts
from stream_fabric.ids import GatewayId, StreamId, TenantId
from stream_fabric.limits import CONTENT_PROMPTS_BYTES_MAX, CONTENT_READS_MAX
from stream_fabric.log import Page
from stream_fabric.ports import EventSink
from stream_fabric.redis.wire import ReplyError
from stream_gw.trace import Over

log = logging.getLogger(__name__)

_ASKED = ("messages", "prompt", "input", "query", "documents", "tools")


class Log(Protocol):
    async def watch(
        self, stream: StreamId, tenant: TenantId | None, gateway: GatewayId | None, after: Cursor
    ) -> Page | None: ...


class Contents:
    """An ``EventSink`` before another. ``bytes_of``: how much of a prompt and of a completion a tenant's plan lets be
    told; 0: nothing. ``one_in``: as the tracer samples."""

    def __init__(
        self,
        sink: EventSink,
        bytes_of: Callable[[TenantId], int],
        streams: Log,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        one_in: int = 1,
    ) -> None:
        self._sink = sink
        self._bytes_of = bytes_of
        self._streams = streams
        self._spawn = spawn
        self._one_in = one_in
        self._prompts: OrderedDict[str, str] = OrderedDict()
        self.held_bytes = 0
        """Of prompts whose trace has not been told; at the limit the oldest goes."""
        self._reading = 0

    def receive_prompt(self, tenant: TenantId, stream: StreamId, body: bytes | msgspec.Raw) -> None:
        """A request is about to make the stream."""
        bytes_max = self._bytes_of(tenant)
        if not bytes_max:
            return
        self._take_prompt(stream)
        prompt = asked(body, bytes_max)
        self._prompts[stream] = prompt
        self.held_bytes += _size(prompt)
        while self.held_bytes > CONTENT_PROMPTS_BYTES_MAX:
            self._take_prompt(next(iter(self._prompts)))

    def receive_over(self, over: Over) -> None:
        """A reader is over; that its trace is out of the sample is known from here alone."""
        if over.ended == "completed" and self._prompts and not sampled(over.stream, self._one_in):
            self._take_prompt(over.stream)

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestTrace) and event.stream and (bytes_max := self._bytes_of(event.tenant)):
            if event.role in ("created", "refused"):
                event = msgspec.structs.replace(event, prompt=self._take_prompt(event.stream))
            if event.streamed_tokens and self._reading < CONTENT_READS_MAX:
                self._reading += 1
                self._spawn(self._with_completion(event, bytes_max))
                return
        self._sink.emit(event)

    def _take_prompt(self, stream: str) -> str:
        prompt = self._prompts.pop(stream, "")
        self.held_bytes -= _size(prompt)
        return prompt

    async def _with_completion(self, event: RequestTrace, bytes_max: int) -> None:
        try:
            event = msgspec.structs.replace(event, completion=await self._completion(event, bytes_max))
        except (FabricUnavailable, ReplyError) as error:
            log.warning("what a reader of %s was shown cannot be read for its trace: %s", event.stream, error)
        finally:
            self._reading -= 1
            self._sink.emit(event)  # also where it cannot be read, or the process ends

    async def _completion(self, event: RequestTrace, bytes_max: int) -> str:
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
    """Frames as one text of so many bytes at most: what is no plain text of the first choice begins with its name."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._names: dict[int, str | None] = {}
        """By block; None: an item, which is no text."""
        self._block = -1
        self._parts: list[str] = []
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self._bytes >= self._bytes_max

    def note(self, line: bytes) -> None:
        """A frame before those that are told: a block may have begun there."""
        frame = decode(line)
        if isinstance(frame, Open):
            self._names[frame.block] = _name(frame)

    def add(self, line: bytes) -> None:
        if self.full:
            return
        if is_text(line):
            block, _, quoted = text_parts(line)
            self._put(block, msgspec.json.decode(quoted, type=str))
            return
        frame = decode(line)
        if isinstance(frame, Open):
            self._names[frame.block] = _name(frame)
        elif isinstance(frame, Delta):
            self._put(frame.block, frame.text)

    def _put(self, block: int, text: str) -> None:
        name = self._names.get(block, "")
        if name is None:
            return
        if block != self._block:
            self._block = block
            if name or self._parts:
                text = ("\n" if self._parts else "") + (f"[{name}]\n" if name else "") + text
        self._parts.append(text)
        self._bytes += _size(text)

    def whole(self) -> str:
        return cut("".join(self._parts).encode(), self._bytes_max)


def asked(body: bytes | msgspec.Raw, bytes_max: int) -> str:
    """What a request asks, as its client wrote it: those of its fields, as JSON."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    parts = [b'"%b":%b' % (name.encode(), bytes(fields[name])) for name in _ASKED if name in fields]
    return cut(b"{" + b",".join(parts) + b"}", bytes_max)


def cut(text: bytes, bytes_max: int) -> str:
    """At most so many bytes of it, characters whole."""
    return text[:bytes_max].decode("utf-8", "ignore")


def _name(frame: Open) -> str | None:
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


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
