"""The consumer: inserts each record of the log into ClickHouse once, whichever process dies.

One task reads the log. Another task works on each assigned partition: it waits until a block is due (``blocks.py``),
commits its claim, stores invalid records as dead letters, inserts the rest under the block's name, and commits. A step
that fails is repeated with the same block and name until it succeeds. The partition waits meanwhile, and reading stops
when two blocks are held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from stream_fabric.errors import StreamGwError
from stream_fabric.ports import Random
from stream_fabric.process.backoff import Backoff, BackoffPolicy
from telemetry.consume.blocks import Block, BlockPolicy, PartitionBlocks
from telemetry.consume.dlq import Dead, DeadLetters
from telemetry.consume.metrics import ConsumerMetrics
from telemetry.consume.rows import build_batch
from telemetry.consume.source import Fenced, Position, Source, SourceUnavailable
from telemetry.emit.record import Part, Record
from telemetry.store.errors import StoreRefused, StoreUnavailable
from telemetry.store.store import Store

_log = logging.getLogger(__name__)
T = TypeVar("T")

_READ_S = 0.2
_RETRY = BackoffPolicy(first_s=0.1, longest_s=5.0)
_READ_RETRY = BackoffPolicy(first_s=0.1, longest_s=1.0)
_LOG_EVERY_S = 30.0
"""Minimum time between two log lines about the same failing call, in seconds."""


@dataclass
class _OwnedPartition:
    """A partition that is assigned to this consumer."""

    part: Part
    task: asyncio.Task[None] | None = None
    blocks: PartitionBlocks[Record] | None = None
    """None: the position is not read yet, or the partition was fenced."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    claimed_since: float = 0.0


class Consumer:
    """One member of the consumer group."""

    def __init__(
        self,
        source: Source,
        store: Store,
        dead_letters: DeadLetters,
        policy: BlockPolicy,
        metrics: ConsumerMetrics,
        drain_s: float,
        random: Random,
    ) -> None:
        self._source = source
        self._store = store
        self._dead_letters = dead_letters
        self._policy = policy
        self._metrics = metrics
        self._drain_s = drain_s
        self._random = random
        # One block is built at a time, to bound memory. The lock is free during inserts: a refused insert then delays
        # no other partition
        self._making = asyncio.Lock()
        self._parts: dict[Part, _OwnedPartition] = {}
        self._stopping = False
        self._read_to_end = asyncio.Event()
        """Set once the log was read after the stop."""
        self._failed: asyncio.Future[None] | None = None

    @property
    def parts(self) -> list[Part]:
        return list(self._parts)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Consume until ``stop`` is set, then read the log once more and insert what is held, for at most ``drain_s``.

        ``on_ready`` is called when the consumer has joined the group. Raises errors that a retry cannot repair: a claim
        that another version wrote, or a bug.
        """
        self._failed = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read_log(on_ready), name="read")
        stopped = asyncio.create_task(stop.wait())
        try:
            watched: list[asyncio.Future[Any]] = [reading, stopped, self._failed]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            for held in self._parts.values():
                held.changed.set()
            working = [held.task for held in self._parts.values() if held.task]
            if working and not self._failed.done():
                await asyncio.wait(working, timeout=self._drain_s)
            if self._failed.done():
                self._failed.result()
            if reading.done():
                reading.result()
        finally:
            for task in (reading, stopped):
                task.cancel()
            await asyncio.gather(reading, stopped, return_exceptions=True)
            await self._on_revoked(list(self._parts))
            await self._source.close()
            self._failed.cancel()

    def complete_until_us(self, now_us: int) -> dict[Part, int]:
        """Return for each partition the moment before which all of its events are inserted, if that is known."""
        known = {}
        for part, held in self._parts.items():
            if held.blocks is None:
                continue
            oldest_ms, end = held.blocks.oldest_ms, self._source.end(part)
            if oldest_ms is not None:
                known[part] = oldest_ms * 1000
            elif end is not None and held.blocks.next >= end:
                known[part] = now_us
        return known

    # --- partitions come and go ----------------------------------------------------------------------------

    def _on_assigned(self, parts: Collection[Part]) -> None:
        for part in parts:
            assert part not in self._parts
            held = self._parts[part] = _OwnedPartition(part)
            held.task = asyncio.create_task(self._work_on_partition(held), name=f"{part.topic} {part.partition}")
            held.task.add_done_callback(self._on_work_ended)

    async def _on_revoked(self, parts: Collection[Part]) -> None:
        """Stop work on partitions, and wait until no commit of theirs is under way."""
        gone = [held for part in parts if (held := self._parts.pop(part, None)) is not None]
        for held in gone:
            assert held.task is not None
            held.task.cancel()
        # A retried commit must not outlive the group generation that it was made for
        await asyncio.gather(*(held.task for held in gone if held.task), return_exceptions=True)
        for held in gone:
            self._metrics.remove_partition(held.part)

    def _on_work_ended(self, task: asyncio.Task[None]) -> None:
        """End ``run`` with the error of a partition's task."""
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._failed is not None
            if not self._failed.done():
                self._failed.set_exception(error)

    # --- reading -------------------------------------------------------------------------------------------

    async def _read_log(self, on_ready: Callable[[], None]) -> None:
        """Join the group, then read until the stop, and once more after it."""
        await self._retry("start", lambda: self._source.start(self._on_assigned, self._on_revoked))
        on_ready()
        failing = _FailingCall("read of the log", _READ_RETRY, self._metrics, self._random)
        try:
            while not self._stopping:
                try:
                    await self._read_once(_READ_S)
                    failing.ended()
                except SourceUnavailable as error:
                    self._report_partitions(lag_known=False)
                    await failing.wait(error)
            with contextlib.suppress(SourceUnavailable):
                await self._read_once(0.0)  # the last events of processes that end together with this one
        finally:
            self._read_to_end.set()
            for held in self._parts.values():
                if held.blocks is not None:
                    held.blocks.end_linger()
                held.changed.set()

    async def _read_once(self, timeout_s: float) -> None:
        """Hand new records to the partitions with room for them. Raises SourceUnavailable."""
        wanted = [part for part, held in self._parts.items() if held.blocks is not None and held.blocks.has_room]
        found = await self._source.read(wanted, timeout_s)
        now = time.monotonic()
        for part, records in found.items():
            held = self._parts.get(part)
            if held is not None and held.blocks is not None:
                held.blocks.receive(records, now)
                held.changed.set()
        self._report_partitions(lag_known=True)

    def _report_partitions(self, *, lag_known: bool) -> None:
        """Set the gauges of each partition. A log that cannot be read has no lag to tell."""
        for part, held in self._parts.items():
            if held.blocks is not None:
                if lag_known:
                    self._metrics.report_lag(part, self._source.lag(part, held.blocks.next))
                else:
                    self._metrics.remove_lag(part)
                self._metrics.report_partition(part, held.blocks, held.claimed_since)

    # --- one partition -------------------------------------------------------------------------------------

    async def _work_on_partition(self, held: _OwnedPartition) -> None:
        """Insert the partition's blocks one after another, until it is revoked, fenced or drained."""
        part = held.part
        try:
            position = await self._retry("position", lambda: self._source.position(part))
            held.blocks = blocks = await self._resume(part, position)
            held.claimed_since = time.monotonic() if blocks.claimed else 0.0
            self._source.seek(part, blocks.next)
            while await self._wait_until_due(held):
                block = blocks.block(time.monotonic())
                assert block is not None
                if blocks.claimed is None:
                    blocks.claim(block)
                    held.claimed_since = time.monotonic()
                    claim, next = block, blocks.next
                    await self._retry("claim", partial(self._source.commit, part, next, claim))
                await self._insert_block(held, block, blocks.records())
                blocks.done()
                held.claimed_since = 0.0
                held.changed.set()  # there is room again
                due = blocks.due_at(time.monotonic())
                if self._stopping or due is None or due > time.monotonic():
                    # Otherwise the next claim's commit covers it
                    upto = blocks.next
                    await self._retry("commit", partial(self._source.commit, part, upto, None))
        except Fenced as error:
            _log.warning("partition fenced: partition=%s error=%s", part, error)
            held.blocks = None

    async def _resume(self, part: Part, position: Position) -> PartitionBlocks[Record]:
        """Return the partition's blocks, starting at the committed offset, or without one at ClickHouse's offset."""
        next, claim = position.next, position.claim
        if claim is not None:
            if claim.first != next:
                raise ValueError(f"the claim of {part} begins at {claim.first}, but the committed offset is {next}")
            return PartitionBlocks(self._policy, claim.first, claim)
        had = await self._retry("ingest state", lambda: self._ingested_offset(part))
        if next is None:
            next = position.begin
            if had and position.begin <= had <= position.end:
                _log.warning("no committed offset, resuming after the last insert: partition=%s offset=%s", part, had)
                next = had
        elif part.topic == "redis" and had > next:
            _log.warning(
                "Redis lost the committed offset, resuming after the last insert: partition=%s redis=%s clickhouse=%s",
                part,
                next,
                had,
            )
            next = had
        return PartitionBlocks(self._policy, next, None)

    async def _ingested_offset(self, part: Part) -> int:
        """Return the offset after the last insert that ClickHouse has recorded; 0: none."""
        rows = await self._store.query(
            "SELECT argMax(next, inserted_at) FROM ingest_state WHERE topic = {topic:String} "
            "AND partition = {partition:Int32}",
            {"topic": part.topic, "partition": part.partition},
        )
        return int(rows.rows[0][0])

    async def _wait_until_due(self, held: _OwnedPartition) -> bool:
        """Wait until a block is due. False: the consumer stops, and nothing is left that can be inserted."""
        blocks = held.blocks
        assert blocks is not None
        while True:
            now = time.monotonic()
            due = blocks.due_at(now)
            if self._read_to_end.is_set() and due is None:
                return False
            if due is not None and due <= now:
                return True
            held.changed.clear()
            try:
                async with asyncio.timeout(None if due is None else due - now):
                    await held.changed.wait()
            except TimeoutError:
                continue

    async def _insert_block(self, held: _OwnedPartition, block: Block, records: list[Record]) -> None:
        """Store the block's invalid records as dead letters, insert the others, and record the next offset."""
        part = held.part
        name = block.name(*part)
        async with self._making:
            began = time.monotonic()
            found = await asyncio.to_thread(build_batch, part, records)
            build_s = time.monotonic() - began
        if found.poison:
            dead = [Dead.of(part, poison) for poison in found.poison]
            await self._retry("dead letters", partial(self._dead_letters.put, name, dead))
            self._metrics.count_poison(part, found.poison)
        insert_s = 0.0
        for table, rows in found.tables.items():
            what = f"insert {name} into {table}"
            insert_s += await self._retry(what, partial(self._store.insert, table, rows, name))
        state = pa.table(
            {
                "topic": [part.topic],
                "partition": pa.array([part.partition], pa.int32()),
                "next": [block.last + 1],
                "block": [name],
                "rows": [found.rows],
                "poison": [len(found.poison)],
            }
        )
        await self._retry("ingest state", lambda: self._store.insert("ingest_state", state, name))
        self._metrics.count_insert(part, len(records), found.rows, build_s, insert_s)

    async def _retry(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call until it succeeds or is cancelled."""
        failing = _FailingCall(what, _RETRY, self._metrics, self._random)
        while True:
            try:
                return await call()
            except (StoreUnavailable, StoreRefused, SourceUnavailable) as error:
                await failing.wait(error)


class _FailingCall:
    """A call that is repeated until it succeeds: counts and logs its failures, and waits longer after each."""

    def __init__(self, what: str, policy: BackoffPolicy, metrics: ConsumerMetrics, random: Random) -> None:
        self._what = what
        self._metrics = metrics
        self._backoff = Backoff(policy, random)
        self._logged_at = float("-inf")

    async def wait(self, error: StreamGwError) -> None:
        """Wait before the next try."""
        self._metrics.count_failure(error)
        if time.monotonic() - self._logged_at > _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            _log.warning("%s failed, retrying until it succeeds: error=%s", self._what, error)
        await asyncio.sleep(self._backoff.next_s())

    def ended(self) -> None:
        """Begin anew after a success."""
        self._backoff.reset()
