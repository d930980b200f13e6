"""vLLM's processes, started and ended through a guard process (``guard.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from pathlib import Path

from stream_fabric.limits import VLLM_LINE_CHARS_MAX, VLLM_TAIL_LINES_MAX

log = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")
_LAST_LINES_S = 2.0
_LEEWAY_S = 5.0
"""Extra time for the guard to end everything after ``term_s``."""
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")


class Child:
    """A vLLM server with all its processes. The guard ends them also when this process dies."""

    def __init__(self, guard: asyncio.subprocess.Process, url: str, term_s: float) -> None:
        self._guard = guard
        self._term_s = term_s
        self._tail: deque[str] = deque(maxlen=VLLM_TAIL_LINES_MAX)
        self._listening = asyncio.create_task(self._copy_output(), name="vllm-log")
        self._stopping = False
        self.pid = 0
        """Process id of vLLM's server; 0 until the guard has sent it."""
        self.url = url
        self.ended = asyncio.create_task(self._wait_exit_code(), name="vllm-ended")
        """Exit code of vLLM's server, as soon as it has ended; its other processes may still be ending."""

    @classmethod
    async def start(cls, command: list[str], env: dict[str, str], url: str, term_s: float) -> Child:
        making = asyncio.create_task(
            asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(GUARD), str(term_s), *command,
                env=env,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            ),
            name="vllm-guard",
        )  # fmt: skip
        try:
            return cls(await asyncio.shield(making), url, term_s)
        except asyncio.CancelledError:
            # asyncio, cancelled in there, kills the guard alone and waits until vLLM too has closed the guard's pipes
            await cls(await making, url, term_s).stop()
            raise

    async def _wait_exit_code(self) -> int:
        """Wait until vLLM has ended and return its exit code; -1: unknown."""
        assert self._guard.stdout is not None
        self.pid = int(await self._guard.stdout.readline() or 0)
        code = await self._guard.stdout.readline()
        if not code and self.pid:  # the guard was killed: its server dies with it, the other processes do not
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return int(code or -1)

    async def _copy_output(self) -> None:
        """Copy vLLM's output line by line into this process's log and into the kept last lines."""
        assert self._guard.stderr is not None
        rest = ""
        while piece := await self._guard.stderr.read(1 << 16):
            *lines, rest = re.split(r"[\r\n]+", rest + piece.decode(errors="replace"))
            rest = rest[:VLLM_LINE_CHARS_MAX]
            for line in lines:
                self._log_line(line)
        self._log_line(rest)

    def _log_line(self, line: str) -> None:
        line = line[:VLLM_LINE_CHARS_MAX].rstrip()
        if line:
            self._tail.append(line)
            found = _LEVEL.search(line, 0, 80)
            level = logging.getLevelNamesMapping()[found[1]] if found else logging.INFO
            # After a stop it logs the end of its own parts as errors
            log.log(min(level, logging.INFO) if self._stopping else level, "vLLM: %s", line)

    async def last_lines(self) -> str:
        """Return the last lines of vLLM's output as the end of an error message."""
        await asyncio.wait([self._listening], timeout=_LAST_LINES_S if self.ended.done() else 0)
        return "its last lines:\n" + "\n".join(self._tail) if self._tail else "it wrote no output"

    async def stop(self) -> None:
        assert self._guard.stdin is not None
        self._stopping = True
        self._guard.stdin.close()
        try:
            async with asyncio.timeout(self._term_s + _LEEWAY_S):
                await self._guard.wait()
                await asyncio.wait([self.ended, self._listening])
        except TimeoutError:
            log.error("vLLM's processes did not end in time, killing them: pid=%d", self.pid)
            for group in (self.pid, self._guard.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        for task in (self.ended, self._listening):
            task.cancel()
