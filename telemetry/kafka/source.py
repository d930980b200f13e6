"""The consumer group: partitions of the topic, shared by all consumers.

What fences a consumer that was thought dead is the group's generation: a commit carries it, and the broker refuses one
of an older generation. aiokafka takes the generation when it sends, not when it was asked to commit, and tries again by
itself; so before a member joins again ``revoked`` must have ended every commit under way. And in between, when the
broker has told it that it is no member, it sends "no generation", which the broker accepts for a group without members:
if the successor has left, the old offset of the consumer that was thought dead stands, and all since is inserted twice.
``_commit_as_member_only`` refuses that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import CommitFailedError, IllegalGenerationError, IllegalStateError, KafkaError
from aiokafka.structs import OffsetAndMetadata

from telemetry.consume.blocks import Block
from telemetry.consume.source import FRESH_S, Assigned, Fenced, Position, Revoked, SourceUnavailable
from telemetry.emit.record import Part, Record

_log = logging.getLogger(__name__)
_RETRY_S = 0.2
_FETCH_BYTES_MAX = 4 << 20
"""Maximum bytes of one partition in one fetch, held in memory beside the blocks."""
_METADATA_S_MAX = 30.0
"""Age of the list of partitions until it is read again: partitions were added, or the topic was made anew."""
_READ_MAX = 2000
"""Maximum records of one read, so a partition may hold this many more than its bound."""


class KafkaSource:
    """``Source`` on a topic, which must exist. ``options``: aiokafka's connection options."""

    def __init__(
        self,
        options: Mapping[str, Any],
        topic: str,
        group: str,
        *,
        session_s: float = 10.0,
        on_expired: Callable[[Part, int], None] = lambda part, records: None,
    ) -> None:
        """``on_expired`` is called when the topic's retention took records before they were read."""
        self._options = dict(options)
        self._on_expired = on_expired
        self._topic = topic
        self._group = group
        self._timing = {
            "session_timeout_ms": int(session_s * 1000),
            "heartbeat_interval_ms": int(min(session_s / 5, 1.0) * 1000),
            "rebalance_timeout_ms": 30_000,
        }
        self._consumer: AIOKafkaConsumer | None = None
        self._admin: AIOKafkaAdminClient | None = None
        self._expected: dict[TopicPartition, int] = {}
        self._doubted: dict[TopicPartition, int] = {}

    async def start(self, assigned: Assigned, revoked: Revoked) -> None:
        self._admin = AIOKafkaAdminClient(**self._options)
        self._consumer = AIOKafkaConsumer(
            **self._options,
            **self._timing,
            group_id=self._group,
            enable_auto_commit=False,
            # Only for a position that retention has passed; where to begin is decided by us and sought
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            partition_assignment_strategy=[RoundRobinPartitionAssignor],
            max_partition_fetch_bytes=_FETCH_BYTES_MAX,
            fetch_max_wait_ms=100,
            check_crcs=False,
            metadata_max_age_ms=int(_METADATA_S_MAX * 1000),
        )
        self._consumer.subscribe([self._topic], listener=_Listener(self, assigned, revoked))
        try:
            await self._admin.start()
            await self._consumer.start()
            _commit_as_member_only(self._consumer)
        except (KafkaError, OSError) as error:
            await self.close()
            raise SourceUnavailable(f"Kafka at {self._options.get('bootstrap_servers')}: {error}") from error

    async def read(self, wanted: Collection[Part], timeout_s: float) -> Mapping[Part, Sequence[Record]]:
        consumer = self._running()
        ours = consumer.assignment()
        paused = consumer.paused()
        now = {TopicPartition(*part) for part in wanted} & ours
        consumer.pause(*(ours - now - paused))
        consumer.resume(*(now & paused))
        doubted = [tp for tp in now if tp in self._doubted and self._doubted[tp] == self._expected.get(tp)]
        try:
            begins = await consumer.beginning_offsets(doubted) if doubted else {}
            # Also with none wanted: a member that does not ask is taken for stuck
            found = await consumer.getmany(*now, timeout_ms=int(timeout_s * 1000), max_records=_READ_MAX)
        except KafkaError as error:
            _join_again_without_heartbeat(consumer)
            raise SourceUnavailable(f"Kafka: {error!r}") from error
        return {
            Part(*tp): records
            for tp, records in found.items()
            if records and self._accept(consumer, tp, records, begins.get(tp, 0))
        }

    def _accept(self, consumer: AIOKafkaConsumer, tp: TopicPartition, records: Sequence[Any], begin: int) -> bool:
        """Return True if the records continue at the expected offset, and move that offset behind them.

        After a gap the partition is first read again, because the client may have changed its position by itself.
        A second time the gap is accepted: retention took what was before ``begin``, a transaction's marks left others.
        """
        expected = self._expected.get(tp)
        first = records[0].offset
        if expected is None:
            return False
        if first > expected and self._doubted.get(tp) != expected:
            self._doubted[tp] = expected
            consumer.seek(tp, expected)
            return False
        expired = min(begin, first) - expected
        if expired > 0:
            _log.error(
                "events expired in Kafka before they were inserted: topic=%s partition=%s first=%d count=%d; "
                'see docs/runbook.md, "Alert: TelemetryExpired"', tp.topic, tp.partition, expected, expired,
            )  # fmt: skip
            self._on_expired(Part(*tp), expired)
        elif first > expected:
            _log.warning("partition %s of %s has no records %s to %s", tp.partition, tp.topic, expected, first - 1)
        self._expected[tp] = records[-1].offset + 1
        return True

    async def position(self, part: Part) -> Position:
        consumer, tp = self._running(), TopicPartition(*part)
        assert self._admin is not None
        try:
            while True:
                # The consumer's own call takes a coordinator that is still loading for a group without offsets: its
                # answer is then empty, where one that knows says -1
                told = await self._admin.list_consumer_group_offsets(self._group, partitions=[tp])
                if tp in told:
                    break
                await asyncio.sleep(_RETRY_S)
            begin = (await consumer.beginning_offsets([tp]))[tp]
            end = (await consumer.end_offsets([tp]))[tp]
        except (KafkaError, OSError) as error:
            raise SourceUnavailable(f"Kafka: {error!r}") from error
        committed = told[tp]
        if committed.offset < 0:
            return Position(None, None, begin, end)
        return Position(committed.offset, Block.decode(committed.metadata or ""), begin, end)

    def seek(self, part: Part, offset: int) -> None:
        tp = TopicPartition(*part)
        try:
            self._running().seek(tp, offset)
        except IllegalStateError as error:
            raise Fenced(f"partition {part.partition} is not ours any more") from error
        self._expected[tp] = offset

    async def commit(self, part: Part, next: int, claim: Block | None) -> None:
        told = OffsetAndMetadata(next, claim.encode() if claim else "")
        try:
            await self._running().commit({TopicPartition(*part): told})
        except (CommitFailedError, IllegalStateError) as error:
            raise Fenced(f"partition {part.partition} is another consumer's now") from error
        except (KafkaError, OSError) as error:
            raise SourceUnavailable(f"Kafka: {error!r}") from error

    def end(self, part: Part) -> int | None:
        end, fetched_ms = self._fetched(part)
        return end if time.time() - fetched_ms / 1000 <= FRESH_S else None

    def lag(self, part: Part, next: int) -> int | None:
        end, _ = self._fetched(part)
        return None if end is None else max(end - next, 0)

    def _fetched(self, part: Part) -> tuple[int | None, int]:
        """Return the offset after the partition's last record, as of the last fetch, and its Unix time in ms."""
        tp = TopicPartition(*part)
        if self._consumer is None or tp not in self._consumer.assignment():
            return None, 0
        return self._consumer.highwater(tp), self._consumer.last_poll_timestamp(tp) or 0

    async def close(self) -> None:
        for client in (self._consumer, self._admin):
            if client is not None:
                try:
                    await (client.stop() if isinstance(client, AIOKafkaConsumer) else client.close())
                except (KafkaError, OSError) as error:
                    _log.warning("leaving Kafka: %r", error)
        self._consumer = self._admin = None

    def forget(self, parts: Collection[Part]) -> None:
        """Drop the read state of revoked partitions."""
        for part in parts:
            self._expected.pop(TopicPartition(*part), None)
            self._doubted.pop(TopicPartition(*part), None)

    def _running(self) -> AIOKafkaConsumer:
        """Return the started consumer."""
        assert self._consumer is not None
        return self._consumer


def _commit_as_member_only(consumer: AIOKafkaConsumer) -> None:
    """Let a consumer's commits fail while it is no member of its group."""
    coordinator = consumer._coordinator
    commit = coordinator._do_commit_offsets

    async def commit_as_member(assignment: Any, offsets: Any) -> None:
        if coordinator.generation < 0:
            raise IllegalGenerationError("this consumer is no member of its group")
        await commit(assignment, offsets)

    coordinator._do_commit_offsets = commit_as_member


def _join_again_without_heartbeat(consumer: AIOKafkaConsumer) -> None:
    """Have a consumer whose heartbeat was refused join its group anew.

    The client ends its heartbeat then, and raises that error from each read for good, also once it has the right again.
    """
    coordinator = consumer._coordinator
    heartbeat = coordinator._heartbeat_task
    if heartbeat is not None and heartbeat.done():
        coordinator.request_rejoin()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Passes the group's rebalances on to ``assigned`` and ``revoked``."""

    def __init__(self, source: KafkaSource, assigned: Assigned, revoked: Revoked) -> None:
        self._source = source
        self._assigned = assigned
        self._revoked = revoked

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        parts = [Part(*tp) for tp in revoked]
        await self._revoked(parts)
        self._source.forget(parts)

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._assigned([Part(*tp) for tp in assigned])
