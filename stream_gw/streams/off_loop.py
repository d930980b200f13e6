"""Keeps long computations over a request's body or a stream's frames off the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_INLINE_BYTES_MAX = 128 << 10
"""Largest body that is computed at once: it takes about a millisecond, which is less than a thread costs."""

_FRAME_BYTES = 256
"""A frame takes an encoder as long as so many bytes of a body take to be parsed: about 2 µs."""

_threads = ThreadPoolExecutor(2, thread_name_prefix="off-loop")
"""Few, because each competes with the event loop for the GIL: beside six that parse, its turns come 0.5 s late."""

_GIL_S = 0.0005
"""Seconds after which a thread gives the GIL back to the event loop that waits for it."""

_T = TypeVar("_T")


def share_gil() -> None:
    """Let the event loop go on within half a millisecond where a thread computes; Python's own interval is five."""
    sys.setswitchinterval(_GIL_S)


async def off_loop(size: int, compute: Callable[[], _T]) -> _T:
    """Return the result of ``compute``, which runs in a thread for an input of many bytes (``size``)."""
    if size <= _INLINE_BYTES_MAX:
        return compute()
    return await asyncio.get_running_loop().run_in_executor(_threads, compute)


async def frames_off_loop(count: int, compute: Callable[[], _T]) -> _T:
    """Return the result of ``compute``, which runs in a thread for many frames of a stream (``count``)."""
    return await off_loop(count * _FRAME_BYTES, compute)
