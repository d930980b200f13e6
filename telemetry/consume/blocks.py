"""Rules that cut a partition of the log into blocks, so that each of its offsets is inserted once.

A block is a range of offsets of one partition. Ranges follow each other without a gap. Before the insert the block is
*claimed*: its range is written where only the partition's owner may write. After the insert it is *done*: the next
offset is written there.

After a crash or a rebalance the partition's owner reads both. Without a claim, nothing above the next offset was ever
inserted. With a claim, the owner first inserts exactly that range, under the same name. If the range was inserted
before, ClickHouse drops it. The module is pure: records and moments are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from telemetry.emit.record import Record

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Block:
    """Offsets ``first`` to ``last``, both included.

    ``stamp`` is the time of the first record. A log that is created again counts its offsets from the start, and the
    stamp tells its blocks from the old log's.
    """

    first: int
    last: int
    stamp: int

    def name(self, topic: str, partition: int) -> str:
        """Return the deduplication name of the block's inserts."""
        return f"{topic}:{partition}:{self.first}-{self.last}@{self.stamp}"

    def encode(self) -> str:
        """Encode the claim as text, which is committed with an offset."""
        return f"1 {self.first} {self.last} {self.stamp}"

    @classmethod
    def decode(cls, text: str) -> Block | None:
        """Parse a committed claim. None: no claim. Raises ValueError for text that no version of ours wrote."""
        if not text:
            return None
        version, *figures = text.split()
        if version != "1" or len(figures) != 3:
            raise ValueError(
                f"the committed claim {text!r} was written by another version or program; "
                "set STREAM_GW_TELEMETRY_GROUP to a group that nothing else uses"
            )
        return cls(*map(int, figures))


@dataclass(frozen=True)
class BlockPolicy:
    rows_max: int = 20_000
    bytes_max: int = 8 << 20
    linger_s: float = 1.0
    """Maximum time that a record waits before its block is cut, in seconds."""


class PartitionBlocks(Generic[R]):
    """Blocks of one partition, held by its owner. ``next`` and ``claimed`` start as they were committed."""

    def __init__(self, policy: BlockPolicy, next: int, claimed: Block | None) -> None:
        assert claimed is None or claimed.first == next
        self._policy = policy
        self._records: deque[R] = deque()
        self._since: deque[tuple[int, float]] = deque()
        """(last offset, moment) of each delivery of records."""
        self.next = next
        self.claimed = claimed
        self.held_bytes = 0
        self._seen = next - 1
        self._lingers = True
        self.repeated = 0
        """Number of records that arrived again after they were processed."""
        self.skipped = 0
        """Number of offsets without a record."""

    def receive(self, records: Sequence[R], now: float) -> None:
        """Take records from the log. Offsets ascend; some may be missing and some may repeat."""
        before = len(self._records)
        for record in records:
            if record.offset <= self._seen:
                self.repeated += 1
                continue
            self.skipped += record.offset - self._seen - 1
            self._seen = record.offset
            self._records.append(record)
            self.held_bytes += _size(record)
        if len(self._records) > before:
            self._since.append((self._seen, now))

    @property
    def oldest_ms(self) -> int | None:
        """Time of the oldest record that is not inserted, in Unix ms. None: none is held."""
        return self._records[0].timestamp if self._records else None

    @property
    def held(self) -> int:
        """Number of records in memory."""
        return len(self._records)

    @property
    def has_room(self) -> bool:
        """True: more records should be read. An incomplete claimed block is read even beyond the limits."""
        if self.claimed is not None and self._seen < self.claimed.last:
            return True
        return len(self._records) < 2 * self._policy.rows_max and self.held_bytes < 2 * self._policy.bytes_max

    def end_linger(self) -> None:
        """Make a block due at once from now on, however few records there are: the consumer stops."""
        self._lingers = False

    def due_at(self, now: float) -> float | None:
        """Return the time at which a block is due if no more records arrive. None: more records are needed first."""
        if self.claimed is not None:
            return now if self._seen >= self.claimed.last else None
        if not self._records:
            return None
        if not self._lingers or len(self._records) >= self._policy.rows_max:
            return now
        if self.held_bytes >= self._policy.bytes_max:
            return now
        return self._since[0][1] + self._policy.linger_s

    def block(self, now: float) -> Block | None:
        """Return the block that is due: the claimed one unchanged, or a new one to be claimed. None: none is due."""
        due = self.due_at(now)
        if due is None or due > now:
            return None
        if self.claimed is not None:
            return self.claimed
        size, last = 0, self._records[0].offset
        for record in islice(self._records, self._policy.rows_max):
            size += _size(record)
            if size > self._policy.bytes_max and record is not self._records[0]:
                break
            last = record.offset
        return Block(self.next, last, self._records[0].timestamp)

    def claim(self, block: Block) -> None:
        """Fix the range of the next insert, before the claim is written. No other range may be inserted after this."""
        assert self.claimed is None and block.first == self.next
        self.claimed = block

    def records(self) -> list[R]:
        """Return the records of the claimed block."""
        assert self.claimed is not None
        taken = []
        for record in self._records:
            if record.offset > self.claimed.last:
                break
            taken.append(record)
        return taken

    def done(self) -> None:
        """Drop the claimed block after its insert."""
        assert self.claimed is not None
        self.next = self.claimed.last + 1
        self._seen = max(self._seen, self.claimed.last)
        self.claimed = None
        while self._records and self._records[0].offset < self.next:
            self.held_bytes -= _size(self._records.popleft())
        while self._since and self._since[0][0] < self.next:
            self._since.popleft()


def _size(record: Record) -> int:
    """Estimate the memory of a record in bytes."""
    return 200 + len(record.value or b"") + len(record.key or b"")
