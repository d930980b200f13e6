"""A consumer that its group has forgotten cannot move the group's offsets, also when nobody else is there to."""

from __future__ import annotations

from typing import Any

import pytest

from telemetry.consume.blocks import Block
from telemetry.consume.source import Fenced
from telemetry.emit.record import Part
from telemetry.kafka.source import KafkaSource
from tests.support.kafka import KafkaServer
from tests.support.waiting import eventually
from tests.telemetry.load import committed, make_topics

pytestmark = pytest.mark.platform


async def test_who_is_no_member_moves_no_offset_of_an_empty_group(settings: dict[str, Any]) -> None:
    servers, topic, group = settings["kafka_servers"], settings["events_topic"], settings["telemetry_group"]
    await make_topics(servers, topic, partitions=1)
    source = KafkaSource({"bootstrap_servers": servers}, topic, group)
    parts: list[Part] = []

    async def revoked(gone: Any) -> None:
        parts.clear()

    await source.start(parts.extend, revoked)
    try:
        (part,) = await eventually(lambda: parts, "its partition")
        await source.commit(part, 7, None)
        assert (await committed(servers, group, topic))[0] == 7
        # The client does this at the broker's "unknown member"; every other member is gone
        coordinator = source._running()._coordinator
        await coordinator._maybe_leave_group()
        assert coordinator.generation < 0
        with pytest.raises(Fenced):
            await source.commit(part, 0, Block(0, 3, 1))
        assert (await committed(servers, group, topic))[0] == 7
        # It joins again, and may then
        await eventually(lambda: coordinator.generation > 0 and parts, "it to be a member again")
        await source.commit(part, 9, None)
        assert (await committed(servers, group, topic))[0] == 9
    finally:
        await source.close()


async def test_the_end_of_a_partition_whose_broker_does_not_answer_is_not_known(
    settings: dict[str, Any], kafka: KafkaServer
) -> None:
    """Events may pile up in it, so nothing counts as complete. Its lag is told as it was last known."""
    servers, topic = settings["kafka_servers"], settings["events_topic"]
    await make_topics(servers, topic, partitions=1)
    source, parts = KafkaSource({"bootstrap_servers": servers}, topic, settings["telemetry_group"]), list[Part]()

    async def revoked(gone: Any) -> None:
        parts.clear()

    await source.start(parts.extend, revoked)
    try:
        (part,) = await eventually(lambda: parts, "its partition")
        source.seek(part, 0)

        async def is_known() -> bool:
            await source.read([part], 0.05)
            return source.end(part) == 0

        async def is_unknown() -> bool:
            await source.read([part], 0.05)
            return source.end(part) is None

        await eventually(is_known, "the first answer")
        kafka.freeze()
        try:
            await eventually(is_unknown, "the answer to be old")
            assert source.lag(part, 0) == 0
        finally:
            kafka.thaw()
        await eventually(is_known, "the next answer")
    finally:
        await source.close()
