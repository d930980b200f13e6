"""HTTP routes and the WebSocket mode of the Responses API."""

from __future__ import annotations

from stream_gw.transport.responses.routes import ResponseRoutes

__all__ = ["ResponseRoutes"]
