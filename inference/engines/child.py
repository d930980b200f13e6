"""vLLM's process and all that it starts, as the agent holds them: through a guard (``guard.py``)."""

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
_LAST_WORDS_S = 2.0
_LEEWAY_S = 5.0
"""What the guard may take over ``term_s`` to end everything."""
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")


class Child:
    """vLLM and all its processes, behind a guard."""

    def __init__(self, guard: asyncio.subprocess.Process, url: str, term_s: float) -> None:
        self._guard = guard
        self._term_s = term_s
        self._tail: deque[str] = deque(maxlen=VLLM_TAIL_LINES_MAX)
        self._listening = asyncio.create_task(self._listen(), name="vllm-log")
        self._stopping = False
        self.pid = 0
        """vLLM's server; 0 until the guard has said it."""
        self.url = url
        self.ended = asyncio.create_task(self._until_ended(), name="vllm-ended")
        """Its exit code, as soon as its server has ended; the rest of it may still be on its way out."""

    @classmethod
    async def start(cls, command: list[str], env: dict[str, str], url: str, term_s: float) -> Child:
        guard = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(GUARD), str(term_s), *command,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        return cls(guard, url, term_s)

    async def _until_ended(self) -> int:
        assert self._guard.stdout is not None
        self.pid = int(await self._guard.stdout.readline() or 0)
        code = await self._guard.stdout.readline()
        if not code and self.pid:  # somebody killed the guard; vLLM's server is killed with it, the rest is not
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return int(code or -1)

    async def _listen(self) -> None:
        """Its words into our log and into the tail, line by line."""
        assert self._guard.stderr is not None
        rest = ""
        while said := await self._guard.stderr.read(1 << 16):
            *lines, rest = re.split(r"[\r\n]+", rest + said.decode(errors="replace"))
            rest = rest[:VLLM_LINE_CHARS_MAX]
            for line in lines:
                self._say(line)
        self._say(rest)

    def _say(self, line: str) -> None:
        line = line[:VLLM_LINE_CHARS_MAX].rstrip()
        if line:
            self._tail.append(line)
            found = _LEVEL.search(line, 0, 80)
            level = logging.getLevelNamesMapping()[found[1]] if found else logging.INFO
            # Told to end, it tells of its own parts' ends as errors
            log.log(min(level, logging.INFO) if self._stopping else level, "vLLM: %s", line)

    async def last_words(self) -> str:
        """What it said last: of one that has ended, to the end."""
        await asyncio.wait([self._listening], timeout=_LAST_WORDS_S if self.ended.done() else 0)
        return "it said last:\n" + "\n".join(self._tail) if self._tail else "it said nothing"

    async def stop(self) -> None:
        assert self._guard.stdin is not None
        self._stopping = True
        self._guard.stdin.close()
        try:
            async with asyncio.timeout(self._term_s + _LEEWAY_S):
                await self._guard.wait()
                await asyncio.wait([self.ended, self._listening])
        except TimeoutError:
            log.error("vLLM's processes do not end; they are killed and left")
            for group in (self.pid, self._guard.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        for task in (self.ended, self._listening):
            task.cancel()
