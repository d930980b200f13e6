"""Figures of this gateway's own requests in the last minutes, from a few counters updated when a request ends."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from stream_fabric.gap_histogram import ITL_BUCKETS, itl_bounds_us, itl_bucket
from stream_fabric.limits import OPS_RECENT_S
from stream_fabric.ports import Clock
from stream_fabric.process.metrics_registry import CappedLabels
from stream_fabric.process.stats import locate_quantile
from stream_gw.observe.metrics import rejection_layer
from stream_gw.observe.trace import ReaderOutcome

_SLOT_S = 15.0
_RATE_S = 60.0


class FirstTokens(msgspec.Struct, frozen=True):
    """Times to the first token of a pool, from a histogram with an error of at most 12.5 %."""

    pool: str
    count: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


class LocalStats(msgspec.Struct, frozen=True):
    """Figures of this gateway's own requests in the last minutes."""

    window_s: float
    requests_per_s: float
    """Mean of the last minute, like ``tokens_per_s``."""
    tokens_per_s: float
    ended: dict[str, int]
    """Requests that created a stream or were refused, by outcome."""
    sheds: dict[str, int]
    """Rejected requests among them, by the layer that rejected."""
    ttft: list[FirstTokens]
    """First for all pools, with ``pool`` empty, then by pool."""


class _Slot:
    __slots__ = ("ended", "requests", "sheds", "start", "tokens", "ttft")

    def __init__(self, start: float) -> None:
        self.start = start
        self.requests = self.tokens = 0
        self.ended: Counter[str] = Counter()
        self.sheds: Counter[str] = Counter()
        self.ttft: dict[str, Counter[int]] = {}


class LocalStatsWindow:
    """Counters in slots of 15 s; the oldest slot is dropped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._now()
        self._slots: deque[_Slot] = deque(maxlen=int(OPS_RECENT_S / _SLOT_S))
        self._pools = CappedLabels()

    def _now(self) -> float:
        return self._clock.monotonic_us() / 1e6

    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Count a reader that has ended."""
        now = self._now()
        if not self._slots or now - self._slots[-1].start >= _SLOT_S:
            self._slots.append(_Slot(now))
        slot = self._slots[-1]
        slot.tokens += outcome.tokens
        if outcome.role not in ("created", "refused"):
            return
        slot.requests += 1
        slot.ended[outcome.ended] += 1
        if layer := rejection_layer(outcome):
            slot.sheds[layer] += 1
        if outcome.ttft_us:
            slot.ttft.setdefault(self._pools(outcome.pool), Counter())[itl_bucket(outcome.ttft_us)] += 1

    def stats(self) -> LocalStats:
        now = self._now()
        window_s = min(OPS_RECENT_S, now - self._began)
        slots = [slot for slot in self._slots if now - slot.start < OPS_RECENT_S]
        recent = [slot for slot in slots if now - slot.start < _RATE_S]
        earlier = max((slot.start for slot in slots if now - slot.start >= _RATE_S), default=0.0) + _SLOT_S
        # A slot that began before the last minute is not counted, so the rate's interval begins after it
        over_s = max(now - max(now - _RATE_S, self._began, earlier), 1.0)
        ended, sheds = Counter[str](), Counter[str]()
        by_pool: dict[str, Counter[int]] = {}
        for slot in slots:
            ended += slot.ended
            sheds += slot.sheds
            for pool, counts in slot.ttft.items():
                by_pool.setdefault(pool, Counter()).update(counts)
        everyone = Counter[int]()
        for counts in by_pool.values():
            everyone.update(counts)
        return LocalStats(
            round(window_s, 1),
            round(sum(slot.requests for slot in recent) / over_s, 2),
            round(sum(slot.tokens for slot in recent) / over_s, 1),
            dict(ended),
            dict(sheds),
            [_first_tokens(pool, counts) for pool, counts in (("", everyone), *sorted(by_pool.items())) if counts],
        )


def _first_tokens(pool: str, counts: Counter[int]) -> FirstTokens:
    histogram, total = [counts[bucket] for bucket in range(ITL_BUCKETS)], counts.total()

    def quantile_ms(share: float) -> float:
        found = locate_quantile(histogram, share, total)
        assert found is not None
        low_us, high_us = itl_bounds_us(found.bucket)
        return round((low_us + high_us) / 2000, 1)

    return FirstTokens(pool, total, quantile_ms(0.5), quantile_ms(0.95), quantile_ms(0.99))
