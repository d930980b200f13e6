"""``diff``: two cohorts side by side, and what explains that one is slower at its tail.

Quantiles of phases do not add up to the quantile of their sum, so tails are compared by means: of those around the
quantile, the slowest two in a hundred for the p99, the 92nd to the 98th for the p95. Their phases add up, and so do the
differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stream_fabric.errors import BadRequest
from stream_fabric.events import PHASES
from telemetry.ask.causes import shown
from telemetry.ask.port import Ask
from telemetry.ask.queries import COHORT, EVER_US
from telemetry.ask.story import figure

Row = Mapping[str, Any]
By = Literal["ttft", "wall"]
At = Literal["p95", "p99"]
BYS: tuple[By, ...] = ("ttft", "wall")
ATS: tuple[At, ...] = ("p99", "p95")
_INDEX = {"p50": 0, "p95": 1, "p99": 2, "p92": 3, "p98": 4}
"""Of the profile's quantiles."""
_AROUND: Mapping[At, tuple[str, str]] = {"p99": ("p98", ""), "p95": ("p92", "p98")}

BEFORE_FIRST = ("gateway_us", "admission_us", "pool_queue_us", "fabric_us", "engine_queue_us", "prefill_us")
NOTEWORTHY_SHARE = 0.1
"""Of the tail's change; a phase that changed by less is not named."""


@dataclass(frozen=True)
class Cohort:
    """Requests by their time and what they have in common."""

    from_us: int
    until_us: int
    common: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.from_us >= self.until_us:
            raise BadRequest("a cohort's time ends after it begins")
        if unknown := sorted(set(self.common) - set(COHORT)):
            raise BadRequest(f"a cohort has no {', '.join(unknown)}; it is told by {', '.join(COHORT)}")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"from_us": self.from_us, "until_us": self.until_us, **self.common}


@dataclass(frozen=True)
class Tail:
    """The requests around a quantile: what each phase takes of them, and through which replicas."""

    means: Mapping[str, float]
    replicas: Mapping[str, tuple[float, Mapping[str, float]]]
    """Replica → (its share of the tail, its phases' means)."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Tail:
        total = sum(int(row["requests"]) for row in rows) or 1
        shares = {str(row["replica"]): int(row["requests"]) / total for row in rows}
        phases = {str(row["replica"]): {name: float(row[f"{name}_mean"]) for name in PHASES} for row in rows}
        means = {name: sum(shares[r] * phases[r][name] for r in shares) for name in PHASES}
        return cls(means, {replica: (shares[replica], phases[replica]) for replica in shares})


@dataclass(frozen=True)
class Change:
    """What a phase adds to the tail."""

    phase: str
    us: float
    replica: str
    """Through which most of it comes; empty: it is spread."""


@dataclass(frozen=True)
class Side:
    cohort: Cohort
    profile: Row
    tails: Mapping[tuple[By, At], Tail]

    def quantile(self, name: str, index: int) -> float:
        """0: p50, 1: p95, 2: p99."""
        return figure(self.profile[f"{name}_q"][index])


@dataclass(frozen=True)
class Diff:
    a: Side
    b: Side

    def changes(self, by: By, at: At) -> list[Change]:
        """The largest first; those that went the tail's way."""
        names = BEFORE_FIRST if by == "ttft" else PHASES
        before, after = self.a.tails[by, at], self.b.tails[by, at]
        found = [
            Change(name, us, _through(name, us, before, after))
            for name in names
            if (us := after.means[name] - before.means[name])
        ]
        return sorted(found, key=lambda change: -abs(change.us))

    def says(self, by: By, at: At) -> str:
        name = "ttft_us" if by == "ttft" else "wall_us"
        what = f"{at} TTFT" if by == "ttft" else f"{at} of the whole"
        if not self.a.profile["members"] or not self.b.profile["members"]:
            return f"{what}: one side has no requests."
        old, new = self.a.quantile(name, _INDEX[at]), self.b.quantile(name, _INDEX[at])
        delta = new - old
        if abs(delta) < max(0.05 * max(old, new), 1000):
            return f"{what} is the same: {shown(old)} and {shown(new)}."
        changes = self.changes(by, at)
        moved = sum(change.us for change in changes)
        told = [c for c in changes if c.us * delta > 0 and abs(c.us) >= NOTEWORTHY_SHARE * abs(moved)][:3]
        parts = ", ".join(
            f"{'+' if c.us > 0 else '-'}{shown(abs(c.us))} {_NAMES.get(c.phase, c.phase[:-3])}"
            + (f" on replica {c.replica}" if c.replica else "")
            for c in told
        )
        verb = "rose" if delta > 0 else "fell"
        return (
            f"{what} {verb} {shown(abs(delta))}, from {shown(old)} to {shown(new)}: {parts or 'nothing explains it'}."
        )


_NAMES = {"engine_queue_us": "engine queue", "pool_queue_us": "pool queue", "client_stall_us": "client stall",
          "resume_gap_us": "resume gap", "residual_us": "not accounted for"}  # fmt: skip


def _through(phase: str, us: float, before: Tail, after: Tail) -> str:
    """The replica that more than half of a phase's change in the tail comes through."""
    added = {
        replica: after.replicas.get(replica, (0.0, {}))[0] * after.replicas.get(replica, (0.0, {}))[1].get(phase, 0.0)
        - before.replicas.get(replica, (0.0, {}))[0] * before.replicas.get(replica, (0.0, {}))[1].get(phase, 0.0)
        for replica in sorted({*before.replicas, *after.replicas})
    }
    replica = max(added, key=lambda name: added[name] / us, default="")
    return replica if replica and added[replica] / us > 0.5 else ""


async def diff(ask: Ask, a: Cohort, b: Cohort) -> Diff:
    return Diff(await _side(ask, a), await _side(ask, b))


async def _side(ask: Ask, cohort: Cohort) -> Side:
    profile = (await ask.query("profile", cohort.parameters))[0]
    tails: dict[tuple[By, At], Tail] = {}
    for by in BYS:
        for at in ATS:
            low, high = _AROUND[at]
            least, most = _bound(profile, by, low), _bound(profile, by, high) if high else EVER_US
            given = {**cohort.parameters, "by": by, "least_us": least, "most_us": most}
            tails[by, at] = Tail.of(await ask.query("spent_by_replica", given))
    return Side(cohort, profile, tails)


def _bound(profile: Row, by: By, quantile: str) -> int:
    return int(figure(profile[f"{by}_us_q"][_INDEX[quantile]]))
