"""uvicorn's server with these connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn

from stream_fabric.limits import (
    CONNECTIONS_MAX,
    OPEN_FILES_KEPT,
    SWEEP_EVERY_S,
    WS_MESSAGE_BYTES_MAX,
    WS_PROTOCOL_PING_S,
)
from stream_fabric.ports import Clock
from stream_fabric.system_errors import reason
from stream_gw.transport.connection.http import EdgeHttp
from stream_gw.transport.connection.turns import Config
from stream_gw.transport.connection.unsent import UnsentBytes
from stream_gw.transport.connection.websocket import EdgeWebSocket
from stream_gw.transport.sweeping import batches

_log = logging.getLogger(__name__)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _is_ours_to_tell(record: logging.LogRecord) -> bool:
    """False: uvicorn's line for each input that is no HTTP. It names no peer; the peer is told what is wrong."""
    return record.msg != "Invalid HTTP request received."


class EdgeServer(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway handles SIGTERM."""

    async def sweep(self) -> None:
        """Cut connections every few seconds that do not take what they were sent."""
        config, told = cast(Config, self.config), 0
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            if config.cut > told:
                extra = {"limit": config.connections_max, "cut": config.cut - told}
                _log.warning("connections cut, the gateway holds the most it may", extra=extra)
                told = config.cut
            await self._sweep_once(asyncio.get_running_loop())

    async def _sweep_once(self, loop: asyncio.AbstractEventLoop) -> None:
        async for batch in batches(self.server_state.connections):
            for connection in batch:
                connection.sweep(loop.time())  # type: ignore[union-attr]

    def end_keep_alive(self) -> None:
        """Close each connection after the next answer on it: further requests should go to another gateway."""
        cast(Config, self.config).draining = True
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, EdgeHttp):
                connection.end_keep_alive()

    def abort(self) -> None:
        """Cut all connections, whatever they have not taken yet."""
        for connection in tuple(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the address. Raises OSError when the address cannot be bound."""
        log = logging.getLogger("uvicorn.error")
        log.addFilter(_is_no_error)  # the error is raised, and need not be logged too
        try:
            await super().startup(sockets)
        except SystemExit as ended:
            where = f"{self.config.host} port {self.config.port}"
            why = reason(ended.__context__ or ended)
            raise OSError(f"cannot listen on {where}: {why}; choose another --port or --host") from None
        finally:
            log.removeFilter(_is_no_error)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def most_connections(open_files: int) -> int:
    """Return how many connections a gateway holds, so that enough open files are left for Redis and all else."""
    return min(CONNECTIONS_MAX, open_files - min(OPEN_FILES_KEPT, open_files // 4))


def make_server(
    app: Any,
    clock: Clock,
    host: str,
    port: int,
    connections_max: int = CONNECTIONS_MAX,
    on_cut: Callable[[], None] = lambda: None,
) -> EdgeServer:
    """``on_cut`` is called for each connection over ``connections_max``, which is cut."""
    config = Config(
        app,
        host=host,
        port=port,
        http=EdgeHttp,
        ws=EdgeWebSocket,
        loop="none",
        interface="asgi3",
        proxy_headers=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,  # longer than a load balancer's idle limit, so that it closes first
        timeout_graceful_shutdown=5,
        ws_max_size=WS_MESSAGE_BYTES_MAX,
        ws_ping_interval=WS_PROTOCOL_PING_S,
        ws_ping_timeout=WS_PROTOCOL_PING_S,
        ws_per_message_deflate=False,
    )
    config.clock, config.unsent = clock, UnsentBytes()
    config.connections_max, config.on_cut = connections_max, on_cut
    logging.getLogger("uvicorn.error").addFilter(_is_ours_to_tell)
    return EdgeServer(config)
