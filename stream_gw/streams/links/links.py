"""Links to one stream: their generation when one is made, their recall, and the end of those who watch by them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from stream_fabric.errors import FabricError, StreamGwError
from stream_fabric.limits import LINKS_LOOK_EVERY_S
from stream_fabric.links import Links
from stream_fabric.stream.ids import StreamId, is_stream_id
from stream_gw.auth import Principal
from stream_gw.streams.follow import StreamReads

ReasonToEnd = Callable[[Principal], StreamGwError | None]


class StreamLinks:
    """Makes and recalls links, and ends their readers. ``links`` None, in simulations: no link is ever recalled."""

    def __init__(self, links: Links | None, reads: StreamReads) -> None:
        self._links = links
        self._reads = reads

    async def generation(self, stream: str | None) -> int:
        """Return the generation of a new link; 0 without a stream, or for a text that is no id. Raises FabricError."""
        if stream is None or self._links is None or not is_stream_id(stream):
            return 0
        return (await self._links.generations([StreamId(stream)]))[StreamId(stream)]

    async def end(self, who: Principal, stream: str) -> None:
        """End all links to a stream of the caller's. Raises Forbidden, NotFound or FabricError."""
        await self._reads.read_head(who, stream, "cancel")
        if self._links is not None:
            await self._links.end(StreamId(stream))

    async def run(
        self, readers: Callable[[], Iterable[Principal]], end_readers: Callable[[ReasonToEnd], Awaitable[None]]
    ) -> None:
        """End readers whose links were recalled, until cancelled. While Redis is away, readers stay."""
        while self._links is not None:
            await asyncio.sleep(LINKS_LOOK_EVERY_S)
            watched = {who.stream for who in readers() if who.stream is not None}
            if not watched:
                continue
            try:
                found = await self._links.generations(watched)
            except FabricError:
                continue

            def reason_to_end(who: Principal, found: dict[StreamId, int] = found) -> StreamGwError | None:
                return who.link_error(found.get(who.stream, 0)) if who.stream is not None else None

            await end_readers(reason_to_end)
