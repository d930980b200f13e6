"""The port to ended links: capability tokens that read one stream, recalled by the stream's owner."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from stream_fabric.stream.ids import StreamId


class Links(Protocol):
    """A stream's generation of links. A token holds the one that it was minted in; a later one ends it.

    Calls raise ``FabricError``.
    """

    async def generations(self, streams: Collection[StreamId]) -> dict[StreamId, int]:
        """Return the generation of each stream: the Unix time in ms of its last recall.

        0: its links were never ended, or all that were have expired.
        """

    async def end(self, stream: StreamId) -> None:
        """Begin the stream's next generation, which is above all before it.

        It is kept for longer than any capability token lives.
        """
