"""Speeds of one replica, measured from the streams that pass its agent. Pure: time is an argument."""

from __future__ import annotations

from collections import deque
from typing import Literal

from stream_fabric.pool.replica_load import PrefillSpeed, TtftHistogram, TypicalLength

BreakerState = Literal["closed", "half_open", "open"]

_TOKENS_PER_S = 20.0
_SMOOTHING = 0.2
_WINDOW_S = 60.0
_SAMPLES_MAX = 2000


class DecodeConcurrency:
    """Number of sequences that decode at the same time, as a mean over any period."""

    def __init__(self, now: float) -> None:
        self._count = 0
        self._seconds = 0.0
        self._since = now

    def receive(self, count: int, now: float) -> None:
        """Take the number of sequences that decode from ``now`` on."""
        self._seconds = self.sequence_seconds(now)
        self._since, self._count = now, count

    def sequence_seconds(self, now: float) -> float:
        """Sum of the decoding times of all sequences so far."""
        return self._seconds + self._count * (now - self._since)

    def mean(self, seconds: float, since: float, now: float) -> float:
        """Mean number of sequences since the moment ``since``, at least 1.

        ``seconds``: what ``sequence_seconds`` returned at that moment.
        """
        passed_s = now - since
        return (
            max((self.sequence_seconds(now) - seconds) / passed_s, 1.0) if passed_s > 0 else float(max(self._count, 1))
        )


class Meter:
    """Speeds of the replica. Until they are measured, they are those of a small model on a medium GPU."""

    def __init__(self, now: float) -> None:
        self.prefill = PrefillSpeed()
        self.typical_length = TypicalLength()
        self.first_tokens = TtftHistogram()
        self.sequence_per_s = _TOKENS_PER_S
        """Output tokens per second of one sequence."""
        self.tokens_per_s = 0.0
        """Output tokens per second of all sequences."""
        self.bytes_per_token = 4.0
        self._tokens = 0
        self._ticked_at = now
        self.queue_p99_ms = 0.0
        """99th percentile of the time to the first token less the prompt's computation, over the last minute."""
        self._waits: deque[tuple[float, float]] = deque(maxlen=_SAMPLES_MAX)

    def receive_prompt(self, body_bytes: int, tokens: int) -> None:
        """Update the bytes per token by a request's body and the number of tokens in its prompt."""
        if tokens:
            self.bytes_per_token += _SMOOTHING * (min(max(body_bytes / tokens, 1.0), 16.0) - self.bytes_per_token)

    def receive_wait(self, uncached_tokens: int, took_s: float, now: float) -> None:
        """Take the time from a request's submission to its first token, ``took_s``."""
        self._waits.append((now, max(0.0, took_s - uncached_tokens / self.prefill.per_s) * 1000))

    def receive_tokens(self, count: int) -> None:
        self._tokens += count

    def tick(self, decoding: int, now: float) -> None:
        """Close a measuring period of about a second. ``decoding``: sequences that have had their first token."""
        passed_s, tokens = now - self._ticked_at, self._tokens
        if passed_s <= 0:
            return
        self._ticked_at, self._tokens = now, 0
        self.tokens_per_s = tokens / passed_s
        if decoding and tokens:
            self.sequence_per_s += _SMOOTHING * (tokens / passed_s / decoding - self.sequence_per_s)
        while self._waits and now - self._waits[0][0] > _WINDOW_S:
            self._waits.popleft()
        waits = sorted(wait for _, wait in self._waits)
        self.queue_p99_ms = waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 0.0


class Breaker:
    """Circuit breaker: takes a replica out of placement when its engine fails one request after another.

    After a pause it is half open: one request may try.
    """

    def __init__(self, failures_max: int = 5, open_s: float = 2.0, open_s_max: float = 60.0) -> None:
        self._failures_max = failures_max
        self._open_s_first, self._open_s_max = open_s, open_s_max
        self._failures = 0
        self._last = ""
        self._open_s = open_s
        self._until = 0.0

    @property
    def failures(self) -> int:
        """Number of consecutive failures."""
        return self._failures

    @property
    def open_s(self) -> float:
        """Seconds for which the breaker stays open, or would stay open."""
        return self._open_s

    def receive_success(self) -> None:
        self._failures, self._until, self._open_s = 0, 0.0, self._open_s_first

    def receive_failure(self, now: float, code: str) -> None:
        """``code``: of the engine's error."""
        self._failures += 1
        self._last = code
        if self._failures >= self._failures_max and now >= self._until:
            if self._until:
                self._open_s = min(self._open_s * 2, self._open_s_max)
            self._until = now + self._open_s

    def state(self, now: float) -> BreakerState:
        if not self._until:
            return "closed"
        return "open" if now < self._until else "half_open"

    def refusal(self, now: float) -> str:
        """Return why the replica takes no requests at the moment ``now``; empty: it takes them, or tries one."""
        if self.state(now) != "open":
            return ""
        return f"its engine failed {self._failures} requests in a row, the last one with {self._last}"

    def room(self, room: int, now: float) -> int:
        """The part of ``room`` that placement may use: all, none, or one request."""
        match self.state(now):
            case "closed":
                return room
            case "half_open":
                return 1
            case "open":
                return 0
