"""A pool's replicas as one look at them shows: by state, with their utilisation, profile and pending work. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence, Set
from typing import NamedTuple

import msgspec

from stream_fabric.pool.plan import ReplicaProfile
from stream_fabric.pool.records import DemandTotals, ReplicaInfo, TierQueue, service_weights
from stream_fabric.stream.ids import ReplicaId

_STEADY = 0.05
"""Relative change of a profile's figures up to which the old profile is kept."""


class Observation(NamedTuple):
    """Data that the leader has read of a pool at one look."""

    infos: Sequence[ReplicaInfo]
    queues: Sequence[TierQueue]
    """Queue of each tier, highest tier first."""
    arrived: DemandTotals
    held: bool = False
    """An operator forbids scaling down."""
    at_unix_s: float = 0.0
    marked: Set[ReplicaId] = frozenset()
    """Scale-down targets that the platform (Kubernetes) has been told of."""


class PendingWork(NamedTuple):
    """Work that a pool has accepted and not finished."""

    running: int
    """Streams at replicas."""
    waiting: int
    """Requests in the pool's queue."""
    queue_s: float
    """Replica-seconds of work in the queue."""
    backlog_s: float
    """Seconds until the ready replicas have begun everything that has no first token."""
    to_free_s: float
    """Seconds until the ready replicas have finished everything."""
    busy: float
    """Replicas whose slots are filled by running and waiting requests."""


def pending_work(
    infos: Sequence[ReplicaInfo], queues: Sequence[TierQueue], profile: ReplicaProfile | None
) -> PendingWork:
    """Sum up a pool's work.

    ``profile`` None: the speed of its replicas is unknown. Then one token per second is assumed, so that a backlog is
    never hidden.
    """
    ready = [info for info in infos if info.state == "ready"]
    running = sum(streams_of(info) for info in infos)
    waiting = sum(queue.depth for queue in queues)
    profile = profile or ReplicaProfile(max((info.load.slots for info in infos), default=1), 1.0, 1.0, 0.0, 0.0)
    queue_s = sum(
        queue.prompt_tokens / profile.prefill_per_s + queue.output_tokens / profile.decode_per_s for queue in queues
    )
    count = max(len(ready), 1)
    backlog_s = (queue_s + sum(info.prefill_ms for info in ready) / 1000) / count
    to_free_s = backlog_s + sum(info.decode_ms for info in ready) / 1000 / count
    return PendingWork(running, waiting, queue_s, backlog_s, to_free_s, (running + waiting) / max(profile.slots, 1))


class FleetView:
    """Replicas of one pool by state."""

    def __init__(self, infos: Sequence[ReplicaInfo]) -> None:
        self.by_name = {info.replica: info for info in infos}
        self.ready = [info for info in infos if info.state == "ready"]
        self.rested = [info for info in infos if info.state in ("warm", "sleeping")]
        self.coming = [info for info in infos if info.state in ("starting", "warming")]
        self.draining = [info for info in infos if info.state == "draining"]
        self.idle = [info.replica for info in self.rested if not streams_of(info)]
        """Replicas that take no requests and run none."""
        self.revisions = {info.revision for info in infos}

    @property
    def started(self) -> int:
        """Number of replicas that are ready, or were and rest."""
        return len(self.ready) + len(self.rested)

    @property
    def present(self) -> int:
        """Number of replicas without draining ones, which the platform does not count either."""
        return self.started + len(self.coming)

    @property
    def one_revision(self) -> bool:
        """False while a rollout is in progress."""
        return len(self.revisions) <= 1

    def is_idle(self, name: ReplicaId) -> bool:
        return name in self.idle

    def utilisation(self) -> float:
        """Mean share of the ready replicas' slots in use. A replica whose engine queues sequences counts as full."""
        if not self.ready:
            return 0.0
        return statistics.fmean(
            1.0 if info.load.waiting else min(info.load.running / max(info.load.slots, 1), 1.0) for info in self.ready
        )


def streams_of(info: ReplicaInfo) -> int:
    """Streams at the replica, running or waiting in its engine."""
    return info.load.running + info.load.waiting


def drain_cost(info: ReplicaInfo) -> tuple[int, int, ReplicaId]:
    """Sort key for the loss that draining a replica causes: streams, then cached prompt blocks, then the name."""
    return streams_of(info), info.prefix_blocks, info.replica


def profile_of(ready: Sequence[ReplicaInfo]) -> ReplicaProfile | None:
    """Mean profile of the ready replicas that serve; None without a ready one."""
    if not ready:
        return None
    weights = service_weights(ready)
    limits = [info.load.itl_objective_ms for info in ready]
    return ReplicaProfile(
        max(round(statistics.fmean(info.load.slots for info in ready)), 1),
        max(statistics.fmean((info.prefill_per_s for info in ready), weights), 1.0),
        max(statistics.fmean((info.decode_per_s for info in ready), weights), 1.0),
        statistics.fmean((info.output_tokens_mean for info in ready), weights),
        statistics.fmean((info.bytes_per_token for info in ready), weights),
        max(limits) if all(limits) else 0.0,
    )


def steady_profile(new: ReplicaProfile | None, old: ReplicaProfile | None) -> ReplicaProfile | None:
    """The old profile if the new one differs little from it, so that the plan is not written every second."""
    if new is None or old is None:
        return new or old
    pairs = zip(msgspec.structs.astuple(new), msgspec.structs.astuple(old), strict=True)
    return old if all(abs(value - before) <= _STEADY * before for value, before in pairs) else new
