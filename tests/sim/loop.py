"""Virtual time under asyncio: one loop whose clock jumps from event to event, and processes on it that can be killed
or frozen between any two of their steps."""

from __future__ import annotations

import asyncio
import heapq
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Process:
    """A simulated process: when killed, none of its callbacks run again; when frozen, they wait for the thaw."""

    __slots__ = ("alive", "frozen", "late", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.late: list[Handle] = []


class Handle:
    __slots__ = ("args", "callback", "owner")

    def __init__(self, owner: Process, callback: Callable[..., Any] | None, args: tuple[Any, ...]) -> None:
        self.owner = owner
        self.callback = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


class Loop(asyncio.AbstractEventLoop):
    """An event loop on virtual time; a callback belongs to the process that scheduled it, unless another is named."""

    def __init__(self) -> None:
        self.outside = Process("outside")
        self.current = self.outside
        self.now = 0.0
        self.closing = False
        self.thawed_at_s = 0.0
        """When the last frozen process goes on."""
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._tasks: list[asyncio.Task[Any]] = []

    # --- what asyncio asks of a loop -----------------------------------------------------------------------

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        handle = Handle(self.current, callback, args)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        return self.at(delay, self.current, callback, *args)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        return self.at(when - self.now, self.current, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name)
        self._tasks.append(task)  # of a killed process they are never finished, and must not be collected meanwhile
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Processes' main tasks are watched; what else failed has reached them, or died with them."""

    # --- what the world asks -------------------------------------------------------------------------------

    def at(self, delay_s: float, owner: Process, callback: Callable[..., Any], *args: Any) -> Handle:
        """Call after a while, as the owner."""
        self._count += 1
        handle = Handle(owner, callback, args)
        heapq.heappush(self._timers, (self.now + delay_s, self._count, handle))
        return handle

    @contextmanager
    def inside(self, process: Process) -> Iterator[None]:
        """Tasks started inside belong to the process."""
        before, self.current = self.current, process
        try:
            yield
        finally:
            self.current = before

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        with self.inside(process):
            return self.create_task(work)

    def freeze(self, process: Process, for_s: float) -> None:
        if not process.frozen:
            process.frozen = True
            self.thawed_at_s = max(self.thawed_at_s, self.now + for_s)
            self.at(for_s, self.outside, self.thaw, process)

    def thaw(self, process: Process) -> None:
        process.frozen = False
        self._ready.extend(process.late)
        process.late.clear()

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Run until nothing is left to do, the time has come, or ``done``, which is asked now and then."""
        events._set_running_loop(self)
        asked = 0.0
        try:
            while True:
                self._run_ready()
                if not self._timers or self._timers[0][0] > until_s:
                    return
                self.now, _, handle = heapq.heappop(self._timers)
                self._ready.append(handle)
                if self.now - asked > 0.2:
                    asked = self.now
                    if done():
                        return
        finally:
            self.current = self.outside
            events._set_running_loop(None)

    def _run_ready(self) -> None:
        ready = self._ready
        while ready:
            handle = ready.popleft()
            callback, owner = handle.callback, handle.owner
            if callback is None or not owner.alive:
                continue
            if owner.frozen:
                owner.late.append(handle)
                continue
            self.current = owner
            callback(*handle.args)

    def close(self) -> None:
        """Cancel everything, the dead's tasks too, so that nothing is collected half-done."""
        self.closing = True
        events._set_running_loop(self)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what is begun while its task group ends
            self._cancel_all()
        events._set_running_loop(None)

    def _cancel_all(self) -> None:
        for _ in range(5):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            while self._ready:
                handle = self._ready.popleft()
                if handle.callback is not None:
                    # RuntimeError: a task would begin while its group ends. AssertionError: a planted bug acts again
                    with suppress(RuntimeError, AssertionError):
                        handle.callback(*handle.args)
        for task in self._tasks:
            if not task.done():  # killed before its first step
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task.get_coro().close()
            elif not task.cancelled():
                task.exception()  # seen
        self._ready.clear()
        self._timers.clear()
        self._tasks.clear()
