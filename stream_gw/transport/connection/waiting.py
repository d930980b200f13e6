"""Small forms of the objects that uvicorn makes for each connection, of which most are never used."""

from __future__ import annotations

import asyncio
from typing import Any, Literal


class Event:
    """An ``asyncio.Event`` of 48 bytes; it takes 760, even where nobody ever waits for it."""

    __slots__ = ("_event", "_is_set")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._event: asyncio.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()

    def clear(self) -> None:
        self._is_set = False
        if self._event is not None:
            self._event.clear()

    async def wait(self) -> Literal[True]:
        if not self._is_set:
            self._event = self._event or asyncio.Event()
            await self._event.wait()
        return True


class Messages:
    """An unbounded ``asyncio.Queue`` with one reader; one of asyncio takes 2.9 KB. uvicorn bounds it by not reading."""

    __slots__ = ("_arrived", "_held")

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._arrived = Event()

    def empty(self) -> bool:
        return not self._held

    def put_nowait(self, message: Any) -> None:
        self._held.append(message)
        self._arrived.set()

    async def get(self) -> Any:
        while not self._held:
            self._arrived.clear()
            await self._arrived.wait()
        return self._held.pop(0)


class Pipeline(list[Any]):
    """The ``deque`` of uvicorn's waiting requests, without the 600 bytes that an empty one takes."""

    __slots__ = ()

    def appendleft(self, request: Any) -> None:
        self.insert(0, request)
