"""What becomes of one replica, told as events of the fleet: its lease's states as its pool hears of them, and its
breaker. Looked at once a renewal and where a request fails or has its first token; never for a token."""

from __future__ import annotations

from inference.agent.meter import Breaker, BreakerState
from stream_fabric.herald import Herald
from stream_fabric.ids import ReplicaId
from stream_fabric.placement import ReplicaState
from stream_fabric.redis.pool import ReplicaInfo

_BY_ITSELF = {
    "starting": "it starts",
    "warming": "its engine does not serve",
    "warm": "it serves nobody until it is activated",
    "ready": "its engine serves",
    "draining": "it takes nothing new",
    "sleeping": "its engine sleeps",
}
_OF_BREAKER: dict[BreakerState, str] = {
    "open": "its engine fails requests",
    "half_open": "one request may try",
    "closed": "its engine has answered",
}


class Chronicle:
    def __init__(self, herald: Herald, pool: str, replica: ReplicaId, ttl_s: float, *, standby: bool = False) -> None:
        self._herald = herald
        self._pool = pool
        self._replica = replica
        self._ttl_s = ttl_s
        self._state: ReplicaState | None = None
        self._renewed_at = 0.0
        self._breaker: BreakerState = "closed"
        self._woken_s = 0.0
        self._asked: dict[str, tuple[str, str]] = {"warm": ("standby", "")} if standby else {}
        """State → who asked for it, and why; until it is told."""

    def receive_wish(self, state: ReplicaState, asked_by: str, reason: str = "") -> None:
        """Somebody wants the replica in a state, or it has a reason of its own. The first to ask is told."""
        self._asked.setdefault(state, (asked_by, reason))
        if asked_by == "operator" and state == "draining":
            # Who else asks tells it itself, with what it rested on
            self._herald.tell("drain", pool=self._pool, replica=self._replica, source="operator", asked_by="operator")

    def receive_woken(self, took_s: float) -> None:
        """Its engine has slept, and is awake."""
        self._woken_s = took_s

    def receive_renewal(self, info: ReplicaInfo, streams: int, now: float) -> None:
        """The pool has heard this of the replica."""
        away_s, self._renewed_at = now - self._renewed_at, now
        first = self._state is None
        lapsed = not first and away_s > self._ttl_s
        if info.state == self._state and not lapsed:
            return
        self._state = info.state
        asked_by, reason = self._asked.pop(info.state, ("", ""))
        wakes = info.state == "warming" and info.load.asleep
        reason = reason or ("its engine wakes" if wakes else _BY_ITSELF[info.state])
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
            figures["unrenewed_s"] = round(away_s, 1)
        if self._woken_s:
            figures["wake_s"], self._woken_s = round(self._woken_s, 3), 0.0
        self._herald.tell(
            "lease", pool=self._pool, replica=self._replica, state=info.state, reason=reason, asked_by=asked_by,
            figures=figures,
        )  # fmt: skip

    def receive_gone(self, streams: int) -> None:
        """The replica has left its pool. ``streams``: that it could not place elsewhere."""
        self._herald.tell(
            "lease", pool=self._pool, replica=self._replica, state="gone", reason="it has left",
            figures={"streams": streams},
        )  # fmt: skip

    def look_at(self, breaker: Breaker, now: float, reason: str = "") -> None:
        """Tell of the breaker if it is in another state than it was. ``reason``: of the last failure."""
        state = breaker.state(now)
        if state != self._breaker:
            self._breaker = state
            self._herald.tell(
                "breaker", pool=self._pool, replica=self._replica, state=state,
                reason=reason or _OF_BREAKER[state], figures={"failures": breaker.failures, "open_s": breaker.open_s},
            )  # fmt: skip
