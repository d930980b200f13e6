"""Layers between engine and stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

if TYPE_CHECKING:
    from inference.agent.running import RunningStream


class Droppable(Protocol):
    """A sink that can be told to pass nothing on any more."""

    def drop(self) -> None: ...


def is_droppable(sink: object) -> TypeGuard[Droppable]:
    """Whether the sink has that method. Each request asks; ``isinstance`` with a protocol takes sixty times as long."""
    return hasattr(sink, "drop")


def count_held(stream: RunningStream, tokens: int) -> None:
    """Count tokens that a layer holds back. The replica has made them, though nobody is told yet."""
    if not tokens or stream.closed:
        return
    if stream.first_at is None:
        stream.owner.on_first_token(stream)
    stream.timing.receive_held(tokens)
