"""The law of blocks: how a partition of the log is cut, so that each of its offsets is inserted once.

A block is a range of offsets of one partition, and ranges follow each other without a gap. Before a block is inserted
its range is written down where only the partition's owner may write (it is *claimed*); after the insert the next offset
is (it is *done*). Whoever owns the partition then, after a crash or a rebalance, finds either no claim, and nothing
above the next offset was ever inserted, or one, and inserts exactly that range first, under the same name: where it
was inserted before, ClickHouse drops it. Pure: records and moments are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from telemetry.record import Record

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Block:
    """Offsets ``first`` to ``last``, both within. ``stamp`` is the time of the first record: a log that was made anew
    counts its offsets from the start again, and its blocks must not be taken for the old log's."""

    first: int
    last: int
    stamp: int

    def name(self, topic: str, partition: int) -> str:
        return f"{topic}:{partition}:{self.first}-{self.last}@{self.stamp}"

    def encode(self) -> str:
        return f"1 {self.first} {self.last} {self.stamp}"

    @classmethod
    def decode(cls, text: str) -> Block | None:
        """None: no claim. Raises ValueError on what none of our versions wrote."""
        if not text:
            return None
        version, *figures = text.split()
        if version != "1" or len(figures) != 3:
            raise ValueError(f"the committed claim {text!r} was written by another version or program")
        return cls(*map(int, figures))


@dataclass(frozen=True)
class BlockPolicy:
    rows_max: int = 20_000
    bytes_max: int = 8 << 20
    linger_s: float = 1.0
    """A record waits for so long at most before its block is cut."""


class PartitionBlocks(Generic[R]):
    """One partition in the hands of its owner. ``next`` and ``claimed`` as they were committed."""

    def __init__(self, policy: BlockPolicy, next: int, claimed: Block | None) -> None:
        assert claimed is None or claimed.first == next
        self._policy = policy
        self._records: deque[R] = deque()
        self._since: deque[tuple[int, float]] = deque()
        """When records came: (the last's offset, moment) of each delivery."""
        self.next = next
        self.claimed = claimed
        self.held_bytes = 0
        self._seen = next - 1
        self.repeated = 0
        """Records that came though they are done with."""
        self.skipped = 0
        """Offsets that no record had."""

    def receive(self, records: Sequence[R], now: float) -> None:
        """Records as the log gives them: ascending, perhaps with holes, perhaps some again."""
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
    def held(self) -> int:
        return len(self._records)

    @property
    def wants(self) -> bool:
        """Whether there is room; a claimed block that is not complete is read whatever it takes."""
        if self.claimed is not None and self._seen < self.claimed.last:
            return True
        return len(self._records) < 2 * self._policy.rows_max and self.held_bytes < 2 * self._policy.bytes_max

    def due_at(self, now: float) -> float | None:
        """When there is a block, if nothing more comes; None: only then when something does."""
        if self.claimed is not None:
            return now if self._seen >= self.claimed.last else None
        if not self._records:
            return None
        if len(self._records) >= self._policy.rows_max or self.held_bytes >= self._policy.bytes_max:
            return now
        return self._since[0][1] + self._policy.linger_s

    def block(self, now: float) -> Block | None:
        """The block that is due: the claimed one, as it was claimed, or a new one, to be claimed."""
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
        """It is going to be written down; from here on no other range may be inserted."""
        assert self.claimed is None and block.first == self.next
        self.claimed = block

    def records(self) -> list[R]:
        """Of the claimed block."""
        assert self.claimed is not None
        taken = []
        for record in self._records:
            if record.offset > self.claimed.last:
                break
            taken.append(record)
        return taken

    def done(self) -> None:
        """The claimed block is inserted."""
        assert self.claimed is not None
        self.next = self.claimed.last + 1
        self._seen = max(self._seen, self.claimed.last)
        self.claimed = None
        while self._records and self._records[0].offset < self.next:
            self.held_bytes -= _size(self._records.popleft())
        while self._since and self._since[0][0] < self.next:
            self._since.popleft()


def _size(record: Record) -> int:
    """What it takes to hold it, about."""
    return 200 + len(record.value or b"") + len(record.key or b"")
