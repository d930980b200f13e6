"""What a replica does in a second, measured from what passes its agent. Pure: time is an argument."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Literal

from stream_fabric.metrics import TTFT_BUCKETS_S

BreakerState = Literal["closed", "half_open", "open"]

_PREFILL_PER_S = 8000.0
_TOKENS_PER_S = 20.0
_SMOOTHING = 0.2
_WINDOW_S = 60.0
_TURN_S = 5.0
_SAMPLES_MAX = 2000
_ROW_TOKENS = 8192
_SPEED_KEEPS = 0.98
_USUAL_AT_FIRST = 256.0
_USUAL_SHARE = 0.02


class PrefillSpeed:
    """Prompt tokens a second while there was prefill to do, older samples counting less. A sample is what was computed
    in a row: of a short one most of the time is that of the step under way when it came, so it says little."""

    def __init__(self, at_first_per_s: float = _PREFILL_PER_S) -> None:
        self._tokens = at_first_per_s
        self._seconds = 1.0
        self._row_tokens = 0
        self._row_s = 0.0

    @property
    def per_s(self) -> float:
        return self._tokens / self._seconds

    def receive(self, tokens: int, seconds: float, *, goes_on: bool) -> None:
        """So many tokens were computed since the last first token, or since there was something to compute;
        ``goes_on``: there is more."""
        self._row_tokens += tokens
        self._row_s += seconds
        if self._row_tokens >= _ROW_TOKENS:
            self._tokens = self._tokens * _SPEED_KEEPS + self._row_tokens
            self._seconds = self._seconds * _SPEED_KEEPS + self._row_s
            goes_on = False
        if not goes_on:
            self._row_tokens, self._row_s = 0, 0.0


class UsualLength:
    """How many tokens answers have had lately."""

    def __init__(self) -> None:
        self.tokens = _USUAL_AT_FIRST

    def receive_end(self, tokens: int) -> None:
        self.tokens += (tokens - self.tokens) * _USUAL_SHARE


class Company:
    """How many sequences decode at once, over time."""

    def __init__(self, now: float) -> None:
        self._count = 0
        self._seconds = 0.0
        self._at = now

    def receive(self, count: int, now: float) -> None:
        """From now on it is so many."""
        self._seconds = self.upto(now)
        self._at, self._count = now, count

    def upto(self, now: float) -> float:
        """Seconds of all sequences so far, summed."""
        return self._seconds + self._count * (now - self._at)

    def mean(self, seconds: float, since: float, now: float) -> float:
        """How many there were on the mean, ``upto`` having been ``seconds`` at that moment; whoever asks is one."""
        passed_s = now - since
        return max((self.upto(now) - seconds) / passed_s, 1.0) if passed_s > 0 else float(max(self._count, 1))


class FirstTokens:
    """How long first tokens of the last minute have taken, counted by ``TTFT_BUCKETS_S`` and one more for all above."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, list[int]]] = deque()

    def receive(self, took_s: float, now: float) -> None:
        if not self._turns or now - self._turns[-1][0] >= _TURN_S:
            self._turns.append((now, [0] * (len(TTFT_BUCKETS_S) + 1)))
        self._turns[-1][1][bisect_left(TTFT_BUCKETS_S, took_s)] += 1

    def counts(self, now: float) -> tuple[int, ...]:
        """Without the empty buckets at the end."""
        while self._turns and now - self._turns[0][0] >= _WINDOW_S:
            self._turns.popleft()
        counts = [sum(column) for column in zip(*(turn for _, turn in self._turns), strict=True)]
        while counts and not counts[-1]:
            counts.pop()
        return tuple(counts)


class Meter:
    """Until something is measured, the figures are those of a small model on a middling GPU."""

    def __init__(self, now: float) -> None:
        self.prefill = PrefillSpeed()
        self.usual = UsualLength()
        self.first_tokens = FirstTokens()
        self.sequence_per_s = _TOKENS_PER_S
        """Output tokens of one sequence."""
        self.tokens_per_s = 0.0
        """Output tokens of all."""
        self.bytes_per_token = 4.0
        self._made = 0
        self._ticked_at = now
        self._waits: deque[tuple[float, float]] = deque(maxlen=_SAMPLES_MAX)

    def receive_prompt(self, body_bytes: int, tokens: int) -> None:
        """The engine has told how many tokens a request's prompt has."""
        if tokens:
            self.bytes_per_token += _SMOOTHING * (min(max(body_bytes / tokens, 1.0), 16.0) - self.bytes_per_token)

    def receive_wait(self, uncached_tokens: int, took_s: float, now: float) -> None:
        """A request's first token came so long after it was submitted."""
        self._waits.append((now, max(0.0, took_s - uncached_tokens / self.prefill.per_s) * 1000))

    def receive_tokens(self, count: int) -> None:
        self._made += count

    def tick(self, decoding: int, now: float) -> None:
        """Once a second; ``decoding``: sequences that have had their first token."""
        passed_s, made = now - self._ticked_at, self._made
        if passed_s <= 0:
            return
        self._ticked_at, self._made = now, 0
        self.tokens_per_s = made / passed_s
        if decoding and made:
            self.sequence_per_s += _SMOOTHING * (made / passed_s / decoding - self.sequence_per_s)
        while self._waits and now - self._waits[0][0] > _WINDOW_S:
            self._waits.popleft()

    @property
    def queue_p99_ms(self) -> float:
        """Time to the first token beyond the prompt's own computation, of the last minute."""
        waits = sorted(wait for _, wait in self._waits)
        return waits[min(len(waits) - 1, int(len(waits) * 0.99))] if waits else 0.0


class Breaker:
    """Takes a replica out of placement when its engine fails request after request, and tries it again with one."""

    def __init__(self, failures_max: int = 5, open_s: float = 2.0, open_s_max: float = 60.0) -> None:
        self._failures_max = failures_max
        self._open_s_first, self._open_s_max = open_s, open_s_max
        self._failures = 0
        self._open_s = open_s
        self._until = 0.0

    @property
    def failures(self) -> int:
        """In a row."""
        return self._failures

    @property
    def open_s(self) -> float:
        """For how long it stays open, or would."""
        return self._open_s

    def receive_success(self) -> None:
        self._failures, self._until, self._open_s = 0, 0.0, self._open_s_first

    def receive_failure(self, now: float) -> None:
        self._failures += 1
        if self._failures >= self._failures_max and now >= self._until:
            if self._until:
                self._open_s = min(self._open_s * 2, self._open_s_max)
            self._until = now + self._open_s

    def state(self, now: float) -> BreakerState:
        if not self._until:
            return "closed"
        return "open" if now < self._until else "half_open"

    def room(self, room: int, now: float) -> int:
        """Of so much room, what may be used: all, none, or one request for a try."""
        match self.state(now):
            case "closed":
                return room
            case "half_open":
                return 1
            case "open":
                return 0
