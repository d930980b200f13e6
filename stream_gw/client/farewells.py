"""Cancels of streams whose reader has left: tasks of the client send them, so that no reader waits for one."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from stream_gw.client.errors import GatewayError
from stream_gw.client.stream import Stream

FAREWELL_S: Final = 5.0  # time for the cancels of abandoned streams, when the client closes

_log = logging.getLogger(__name__)


class Farewells:
    """The cancels that are on their way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, group: asyncio.TaskGroup, stream: Stream) -> None:
        """Cancel the stream in a task of the group, then close it."""
        task = group.create_task(_cancel_and_close(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Wait until the cancels are answered, for ``FAREWELL_S`` at most."""
        await asyncio.wait(self._tasks, timeout=FAREWELL_S)


async def _cancel_and_close(stream: Stream) -> None:
    try:
        await stream.cancel()
    except GatewayError as error:
        _log.warning("cancel of an abandoned stream failed: stream=%s error=%s", stream.id, error)
    stream.close()
