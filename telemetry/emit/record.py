"""A record as a consumer reads it, from Kafka or from Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Part(NamedTuple):
    """One partition of the log."""

    topic: str
    partition: int


class Record(Protocol):
    """A record read from the log. aiokafka's ConsumerRecord satisfies this protocol."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int:
        """Unix time in milliseconds that the log keeps for the record."""

    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...


class PlainRecord(NamedTuple):
    """A record read from the Redis Stream."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
