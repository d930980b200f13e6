"""The functions of bytes that each token or each long prompt needs: in C where the platform's wheel is installed, in
Python elsewhere.

``python.py`` says what each of them does, and is what a source tree runs. A test compares the two.
``_native.pack_command`` is for ``stream_fabric.redis``, which has hiredis' elsewhere.
"""

from __future__ import annotations

try:
    from stream_fabric.native._native import (
        chunk,
        json_counts,
        may_hold_url,
        read_chunk,
        split_message,
        text_event,
        text_frame,
    )
except ModuleNotFoundError:  # a source tree; a library that does not load is an error
    from stream_fabric.native.python import (
        chunk,
        json_counts,
        may_hold_url,
        read_chunk,
        split_message,
        text_event,
        text_frame,
    )

__all__ = [
    "chunk",
    "json_counts",
    "may_hold_url",
    "read_chunk",
    "split_message",
    "text_event",
    "text_frame",
]
