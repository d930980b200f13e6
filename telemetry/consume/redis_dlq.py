"""Dead letters where events travel by Redis: a bounded Redis Stream of their own, which holds each once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from telemetry.consume.dlq import Dead
from telemetry.consume.source import SourceUnavailable, from_redis

T = TypeVar("T")
_PAGE = 500
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Dead)


class RedisDeadLetters:
    def __init__(self, client: RedisClient, events_bytes_max: int) -> None:
        self._events = RedisEvents(client, bytes_max=events_bytes_max)
        self._dead = RedisEvents(client, "dlq")

    async def put(self, name: str, dead: Sequence[Dead]) -> None:
        left = [(_encoder.encode(letter), True) for letter in dead]
        writer = name
        while left:
            # The block's name makes the append idempotent: a repeated batch gets the first answer, also when there is
            # room meanwhile. What found none is therefore a batch of its own
            refused = await from_redis(self._dead.append(writer, 1, left))
            if len(refused) == len(left):
                raise SourceUnavailable(
                    "the dead letters' stream is full, so the consumer has stopped: run stream-gw telemetry dlq list, "
                    "repair the cause, then run stream-gw telemetry dlq replay"
                )
            left = [left[index] for index in refused]
            writer += "+"

    async def waiting(self, count: int) -> list[Dead]:
        return [letter for _, letter in await self._page(0, count)]

    async def replay(self, count: int, ids: Sequence[str]) -> int:
        replayed, after = 0, 0
        while replayed < count and (page := await self._page(after, _PAGE)):
            for offset, letter in page:
                after = offset
                if replayed == count or (ids and letter.id not in ids):
                    continue
                # The number makes the append idempotent after a crash between the two steps
                refused = await from_redis(self._events.append(f"dlq:{offset}", 1, [(letter.value or b"", True)]))
                if refused:
                    raise SourceUnavailable(f"the event stream is full; {replayed} were replayed")
                await from_redis(self._dead.drop([offset]))
                replayed += 1
        return replayed

    async def close(self) -> None:
        """Do nothing: ``main`` closes the client."""

    async def _page(self, after: int, count: int) -> list[tuple[int, Dead]]:
        """Return up to ``count`` dead letters with their offsets above ``after``."""
        found = await from_redis(self._dead.read(after, count))
        return [(offset, _decoder.decode(value)) for offset, value in found]
