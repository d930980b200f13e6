"""What carries events away from a process: the port that the sink speaks to, and what passes through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from stream_fabric.events import SCHEMA_VERSION


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An encoded event, with what its transport must know of it. It is also what the spool keeps on disk: fields are
    only ever added at the end, with a default."""

    value: bytes
    key: bytes
    """All of a key go the same way, where there are several."""
    kind: str
    kept: bool = False
    """It must not be dropped."""
    trace_id: str = ""
    v: int = SCHEMA_VERSION

    @property
    def size(self) -> int:
        """What it counts for in memory."""
        return len(self.value) + OVERHEAD_BYTES


OVERHEAD_BYTES = 256


class TransportUnavailable(Exception):
    """``unsent`` will not arrive unless it is sent again; ``refused`` is too large for the transport, for good."""

    def __init__(self, message: str, unsent: Sequence[Record], refused: Sequence[Record] = ()) -> None:
        super().__init__(message)
        self.unsent = unsent
        self.refused = refused


class Transport(Protocol):
    """Where a batch goes. One ``send`` at a time."""

    name: str

    async def send(self, batch: Sequence[Record]) -> None:
        """Deliver, and return once all of it is acknowledged. Raises TransportUnavailable.

        As long as it is unknown whether an attempt arrived it tries again, however long that takes, in a way that lets
        nothing arrive twice. Cancelled meanwhile, it leaves that unknown.
        """

    async def close(self) -> None:
        """Let go of everything, and wait for nothing."""
