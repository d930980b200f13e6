"""Private parts of aiokafka that ``telemetry/kafka`` replaces. A release that renames one fails here."""

from __future__ import annotations

import inspect

from aiokafka import AIOKafkaProducer
from aiokafka.client import AIOKafkaClient
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.producer.sender import Sender


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
