"""One reader of the operations feed."""

from __future__ import annotations

from stream_fabric.errors import StreamGwError, Unauthenticated
from stream_gw.auth import Principal
from stream_gw.dialects.errors import error_body
from stream_gw.transport.connection import ResponseWriter
from stream_gw.transport.sse import SseBody


class Viewer(SseBody):
    """One reader. Besides its socket's buffer it holds at most the newest snapshot, which all viewers share."""

    __slots__ = ("_newest", "_request_id", "who")

    def __init__(self, response: ResponseWriter, who: Principal, request_id: str) -> None:
        self.who = who
        self._newest: bytes | None = None
        self._request_id = request_id
        super().__init__(response)

    def open(self, retry_ms: int | None) -> None:
        super().open(retry_ms)
        if not self.full:
            self.drained()

    def show(self, piece: bytes) -> None:
        """Send a snapshot now, or keep it in place of an older one until the connection takes data again."""
        if self.done.done():
            return
        if self._early is not None or self.full:
            self._newest = piece
        elif not self._is_closing():
            self._silent = False
            self._write(piece)

    def drained(self) -> None:
        piece, self._newest = self._newest, None
        if piece is not None:
            self.show(piece)

    def expire(self, unix_now: float) -> None:
        """End the feed with an error if the capability token has expired."""
        if self.who.expires_at is not None and self.who.expires_at <= unix_now:
            self.fail(Unauthenticated("the capability token has expired; mint another"))

    def fail(self, error: StreamGwError) -> None:
        if not self.done.done():
            self._newest = None
            self._end(b"data: " + error_body(error, self._request_id) + b"\n\n")
