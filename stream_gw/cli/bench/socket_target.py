"""A gateway of ours over WebSocket, with the project's Python client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from stream_gw.cli.bench.events import BadAnswer, Chunk, ChunkUsage, Event, PromptDetails
from stream_gw.cli.bench.target import Answer, Cancelled, Refused
from stream_gw.client import BEGINNING, Data, Gap, GatewayError, Reset, Stream, StreamGateway

_STREAMS_A_SOCKET = 64


class SocketTarget:
    """Streams over sockets that each carry up to 64. A stream that is left before its end goes on without a reader."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self._urls, self._key = urls, key
        self._sockets: list[list[tuple[StreamGateway, set[Stream]]]] = [[] for _ in urls]
        self._open = contextlib.AsyncExitStack()

    async def close(self) -> None:
        await self._open.aclose()

    @contextlib.asynccontextmanager
    async def create(self, index: int, body: dict[str, Any], *, slow: bool = False) -> AsyncIterator[Answer]:
        async with self._answer(index, body=body) as answer:
            yield answer

    @contextlib.asynccontextmanager
    async def resume(self, index: int, stream: str, after: str) -> AsyncIterator[Answer]:
        async with self._answer(index, stream=stream, after=after or BEGINNING) as answer:
            yield answer

    async def cancel(self, index: int, stream: str) -> Cancelled:
        gateway, _ = await self._socket(index)
        try:
            ack = await gateway.cancel(stream)
        except GatewayError as error:
            raise Refused(error.code, str(error)) from error
        return Cancelled(ack.result, ack.at)

    @contextlib.asynccontextmanager
    async def _answer(
        self, index: int, *, body: dict[str, Any] | None = None, stream: str = "", after: str = BEGINNING
    ) -> AsyncIterator[Answer]:
        gateway, streams = await self._socket(index)
        try:
            if body is not None:
                opened = gateway.create(body, on_exit="detach")
            else:
                opened = gateway.subscribe(stream, after=after)
            streams.add(opened)
            try:
                async with opened:
                    yield _SocketAnswer(opened)
            finally:
                streams.discard(opened)
        except GatewayError as error:
            raise Refused(error.code, str(error)) from error

    async def _socket(self, index: int) -> tuple[StreamGateway, set[Stream]]:
        """Return a socket with room for a stream; open one if none has."""
        sockets = self._sockets[index % len(self._urls)]
        for found in sockets:
            if len(found[1]) < _STREAMS_A_SOCKET:
                return found
        opened = (StreamGateway(self._urls[index % len(self._urls)], token=self._key), set[Stream]())
        sockets.append(opened)  # before the first await, so that no other request opens one too
        await self._open.enter_async_context(opened[0])
        return opened


class _SocketAnswer:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def stream(self) -> str:
        return self._stream.id or ""

    async def events(self) -> AsyncIterator[Event]:
        async for item in self._stream:
            match item:
                case Data(cursor=cursor, chunks=chunks):
                    for number, chunk in enumerate(chunks, 1):
                        yield Event(_chunk_of(chunk), cursor if number == len(chunks) else "")
                    if not chunks:
                        yield Event(None, cursor)
                case Reset(cursor=cursor):
                    yield Event(None, cursor, reset=True)
                case Gap():
                    raise BadAnswer(f"frames {item.first} to {item.seq} are lost")
        usage = self._stream.usage
        if usage is not None:
            cached = PromptDetails(usage.get("cached"))
            yield Event(Chunk(usage=ChunkUsage(usage.get("prompt"), usage.get("output"), cached)))


def _chunk_of(chunk: Any) -> Chunk:
    try:
        return msgspec.convert(chunk, Chunk)
    except msgspec.ValidationError as wrong:
        raise BadAnswer(f"an entry is no chunk: {wrong}") from wrong
