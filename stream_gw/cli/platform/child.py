"""Child processes of ``stream-gw up``: started, found ready, and ended with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

START_S = 60.0
STOP_S = 10.0
_HURRY_S = 3.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """Make a ``preexec_fn`` that ends the child when its parent dies. None where the system has no such signal."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arm_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return arm_death_signal


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def start(
    stack: contextlib.AsyncExitStack,
    flags: list[str],
    env: dict[str, str],
    start_s: float | None = START_S,
    stop_s: float = STOP_S,
) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    """Start ``stream-gw`` with these flags; return the process and its ready line. ``stack`` ends the process.

    Raises OSError when the process ends, or is not ready within ``start_s`` (None: no limit).
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stream_gw.cli", *flags, "--json",
        env=env, stdout=asyncio.subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent(),
    )  # fmt: skip
    stack.push_async_callback(end, process, stop_s)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(start_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise OSError(f"{flags[0]} was not ready within {start_s:g} s") from None
    if not line:
        raise OSError(f"{flags[0]} ended at its start (exit code {await process.wait()}); its message is above")
    return process, json.loads(line)


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
