"""uvicorn's connection protocols, extended for the token path: header limits, and a direct path from an outlet to its
transport (bytes leave without a task switch; the outlet hears at once of a full, drained or lost connection).

``docs/adr/0002-direct-transport.md`` has the measurement behind it.
"""

from stream_gw.transport.connection.http import EdgeHttp
from stream_gw.transport.connection.response import ResponseWriter
from stream_gw.transport.connection.server import EdgeServer, make_server, most_connections
from stream_gw.transport.connection.turns import CONNECTION, RESPONSE
from stream_gw.transport.connection.websocket import EdgeWebSocket

__all__ = [
    "CONNECTION",
    "RESPONSE",
    "EdgeHttp",
    "EdgeServer",
    "EdgeWebSocket",
    "ResponseWriter",
    "make_server",
    "most_connections",
]
