"""``diff``: two cohorts side by side, and the phases that explain the difference of their tails.

Quantiles of phases do not add up to the quantile of their sum. So tails are compared by the means of the requests
around a quantile: the slowest 2 % for the p99, the 92nd to 98th percentile for the p95. Means and differences add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stream_fabric.errors import BadRequest
from stream_fabric.events import PHASES
from telemetry.ask.port import Ask
from telemetry.ask.queries import COHORT, EVER_US
from telemetry.ask.why.causes import duration
from telemetry.ask.why.story import figure

Row = Mapping[str, Any]
By = Literal["ttft", "wall"]
At = Literal["p95", "p99"]
BYS: tuple[By, ...] = ("ttft", "wall")
ATS: tuple[At, ...] = ("p99", "p95")
_INDEX = {"p50": 0, "p95": 1, "p99": 2, "p92": 3, "p98": 4}
"""Position of each quantile in the profile."""
_AROUND: Mapping[At, tuple[str, str]] = {"p99": ("p98", ""), "p95": ("p92", "p98")}

BEFORE_FIRST = ("gateway_us", "admission_us", "pool_queue_us", "fabric_us", "engine_queue_us", "prefill_us")
NOTEWORTHY_SHARE = 0.1
"""Minimum share of the tail's change for a phase to be named."""


@dataclass(frozen=True)
class Cohort:
    """Requests of a time window with common properties."""

    from_us: int
    until_us: int
    common: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.from_us >= self.until_us:
            raise BadRequest("a cohort must end after it begins")
        if unknown := sorted(set(self.common) - set(COHORT)):
            raise BadRequest(f"a cohort has no {', '.join(unknown)}; it takes {', '.join(COHORT)}")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"from_us": self.from_us, "until_us": self.until_us, **self.common}


@dataclass(frozen=True)
class Tail:
    """Mean phases of the requests around a quantile, in all and by replica."""

    means: Mapping[str, float]
    replicas: Mapping[str, tuple[float, Mapping[str, float]]]
    """Replica → (its share of the tail, its phases' means)."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Tail:
        """Build the tail from rows of the query ``spent_by_replica``."""
        total = sum(int(row["requests"]) for row in rows) or 1
        shares = {str(row["replica"]): int(row["requests"]) / total for row in rows}
        phases = {str(row["replica"]): {name: float(row[f"{name}_mean"]) for name in PHASES} for row in rows}
        means = {name: sum(shares[r] * phases[r][name] for r in shares) for name in PHASES}
        return cls(means, {replica: (shares[replica], phases[replica]) for replica in shares})


@dataclass(frozen=True)
class Change:
    """Change of a phase in the tail."""

    phase: str
    us: float
    replica: str
    """Replica with most of the change; empty: several."""


@dataclass(frozen=True)
class Side:
    """One of the two compared cohorts, with its quantiles and tails."""

    cohort: Cohort
    profile: Row
    tails: Mapping[tuple[By, At], Tail]

    def quantile(self, name: str, index: int) -> float:
        """Return a quantile of a field, in µs. ``index``: 0 is p50, 1 is p95, 2 is p99."""
        return figure(self.profile[f"{name}_q"][index])


@dataclass(frozen=True)
class Diff:
    """Difference from cohort ``a`` to cohort ``b``."""

    a: Side
    b: Side

    def changes(self, by: By, at: At) -> list[Change]:
        """Return the changes of the phases, the largest first."""
        names = BEFORE_FIRST if by == "ttft" else PHASES
        before, after = self.a.tails[by, at], self.b.tails[by, at]
        found = [
            Change(name, us, _replica_of_change(name, us, before, after))
            for name in names
            if (us := after.means[name] - before.means[name])
        ]
        return sorted(found, key=lambda change: -abs(change.us))

    def sentence(self, by: By, at: At) -> str:
        """Describe the change of one quantile and the phases that explain it."""
        name = "ttft_us" if by == "ttft" else "wall_us"
        what = f"{at} TTFT" if by == "ttft" else f"{at} of the total time"
        if not self.a.profile["members"] or not self.b.profile["members"]:
            return f"{what}: one cohort has no requests."
        old, new = self.a.quantile(name, _INDEX[at]), self.b.quantile(name, _INDEX[at])
        delta = new - old
        if abs(delta) < max(0.05 * max(old, new), 1000):
            return f"{what} is the same: {duration(old)} and {duration(new)}."
        changes = self.changes(by, at)
        moved = sum(change.us for change in changes)
        told = [c for c in changes if c.us * delta > 0 and abs(c.us) >= NOTEWORTHY_SHARE * abs(moved)][:3]
        parts = ", ".join(
            f"{'+' if c.us > 0 else '-'}{duration(abs(c.us))} {_NAMES.get(c.phase, c.phase[:-3])}"
            + (f" on replica {c.replica}" if c.replica else "")
            for c in told
        )
        verb = "rose" if delta > 0 else "fell"
        return (
            f"{what} {verb} {duration(abs(delta))}, from {duration(old)} to {duration(new)}: "
            f"{parts or 'no phase explains it'}."
        )


_NAMES = {"engine_queue_us": "engine queue", "pool_queue_us": "pool queue", "client_stall_us": "client stall",
          "resume_gap_us": "resume gap", "check_us": "check and repair", "steer_us": "steering",
          "residual_us": "unaccounted"}  # fmt: skip


def _replica_of_change(phase: str, us: float, before: Tail, after: Tail) -> str:
    """Return the replica with more than half of a phase's change; empty: none."""
    added = {
        replica: after.replicas.get(replica, (0.0, {}))[0] * after.replicas.get(replica, (0.0, {}))[1].get(phase, 0.0)
        - before.replicas.get(replica, (0.0, {}))[0] * before.replicas.get(replica, (0.0, {}))[1].get(phase, 0.0)
        for replica in sorted({*before.replicas, *after.replicas})
    }
    replica = max(added, key=lambda name: added[name] / us, default="")
    return replica if replica and added[replica] / us > 0.5 else ""


async def diff(ask: Ask, a: Cohort, b: Cohort) -> Diff:
    """Load two cohorts and compare them."""
    return Diff(await _load_side(ask, a), await _load_side(ask, b))


async def _load_side(ask: Ask, cohort: Cohort) -> Side:
    profile = (await ask.query("profile", cohort.parameters))[0]
    tails: dict[tuple[By, At], Tail] = {}
    for by in BYS:
        for at in ATS:
            low, high = _AROUND[at]
            least, most = _quantile_us(profile, by, low), _quantile_us(profile, by, high) if high else EVER_US
            given = {**cohort.parameters, "by": by, "least_us": least, "most_us": most}
            tails[by, at] = Tail.of(await ask.query("spent_by_replica", given))
    return Side(cohort, profile, tails)


def _quantile_us(profile: Row, by: By, quantile: str) -> int:
    """Return a quantile of the cohort's TTFT or total time, in µs."""
    return int(figure(profile[f"{by}_us_q"][_INDEX[quantile]]))
