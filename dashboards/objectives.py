"""What the platform promises, and how Prometheus sees whether it keeps it. Alerts and dashboards are made from this."""

from __future__ import annotations

from typing import NamedTuple

from stream_fabric.metrics import ITL, READS, TTFT

DAYS = 30
"""Over which the budget of errors is counted."""
TTFT_S = 1.0
ITL_S = 0.098304
assert TTFT_S in TTFT.buckets and ITL_S in ITL.buckets, "a histogram tells of its own bounds only"
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
_ASKED = 'role=~"created|refused"'


class Objective(NamedTuple):
    slo: str
    about: str
    target: float
    bad: str
    """Of a window ``{w}``, by pool: the share that was not as promised."""

    @property
    def budget(self) -> float:
        return round(1 - self.target, 6)

    def bad_in(self, window: str) -> str:
        return self.bad.replace("{w}", window)


def _slower(name: str, bound: float) -> str:
    within = f'sum by (pool) (rate({name}_bucket{{le="{bound!r}"}}[{{w}}]))'
    return f"1 - {within} / sum by (pool) (rate({name}_count[{{w}}]))"


OBJECTIVES = (
    Objective("ttft", f"the first token comes within {TTFT_S:g} s", 0.99, _slower(TTFT.name, TTFT_S)),
    Objective("itl", f"the next token comes within {ITL_S * 1000:.0f} ms", 0.99, _slower(ITL.name, ITL_S)),
    Objective(
        "availability",
        "a request is served, or fails for a reason of the client's",
        0.999,
        f'(sum by (pool) (rate({READS.name}{{{_ASKED},fault="platform"}}[{{w}}]))'
        f" or 0 * sum by (pool) (rate({READS.name}{{{_ASKED}}}[{{w}}])))"
        f" / sum by (pool) (rate({READS.name}{{{_ASKED}}}[{{w}}]))",
    ),
)


def error_ratio(window: str) -> str:
    """The recorded series of a window; its labels are ``slo`` and ``pool``."""
    assert window in WINDOWS
    return f"slo_error_ratio_{window}"


class Burn(NamedTuple):
    """The budget goes so many times as fast as it may, over a short window and over a long one."""

    rate: float
    short: str
    long: str


FAST = (Burn(14.4, "5m", "1h"), Burn(6, "30m", "6h"))
"""Two per cent of the month's budget in an hour, five in six hours."""
SLOW = (Burn(3, "2h", "1d"), Burn(1, "6h", "3d"))
