"""Dead letters: records that are no valid events, stored whole with the reason."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from telemetry.consume.rows import Poison
from telemetry.emit.record import Part, Record


class Dead(msgspec.Struct, frozen=True):
    """A dead letter. ``id`` is the record's origin, so a copy of the same record has the same id."""

    id: str
    topic: str
    partition: int
    offset: int
    timestamp: int
    reason: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes], ...] = ()
    """The record's own headers."""

    @classmethod
    def of(cls, part: Part, poison: Poison) -> Dead:
        """Make the dead letter of an invalid record."""
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
        """Return the dead letter as JSON values. Bytes that are not UTF-8 become base64."""
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
    """Store of dead letters. Its methods raise SourceUnavailable."""

    async def put(self, name: str, dead: Sequence[Dead]) -> None:
        """Store the dead letters of the block ``name``. Repeating the call adds at most a copy of each, with its id."""

    async def waiting(self, count: int) -> list[Dead]:
        """Return the oldest dead letters that were not replayed, each once."""

    async def replay(self, count: int, ids: Sequence[str]) -> int:
        """Append at most ``count`` dead letters to the log unchanged, and return the number. No ``ids``: any.

        A replayed dead letter no longer waits.
        """

    async def close(self) -> None: ...


_HEADER = "dlq-"


def headers_of_dead(dead: Dead) -> list[tuple[str, bytes]]:
    """Return the headers to store with a dead letter: the record's own, its origin and the reason."""
    ours = {
        "id": dead.id,
        "topic": dead.topic,
        "partition": dead.partition,
        "offset": dead.offset,
        "timestamp": dead.timestamp,
        "reason": dead.reason,
    }
    return [*dead.headers, *((_HEADER + name, str(value).encode()) for name, value in ours.items())]


def dead_from_record(record: Record) -> Dead:
    """Decode a stored dead letter. A record of another program becomes one with offset -1."""
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
        ours.get("reason", "another program wrote it to the dead letters"),
        record.key,
        record.value,
        tuple(own),
    )


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else -1
