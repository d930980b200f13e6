"""Supervision of one WebSocket, whatever its protocol: takes its messages, and runs their work in tasks."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, ClassVar, Generic, TypeVar

from starlette.types import Receive

from stream_fabric.errors import TooMany
from stream_gw.streams.gateway import Gateway
from stream_gw.transport.sockets.base import EdgeSocket

log = logging.getLogger(__name__)

_INTERNAL_ERROR = 1011
S = TypeVar("S", bound=EdgeSocket)


class SocketSession(ABC, Generic[S]):
    """Carries out the messages of one socket. Their work runs in tasks, so that none waits for another."""

    __slots__ = ("gateway", "socket", "tasks")

    protocol: ClassVar[str]
    """Name of the protocol in messages to clients."""
    resume_with: ClassVar[str] = ""
    """How a client goes on after an internal error, beside a new connection."""

    def __init__(self, socket: S, gateway: Gateway) -> None:
        self.socket = socket
        self.gateway = gateway
        self.tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def take(self, text: str) -> None:
        """Carry out one message. The next is taken after it."""

    async def wait_for_answers(self) -> None:
        """Wait for what is answered before a socket that sends too much is closed."""

    async def run(self, receive: Receive) -> None:
        """Take messages until the client has gone."""
        socket = self.socket
        while True:
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            if socket.close_code is not None:
                continue
            text = event.get("text")
            if text is None:
                socket.close(1008, f"binary frames are not part of {self.protocol}; send JSON text")
                continue
            if not socket.take_credit():
                await self.wait_for_answers()
                socket.close(TooMany.close_code, socket.rate_limit)
                continue
            await self.take(text)

    async def end(self) -> None:
        """Take that the client has gone, and wait for the work that runs.

        A stream whose create was begun is created, and kept for its grace period.
        """
        self.socket.leave()
        await self.wait_for_tasks()

    async def wait_for_tasks(self) -> None:
        if self.tasks:
            await asyncio.wait(self.tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in a task, and close the socket after an unexpected error."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def _finish(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work of a websocket failed: socket=%s", self.socket.name, exc_info=error)
            self.socket.close(_INTERNAL_ERROR, f"internal error of the gateway; reconnect{self.resume_with}")
