"""Reads streams that exist: follow, replay, describe, list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec

from stream_fabric.errors import CursorGone, NotFound, StreamLost
from stream_fabric.limits import ORPHAN_GRACE_S, RECONNECT_S_MAX
from stream_fabric.stream.cursor import BEGINNING, Cursor
from stream_fabric.stream.frames import STARTED_PREFIX, End, Note, Usage, decode, is_end
from stream_fabric.stream.ids import StreamId, UserId, created_ms, is_stream_id
from stream_fabric.stream.log import Page
from stream_fabric.stream.reader import check_cursor
from stream_gw.auth import Principal, Scope
from stream_gw.delivery.hub import no_stream
from stream_gw.dialects import DIALECTS, encoder_class
from stream_gw.dialects.facts import StreamFacts, StreamMeta, meta_decoder
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.off_loop import frames_off_loop
from stream_gw.streams.opened import OpenedStream
from stream_gw.streams.parts import GatewayParts
from stream_gw.streams.placements import PlacementRecords

_NO_ENTRIES = Cursor(1 << 40, 0)
"""A position after everything: reads a page without entries."""
_RETRY_S = 0.05
_LISTED_EARLY_MS = 60_000
"""A stream is listed as running a moment before it is created; only after this time is a missing one unlisted."""
_LOOKUPS_MAX = 32


class StreamReads:
    """Read access to a tenant's streams. Every call also raises NotFound for a stream of another tenant or user."""

    def __init__(self, parts: GatewayParts, placements: PlacementRecords) -> None:
        self._parts = parts
        self._hub = parts.hub
        self._placements = placements

    async def read_head(self, who: Principal, stream: str, scope: Scope = "read") -> tuple[Page, StreamMeta]:
        """Read the head of a stream that the caller may access, and its meta.

        After an outage a missing stream is waited for, because its producer may still recreate it.
        """
        who.require(scope)
        if not who.may_read(stream):
            raise no_stream(stream_id(stream))
        if who.stream is not None and self._parts.links is not None:
            ended = who.link_error((await self._parts.links.generations([who.stream]))[who.stream])
            if ended is not None:
                raise ended
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ORPHAN_GRACE_S
        while True:
            try:
                return await self._read_head_once(who, stream)
            except NotFound:
                if not self._hub.awaits_recreation or loop.time() > deadline:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _read_head_once(self, who: Principal, stream: str) -> tuple[Page, StreamMeta]:
        page = await self._hub.read_page(stream_id(stream), who.tenant, _NO_ENTRIES)
        meta = meta_decoder.decode(page.facts)
        if not who.may_see(meta.user):
            raise no_stream(stream)
        if who.stream is not None and meta.facts.settings is not None:
            # The holder of a link to the stream sees its answer, and nothing of the request
            meta = msgspec.structs.replace(meta, facts=msgspec.structs.replace(meta.facts, settings=None))
        return page, meta

    async def describe(self, who: Principal, stream: str) -> dict[str, Any]:
        """Describe a stream; the usage of one that has ended is what its bill has."""
        page, meta = await self.read_head(who, stream)
        usage = None
        if page.status != "live":
            last = await self._hub.read_page(StreamId(stream), who.tenant, Cursor(page.epoch.n, page.head - 1))
            frame = decode(last.entries[-1].frames.rpartition(b"\n")[2]) if last.entries else None
            usage = frame.usage if isinstance(frame, End) else None
        return describe(StreamId(stream), page, meta, usage)

    async def follow(
        self, who: Principal, stream: str, after: Cursor, trace: ReaderTrace, *, exact: bool, dialect: str | None
    ) -> OpenedStream | None:
        """Open a stream for a reader that continues after the cursor; None: the stream has ended there.

        ``dialect`` None: the stream's own.

        Raises CursorInvalid and CursorGone.
        """
        trace.tenant, trace.role = who.tenant, "resumed"
        return await self.open(who, stream, after, trace, exact=exact, dialect=dialect)

    async def open(
        self, who: Principal, stream: str, after: Cursor, trace: ReaderTrace, *, exact: bool, dialect: str | None
    ) -> OpenedStream | None:
        """Do the same as ``follow``, but leave the trace's role to the caller."""
        page, meta = await self.read_head(who, stream)
        page = await self._await_head(page, StreamId(stream), who, after)
        end = Cursor(page.epoch.n, page.head)
        if page.status != "live" and after >= end:
            if after > end:  # a failover of Redis lost what the client has seen after the end
                raise CursorGone(f"cursor {after} lies beyond the end of the stream, {end}; read the stream again")
            return None
        check_cursor(after, page.epoch, page.head, page.bases)
        trace.dialect = dialect if dialect in DIALECTS else ""  # a wrong one is refused later
        self._note_opened(trace, page, meta, after)
        seen = _structure_frames(page.structure, after.seq)
        if after.seq and encoder_class(dialect or meta.facts.own_dialect, meta.facts).needs_history:
            seen = await self._read_before(who, StreamId(stream), after)
        return self._make_opened_stream(StreamId(stream), page, meta, after, seen, trace, exact=exact)

    async def follow_whole(self, who: Principal, stream: str, trace: ReaderTrace) -> OpenedStream:
        """Open a stream at its last frame before the terminal; ``seen`` holds all frames up to there."""
        found, meta = await self.read_head(who, stream)
        at, lines = await self._read_all(who, StreamId(stream))
        page = await self._hub.read_page(StreamId(stream), who.tenant, _NO_ENTRIES)
        trace.tenant, trace.role = who.tenant, "resumed"
        self._note_opened(trace, found, meta, at)
        return self._make_opened_stream(StreamId(stream), page, meta, at, tuple(lines), trace, exact=False)

    async def read_frames(self, who: Principal, stream: str) -> tuple[StreamMeta, list[tuple[int, bytes]]]:
        """Read all frames so far, each with its epoch, and the stream's meta."""
        _, meta = await self.read_head(who, stream)
        frames: list[tuple[int, bytes]] = []
        async for page in self._pages(who, StreamId(stream)):
            for entry in page.entries:
                frames[entry.first - 1 :] = [(entry.epoch, line) for line in entry.frames.split(b"\n")]
        return meta, frames

    async def follow_from(
        self, who: Principal, stream: str, place: Callable[[StreamFacts, list[bytes]], int], trace: ReaderTrace
    ) -> OpenedStream | None:
        """Open a stream for a reader whose position only its dialect knows; None: the stream has ended there.

        ``place`` returns how many of the frames so far the reader has.
        """
        meta, frames = await self.read_frames(who, stream)
        lines = [line for _, line in frames]
        seq = await frames_off_loop(len(lines), lambda: place(meta.facts, lines))
        page = await self._hub.read_page(StreamId(stream), who.tenant, _NO_ENTRIES)
        if page.status != "live" and seq >= page.head:
            return None
        after = Cursor(frames[seq - 1][0], seq) if seq else BEGINNING
        trace.tenant, trace.role = who.tenant, "resumed"
        self._note_opened(trace, page, meta, after)
        return self._make_opened_stream(StreamId(stream), page, meta, after, tuple(lines[:seq]), trace, exact=True)

    def _make_opened_stream(
        self,
        stream: StreamId,
        page: Page,
        meta: StreamMeta,
        after: Cursor,
        seen: tuple[bytes, ...],
        trace: ReaderTrace,
        *,
        exact: bool,
    ) -> OpenedStream:
        subscribe = partial(self._hub.follow, stream, page, after, trace, exact=exact)
        return OpenedStream(stream, str(page.epoch), meta.facts, after, seen, subscribe, attached=True)

    def _note_opened(self, trace: ReaderTrace, page: Page, meta: StreamMeta, after: Cursor) -> None:
        """Record in the trace where the reader starts, and when."""
        trace.facts, trace.user, trace.first_seq = meta.facts, meta.user, after.seq + 1
        trace.placed = self._parts.clock.monotonic_us()
        trace.gap_us = page.alone_ms * 1000

    async def _await_head(self, page: Page, stream: StreamId, who: Principal, after: Cursor) -> Page:
        """Wait while a live stream is behind the caller's cursor after an outage.

        The producer appends the lost tail again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + RECONNECT_S_MAX
        while (
            self._hub.recently_away
            and page.status == "live"
            and after.epoch == page.epoch.n
            and after.seq > page.head
            and loop.time() < deadline
        ):
            await asyncio.sleep(_RETRY_S)
            page = await self._hub.read_page(stream, who.tenant, _NO_ENTRIES)
        return page

    async def end_of(self, who: Principal, stream: StreamId) -> tuple[Page, bytes]:
        """Read the last page of an ended stream and its terminal. Raises StreamLost when the terminal is gone."""
        page = await self._hub.read_page(stream, who.tenant, _NO_ENTRIES)
        # In the last epoch: an earlier one would match every entry of the stream, and a page holds only the first
        page = await self._hub.read_page(stream, who.tenant, Cursor(page.epoch.n, page.head - 1))
        terminal = page.entries[-1].frames.rpartition(b"\n")[2] if page.entries else b""
        if not is_end(terminal) or not isinstance(decode(terminal), End):
            raise StreamLost(f"the end of stream {stream} is lost")
        return page, terminal

    async def placement(self, who: Principal, stream: str) -> dict[str, Any]:
        """Describe the stream's producers, and its placements with candidates, scores and reason."""
        page, _ = await self.read_head(who, stream)
        producers: list[dict[str, Any]] = []
        seq = 0
        async for page in self._pages(who, StreamId(stream)):
            for entry in page.entries:
                for seq, line in enumerate(entry.frames.split(b"\n"), entry.first):
                    if line.startswith(STARTED_PREFIX) and isinstance(note := decode(line), Note):
                        body = {} if note.body is None else msgspec.json.decode(note.body)
                        producers.append({**body, "epoch": entry.epoch, "from": f"{entry.epoch}-{seq}"})
        await self._placements.send()
        placements = await self._parts.log.placements(StreamId(stream))
        return {
            "id": stream,
            "placements": [msgspec.Raw(record) for record in placements],
            "producers": producers,
            "head": str(Cursor(page.epoch.n, seq)),
        }

    async def _read_all(self, who: Principal, stream: StreamId) -> tuple[Cursor, list[bytes]]:
        """Read all frames but the terminal; return them with the cursor of the last one."""
        lines: list[bytes] = []
        at = BEGINNING
        async for page in self._pages(who, stream):
            for entry in page.entries:
                frames = entry.frames.split(b"\n")
                if is_end(frames[-1]):
                    frames.pop()
                lines += frames
                if frames:
                    at = Cursor(entry.epoch, len(lines))
        return at, lines

    async def _read_before(self, who: Principal, stream: StreamId, after: Cursor) -> tuple[bytes, ...]:
        """Read all frames up to the cursor. Raises CursorGone when the log has not all of them."""
        lines: list[bytes] = []
        async for page in self._pages(who, stream):
            for entry in page.entries:
                lines[entry.first - 1 :] = entry.frames.split(b"\n")
            if len(lines) >= after.seq:
                return tuple(lines[: after.seq])
        raise CursorGone(f"the log has not all frames before cursor {after}; read the stream from the beginning")

    async def _pages(self, who: Principal, stream: StreamId) -> AsyncIterator[Page]:
        after = BEGINNING
        while True:
            page = await self._hub.read_page(stream, who.tenant, after)
            yield page
            if not page.entries:
                return
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)

    async def running(self, who: Principal, user: str) -> list[dict[str, Any]]:
        """Describe the user's running streams, newest first."""
        who.require("read")
        who.require_any_stream()
        if not who.may_see(user):
            raise NotFound("this token belongs to another user")
        oldest_ms = self._parts.clock.now_us() // 1000 - _LISTED_EARLY_MS
        ended: list[StreamId] = []
        busy = asyncio.Semaphore(_LOOKUPS_MAX)

        async def describe_running(stream: StreamId) -> dict[str, Any] | None:
            try:
                async with busy:
                    page, meta = await self._read_head_once(who, stream)
            except NotFound:
                if created_ms(stream) < oldest_ms:
                    ended.append(stream)
                return None
            if page.status == "live":
                return describe(stream, page, meta)
            ended.append(stream)
            return None

        listed = await self._parts.index.live(who.tenant, UserId(user))
        found = await asyncio.gather(*map(describe_running, listed))
        await self._parts.index.remove_live(who.tenant, UserId(user), ended)
        return [description for description in found if description is not None]


def stream_id(text: str) -> StreamId:
    """Check and convert the text of a stream id. Raises NotFound for any other text."""
    if not is_stream_id(text):
        raise NotFound(f"no stream {text[:64]!r}: a stream id is resp_ and 32 hex digits")
    return StreamId(text)


def _structure_frames(structure: bytes, seq: int) -> tuple[bytes, ...]:
    """Return the frames up to ``seq`` of a page's structure."""
    numbered = (line.partition(b" ") for line in structure.splitlines())
    return tuple(frame for number, _, frame in numbered if int(number) <= seq)


def describe(stream: StreamId, page: Page, meta: StreamMeta, usage: Usage | None = None) -> dict[str, Any]:
    """Return the API's description of a stream. ``usage`` None: it runs, or its last frame is lost."""
    return {
        "id": stream,
        "object": "stream",
        "epoch": str(page.epoch),
        "head": page.head,
        "status": page.status,
        "model": meta.facts.model,
        "created": meta.facts.created,
        "user": meta.user,
        "usage": None if usage is None else msgspec.to_builtins(usage),
    }
