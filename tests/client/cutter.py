"""A TCP proxy that cuts, stalls and refuses: what networks do to a client, on any gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Cutter:
    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None and parts.port is not None
        self._target = (parts.hostname, parts.port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self.url = ""
        self.refuses = False
        self.refuses_sockets = False
        self.accepted = 0

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Bytes stop in both directions; no connection is closed."""
        self._flow.clear()

    def flow(self) -> None:
        self._flow.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refuses:
            writer.transport.abort()
            return
        head = await reader.read(65536) if self.refuses_sockets else b""
        if b"upgrade: websocket" in head.lower():
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        there_writer.write(head)
        self._writers |= {writer, there_writer}
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            for each in (writer, there_writer):
                self._writers.discard(each)
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._flow.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    @classmethod
    @asynccontextmanager
    async def before(cls, target: str) -> AsyncIterator[Cutter]:
        cutter = cls(target)
        server = await asyncio.start_server(cutter._accept, "127.0.0.1", 0)
        cutter.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield cutter
        finally:
            cutter.flow()
            server.close()
            cutter.cut()
            await asyncio.sleep(0)
