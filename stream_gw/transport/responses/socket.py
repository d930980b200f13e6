"""One WebSocket of the Responses API: its lanes, what it remembers, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from stream_fabric.errors import Draining
from stream_fabric.limits import RESPONSES_SOCKET_S_MAX
from stream_gw.auth import Principal
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport.connection import EdgeWebSocket
from stream_gw.transport.responses.errors import ConnectionLimit, error_event
from stream_gw.transport.responses.lanes import Lanes
from stream_gw.transport.responses.recent import RecentResponses
from stream_gw.transport.responses.turn import Turn
from stream_gw.transport.sockets.base import EdgeSocket

_GOING_AWAY = 1001


class ResponsesSocket(EdgeSocket):
    """One connection of the Responses API."""

    __slots__ = ("is_open_profile", "lanes", "recent")

    def __init__(
        self,
        connection: EdgeWebSocket,
        name: str,
        monotonic: Callable[[], float],
        bodies: BodyBytes,
        histories: BodyBytes,
        who: Principal,
        *,
        is_open: bool,
    ) -> None:
        """``histories``: counts the bytes that the gateway's sockets remember. ``is_open``: the profile is Open
        Responses."""
        super().__init__(connection, name, monotonic, bodies)
        self.principal: Principal = who
        self.is_open_profile = is_open
        self.lanes: Lanes[Turn] = Lanes()
        self.recent = RecentResponses(histories, who.tenant)

    def outlets(self) -> Collection[Turn]:
        return self.lanes.running.values()

    def close_outlets(self) -> None:
        for waiting in self.lanes.clear():
            self._bodies.remove(self.principal.tenant, len(waiting.message))
        for turn in tuple(self.lanes.running.values()):
            turn.leave(self.read_end)

    def running(self, response: str) -> Turn | None:
        """Return the turn whose response runs; None: no such response runs here."""
        named = (turn for turn in self.lanes.running.values() if turn.response)  # others are being made
        return next((turn for turn in named if turn.response == response), None)

    # --- the end -------------------------------------------------------------------------------------------

    def ask_to_reconnect(self, after_s: float) -> None:
        """Close the socket once it is idle, from ``after_s`` on: the API has no event for it, and its clients connect
        again after this close code."""
        asyncio.get_running_loop().call_later(after_s, self._begin_to_leave)

    def _begin_to_leave(self) -> None:
        self.hinted = True
        self.close_if_leaving()

    def close_if_leaving(self) -> None:
        """Close a socket that is asked to reconnect and on which nothing runs."""
        if self.hinted and self.lanes.is_idle:
            self.close(Draining.close_code, "this gateway is shutting down; reconnect")

    def sweep(self, now: float, unix_now: float) -> None:
        if self.close_code is None and now - self._opened_at > RESPONSES_SOCKET_S_MAX:
            error = ConnectionLimit(
                f"this socket is open for {RESPONSES_SOCKET_S_MAX / 60:g} minutes, the limit; open another one. What "
                "runs goes on: read it with GET /v1/responses/{id}?stream=true"
            )
            self.send(error_event(error, None, self.name, is_open=self.is_open_profile))
            self.close(_GOING_AWAY, error.message)
            return
        super().sweep(now, unix_now)

    def _ping(self, now: float) -> None:
        pass  # pings of the WebSocket protocol suffice: the API has no event for it
