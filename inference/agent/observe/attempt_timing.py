"""Timing of one attempt at a stream: waiting, prefill, and the gaps between tokens."""

from __future__ import annotations

from array import array

from stream_fabric.events import ITL_BUCKETS, TOKEN_TIMES_MAX, Timing, itl_bucket
from stream_fabric.ports import Clock

_GAP_US_MAX = (1 << 32) - 1


class AttemptTiming:
    """Timing of one attempt, which begins now.

    ``waited_us`` (time in the queue) and ``handed_us`` (moment of placement) come from the pool.
    """

    __slots__ = (
        "_began_us",
        "_ended_us",
        "_engine_us",
        "_first_us",
        "_gaps",
        "_last_us",
        "_monotonic_us",
        "generated",
        "handed_us",
        "itl_max_us",
        "prefill_s",
        "taken_us",
        "waited_us",
    )  # fmt: skip

    def __init__(self, clock: Clock, waited_us: int, handed_us: int) -> None:
        self.waited_us = waited_us
        self.handed_us = handed_us
        self.taken_us = clock.now_us()
        self.prefill_s = 0.0
        """Estimated duration of the prompt's computation."""
        self._engine_us: tuple[int, int] | None = None
        """The engine's own figures: time in its queue, and from then to the first token."""
        self.generated = 0
        """Tokens that the engine has generated."""
        self.itl_max_us = 0
        self._monotonic_us = clock.monotonic_us
        self._began_us = self._monotonic_us()
        self._first_us = self._last_us = self._ended_us = 0
        self._gaps = array("I", bytes(4 * ITL_BUCKETS))

    def receive_tokens(self, tokens: int) -> None:
        """Count ``tokens`` that the engine returned together, and the gap before them. Called for each delta."""
        now_us = self._monotonic_us()
        self.generated += tokens
        if not self._first_us:
            self._first_us = self._last_us = now_us
            return
        gap_us = now_us - self._last_us
        self._last_us = now_us
        if gap_us > self.itl_max_us:
            self.itl_max_us = gap_us
        self._gaps[itl_bucket(gap_us)] += 1
        if tokens > 1:  # the others came together with the first
            self._gaps[0] += tokens - 1

    def receive_end(self) -> None:
        """Set the end of the attempt to now, unless it is already set."""
        self._ended_us = self._ended_us or self._monotonic_us()

    def receive_computed(self, queue_s: float, prefill_s: float) -> None:
        """Take the engine's own figures: time in its queue, and from then to the first token."""
        self._engine_us = int(queue_s * 1e6), int(prefill_s * 1e6)

    @property
    def estimated(self) -> bool:
        """Whether the time in the engine's queue is this agent's estimate."""
        return self._engine_us is None or not self._first_us

    def summary(self) -> Timing:
        """Return the attempt's durations so far. The engine's own figures exclude the network round trip."""
        ended_us = self._ended_us or self._monotonic_us()
        first_us = (self._first_us or ended_us) - self._began_us
        prefill_us = min(int(self.prefill_s * 1e6), first_us) if self._first_us else first_us
        decode_us = ended_us - self._first_us if self._first_us else 0
        if self._engine_us is not None and self._first_us:
            queue_us = min(self._engine_us[0], first_us)
            prefill_us = min(self._engine_us[1], first_us - queue_us)
            return Timing(self.waited_us, self.handed_us, self.taken_us, queue_us, prefill_us, decode_us)
        return Timing(self.waited_us, self.handed_us, self.taken_us, first_us - prefill_us, prefill_us, decode_us)

    def sketch(self) -> tuple[int, ...]:
        """Number of inter-token gaps in each ``itl_bucket``, without the empty buckets at the end."""
        counts = self._gaps.tolist()
        while counts and not counts[-1]:
            counts.pop()
        return tuple(counts)

    def token_us(self) -> tuple[int, ...]:
        """Microseconds from one token to the next; empty when the attempt is not sampled."""
        return ()


class TokenTiming(AttemptTiming):
    """Timing of a sampled attempt, with the time of each of the first ``TOKEN_TIMES_MAX`` tokens."""

    __slots__ = ("_before_us", "_each")

    def __init__(self, clock: Clock, waited_us: int, handed_us: int) -> None:
        super().__init__(clock, waited_us, handed_us)
        self._each = array("I")
        self._before_us = self._began_us

    def receive_tokens(self, tokens: int) -> None:
        super().receive_tokens(tokens)
        if len(self._each) < TOKEN_TIMES_MAX:
            gap_us, self._before_us = self._last_us - self._before_us, self._last_us
            # Tokens that came together have no time between them
            self._each.extend([min(gap_us, _GAP_US_MAX), *[0] * (min(tokens, TOKEN_TIMES_MAX - len(self._each)) - 1)])

    def token_us(self) -> tuple[int, ...]:
        return tuple(self._each)
