"""Report of ``bench.surge``: what was seen in one run, as tables. Times are in seconds from the first of the step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from bench.harness import table

BUSY_MAX = 0.9
"""Share of the machine's cores above which a second counts as too busy."""
BUSY_SECONDS_MAX = 0.05
LATE_P99_S_MAX = 0.1


class Try(msgspec.Struct):
    """One request of a client. ``retry``: 0 for its first, then one more for each time it came again."""

    client: int
    retry: int
    sent_s: float
    told: Literal["", "token", "refused", "failed"] = ""
    """The first thing of account that the client was told."""
    told_s: float = 0.0
    status: int = 0
    retry_after_s: int = 0
    queued: list[tuple[float, str]] = []
    """Comments that told it its place in the queue, each with its moment."""
    ended_s: float = 0.0
    said: str = ""
    """Body of a refusal, or the error."""

    @property
    def took_s(self) -> float:
        return self.told_s - self.sent_s


class Second(msgspec.Struct):
    """One look: what the controllers wanted, and what there was."""

    at_s: float
    wanted: int
    planned_s: float
    """Moment of the plan's last change."""
    reason: str
    replicas: int
    """Replicas of the Deployment, as the autoscaler has set it."""
    ready: int
    warm: int
    registered: int
    """Replicas with a lease, in any state."""
    used_s: float
    stolen_s: float
    """CPU seconds of all cores since the machine's start: used, and taken away by its host."""
    own_s: float = 0.0
    """CPU seconds of the load, the platform and the control plane."""


class Pod(msgspec.Struct):
    """When a pod was bound to a node, when its process began and when its probe said ready; None: never."""

    name: str
    bound_s: float
    begins_s: float | None
    ready_s: float | None


class Run(msgspec.Struct):
    facts: dict[str, int | float | str | list[float]]
    tries: list[Try]
    seconds: list[Second]
    pods: list[Pod]

    def fact(self, name: str) -> float:
        found = self.facts[name]
        assert isinstance(found, int | float)
        return found

    @property
    def objective_s(self) -> float:
        return self.fact("objective")

    def first(self, condition: Callable[[Second], bool]) -> float:
        """First moment of the step at which this was so; infinite: never."""
        return next((one.at_s for one in self.seconds if one.at_s >= 0 and condition(one)), float("inf"))

    @property
    def first_s(self) -> float:
        """Moment at which more replicas were ready than before the step."""
        before = self.began.ready
        return self.first(lambda one: one.ready > before)

    @property
    def wanted(self) -> int:
        """Most replicas that were wanted before the first new one was ready."""
        first_s = self.first_s
        return max(one.wanted for one in self.seconds if 0 <= one.at_s <= first_s)

    @property
    def all_s(self) -> float:
        """Moment at which as many replicas were ready, or warm."""
        wanted = self.wanted
        return self.first(lambda one: one.ready + one.warm >= wanted)

    @property
    def began(self) -> Second:
        """Last look before the step."""
        return [one for one in self.seconds if one.at_s < 0][-1]

    @property
    def wanted_s(self) -> float:
        """Moment at which more replicas were wanted than before the step."""
        before = self.began.wanted
        return next((one.planned_s for one in self.seconds if one.planned_s >= 0 and one.wanted > before), float("inf"))

    def shares(self, seconds: Callable[[Second], float]) -> list[float]:
        """Share of the cores that such CPU seconds took between two looks."""
        cores = self.fact("cores")
        pairs = zip(self.seconds, self.seconds[1:], strict=False)
        return [(seconds(new) - seconds(old)) / (new.at_s - old.at_s) / cores for old, new in pairs]

    def own(self) -> list[float]:
        return self.shares(lambda one: one.own_s)

    def busy(self) -> list[float]:
        return self.shares(lambda one: one.used_s + one.stolen_s)


class Phase(NamedTuple):
    name: str
    from_s: float
    to_s: float


def phases(run: Run) -> list[Phase]:
    step_s = run.fact("step")
    first_s = min(run.first_s, step_s)
    all_s = min(max(run.all_s, first_s), step_s)
    return [
        Phase("before the step", -run.fact("before"), 0),
        Phase("step, until the first new replica is ready", 0, first_s),
        Phase("step, until all are ready", first_s, all_s),
        Phase("step, the rest", all_s, step_s),
        Phase("the old load again", step_s, step_s + run.fact("after")),
    ]


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else float("nan")


KINDS = ("in time", "again", "queued", "late", "refused", "refused again", "failed")


def kind_of(one: Try, objective_s: float) -> str:
    """Return what the client was told: one of ``KINDS``. ``queued``: its place in the queue, then a token in time.
    ``again``: it came because an earlier refusal had named this moment."""
    if one.told == "refused":
        return "refused again" if one.retry else "refused"
    if one.told != "token":
        return "failed"
    if one.took_s > objective_s:
        return "late"
    return "queued" if one.queued else "again" if one.retry else "in time"


def _row(run: Run, phase: Phase) -> tuple[str, ...]:
    asked = [one for one in run.tries if phase.from_s <= one.sent_s < phase.to_s]
    kinds = [kind_of(one, run.objective_s) for one in asked]
    ttft_s = [one.took_s for one in asked if one.told == "token"]
    refused = [one for one in asked if one.told == "refused"]
    refusal_ms = [one.took_s * 1000 for one in refused]
    after_s = [one.retry_after_s for one in refused]

    def share(*wanted: str) -> str:
        return f"{sum(kind in wanted for kind in kinds) / max(len(kinds), 1):.1%}"

    return (
        phase.name,
        f"{phase.from_s:.0f} to {phase.to_s:.0f}",
        f"{len(asked)} ({sum(one.retry > 0 for one in asked)})",
        share("in time", "again", "queued"),
        share("queued"),
        share("late"),
        share("refused", "refused again"),
        share("failed"),
        f"{quantile(ttft_s, 0.5):.2f} / {quantile(ttft_s, 0.99):.2f}" if ttft_s else "-",
        f"{quantile(refusal_ms, 0.5):.1f} / {quantile(refusal_ms, 0.99):.1f}" if refused else "-",
        f"{min(after_s)} to {max(after_s)}, {statistics.median(after_s):.0f}" if refused else "-",
    )


HEAD = (
    "phase", "seconds", "requests (retries)", "first token in time", "of them told a place in the queue", "late",
    "refused", "failed", "TTFT p50 / p99, s", "a refusal takes p50 / p99, ms", "Retry-After, s: range, median",
)  # fmt: skip


def _clients(run: Run, phase: Phase) -> tuple[str, ...]:
    """Return what became of the clients whose first request was sent in this phase."""
    first = {one.client for one in run.tries if one.retry == 0 and phase.from_s <= one.sent_s < phase.to_s}
    last = {one.client: one for one in run.tries if one.client in first}
    begun = {one.client: one.sent_s for one in run.tries if one.retry == 0}
    retries = int(run.fact("retries"))
    served = [[one for one in last.values() if one.told == "token" and one.retry == n] for n in range(retries + 1)]
    waits_s = [one.told_s - begun[one.client] for one in last.values() if one.told == "token" and one.retry]
    shares = [f"{len(some) / max(len(first), 1):.1%}" for some in served]
    left = sum(one.told != "token" for one in last.values())
    wait = f"{quantile(waits_s, 0.5):.0f} / {quantile(waits_s, 0.99):.0f}" if waits_s else "-"
    return (phase.name, str(len(first)), *shares, f"{left / max(len(first), 1):.1%}", wait)


def report(run: Run) -> str:
    parts = phases(run)
    retries = int(run.fact("retries"))
    nth = ["at the first try", *(f"at retry {number + 1}" for number in range(retries))]
    head = ("clients that came in", "clients", *(f"served {one}" for one in nth), "never", "those wait p50 / p99, s")
    began = run.began
    step = [one for one in run.seconds if 0 <= one.at_s < run.fact("step")]
    own, busy = run.own(), run.busy()
    late_s = run.facts["late_s"]
    assert isinstance(late_s, list)
    colds = [one.ready_s - one.bound_s for one in run.pods if one.ready_s is not None and one.bound_s > 0]
    lines = [
        f"{run.facts['began']}, {run.fact('cores'):.0f} cores; {run.fact('rate'):g} requests/s, {run.fact('factor'):g} "
        f"times as many within {run.fact('ramp'):g} s; a replica has {run.fact('slots'):.0f} slots; TTFT objective "
        f"{run.objective_s:g} s; seed {run.fact('seed'):.0f}",
        "",
        table(HEAD, [_row(run, phase) for phase in parts]),
        "",
        table(head, [_clients(run, phase) for phase in parts]),
        "",
        f"before the step {began.ready} ready, {began.warm} warm, {began.wanted} wanted; in the step at most "
        f"{max(one.wanted for one in step)} wanted, {max(one.ready for one in step)} ready, "
        f"{max(one.warm for one in step)} warm",
        f"more replicas were wanted {run.wanted_s:.1f} s after the first second of the step (the Deployment had more "
        f"after {run.first(lambda one: one.replicas > began.replicas):.0f} s), {run.wanted} before the first new one "
        f"was ready, after {run.first_s:.0f} s; so many were there after {run.all_s:.0f} s",
        f"a pod was ready {min(colds, default=0):.0f} to {max(colds, default=0):.0f} s after it was bound to its node",
        *(f"{at_s:.1f} s: {wanted} wanted: {reason}" for at_s, wanted, reason in _changes(run)),
        f"the load, the platform and the control plane used {statistics.mean(own):.0%} of the cores in the mean, "
        f"{quantile(own, 0.95):.0%} in the second at p95, {max(own):.0%} at most; with all others on the machine "
        f"{statistics.mean(busy):.0%} and {quantile(busy, 0.95):.0%}; requests were sent late by "
        f"{quantile(late_s, 0.5) * 1e3:.1f} ms (p50) and {quantile(late_s, 0.99) * 1e3:.1f} ms (p99)",
    ]
    return "\n".join(lines)


def _changes(run: Run) -> list[tuple[float, int, str]]:
    """(moment, wanted, reason) of each change of the wanted number."""
    pairs = zip(run.seconds, run.seconds[1:], strict=False)
    return [(new.planned_s, new.wanted, new.reason) for old, new in pairs if new.wanted != old.wanted]


def faults_of(run: Run) -> list[str]:
    """Return what makes the run no measurement, or the platform not hold its word."""
    failed = [one for one in run.tries if one.told in ("failed", "")]
    faults = [f"request of {one.sent_s:.1f} s: {one.status} {one.said or 'no answer'}" for one in failed[:10]]
    blind = [one for one in run.tries if one.told == "refused" and one.retry_after_s < 1]
    faults += [f"the refusal at {one.told_s:.1f} s named no Retry-After" for one in blind[:10]]
    own, late_s = run.own(), run.facts["late_s"]
    assert isinstance(late_s, list)
    too_busy = sum(share > BUSY_MAX for share in own) / len(own)
    if too_busy > BUSY_SECONDS_MAX:
        faults.append(f"the run took nearly all of the machine in {too_busy:.0%} of the seconds")
    if (late_p99_s := quantile(late_s, 0.99)) > LATE_P99_S_MAX:
        faults.append(f"requests were sent {late_p99_s:.2f} s late at p99")
    return faults
