"""HTTP routes of conversations and of what is stored beside a response."""

from __future__ import annotations

from stream_gw.transport.stored.routes import StoredRoutes

__all__ = ["StoredRoutes"]
