"""A record of the log, whichever log it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Part(NamedTuple):
    """One partition of the log."""

    topic: str
    partition: int


class Record(Protocol):
    """aiokafka's ConsumerRecord is one."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int:
        """Milliseconds since 1970, when it came into the log."""

    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...


class PlainRecord(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
