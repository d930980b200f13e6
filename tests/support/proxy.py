"""A TCP proxy that does what networks do: cut, delay, half-close, go silent, throttle, refuse."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Settings act at once, on open connections too.

    ``delay_s`` before each piece is passed on; ``bytes_per_s`` slows (0: not); ``refuse`` aborts new connections.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flow = asyncio.Event()
        self._flow.set()
        self._cut_after: int | None = None
        self._next_cuts: list[int] = []
        self.delay_s = 0.0
        self.bytes_per_s = 0
        self.refuse = False
        self.accepted_at: list[float] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def accepted(self) -> int:
        return len(self.accepted_at)

    @property
    def open(self) -> int:
        """Open connections."""
        return len(self._writers) // 2

    def point_at(self, port: int) -> None:
        """Send new connections to another server."""
        self._target = (self._target[0], port)

    def cut_all(self) -> None:
        """Abort every connection, with a reset."""
        for writer in list(self._writers):
            writer.transport.abort()

    def cut_after_bytes(self, count: int, times: int = 1) -> None:
        """Abort everything once so many more bytes have come from the server: replies end in their middle. After
        that, do it again, ``times`` times in all."""
        self._cut_after, *self._next_cuts = [count] * times

    @property
    def cuts_left(self) -> int:
        return len(self._next_cuts) + (self._cut_after is not None)

    def half_close_all(self) -> None:
        """Both ends see an end of file, nobody a reset."""
        for writer in list(self._writers):
            with suppress(OSError, RuntimeError):
                writer.write_eof()

    def pause(self) -> None:
        """Black hole: connections stay open, nothing passes."""
        self._flow.clear()

    def resume(self) -> None:
        self._flow.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted_at.append(asyncio.get_running_loop().time())
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.refuse:
                return
            try:
                there_reader, there_writer = await asyncio.open_connection(*self._target)
            except OSError:
                return
            self._writers |= {writer, there_writer}
            try:
                await asyncio.gather(self._pump(reader, there_writer, False), self._pump(there_reader, writer, True))
            finally:
                self._writers -= {writer, there_writer}
                there_writer.transport.abort()
        except asyncio.CancelledError:
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                await self._flow.wait()
                if replies and self._cut_after is not None:
                    self._cut_after -= len(data)
                    if self._cut_after < 0:
                        writer.write(data[: self._cut_after])
                        self._cut_after = self._next_cuts.pop() if self._next_cuts else None
                        await writer.drain()
                        self.cut_all()
                        return
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    @classmethod
    @asynccontextmanager
    async def before(
        cls, port: int, host: str = "127.0.0.1", listen: int = 0, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[Proxy]:
        """A proxy in front of a server, on a port of its own, or one that clients have been told.

        ``tls``: clients speak TLS with the proxy.
        """
        proxy = cls(host, port)
        server = await asyncio.start_server(proxy._accept, "127.0.0.1", listen, ssl=tls)
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            proxy.resume()
            server.close()
            tasks = list(proxy._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
