"""Fleet events of one replica: the states of its lease as the pool hears them, and the states of its breaker."""

from __future__ import annotations

import logging
from typing import cast

from inference.agent.observe.meter import Breaker, BreakerState
from stream_fabric.pool.placement import ReplicaState
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.stream.ids import ReplicaId

_REASONS: dict[ReplicaState, str] = {
    "starting": "it starts",
    "warming": "its engine does not serve",
    "warm": "it serves nobody until it is activated",
    "ready": "its engine serves",
    "draining": "it takes nothing new",
    "sleeping": "its engine sleeps",
}
_BREAKER_REASONS: dict[BreakerState, str] = {
    "open": "its engine fails requests",
    "half_open": "one request may try",
    "closed": "its engine has answered",
}


log = logging.getLogger(__name__)


class ReplicaEvents:
    def __init__(
        self, fleet_events: FleetEventReporter, pool: str, replica: ReplicaId, ttl_s: float, *, standby: bool = False
    ) -> None:
        self._fleet_events = fleet_events
        self._pool = pool
        self._replica = replica
        self._ttl_s = ttl_s
        self._state: ReplicaState | None = None
        self._renewed_at = 0.0
        self._breaker: BreakerState = "closed"
        self._wake_s = 0.0
        self._requests: dict[str, tuple[str, str]] = {"warm": ("standby", "")} if standby else {}
        """State → who asked for it and why, until the pool hears of the state."""

    def receive_state_request(self, state: ReplicaState, asked_by: str, reason: str = "") -> None:
        """Keep who asked for the state and why, for the event of that state. The first request wins.

        An operator's request to drain is also reported at once.
        """
        self._requests.setdefault(state, (asked_by, reason))
        if asked_by == "operator" and state == "draining":
            # Other sources report their requests themselves, with the figures behind them
            self._fleet_events.report(
                "drain", pool=self._pool, replica=self._replica, source="operator", asked_by="operator"
            )

    def receive_wake(self, took_s: float) -> None:
        """Keep the duration of the engine's wake for the next lease event."""
        self._wake_s = took_s

    def receive_renewal(self, info: ReplicaInfo, streams: int, now: float) -> None:
        """Report a new state, or a lease that had expired, once the pool has taken this record."""
        unrenewed_s, self._renewed_at = now - self._renewed_at, now
        first = self._state is None
        lapsed = not first and unrenewed_s > self._ttl_s
        if info.state == self._state and not lapsed:
            return
        self._state = cast(ReplicaState, info.state)  # this process wrote it
        asked_by, reason = self._requests.pop(self._state, ("", ""))
        wakes = info.state == "warming" and info.load.asleep
        reason = reason or ("its engine wakes" if wakes else _REASONS[self._state])
        figures: dict[str, float] = {
            "streams": streams,
            "running": info.load.running,
            "waiting": info.load.waiting,
            "slots": info.load.slots,
            "room": info.room,
            "queue_p99_ms": round(info.queue_p99_ms, 1),
        }
        if first:
            reason = f"its first lease: {reason}"
        elif lapsed:
            reason = f"its lease had ended unrenewed, and it has one again: {reason}"
            figures["unrenewed_s"] = round(unrenewed_s, 1)
        if self._wake_s:
            figures["wake_s"], self._wake_s = round(self._wake_s, 3), 0.0
        self._fleet_events.report(
            "lease", pool=self._pool, replica=self._replica, state=info.state, reason=reason, asked_by=asked_by,
            figures=figures,
        )  # fmt: skip

    def receive_left(self, streams: int) -> None:
        """Report that the replica has left its pool. ``streams``: the number it could not place elsewhere."""
        self._fleet_events.report(
            "lease", pool=self._pool, replica=self._replica, state="gone", reason="it has left",
            figures={"streams": streams},
        )  # fmt: skip

    def receive_breaker(self, breaker: Breaker, now: float, reason: str = "") -> None:
        """Report and log the breaker if its state has changed. ``reason``: code of the last failure."""
        state = breaker.state(now)
        if state != self._breaker:
            self._breaker = state
            if state == "open":
                log.warning("circuit breaker open, taking no requests: %s", breaker.refusal(now))
            elif state == "closed":
                log.warning("circuit breaker closed, taking requests: the engine has answered")
            self._fleet_events.report(
                "breaker",
                pool=self._pool,
                replica=self._replica,
                state=state,
                reason=reason or _BREAKER_REASONS[state],
                figures={"failures": breaker.failures, "open_s": breaker.open_s},
            )
