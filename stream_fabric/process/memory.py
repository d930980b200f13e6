"""A process's memory, set for processes that hold many streams and take long prompts."""

from __future__ import annotations

import ctypes
import gc

_YOUNG, _MIDDLE, _OLD = 2_000, 10, 50
"""A full collection comes after a million objects that stayed, and not after 70,000 as by default."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 16 << 20
"""Freed memory that the process keeps. A prompt is copied some ten times on its way."""
_MAPPED_BYTES_MIN = 2 << 20
"""A larger block comes from the kernel and goes back to it. WebSocket messages that are half received would otherwise
leave holes in the heap: sockets that were refused left 110 MiB behind."""


def prepare_memory() -> None:
    """Call it once a process is ready. Full collections of Python's cycle collector become rare, and none of them looks
    at the modules. Freed memory is kept for the next request.

    A full collection looks at every object: 35 ms in an idle gateway, half a second with 5,000 streams, and nothing
    else runs meanwhile. Streams leave no cycles behind, so it seldom finds anything.

    Memory that comes from the kernel costs a page fault for each 4 KiB: ten times the copy that is written to it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)
