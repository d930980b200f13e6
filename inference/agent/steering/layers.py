"""Layers between engine and stream. Not compiled: mypyc has no protocols that are checked at run time."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Droppable(Protocol):
    """A sink that can be told to pass nothing on any more."""

    def drop(self) -> None: ...
