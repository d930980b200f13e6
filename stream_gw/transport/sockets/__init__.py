"""State that the WebSockets of every protocol have."""

from __future__ import annotations

from stream_gw.transport.sockets.base import STALLED, EdgeSocket, Headers, OnSocket, headers_object

__all__ = ["STALLED", "EdgeSocket", "Headers", "OnSocket", "headers_object"]
