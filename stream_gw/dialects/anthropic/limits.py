"""Headers with what is left of a caller's limits, as Anthropic's clients read them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple


class Left(NamedTuple):
    """The limit of one kind that has the least left."""

    kind: str
    """``requests`` or ``tokens``, per minute."""
    limit: int
    remaining: int
    reset_ms: float
    """Time until the whole limit is free again."""


def limit_headers(left: Iterable[Left], now_ms: int) -> tuple[tuple[bytes, bytes], ...]:
    """Return ``anthropic-ratelimit-*``. ``now_ms``: Unix time; a reset is a time of day, as RFC 3339 writes it."""
    headers = []
    for kind, limit, remaining, reset_ms in left:
        reset = datetime.fromtimestamp(math.ceil((now_ms + reset_ms) / 1000), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for figure, value in (("limit", limit), ("remaining", remaining), ("reset", reset)):
            headers.append((f"anthropic-ratelimit-{kind}-{figure}".encode(), str(value).encode()))
    return tuple(headers)
