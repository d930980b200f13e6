"""Private parts of aiokafka that ``telemetry/kafka`` replaces. A release that renames one fails here."""

from __future__ import annotations

import inspect

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.producer.sender import Sender

from telemetry.kafka.transport import keep_sent_batches


def test_aiokafka_still_has_what_the_transport_replaces() -> None:
    assert inspect.iscoroutinefunction(AIOKafkaClient._metadata_update)
    assert inspect.iscoroutinefunction(AIOKafkaClient._maybe_wait_metadata)
    assert "self._md_update_fut" in inspect.getsource(AIOKafkaClient)
    assert isinstance(inspect.getattr_static(Sender, "sender_task"), property)
    producer = inspect.getsource(AIOKafkaProducer)
    assert "self._closed = False" in producer and "self._sender = Sender(" in producer


def test_aiokafka_still_has_what_the_source_replaces() -> None:
    assert inspect.iscoroutinefunction(GroupCoordinator._do_commit_offsets)
    assert "self._do_commit_offsets(assignment, offsets)" in inspect.getsource(GroupCoordinator.commit_offsets)
    assert "self.generation = OffsetCommitRequest.DEFAULT_GENERATION_ID" in inspect.getsource(GroupCoordinator)


async def test_a_batch_that_may_have_arrived_never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its leader is known, takes it and dies before its reply; the partition then has none for longer than a try."""
    producer = AIOKafkaProducer(enable_idempotence=True)
    keep_sent_batches(producer)
    producer._txn_manager.set_pid_and_epoch(1, 0)
    accumulator, where = producer._message_accumulator, TopicPartition("ev", 0)
    builder = producer.create_batch()
    builder.append(timestamp=0, key=b"k", value=b"v", headers=[])
    arrived = await accumulator.add_batch(builder, where, timeout=1)
    leader: int | None = 1
    monkeypatch.setattr(producer.client.cluster, "leader_for_partition", lambda _: leader)
    nodes, _ = accumulator.drain_by_nodes(ignore_nodes=[])
    accumulator.reenqueue(nodes[1][where])
    leader = None
    accumulator._batches[where][0]._ctime -= 3600  # it has waited for longer than a request's time
    assert accumulator.drain_by_nodes(ignore_nodes=[]) == ({}, True)
    assert not arrived.done()
    leader = 2
    nodes, _ = accumulator.drain_by_nodes(ignore_nodes=[])
    nodes[2][where].done(base_offset=0)
    await arrived
    producer._closed = True  # it was never started
