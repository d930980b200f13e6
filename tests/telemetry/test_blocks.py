"""Whatever the crashes, rebalances and batches: each offset is inserted once, a claimed range first and as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.consume.blocks import Block, BlockPolicy, PartitionBlocks
from telemetry.emit.record import PlainRecord

LOG_MAX = 120


@dataclass
class ClickHouse:
    """Drops a name that it has had, whatever the rows."""

    names: set[str] = field(default_factory=set)
    rows: Counter[int] = field(default_factory=Counter)

    def insert(self, name: str, rows: list[PlainRecord]) -> None:
        if name not in self.names:
            self.names.add(name)
            self.rows.update(record.offset for record in rows)


@dataclass
class Log:
    """One partition with what its group has committed, which only the newest generation may change."""

    records: list[PlainRecord]
    next: int = 0
    claim: str = ""
    generation: int = 0

    def commit(self, generation: int, next: int, claim: Block | None) -> bool:
        if generation != self.generation:
            return False
        self.next, self.claim = next, claim.encode() if claim else ""
        return True


class Owner:
    """A consumer that takes one step at a time, so that it can be stopped between any two."""

    def __init__(self, log: Log, house: ClickHouse, policy: BlockPolicy, *, pending: bool = True) -> None:
        log.generation += 1
        self.generation, self.log, self.house = log.generation, log, house
        self.blocks: PartitionBlocks[PlainRecord] = PartitionBlocks(
            policy, log.next, Block.decode(log.claim) if pending else None
        )
        self.written = self.blocks.claimed is not None
        self.position = log.next
        self.inserted = False
        self.fenced = False

    def read(self, count: int, now: float) -> None:
        found = [record for record in self.log.records if record.offset >= self.position][:count]
        if found:
            self.position = found[-1].offset + 1
            self.blocks.receive(found, now)

    def step(self, now: float) -> None:
        """Claim, write the claim down, insert, commit: the next of them."""
        if self.fenced:
            return
        if self.blocks.claimed is None:
            block = self.blocks.block(now)
            if block is not None:
                self.blocks.claim(block)
                self.written = False
        elif not self.written:
            self.fenced = not self.log.commit(self.generation, self.blocks.next, self.blocks.claimed)
            self.written = True
        elif not self.inserted:
            if self.blocks.block(now) is not None:
                self.house.insert(self.blocks.claimed.name("t", 0), self.blocks.records())
                self.inserted = True
        else:
            self.blocks.done()
            self.inserted = False
            self.fenced = not self.log.commit(self.generation, self.blocks.next, None)


logs = st.lists(st.integers(1, 3), min_size=1, max_size=LOG_MAX).map(
    lambda gaps: [PlainRecord(sum(gaps[: i + 1]) - 1, 1000 + i, None, b"x" * (i % 7)) for i in range(len(gaps))]
)
policies = st.builds(
    BlockPolicy, rows_max=st.integers(1, 20), bytes_max=st.integers(1, 4000), linger_s=st.sampled_from([0.0, 1.0, 5.0])
)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 30)),
        st.tuples(st.just("step"), st.integers(1, 8)),
        st.tuples(st.just("old"), st.integers(1, 8)),
        st.tuples(st.just("wait"), st.integers(1, 3)),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    max_size=120,
)


def live(
    records: list[PlainRecord], policies_: list[BlockPolicy], moves_: list[tuple[str, int]], *, pending: bool
) -> ClickHouse:
    """Lives of owners: each crash leaves an old one behind that still believes it owns the partition, and goes on."""
    log, house = Log(records), ClickHouse()
    now, lives = 0.0, 0
    owner = old = Owner(log, house, policies_[0], pending=pending)
    for what, count in moves_:
        match what:
            case "read":
                owner.read(count, now)
            case "step" | "old":
                for _ in range(count):
                    (owner if what == "step" else old).step(now)
            case "wait":
                now += count
            case "crash":
                lives += 1
                old, owner = owner, Owner(log, house, policies_[lives % len(policies_)], pending=pending)
    for _ in range(10 * len(records) + 50):
        now += 10
        owner.read(7, now)
        owner.step(now)
    return house


@given(logs, st.lists(policies, min_size=1, max_size=3), moves)
def test_each_offset_is_inserted_once(
    records: list[PlainRecord], policies_: list[BlockPolicy], moves_: list[tuple[str, int]]
) -> None:
    house = live(records, policies_, moves_, pending=True)
    assert house.rows == Counter(record.offset for record in records)


def test_without_the_pending_range_rows_are_counted_twice() -> None:
    """Reason for the blocks: a short block is inserted but not committed, and the next owner cuts a longer one."""
    records = [PlainRecord(i, 0, None, b"") for i in range(21)]
    moves_ = [("read", 6), ("wait", 2), ("step", 3), ("crash", 0), ("read", 21)]
    policies_ = [BlockPolicy(linger_s=1)]
    assert live(records, policies_, moves_, pending=True).rows.total() == 21
    assert live(records, policies_, moves_, pending=False).rows.total() == 27


@given(logs, policies, st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_blocks_follow_each_other_and_keep_to_their_sizes(
    records: list[PlainRecord], policy: BlockPolicy, reads: list[int]
) -> None:
    blocks: PartitionBlocks[PlainRecord] = PartitionBlocks(policy, 0, None)
    at, now, upto = 0, 0.0, 0
    for count in [*reads, *[30] * len(records)]:
        now += 1
        blocks.receive(records[at : at + count], now)
        at += count
        while (block := blocks.block(now + (10 if at >= len(records) else 0))) is not None:
            assert block.first == upto <= block.last
            blocks.claim(block)
            taken = blocks.records()
            assert 1 <= len(taken) <= policy.rows_max
            assert len(taken) == 1 or sum(200 + len(r.value or b"") for r in taken) <= policy.bytes_max
            blocks.done()
            upto = block.last + 1
            assert blocks.next == upto
    assert upto == records[-1].offset + 1
    assert blocks.held == blocks.held_bytes == 0


def test_a_claimed_block_waits_for_all_its_records() -> None:
    blocks: PartitionBlocks[PlainRecord] = PartitionBlocks(BlockPolicy(rows_max=2), 5, Block(5, 9, 0))
    assert blocks.block(0) is None and blocks.due_at(0) is None
    blocks.receive([PlainRecord(i, 0, None, b"") for i in range(5, 9)], 0)
    assert blocks.block(100) is None
    assert blocks.has_room, "it is read whatever it takes"
    blocks.receive([PlainRecord(12, 0, None, b"")], 0)  # 9 to 11 are no more in the log
    assert blocks.block(0) == Block(5, 9, 0)
    assert [record.offset for record in blocks.records()] == [5, 6, 7, 8]
    blocks.done()
    assert (blocks.next, blocks.held) == (10, 1)
    assert blocks.block(1) == Block(10, 12, 0)


def test_what_is_done_is_not_taken_again() -> None:
    blocks: PartitionBlocks[PlainRecord] = PartitionBlocks(BlockPolicy(linger_s=0), 5, None)
    blocks.receive([PlainRecord(i, 0, None, b"") for i in range(8)], 0)
    blocks.receive([PlainRecord(i, 0, None, b"") for i in range(4, 9)], 0)
    assert (blocks.held, blocks.repeated) == (4, 9)
    assert blocks.block(0) == Block(5, 8, 0)


def test_no_room_above_two_blocks() -> None:
    blocks: PartitionBlocks[PlainRecord] = PartitionBlocks(BlockPolicy(rows_max=10), 0, None)
    blocks.receive([PlainRecord(i, 0, None, b"") for i in range(19)], 0)
    assert blocks.has_room
    blocks.receive([PlainRecord(19, 0, None, b"")], 0)
    assert not blocks.has_room


@given(st.integers(0), st.integers(0), st.integers(0))
def test_a_claim_is_read_as_it_was_written(first: int, last: int, stamp: int) -> None:
    assert Block.decode(Block(first, last, stamp).encode()) == Block(first, last, stamp)


def test_a_claim_of_another_version_stops_us() -> None:
    assert Block.decode("") is None
    for text in ("2 1 2 3", "1 2", "by another program"):
        with pytest.raises(ValueError, match="another version"):
            Block.decode(text)
