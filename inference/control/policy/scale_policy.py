"""The declared scaling policy of a pool, as its section of the pools file says it. Pure."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping

import msgspec

from inference.control.policy.schedule import ScheduledEvent
from stream_fabric.pool.overload import SPAN, OverloadMarks
from stream_fabric.pool.placement import TIERS
from stream_fabric.pool.plan import ReplicaProfile

MARK_SHARES = {"interactive": 1.0, "standard": 0.8, "batch": 0.25, "free": 0.15}
"""Marks of the tiers as shares of the highest that keeps the objective."""
DUTY_SHARES = {"interactive": 1.0, "standard": 0.95, "batch": 0.85, "free": 0.75}
"""Part of the prefill share up to which each tier is admitted: in a surge the lower one gives way first."""
PREFILL_SHARE_MIN = 0.1


class ScalePolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scaling settings of one pool. Shares are from 0 to 1, times in seconds. ``docs/scaling.md`` explains them."""

    models: tuple[str, ...] = ()
    """Models that the pool accepts requests for, also while it has no replica."""
    replicas_min: int = 1
    replicas_max: int = 100
    """Upper limit for all replicas, warm ones included."""
    warm_min: int = 0
    warm_share: float = 0.05
    """Warm replicas as a share of ready ones (rounded)."""
    jump_share: float = 0.99
    """Share of the time for which warm replicas cover the increase in arrivals within a cold start: the risk.
    1: the largest increase of the last week."""
    warm_max_share: float = 0.25
    """Upper limit for warm replicas, as a share of ready ones, when they are kept for jumps of arrivals."""
    ttft_objective_s: float = 1.0
    ttft_over: float = 1.2
    """Factor above the objective from which the pool grows."""
    ttft_over_s: float = 60.0
    ttft_step: float = 0.10
    slo_share: float = 0.99
    """Share of first tokens promised within the objective. Used for the burn rate; it changes no decision."""
    backlog_s_max: float = 0.5
    backlog_over_s: float = 5.0
    backlog_step: float = 0.05
    utilisation_max: float = 0.85
    utilisation_over_s: float = 180.0
    utilisation_step: float = 0.05
    utilisation_aimed: float = 0.8
    """Planned utilisation of a replica in a pool so large that random variation averages out."""
    spare_sigmas: float = 2.0
    """Extra capacity for random variation, in standard deviations; at most as much again as the work."""
    utilisation_low: float = 0.4
    low_s: float = 900.0
    peak_share: float = 0.99
    """Share of the time for which the replicas that stay for usual peaks are enough; 0: none stay for them."""
    zero_s: float = 900.0
    """Time without a request after which the last replica leaves, if ``replicas_min`` is 0."""
    cold_start_s: float = 300.0
    """Time from asking for a replica until it takes requests. Arrivals are forecast this far ahead."""
    growth_max: float = 1.5
    """Upper limit of the forecast, as a multiple of the current arrival rate."""
    sleep_level: int = 0
    """Sleep level of idle warm replicas; 0: they stay awake."""
    sleep_after_s: float = 300.0
    awake_min: int = 1
    """Warm replicas that stay awake, ready to be promoted at once."""
    itl_objective_s: float = 0.0
    """Mean time between the tokens of an answer that is promised; 0: none is."""
    shed_free_s: float | None = None
    """Backlog from which requests of the tier are rejected, in seconds; 0: never. None: from the objective, and at most
    ``shed_batch_s``."""
    shed_batch_s: float | None = None
    shed_standard_s: float | None = None
    shed_interactive_s: float | None = None
    shift_backlog_s: float | None = None
    """Backlog from which requests overflow to an adjacent pool, if a cache miss costs them little. None: a quarter of
    the objective."""
    adjacent: tuple[str, ...] = ()
    """Pools that serve the same models and may take overflow, in order."""
    shift_utilisation_max: float = 0.6
    """Highest share of an adjacent pool's slots in use at which it takes overflow."""
    batch_yields: bool = True
    """Batch work yields to requests of higher tiers that would wait longer than their mark."""
    batch_pools: tuple[str, ...] = ()
    """Batch hosts: pools with the same base model on interruptible or off-peak capacity. Batch requests try them first,
    in this order."""
    schedule: tuple[ScheduledEvent, ...] = ()
    """Declared events. Their replicas are ready when an event begins, and stay until it ends."""

    def __post_init__(self) -> None:
        for rule, holds in (
            ("replicas_min must be 0 or more", self.replicas_min >= 0),
            (
                "replicas_max must be at least 1 and at least replicas_min",
                self.replicas_max >= max(self.replicas_min, 1),
            ),
            ("warm_min must be from 0 to replicas_max", 0 <= self.warm_min <= self.replicas_max),
            ("warm_share must be from 0 to 1", 0 <= self.warm_share <= 1),
            ("warm_max_share must be from 0 to 1", 0 <= self.warm_max_share <= 1),
            ("jump_share must be more than 0 and at most 1", 0 < self.jump_share <= 1),
            ("peak_share must be from 0 to 1", 0 <= self.peak_share <= 1),
            ("ttft_objective_s must be more than 0", self.ttft_objective_s > 0),
            ("ttft_over must be at least 1", self.ttft_over >= 1),
            ("slo_share must be more than 0 and less than 1", 0 < self.slo_share < 1),
            ("growth_max must be from 1 to 10", 1 <= self.growth_max <= 10),
            ("sleep_level must be 0, 1 or 2", self.sleep_level in (0, 1, 2)),
            ("awake_min must be 0 or more", self.awake_min >= 0),
            (
                "these must hold: 0 < utilisation_low < utilisation_aimed <= utilisation_max <= 1",
                0 < self.utilisation_low < self.utilisation_aimed <= self.utilisation_max <= 1,
            ),
            ("spare_sigmas must be 0 or more", self.spare_sigmas >= 0),
            ("steps must be from 0 to 1", all(0 <= step <= 1 for step in self._step_shares)),
            ("times must be 0 or more", all(time_s >= 0 for time_s in self._times)),
            # A plan holds these as JSON, which has no infinity: nobody could read it, and the pool would have no plan
            (
                "objectives, marks, shift_backlog_s and cold_start_s must be finite",
                math.isfinite(
                    sum((self.ttft_objective_s, self.itl_objective_s, self.overflow_s, self.cold_start_s))
                    + sum(self._marks_by_tier().values())
                ),
            ),
            (
                "marks other than 0 must rise: shed_free_s <= shed_batch_s <= shed_standard_s <= shed_interactive_s",
                sorted(self._reject_marks) == self._reject_marks,
            ),
            (
                "with adjacent pools shift_backlog_s must be more than 0 and at least the lowest shed_*_s above 0, "
                "shed_free_s aside",
                not self.adjacent or self.overflow_s >= max(self._lowest_paid_mark_s, 1e-9),
            ),
            (
                f"shed_standard_s and shed_interactive_s must be at most half of ttft_objective_s, which is "
                f"{self.ttft_objective_s:g}: at twice its mark all of a tier's requests are rejected, and those behind "
                "a longer backlog miss the objective; leave them out to have them follow it",
                max(self.shed_standard_s or 0, self.shed_interactive_s or 0) <= self.ttft_objective_s / SPAN,
            ),
            (
                f"replicas of a schedule must be at most replicas_max, which is {self.replicas_max}",
                all(event.replicas <= self.replicas_max for event in self.schedule),
            ),
            ("shift_utilisation_max must be more than 0 and at most 1", 0 < self.shift_utilisation_max <= 1),
        ):
            if not holds:
                raise ValueError(rule)

    @property
    def _step_shares(self) -> tuple[float, ...]:
        return self.ttft_step, self.backlog_step, self.utilisation_step

    @property
    def _times(self) -> tuple[float, ...]:
        """All settings in seconds that must not be negative."""
        return (
            self.ttft_over_s, self.backlog_s_max, self.backlog_over_s, self.utilisation_over_s, self.low_s, self.zero_s,
            self.cold_start_s, self.sleep_after_s,
            self.itl_objective_s, self.overflow_s, *self._marks_by_tier().values(),
        )  # fmt: skip

    @property
    def _reject_marks(self) -> list[float]:
        """Marks other than 0, from free to interactive."""
        return [mark_s for mark_s in self._marks_by_tier().values() if mark_s]

    @property
    def _lowest_paid_mark_s(self) -> float:
        """Lowest mark other than 0 of the tiers above free; 0: they have none."""
        return min((mark_s for tier, mark_s in self._marks_by_tier().items() if mark_s and tier != "free"), default=0.0)

    def _marks_by_tier(self) -> dict[str, float]:
        """Backlogs from which a tier's requests begin to be rejected.

        Twice the mark rejects all, so a backlog that half the objective begins is never longer than the objective.
        """
        declared = {
            "free": self.shed_free_s,
            "batch": self.shed_batch_s,
            "standard": self.shed_standard_s,
            "interactive": self.shed_interactive_s,
        }
        highest_s = self.ttft_objective_s / SPAN
        marks = {tier: MARK_SHARES[tier] * highest_s if own is None else own for tier, own in declared.items()}
        if self.shed_free_s is None and marks["batch"]:
            marks["free"] = min(marks["free"], marks["batch"])
        return marks

    @property
    def overflow_s(self) -> float:
        """Backlog from which requests overflow: before a tier that people wait for is rejected."""
        return self.ttft_objective_s / SPAN / 2 if self.shift_backlog_s is None else self.shift_backlog_s

    def prefill_share(self, profile: ReplicaProfile | None) -> float:
        """Largest share of a full replica's time for prompts that keeps the objective between tokens.

        The other streams get no token meanwhile: d seconds a step become d / (1 - share). 1: nothing is promised, no
        replica's speed is known, or the engines keep the objective themselves in each step.
        """
        if not self.itl_objective_s or profile is None or self._is_kept_by_engines(profile):
            return 1.0
        step_s = profile.slots / profile.decode_per_s
        return max(1 - step_s / self.itl_objective_s, PREFILL_SHARE_MIN)

    def _is_kept_by_engines(self, profile: ReplicaProfile) -> bool:
        return 0 < profile.itl_objective_ms <= self.itl_objective_s * 1000

    def marks(self, profile: ReplicaProfile | None) -> OverloadMarks:
        """Limits above which requests are rejected or overflow, as gateways read them from the plan."""
        by_tier = self._marks_by_tier()
        share = self.prefill_share(profile)
        return OverloadMarks(
            tuple(by_tier[tier] for tier in TIERS),
            self.overflow_s,
            self.adjacent,
            self.shift_utilisation_max,
            tuple(share * DUTY_SHARES[tier] for tier in TIERS) if share < 1 else (),
            self.batch_yields,
            self.batch_pools,
        )

    def warm_count(self, ready: int, filled: float = 0.0, jump: float = 0.0) -> int:
        """Number of warm replicas to keep beside ``ready`` ready ones.

        ``filled``: planned utilisation of the ready ones. ``jump``: replicas of work by which arrivals may rise within
        a cold start. Warm replicas cover the part of a jump that the ready ones have no room for.
        """
        if not ready:
            return self.warm_min
        beyond = math.ceil((ready * filled + jump) / self.utilisation_max - ready - 1e-9)
        warm = max(self.warm_min, round(self.warm_share * ready), min(beyond, round(self.warm_max_share * ready)))
        return min(warm, self.replicas_max - ready)


class _PoolsFile(msgspec.Struct, forbid_unknown_fields=True):
    pool: dict[str, dict[str, object]]
    defaults: dict[str, object] = {}


def parse_policies(content: bytes, source: str) -> dict[str, ScalePolicy]:
    """Read policies by pool from the TOML of a pools file. Raises ValueError that names ``source`` and the mistake."""
    where = source
    try:
        parsed = msgspec.convert(tomllib.loads(content.decode("utf-8")), _PoolsFile)
        policies = {}
        for name, own in parsed.pool.items():
            where = f"{source}: pool {name!r}"
            policies[name] = policy = msgspec.convert({**parsed.defaults, **own}, ScalePolicy)
            if name in policy.adjacent:
                raise ValueError(f"{where}: adjacent names the pool itself")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{where}: {error}") from error
    for name in policies:
        if fault := _batch_pools_fault(name, policies):
            raise ValueError(f"{source}: pool {name!r}: batch_pools {fault}")
    return policies


def _batch_pools_fault(name: str, policies: Mapping[str, ScalePolicy]) -> str:
    """Return what is wrong with a pool's ``batch_pools``; empty: nothing is."""
    policy = policies[name]
    for host in policy.batch_pools:
        if host == name:
            return "names the pool itself"
        if host not in policies:
            return f"names {host!r}, which is not declared; add a table [pool.{host}]"
        if policies[host].batch_pools:
            return f"names {host!r}, which has batch_pools itself; a request goes to one batch host at most"
        if any(host in other.adjacent for other in policies.values()):
            return f"names {host!r}, which is adjacent to a pool; requests of higher tiers would go there"
        models = policies[host].models
        if models and policy.models and not set(models) & set(policy.models):
            return f"names {host!r}, which serves other models: {', '.join(models)}"
    return ""
