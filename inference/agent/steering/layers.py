"""Layers between engine and stream."""

from __future__ import annotations

from typing import Protocol, TypeGuard


class Droppable(Protocol):
    """A sink that can be told to pass nothing on any more."""

    def drop(self) -> None: ...


def is_droppable(sink: object) -> TypeGuard[Droppable]:
    """Whether the sink has that method. Each request asks; ``isinstance`` with a protocol takes sixty times as long."""
    return hasattr(sink, "drop")
