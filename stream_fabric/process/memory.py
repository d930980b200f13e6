"""Python's cycle collector, set for processes that hold many streams.

A full collection looks at every object: 35 ms in an idle gateway, half a second with 5,000 streams, and nothing else
runs meanwhile. Streams leave no cycles behind, so a full collection seldom finds anything.
"""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE, _OLD = 2_000, 10, 50
"""A full collection comes after a million objects that stayed, and not after 70,000 as by default."""


def spare_full_collections() -> None:
    """Call it once a process is ready: its modules are never looked at again, and full collections become rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
