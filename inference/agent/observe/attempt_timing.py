"""When things happened to one try at a stream, and how far apart its tokens came."""

from __future__ import annotations

import time
from array import array

from stream_fabric.events import ITL_BUCKETS, TOKEN_TIMES_MAX, Timing, itl_bucket

_GAP_US_MAX = (1 << 32) - 1


class Times:
    """``waited_us``, ``handed_us``: as the pool tells. ``taken_us``: now, on the fabric's clock."""

    __slots__ = (
        "_began_ns",
        "_ended_ns",
        "_first_ns",
        "_gaps",
        "_last_ns",
        "_own_us",
        "generated",
        "handed_us",
        "itl_max_us",
        "prefill_s",
        "taken_us",
        "waited_us",
    )  # fmt: skip

    def __init__(self, waited_us: int, handed_us: int, taken_us: int) -> None:
        self.waited_us = waited_us
        self.handed_us = handed_us
        self.taken_us = taken_us
        self.prefill_s = 0.0
        """Of the time to the first token, the prompt's computation."""
        self._own_us: tuple[int, int] | None = None
        """What the engine tells of itself: in its queue, and from then to the first token."""
        self.generated = 0
        """Tokens that the engine has made."""
        self.itl_max_us = 0
        self._began_ns = time.monotonic_ns()
        self._first_ns = self._last_ns = self._ended_ns = 0
        self._gaps = array("I", bytes(4 * ITL_BUCKETS))

    def receive_tokens(self, tokens: int) -> None:
        """So many came together; the hot call."""
        now_ns = time.monotonic_ns()
        self.generated += tokens
        if not self._first_ns:
            self._first_ns = self._last_ns = now_ns
            return
        gap_us = (now_ns - self._last_ns) // 1000
        self._last_ns = now_ns
        if gap_us > self.itl_max_us:
            self.itl_max_us = gap_us
        self._gaps[itl_bucket(gap_us)] += 1
        if tokens > 1:  # the others came with the first of them
            self._gaps[0] += tokens - 1

    def receive_end(self) -> None:
        self._ended_ns = self._ended_ns or time.monotonic_ns()

    def receive_computed(self, queue_s: float, prefill_s: float) -> None:
        self._own_us = int(queue_s * 1e6), int(prefill_s * 1e6)

    @property
    def estimated(self) -> bool:
        """Whether the time in the engine's queue is our own guess."""
        return self._own_us is None or not self._first_ns

    def timing(self) -> Timing:
        """Of what the engine tells the way to it and back is no part: that is between others' times."""
        ended_ns = self._ended_ns or time.monotonic_ns()
        first_us = ((self._first_ns or ended_ns) - self._began_ns) // 1000
        prefill_us = min(int(self.prefill_s * 1e6), first_us) if self._first_ns else first_us
        decode_us = (ended_ns - self._first_ns) // 1000 if self._first_ns else 0
        if self._own_us is not None and self._first_ns:
            queue_us = min(self._own_us[0], first_us)
            prefill_us = min(self._own_us[1], first_us - queue_us)
            return Timing(self.waited_us, self.handed_us, self.taken_us, queue_us, prefill_us, decode_us)
        return Timing(self.waited_us, self.handed_us, self.taken_us, first_us - prefill_us, prefill_us, decode_us)

    def sketch(self) -> tuple[int, ...]:
        """Gaps by ``itl_bucket``, without the empty buckets at the end."""
        counts = self._gaps.tolist()
        while counts and not counts[-1]:
            counts.pop()
        return tuple(counts)

    def token_us(self) -> tuple[int, ...]:
        """Of each token, microseconds since the one before; of a try that is not sampled nothing."""
        return ()


class EachTime(Times):
    """Of a sampled try: every token's time, of so many."""

    __slots__ = ("_before_ns", "_each")

    def __init__(self, waited_us: int, handed_us: int, taken_us: int) -> None:
        super().__init__(waited_us, handed_us, taken_us)
        self._each = array("I")
        self._before_ns = self._began_ns

    def receive_tokens(self, tokens: int) -> None:
        super().receive_tokens(tokens)
        if len(self._each) < TOKEN_TIMES_MAX:
            gap_us, self._before_ns = (self._last_ns - self._before_ns) // 1000, self._last_ns
            # Of those that come together all but the first take no time
            self._each.extend([min(gap_us, _GAP_US_MAX), *[0] * (min(tokens, TOKEN_TIMES_MAX - len(self._each)) - 1)])

    def token_us(self) -> tuple[int, ...]:
        return tuple(self._each)
