"""Dead letters where events travel by Redis: a bounded stream beside theirs. Each is in it once."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TypeVar

import msgspec

from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from telemetry.dlq import Dead
from telemetry.source import SourceUnavailable

T = TypeVar("T")
_PAGE = 500
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Dead)


class RedisDeadLetters:
    def __init__(self, client: RedisClient, events_bytes_max: int) -> None:
        self._events = RedisEvents(client, bytes_max=events_bytes_max)
        self._dead = RedisEvents(client, "dlq")

    async def put(self, name: str, dead: Sequence[Dead]) -> None:
        # A block's letters under its name: the stream answers the same batch again as it did before
        refused = await _told(self._dead.append(name, 1, [(_encoder.encode(letter), True) for letter in dead]))
        if refused:
            raise SourceUnavailable(
                "the dead letters' stream is full: see stream-gw telemetry dlq list, mend what made them and replay "
                "them; until then nothing more is consumed"
            )

    async def waiting(self, count: int) -> list[Dead]:
        return [letter for _, letter in await self._page(0, count)]

    async def replay(self, count: int, ids: Sequence[str]) -> int:
        replayed, after = 0, 0
        while replayed < count and (page := await self._page(after, _PAGE)):
            for offset, letter in page:
                after = offset
                if replayed == count or (ids and letter.id not in ids):
                    continue
                # Sent again after a crash between the two steps, it is known by its number
                refused = await _told(self._events.append(f"dlq:{offset}", 1, [(letter.value or b"", True)]))
                if refused:
                    raise SourceUnavailable(f"the event stream is full; {replayed} were replayed")
                await _told(self._dead.drop([offset]))
                replayed += 1
        return replayed

    async def close(self) -> None:
        """The client is its maker's to close."""

    async def _page(self, after: int, count: int) -> list[tuple[int, Dead]]:
        found = await _told(self._dead.read(after, count))
        return [(offset, _decoder.decode(value)) for offset, value in found]


async def _told(call: Awaitable[T]) -> T:
    try:
        return await call
    except FabricUnavailable as error:
        raise SourceUnavailable(error.message) from error
