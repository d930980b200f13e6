"""What the host's GPUs do, as ``nvidia-smi`` tells it; nothing where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_ANSWER_S_MAX = 10.0
_FIELDS = "index,utilization.gpu,memory.used,memory.total"


class Gpu(NamedTuple):
    number: str
    utilization: float
    memory: float
    """Shares, 0 to 1."""


def parse(text: str) -> list[Gpu]:
    """What ``nvidia-smi --format=csv,noheader,nounits`` says; a GPU that does not tell a figure is left out."""
    found: list[Gpu] = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != 4:
            continue
        index, busy, used, total = values
        try:
            found.append(Gpu(index, float(busy) / 100, float(used) / float(total)))
        except (ValueError, ZeroDivisionError):
            log.debug("nvidia-smi does not tell of GPU %s: %s", index, line)
    return found


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Callable[[], Sequence[Gpu]]]:
    """The GPUs that this process may use, looked at every few seconds; gives what was seen last."""
    seen: list[Gpu] = []
    program = shutil.which("nvidia-smi")
    if program is None:
        yield lambda: ()
        return

    async def look() -> None:
        while True:
            seen[:] = parse(await _ask(program))
            await asyncio.sleep(_LOOK_EVERY_S)

    task = asyncio.create_task(look(), name="gpus")
    try:
        yield lambda: seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _ask(program: str) -> str:
    flags = [f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible:
        flags.append(f"--id={visible}")
    process = await asyncio.create_subprocess_exec(
        program, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(_ANSWER_S_MAX):
            out, _ = await process.communicate()
    except TimeoutError:
        log.warning("nvidia-smi does not answer within %g s", _ANSWER_S_MAX)
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode(errors="replace")
