"""Order of the requests of one Responses socket: FIFO within a lane, and lanes run side by side. Pure."""

from __future__ import annotations

from typing import Generic, TypeVar

from stream_fabric.errors import TooMany
from stream_fabric.limits import RESPONSE_LANES_MAX, RESPONSES_IN_FLIGHT_MAX, RESPONSES_WAITING_MAX
from stream_gw.transport.responses.errors import LaneLimit

_T = TypeVar("_T")


class Lanes(Generic[_T]):
    """Requests that run or wait. A lane is named by a string; None names the default lane, which has no limit."""

    __slots__ = ("_named", "_waiting", "running")

    def __init__(self) -> None:
        self.running: dict[str | None, _T] = {}
        """The request that runs in each lane."""
        self._waiting: list[tuple[str | None, _T]] = []
        """In the order of their arrival."""
        self._named: set[str] = set()
        """Names of all lanes since the socket was opened: a client may continue each of them."""

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.running and not self._waiting

    def add(self, lane: str | None, request: _T) -> None:
        """Queue a request. Raises LaneLimit or TooMany."""
        if lane is not None and lane not in self._named and len(self._named) >= RESPONSE_LANES_MAX:
            raise LaneLimit(
                f"this socket has {RESPONSE_LANES_MAX} named lanes, the limit; use one of them or open another socket",
                param="stream_id",
            )
        if len(self._waiting) >= RESPONSES_WAITING_MAX:
            raise TooMany(f"{RESPONSES_WAITING_MAX} requests of this socket wait, the limit; wait for their responses")
        if lane is not None:
            self._named.add(lane)
        self._waiting.append((lane, request))

    def add_next(self, lane: str | None, request: _T) -> None:
        """Queue a request in front of all others: the gateway itself has made it."""
        self._waiting.insert(0, (lane, request))

    def startable(self) -> list[_T]:
        """Return the requests that may run, and count them as running."""
        started: list[_T] = []
        left: list[tuple[str | None, _T]] = []
        for lane, request in self._waiting:
            if lane in self.running or len(self.running) >= RESPONSES_IN_FLIGHT_MAX:
                left.append((lane, request))
            else:
                self.running[lane] = request
                started.append(request)
        self._waiting = left
        return started

    def finish(self, lane: str | None) -> None:
        """Take that the request of a lane has ended."""
        self.running.pop(lane, None)

    def clear(self) -> list[_T]:
        """Forget the requests that wait, and return them."""
        left, self._waiting = self._waiting, []
        return [request for _, request in left]
