"""The consumer: records of the log become rows of ClickHouse, each once, whatever dies between.

One task reads; one works on each partition that is ours: it waits until a block is due (``blocks.py``), writes its
claim down, puts aside what is no event, inserts the rest under the block's name, and commits. What fails is tried
again, the same block under the same name, until it works: a partition waits for it, and its reading stops when two
blocks are held.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from telemetry.blocks import Block, BlockPolicy, PartitionBlocks
from telemetry.dlq import Dead, DeadLetters
from telemetry.metrics import ConsumerMetrics
from telemetry.record import Part, Record
from telemetry.rows import batch
from telemetry.source import Fenced, Position, Source, SourceUnavailable
from telemetry.store import Store, StoreRefused, StoreUnavailable

_log = logging.getLogger(__name__)
T = TypeVar("T")

_READ_S = 0.2
_RETRY_S_MIN = 0.1
_RETRY_S_MAX = 5.0
_SAY_S = 30.0
"""What goes on failing is said so often."""


@dataclass
class _Held:
    """A partition that is ours."""

    part: Part
    task: asyncio.Task[None] | None = None
    law: PartitionBlocks[Record] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    claimed_since: float = 0.0


class Consumer:
    """One member of the consumer group. ``on_ready`` is called when it takes part."""

    def __init__(
        self,
        source: Source,
        store: Store,
        dead_letters: DeadLetters,
        policy: BlockPolicy,
        metrics: ConsumerMetrics,
        drain_s: float = 10.0,
    ) -> None:
        self._source = source
        self._store = store
        self._dead_letters = dead_letters
        self._policy = policy
        self._metrics = metrics
        self._drain_s = drain_s
        # More at once would only take memory. Not held while a block is inserted: one that is refused stops no others
        self._making = asyncio.Lock()
        self._parts: dict[Part, _Held] = {}
        self._stopping = False
        self._failed: asyncio.Future[None] | None = None

    @property
    def parts(self) -> list[Part]:
        return list(self._parts)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Returns when stopped, after the blocks that are claimed are finished, or ``drain_s``. Raises what cannot be
        tried again: a claim that another version wrote, a bug."""
        self._failed = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read(on_ready), name="read")
        stopped = asyncio.create_task(stop.wait())
        try:
            watched: list[asyncio.Future[Any]] = [reading, stopped, self._failed]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            for held in self._parts.values():
                held.news.set()
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
            await self._revoked(list(self._parts))
            await self._source.close()
            self._failed.cancel()

    # --- partitions come and go ----------------------------------------------------------------------------

    def _assigned(self, parts: Collection[Part]) -> None:
        for part in parts:
            assert part not in self._parts
            held = self._parts[part] = _Held(part)
            held.task = asyncio.create_task(self._work(held), name=f"{part.topic} {part.partition}")
            held.task.add_done_callback(self._ended)

    async def _revoked(self, parts: Collection[Part]) -> None:
        gone = [held for part in parts if (held := self._parts.pop(part, None)) is not None]
        for held in gone:
            assert held.task is not None
            held.task.cancel()
        # A commit that is tried again must not outlive the generation it was meant for
        await asyncio.gather(*(held.task for held in gone if held.task), return_exceptions=True)
        for held in gone:
            self._metrics.gone(held.part)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            assert self._failed is not None
            if not self._failed.done():
                self._failed.set_exception(error)

    # --- reading -------------------------------------------------------------------------------------------

    async def _read(self, on_ready: Callable[[], None]) -> None:
        await self._again("start", lambda: self._source.start(self._assigned, self._revoked))
        on_ready()
        while True:
            wanted = [part for part, held in self._parts.items() if held.law is not None and held.law.wants]
            try:
                found = await self._source.read(wanted, _READ_S)
            except SourceUnavailable as error:
                _log.warning("reading: %s", error)
                await asyncio.sleep(_RETRY_S_MIN)
                continue
            now = time.monotonic()
            for part, records in found.items():
                held = self._parts.get(part)
                if held is not None and held.law is not None:
                    held.law.receive(records, now)
                    held.news.set()
            for part, held in self._parts.items():
                if held.law is not None:
                    self._metrics.state(part, self._source.end(part), held.law, held.claimed_since)

    # --- one partition -------------------------------------------------------------------------------------

    async def _work(self, held: _Held) -> None:
        part = held.part
        try:
            position = await self._again("position", lambda: self._source.position(part))
            held.law = law = await self._resume(part, position)
            held.claimed_since = time.monotonic() if law.claimed else 0.0
            self._source.seek(part, law.next)
            while await self._due(held):
                block = law.block(time.monotonic())
                assert block is not None
                if law.claimed is None:
                    law.claim(block)
                    held.claimed_since = time.monotonic()
                    claim, next = block, law.next
                    await self._again("claim", lambda: self._source.commit(part, next, claim))  # noqa: B023
                await self._insert(held, block, law.records())
                law.done()
                held.claimed_since = 0.0
                held.news.set()  # there is room again
                due = law.due_at(time.monotonic())
                if self._stopping or due is None or due > time.monotonic():
                    # Else the next claim says it too
                    upto = law.next
                    await self._again("commit", lambda: self._source.commit(part, upto, None))  # noqa: B023
        except Fenced as error:
            _log.warning("%s", error)
            held.law = None

    async def _resume(self, part: Part, position: Position) -> PartitionBlocks[Record]:
        """Where to go on. The group's commit decides; without one, what ClickHouse says it has."""
        next, claim = position.next, position.claim
        if claim is not None:
            if claim.first != next:
                raise ValueError(f"the claim of {part} begins at {claim.first}, what is committed is {next}")
            return PartitionBlocks(self._policy, claim.first, claim)
        had = await self._again("ingest state", lambda: self._ingested(part))
        if next is None:
            next = position.begin
            if had and position.begin <= had <= position.end:
                _log.warning("no committed offset for %s; going on at %s, after what ClickHouse has", part, had)
                next = had
        elif part.topic == "redis" and had > next:
            _log.warning("Redis forgot how far %s was consumed: it says %s, ClickHouse has up to %s", part, next, had)
            next = had
        return PartitionBlocks(self._policy, next, None)

    async def _ingested(self, part: Part) -> int:
        rows = await self._store.query(
            "SELECT argMax(next, inserted_at) FROM ingest_state WHERE topic = {topic:String} "
            "AND partition = {partition:Int32}",
            {"topic": part.topic, "partition": part.partition},
        )
        return int(rows.rows[0][0])

    async def _due(self, held: _Held) -> bool:
        """Wait until a block is due; False: we stop instead. A block that is claimed and complete is finished first."""
        law = held.law
        assert law is not None
        while True:
            now = time.monotonic()
            due = law.due_at(now)
            if self._stopping and (law.claimed is None or due is None):
                return False
            if due is not None and due <= now:
                return True
            held.news.clear()
            try:
                async with asyncio.timeout(None if due is None else due - now):
                    await held.news.wait()
            except TimeoutError:
                continue

    async def _insert(self, held: _Held, block: Block, records: list[Record]) -> None:
        part = held.part
        name = block.name(*part)
        async with self._making:
            began = time.monotonic()
            found = await asyncio.to_thread(batch, part, records)
            build_s = time.monotonic() - began
        if found.poison:
            dead = [Dead.of(part, poison) for poison in found.poison]
            await self._again("dead letters", lambda: self._dead_letters.put(name, dead))
            self._metrics.poison(part, found.poison)
        insert_s = 0.0
        for table, rows in found.tables.items():
            what = f"insert {name} into {table}"
            insert_s += await self._again(what, lambda: self._store.insert(table, rows, name))  # noqa: B023
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
        await self._again("ingest state", lambda: self._store.insert("ingest_state", state, name))
        self._metrics.inserted(part, len(records), found.rows, build_s, insert_s)

    async def _again(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Until it works, or we are cancelled."""
        wait_s, told = _RETRY_S_MIN, -_SAY_S
        while True:
            try:
                return await call()
            except (StoreUnavailable, StoreRefused, SourceUnavailable) as error:
                self._metrics.failed(error)
                if time.monotonic() - told > _SAY_S:
                    told = time.monotonic()
                    _log.warning("%s: %s; it is tried again until it works", what, error)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _RETRY_S_MAX)
