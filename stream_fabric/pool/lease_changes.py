"""Changes of a pool since a gateway last read it: leases, and the prompt blocks that replicas have cached. Pure.

An agent reports its load each second. Most reports change nothing for routing, and gateways do not read those: the
report's generation (``RoutingGeneration``) tells them apart. Cached blocks go the same way: a replica's whole summary
(32 KiB) is published every 20 s, its changes each second.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.stream.ids import ReplicaId

BLOCK_CHANGES_MAX = 512
"""Block changes of one read."""
_LOAD_RATIO = 1.5
_LOAD_MS = 500.0
_RUNNING_SHARE = 0.1
_ESTIMATE_RATIO = 1.1
_VERSION = struct.Struct("<Q")
_BLOCK_CHANGE = struct.Struct("<qqBI")


class BlockChange(NamedTuple):
    """Blocks that a replica's cache gained and lost between two versions of its ledger; 4 bytes each."""

    since: int
    """-1: not known; only a summary tells what changed before."""
    version: int
    added: bytes = b""
    removed: bytes = b""
    has_summary: bool = False
    """A summary of ``version`` was published just before."""

    def encode(self) -> bytes:
        head = _BLOCK_CHANGE.pack(self.since, self.version, self.has_summary, len(self.added))
        return head + self.added + self.removed

    @classmethod
    def decode(cls, record: bytes) -> BlockChange:
        """Raises ValueError."""
        try:
            since, version, has_summary, size = _BLOCK_CHANGE.unpack_from(record)
        except struct.error as error:
            raise ValueError(f"{len(record)} bytes") from error
        added, removed = record[_BLOCK_CHANGE.size :][:size], record[_BLOCK_CHANGE.size + size :]
        if len(added) != size or size % 4 or len(removed) % 4:
            raise ValueError(f"{len(added)} and {len(removed)} bytes of blocks")
        return cls(since, version, added, removed, bool(has_summary))


class LeaseChanges(NamedTuple):
    """Reply to a gateway's read of a pool."""

    at: int
    """Moment of the read; the next read starts there."""
    whole: bool
    """True: ``changed`` has all replicas of the pool."""
    leases: int
    """Number of leases in the pool, expired ones included."""
    streams: int
    """Streams in flight and queued in the pool."""
    changed: Sequence[tuple[ReplicaId, ReplicaInfo | None]]
    """None: the record cannot be decoded."""
    gone: Sequence[ReplicaId] = ()
    expired: Sequence[ReplicaId] = ()
    blocks_at: str = ""
    """Position in the pool's block changes; the next read starts there."""
    blocks: Sequence[tuple[ReplicaId, BlockChange]] = ()


def encode_summary(version: int, blocks: bytes) -> bytes:
    """Put the ledger's version in front of its summary. An older gateway takes it for two more blocks."""
    return _VERSION.pack(version) + blocks


def decode_summary(summary: bytes) -> tuple[int, bytes]:
    """Return the version and the blocks; of an empty summary 0 and none."""
    if len(summary) < _VERSION.size:
        return 0, b""
    return _VERSION.unpack_from(summary)[0], summary[_VERSION.size :]


class RoutingGeneration:
    """Numbers an agent's reports: the number grows when a report changes something that gateways route by.

    Figures that move all the time count once they have moved far enough, compared with the last report that counted.
    """

    def __init__(self) -> None:
        self._last: ReplicaInfo | None = None
        self._number = 0

    def stamp(self, info: ReplicaInfo) -> ReplicaInfo:
        """Return the report with its number in ``generation``."""
        if self._last is None or _differs(self._last, info):
            self._number += 1
            self._last = info
        return msgspec.structs.replace(info, generation=self._number)


def _differs(old: ReplicaInfo, new: ReplicaInfo) -> bool:
    if _fixed(old) != _fixed(new):
        return True
    old_ms, new_ms = old.prefill_ms + old.decode_ms, new.prefill_ms + new.decode_ms
    low, high = min(old_ms, new_ms), max(old_ms, new_ms)
    return (
        (high - low > _LOAD_MS and high > _LOAD_RATIO * low)
        or abs(new.load.running - old.load.running) > max(1.0, _RUNNING_SHARE * new.load.slots)
        or _apart(old.bytes_per_token, new.bytes_per_token)
        or _apart(old.output_tokens_mean, new.output_tokens_mean)
    )


def _fixed(info: ReplicaInfo) -> tuple[object, ...]:
    load = info.load
    return (
        info.state,
        info.models,
        info.adapters,
        info.artifact,
        info.simulated,
        info.wake_s,
        load.slots,
        load.ready,
        load.asleep,
        load.max_model_len,
    )


def _apart(old: float, new: float) -> bool:
    return max(old, new) > _ESTIMATE_RATIO * min(old, new)
