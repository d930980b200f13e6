"""Ids. They are opaque strings that sort by creation time; time and entropy are arguments."""

from __future__ import annotations

import hashlib
import re
from binascii import crc32
from functools import cache
from typing import NewType

StreamId = NewType("StreamId", str)
"""``resp_`` and the 32 hex digits of a UUIDv7 (RFC 9562, section 5.7)."""

TenantId = NewType("TenantId", str)
UserId = NewType("UserId", str)
GatewayId = NewType("GatewayId", str)
"""Incarnation of a gateway process; a restarted gateway has a new id."""

ReplicaId = NewType("ReplicaId", str)
"""Incarnation of an agent process; a restarted agent has a new id. Its end has the time of the process's start."""

_PARTITION_BITS_MAX = 12
"""Bits of the hash that decide a partition: there are at most 4,096."""
_STREAM_ID = re.compile(r"resp_[0-9a-f]{32}")
_REPLICA_END = re.compile(r"-([0-9a-f]{8})[0-9a-f]{6}$")


def hashed_user(tenant: TenantId, user: str | None) -> str:
    """Return the short hash of tenant and user that events have; empty: there is no user."""
    return hashlib.sha256(f"{tenant}\0{user}".encode()).hexdigest()[:16] if user else ""


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


def moved_to(stream: StreamId, partition: int, partitions: int) -> StreamId:
    """Return the id with other last digits, which are random too, so that it belongs to ``partition``.

    ``partitions``: a power of two, 4,096 at most. Only for an id that nobody knows yet.
    """
    head, drawn = stream[:-4], int(stream[-4:], 16)
    change = partition_of(StreamId(head + "0000"), partitions) ^ partition
    firsts, lasts = _changes(partitions)
    first = drawn >> 8
    while not (found := lasts.get(change ^ firsts[first])):  # some pair of digits changes each bit
        first = (first + 1) % 256
    return StreamId(f"{head}{first:02x}{found[drawn % 256 % len(found)]:02x}")


@cache
def _changes(partitions: int) -> tuple[list[int], dict[int, list[int]]]:
    """How an id's partition changes when its last four digits are not 0000.

    Returns the change by the first two digits, and the last two digits by their change. Both changes add up by XOR:
    CRC-32 is linear, so equal digits change the same bits of the checksum whatever the others are.
    """
    zeros = crc32(b"0000")
    firsts = [(crc32(b"%02x00" % digits) ^ zeros) % partitions for digits in range(256)]
    lasts: dict[int, list[int]] = {}
    for digits in range(256):
        lasts.setdefault((crc32(b"00%02x" % digits) ^ zeros) % partitions, []).append(digits)
    return firsts, lasts


def created_ms(stream: StreamId) -> int:
    """Creation time of a stream id, in milliseconds since 1970."""
    return int(stream[5:17], 16)


def is_stream_id(text: str) -> bool:
    return _STREAM_ID.fullmatch(text) is not None


def derived_id(prefix: str, stream: StreamId, number: int = 0) -> str:
    """Derive the id of a part of a stream (message, item, tool call); every replay derives the same."""
    suffix = f"{number:x}" if number else ""
    return f"{prefix}{stream[5:]}{suffix}"


def spread_of(key: bytes) -> int:
    """Hash of a stream's id that tells nothing of its partition.

    The streams of a pool share a few partitions: a hash that its partition decides would put all of them in a sample,
    or none.
    """
    return crc32(key) >> _PARTITION_BITS_MAX


def partition_of(stream: StreamId, partitions: int) -> int:
    """Partition that holds the stream, in ``range(partitions)``."""
    return crc32(stream.encode()) % partitions


def new_replica_id(name: str, unix_s: int, random_hex: str) -> ReplicaId:
    """Make a replica id that no earlier process had: the name, the start time and six random hex digits."""
    return ReplicaId(f"{name}-{unix_s:x}{random_hex}")


def started_s(replica: ReplicaId) -> int:
    """Return the unix time at which the replica's process started; 0: its id does not tell."""
    found = _REPLICA_END.search(replica)
    return int(found[1], 16) if found else 0
