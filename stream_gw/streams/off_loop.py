"""Keeps long computations over a request's body off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_INLINE_BYTES_MAX = 128 << 10
"""Largest body that is computed at once: it takes about a millisecond, which is less than a thread costs."""

_T = TypeVar("_T")


async def off_loop(size: int, compute: Callable[[], _T]) -> _T:
    """Return the result of ``compute``, which runs in a thread for an input of many bytes (``size``)."""
    if size <= _INLINE_BYTES_MAX:
        return compute()
    return await asyncio.to_thread(compute)
