"""An answer that is not streamed, for the client of one connection."""

from __future__ import annotations

from stream_fabric.stream.ids import StreamId
from stream_gw.delivery.collected import CollectingOutlet
from stream_gw.dialects.facts import StreamFacts
from stream_gw.transport.connection import EdgeHttp


class WholeResponse(CollectingOutlet):
    """Collects a stream until its client leaves."""

    def __init__(self, connection: EdgeHttp, stream: StreamId, facts: StreamFacts) -> None:
        super().__init__(facts)
        self.stream = stream
        connection.listener = self
        if connection.transport.is_closing():  # the client left while its stream was being opened
            self.leave()

    # --- ConnectionListener --------------------------------------------------------------------------------

    def connection_paused(self) -> None:
        pass

    def connection_resumed(self) -> None:
        pass

    def connection_lost(self) -> None:
        self.leave()
