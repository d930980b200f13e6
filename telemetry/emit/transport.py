"""The port that sends events out of a process, and its record type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from stream_fabric.events import SCHEMA_VERSION


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An encoded event, with the fields that its transport needs.

    The spool stores this record: add fields only at the end, with a default.
    """

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
        """Bytes that the record counts for in memory."""
        return len(self.value) + OVERHEAD_BYTES


OVERHEAD_BYTES = 256


class TransportUnavailable(Exception):
    """The transport did not take all of a batch.

    ``unsent`` records must be sent again; ``refused`` records are too large for the transport and never can be sent.
    """

    def __init__(self, message: str, unsent: Sequence[Record], refused: Sequence[Record] = ()) -> None:
        super().__init__(message)
        self.unsent = unsent
        self.refused = refused


class Transport(Protocol):
    """Destination of batches. One ``send`` runs at a time."""

    name: str

    async def send(self, batch: Sequence[Record]) -> None:
        """Send a batch, and return when all of it is acknowledged. Raises TransportUnavailable.

        While it is unknown whether a try arrived, the transport repeats that try so that nothing arrives twice. If the
        caller cancels meanwhile, the outcome stays unknown.
        """

    async def close(self) -> None:
        """Close the connections at once, without sending what waits."""
