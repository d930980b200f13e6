"""Dead letters where events travel by Kafka: a topic of their own, at least once under stable ids.

A record with its id marks a replayed dead letter there, in one transaction with the record that goes back into the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from telemetry.consume.dlq import Dead, dead_from_record, headers_of_dead
from telemetry.consume.source import SourceUnavailable
from telemetry.kafka.transport import end_producer, start_producer

_REPLAYED = "dlq-replayed"
_IN_ONE = 100


class KafkaDeadLetters:
    """``DeadLetters`` in a topic. ``options``: aiokafka's connection options. Both topics must exist."""

    def __init__(self, options: Mapping[str, Any], topic: str) -> None:
        self._options = dict(options)
        self._topic = topic
        self._producer: AIOKafkaProducer | None = None
        self._putting = asyncio.Lock()

    async def put(self, name: str, dead: Sequence[Dead]) -> None:
        async with self._putting:  # a producer that has failed is ended, with all that others send by it
            await self._put(dead)

    async def _put(self, dead: Sequence[Dead]) -> None:
        try:
            await self._send(dead)
        except MessageSizeTooLargeError as error:
            await self._end_producer()
            if len(dead) > 1:  # which of them is it?
                for letter in dead:
                    await self._put([letter])
            elif dead[0].value or dead[0].key or dead[0].headers:
                # Its partition must go on; the record itself stays in the log for that topic's retention
                reason = f"{dead[0].reason}; left out here: its key, value and headers are too large for {self._topic}"
                await self._put([msgspec.structs.replace(dead[0], reason=reason, key=None, value=b"", headers=())])
            else:
                raise SourceUnavailable(f"the dead letters' topic {self._topic} takes no record: {error!r}") from error
        except (KafkaError, OSError) as error:
            await self._end_producer()
            raise SourceUnavailable(f"the dead letters' topic {self._topic}: {error!r}") from error

    async def _send(self, dead: Sequence[Dead]) -> None:
        """Send dead letters, and wait until all are acknowledged. Raises KafkaError and OSError."""
        if self._producer is None:
            producer = AIOKafkaProducer(**self._options, acks="all", enable_idempotence=True, max_request_size=4 << 20)
            await start_producer(producer)
            self._producer = producer
        sent = [
            await self._producer.send(
                self._topic,
                b"" if letter.value is letter.key is None else letter.value,  # the client sends no record without both
                key=letter.key,
                headers=headers_of_dead(letter),
                timestamp_ms=letter.timestamp,
            )
            for letter in dead
        ]
        for future in sent:
            await future

    async def _end_producer(self) -> None:
        """End a producer that has failed: its sequence numbers have a gap, so brokers refuse all that it sends."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await end_producer(producer)

    async def waiting(self, count: int) -> list[Dead]:
        return (await self._read_waiting())[:count]

    async def replay(self, count: int, ids: Sequence[str]) -> int:
        # Started first: another replay that is under way is ended by it, and seen whole or not at all
        async with self._transactional_producer() as producer:
            chosen = [letter for letter in await self._read_waiting() if not ids or letter.id in ids][:count]
            for begin in range(0, len(chosen), _IN_ONE):
                async with producer.transaction():
                    for letter in chosen[begin : begin + _IN_ONE]:
                        await producer.send(
                            letter.topic,
                            letter.value,
                            key=letter.key,
                            headers=list(letter.headers),
                            timestamp_ms=max(letter.timestamp, 0),
                        )
                        await producer.send(self._topic, b"", headers=[(_REPLAYED, letter.id.encode())])
        if chosen:
            # The broker answers a commit before its readers see it (KAFKA-5477). The next producer of the same
            # transactions starts only after that, so whoever lists the letters from now on sees the replay
            async with self._transactional_producer():
                pass
        return len(chosen)

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.stop()
            self._producer = None

    @asynccontextmanager
    async def _transactional_producer(self) -> AsyncIterator[AIOKafkaProducer]:
        """Open a producer with transactions; it fences any other replay of this topic."""
        producer = AIOKafkaProducer(**self._options, transactional_id=f"{self._topic}.replay")
        try:
            await producer.start()
            yield producer
        except (KafkaError, OSError) as error:
            raise SourceUnavailable(f"the dead letters' topic {self._topic}: {error!r}") from error
        finally:
            await producer.stop()

    async def _read_waiting(self) -> list[Dead]:
        """Read all dead letters that were not replayed, each once, oldest first."""
        found: dict[str, Dead] = {}
        replayed = set()
        # Without a group it has every partition, and begins each where auto_offset_reset says. A seek after the start
        # would race with the client's own first seek
        consumer = AIOKafkaConsumer(
            self._topic,
            **self._options,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level="read_committed",
        )
        try:
            await consumer.start()
            tps = list(consumer.assignment())
            ends = await consumer.end_offsets(tps)
            while [tp for tp in tps if await consumer.position(tp) < ends[tp]]:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    for record in records:
                        marks = [value.decode() for name, value in record.headers if name == _REPLAYED]
                        if marks:
                            replayed.update(marks)
                        else:
                            letter = dead_from_record(record)
                            found.setdefault(letter.id, letter)
        except (KafkaError, OSError) as error:
            raise SourceUnavailable(f"the dead letters' topic {self._topic}: {error!r}") from error
        finally:
            await consumer.stop()
        waiting = [letter for letter in found.values() if letter.id not in replayed]
        return sorted(waiting, key=lambda letter: (letter.timestamp, letter.id))
