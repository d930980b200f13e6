"""Records that are no events are put aside whole, with the reason: never dropped, never in the way."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from telemetry.record import Part, Record
from telemetry.rows import Poison


class Dead(msgspec.Struct, frozen=True):
    """A record put aside. ``id`` is where it came from, so a copy of it is known for one."""

    id: str
    topic: str
    partition: int
    offset: int
    timestamp: int
    reason: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    """Its own."""

    @classmethod
    def of(cls, part: Part, poison: Poison) -> Dead:
        record = poison.record
        return cls(
            f"{part.topic}:{part.partition}:{record.offset}@{record.timestamp}",
            part.topic,
            part.partition,
            record.offset,
            record.timestamp,
            poison.reason,
            record.key,
            record.value,
            tuple((name, bytes(value or b"")) for name, value in record.headers),
        )

    def shown(self) -> dict[str, Any]:
        """For people and JSON: what is not text comes in base64."""
        return {
            **{name: getattr(self, name) for name in ("id", "topic", "partition", "offset", "timestamp", "reason")},
            "key": _text(self.key),
            "value": _text(self.value),
            "headers": {name: _text(value) for name, value in self.headers},
        }


def _text(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(value).decode()


class DeadLetters(Protocol):
    """Where they go. Its methods raise SourceUnavailable."""

    async def put(self, name: str, dead: Sequence[Dead]) -> None:
        """Those of the block of that name. The same again is at most a copy of each, under its id."""

    async def waiting(self, count: int) -> list[Dead]:
        """The oldest that were not replayed, each once."""

    async def replay(self, count: int, ids: Sequence[str]) -> int:
        """Send them into the log again, as they were, and forget them here; none named: all. How many it were."""

    async def close(self) -> None: ...


_HEADER = "dlq-"


def headers(dead: Dead) -> list[tuple[str, bytes]]:
    """Its own, and ours with where it came from and why it is here."""
    ours = {
        "id": dead.id,
        "topic": dead.topic,
        "partition": dead.partition,
        "offset": dead.offset,
        "timestamp": dead.timestamp,
        "reason": dead.reason,
    }
    return [*dead.headers, *((_HEADER + name, str(value).encode()) for name, value in ours.items())]


def parse(record: Record) -> Dead:
    """What ``headers`` made. A record that somebody else put there is shown as it is."""
    ours: dict[str, str] = {}
    own = []
    for name, value in record.headers:
        if name.startswith(_HEADER):
            ours[name.removeprefix(_HEADER)] = (value or b"").decode(errors="replace")
        else:
            own.append((name, bytes(value or b"")))
    return Dead(
        ours.get("id", f"?:{record.offset}"),
        ours.get("topic", ""),
        _int(ours.get("partition")),
        _int(ours.get("offset")),
        _int(ours.get("timestamp")),
        ours.get("reason", "it was put here by another program"),
        record.key,
        record.value,
        tuple(own),
    )


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1
