"""How this gateway's own requests went in the last minutes. Kept whether somebody looks or not: a few counts at the end
of each request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec

from stream_fabric.events import itl_bounds_us, itl_bucket
from stream_fabric.exposition import Capped
from stream_fabric.limits import OPS_RECENT_S
from stream_gw.metrics import shed_layer
from stream_gw.trace import Over

_SLOT_S = 15.0
_RATE_S = 60.0
_SHARES = (0.5, 0.95, 0.99)


class FirstTokens(msgspec.Struct, frozen=True):
    """Times to the first token. Of a sketch: within an eighth."""

    pool: str
    count: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


class Told(msgspec.Struct, frozen=True):
    window_s: float
    requests_per_s: float
    """Of the last minute, as ``tokens_per_s``."""
    tokens_per_s: float
    ended: dict[str, int]
    """Requests that made a stream, or were refused one, by how they ended."""
    sheds: dict[str, int]
    """Of them, those turned away for want of room, by where."""
    ttft: list[FirstTokens]
    """All, whose pool is empty, and then by pool."""


class _Slot:
    __slots__ = ("ended", "requests", "sheds", "start", "tokens", "ttft")

    def __init__(self, start: float) -> None:
        self.start = start
        self.requests = self.tokens = 0
        self.ended: Counter[str] = Counter()
        self.sheds: Counter[str] = Counter()
        self.ttft: dict[str, Counter[int]] = {}


class Recent:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began = now()
        self._slots: deque[_Slot] = deque(maxlen=int(OPS_RECENT_S / _SLOT_S))
        self._pools = Capped()

    def receive_over(self, over: Over) -> None:
        """A reader is over."""
        now = self._now()
        if not self._slots or now - self._slots[-1].start >= _SLOT_S:
            self._slots.append(_Slot(now))
        slot = self._slots[-1]
        slot.tokens += over.tokens
        if over.role not in ("created", "refused"):
            return
        slot.requests += 1
        slot.ended[over.ended] += 1
        if layer := shed_layer(over):
            slot.sheds[layer] += 1
        if over.ttft_us:
            slot.ttft.setdefault(self._pools(over.pool), Counter())[itl_bucket(over.ttft_us)] += 1

    def told(self) -> Told:
        now = self._now()
        window_s = min(OPS_RECENT_S, now - self._began)
        slots = [slot for slot in self._slots if now - slot.start < OPS_RECENT_S]
        late = [slot for slot in slots if now - slot.start < _RATE_S]
        earlier = max((slot.start for slot in slots if now - slot.start >= _RATE_S), default=0.0) + _SLOT_S
        # A slot that reaches into the minute is not counted, so the minute begins behind it
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
        return Told(
            round(window_s, 1),
            round(sum(slot.requests for slot in late) / over_s, 2),
            round(sum(slot.tokens for slot in late) / over_s, 1),
            dict(ended),
            dict(sheds),
            [_first_tokens(pool, counts) for pool, counts in (("", everyone), *sorted(by_pool.items())) if counts],
        )


def _first_tokens(pool: str, counts: Counter[int]) -> FirstTokens:
    total = counts.total()
    wanted = [share * total for share in _SHARES]
    found: list[float] = []
    seen = 0
    for bucket, count in sorted(counts.items()):
        seen += count
        low, high = itl_bounds_us(bucket)
        while len(found) < len(wanted) and seen >= wanted[len(found)]:
            found.append(round((low + high) / 2000, 1))
    return FirstTokens(pool, total, *found)
