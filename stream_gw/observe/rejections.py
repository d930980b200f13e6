"""Requests that were refused for want of room, told to the fleet's events: counted, an event for each layer, pool and
reason in so many seconds, never one a request."""

from __future__ import annotations

import asyncio
from collections import Counter

from stream_fabric.herald import Herald
from stream_fabric.limits import SHED_KINDS_MAX, SHED_TOLD_EVERY_S
from stream_gw.metrics import shed_layer
from stream_gw.trace import Over

_OTHERS = ("", "others")


class Sheds:
    def __init__(self, herald: Herald) -> None:
        self._herald = herald
        self._counts: Counter[tuple[str, str, str]] = Counter()
        """(layer, pool, reason) → requests since it was told."""

    def receive_over(self, over: Over) -> None:
        """A reader is over."""
        layer = shed_layer(over)
        if layer:
            kind = (layer, over.pool, over.error_code)
            if kind not in self._counts and len(self._counts) >= SHED_KINDS_MAX:
                kind = (layer, *_OTHERS)
            self._counts[kind] += 1

    async def run(self) -> None:
        """Tell what has gathered, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(SHED_TOLD_EVERY_S)
                self.tell()
        finally:
            self.tell()

    def tell(self) -> None:
        counts, self._counts = self._counts, Counter()
        for (layer, pool, reason), count in counts.items():
            self._herald.tell(
                "shed", pool=pool, state=layer, reason=reason,
                figures={"requests": count, "within_s": SHED_TOLD_EVERY_S},
            )  # fmt: skip
