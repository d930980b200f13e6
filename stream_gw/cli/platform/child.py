"""Child processes of ``stream-gw up``: started, found ready, and ended with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stream_fabric.process.death_signal import die_with_parent

START_S = 60.0
STOP_S = 10.0
_HURRY_S = 3.0
_LAST_WORDS_S = 0.5
"""Time for what an ended process has written to arrive."""
_LINE_BYTES_MAX = 1 << 16


class ChildFailed(OSError):
    """A process of the platform could not start."""


@dataclass
class _Child:
    process: asyncio.subprocess.Process
    name: str
    role: str
    stop_s: float
    relay: asyncio.Task[None] | None = None
    error: str = ""
    """The line in which the process said why it ends."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Children:
    """Child processes that start and end side by side.

    ``log`` takes each line that a child writes to stderr, but its error line: that is part of this process's own error.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._children: list[_Child] = []
        self._muted = False

    async def start(
        self,
        flags: list[str],
        env: dict[str, str],
        start_s: float | None = START_S,
        stop_s: float = STOP_S,
        name: str = "",
    ) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        """Start ``stream-gw`` with these flags; return the process and its ready line. ``name``: for the user.

        Raises ChildFailed when the process ends, or is not ready within ``start_s`` (None: no limit).
        """
        role = flags[0]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "stream_gw.cli", *flags, "--json", env=env, start_new_session=True,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, preexec_fn=die_with_parent(),
        )  # fmt: skip
        child = _Child(process, name or role, role, stop_s)
        child.relay = asyncio.create_task(self._relay(child))
        self._children.append(child)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(start_s):
                line = await process.stdout.readline()
        except TimeoutError:
            raise ChildFailed(f"{child.name} was not ready within {start_s:g} s") from None
        if not line:
            code = await process.wait()
            await asyncio.wait([child.relay], timeout=_LAST_WORDS_S)
            self._muted = True  # the others fail of the same cause, or because this process ends them
            # The lines that follow an error line are relayed, so they stand above this one
            error = child.error.replace("its last lines:", "its last lines are above")
            raise ChildFailed(f"{child.name}: {error or f'ended at its start with exit code {code}'}")
        return process, json.loads(line)

    async def last_words(self, pid: int) -> str:
        """Return the name of the ended child with this process id, and the line in which it said why; empty: none."""
        child = next((each for each in self._children if each.process.pid == pid), None)
        if child is None:
            return ""
        if child.relay is not None:
            await asyncio.wait([child.relay], timeout=_LAST_WORDS_S)
        return f"{child.name}: {child.error}" if child.error else child.name

    @property
    def alive(self) -> list[str]:
        """Names of the children that have not ended."""
        return [child.name for child in self._children if child.process.returncode is None]

    async def end(self) -> None:
        """End every child, all at once."""
        await asyncio.gather(*(end(child.process, child.stop_s) for child in self._children))
        relays = [child.relay for child in self._children if child.relay is not None]
        if relays:
            await asyncio.wait(relays, timeout=_LAST_WORDS_S)  # a grandchild may hold the pipe open
        for relay in relays:
            relay.cancel()

    def kill(self) -> None:
        """Kill every child that has not ended."""
        for child in self._children:
            if child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.kill()

    async def _relay(self, child: _Child) -> None:
        """Pass the lines of a child's stderr on, until it closes."""
        assert child.process.stderr is not None
        rest = b""
        while piece := await child.process.stderr.read(_LINE_BYTES_MAX):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(child, line.decode("utf-8", "replace"))
        if rest:
            self._take(child, rest.decode("utf-8", "replace"))

    def _take(self, child: _Child, line: str) -> None:
        prefix = f"stream-gw {child.role}: "
        if line.startswith(prefix):
            child.error = line.removeprefix(prefix)
        elif not self._muted:
            self._log(line)


async def end(process: asyncio.subprocess.Process, stop_s: float = STOP_S) -> None:
    """Send SIGTERM, then SIGTERM again, so that an agent no longer waits for its streams, then SIGKILL."""
    for number, within_s in ((signal.SIGTERM, _HURRY_S), (signal.SIGTERM, stop_s - _HURRY_S), (signal.SIGKILL, None)):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await process.wait()
