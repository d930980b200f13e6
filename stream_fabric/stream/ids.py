"""Names of things. Ids are opaque strings that sort by creation time; time and entropy are arguments."""

from __future__ import annotations

import re
from binascii import crc32
from typing import NewType

StreamId = NewType("StreamId", str)
"""``resp_`` and the 32 hex digits of a UUIDv7 (RFC 9562, section 5.7)."""

TenantId = NewType("TenantId", str)
UserId = NewType("UserId", str)
GatewayId = NewType("GatewayId", str)
"""One gateway process's incarnation: a restarted gateway is another one."""

ReplicaId = NewType("ReplicaId", str)
"""One agent process's incarnation beside an engine: a restarted agent is another one."""

_STREAM_ID = re.compile(r"resp_[0-9a-f]{32}")


def new_stream_id(unix_ms: int, entropy: bytes) -> StreamId:
    """Make a stream id.

    ``unix_ms``: milliseconds since 1970. ``entropy``: 10 random bytes.
    """
    if len(entropy) != 10:
        raise ValueError("entropy must be 10 bytes")
    value = (unix_ms & (1 << 48) - 1) << 80 | int.from_bytes(entropy, "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return StreamId(f"resp_{value:032x}")


def created_ms(stream: StreamId) -> int:
    """When a stream's id was made, in milliseconds since 1970."""
    return int(stream[5:17], 16)


def is_stream_id(text: str) -> bool:
    return _STREAM_ID.fullmatch(text) is not None


def derived_id(prefix: str, stream: StreamId, number: int = 0) -> str:
    """The id of a part of a stream (message, item, tool call): the same in every replay."""
    suffix = f"{number:x}" if number else ""
    return f"{prefix}{stream[5:]}{suffix}"


def partition_of(stream: StreamId, partitions: int) -> int:
    """The partition whose slot holds the stream, in ``range(partitions)``."""
    return crc32(stream.encode()) % partitions
