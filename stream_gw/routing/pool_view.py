"""One gateway's copy of a pool: its replicas, and what they have cached. Sans I/O."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stream_fabric.limits import CANDIDATES_MAX, PREFIX_BLOCK_BYTES
from stream_fabric.pool.cells import CellLoad
from stream_fabric.pool.lease_changes import BlockChange, LeaseChanges, decode_summary
from stream_fabric.pool.overload import PROMOTION_S, relief
from stream_fabric.pool.prefix import PrefixView, unpack_blocks
from stream_fabric.pool.prefix_index import PrefixIndex
from stream_fabric.pool.queue import Lane, admits
from stream_fabric.pool.records import Candidate, ReplicaInfo, service_weights
from stream_fabric.stream.ids import ReplicaId

_CACHED_MAX = CANDIDATES_MAX // 2
"""Candidates of a large pool that are chosen for their cached prefix."""
_WINDOW = 2 * CANDIDATES_MAX


class Estimates(NamedTuple):
    """Expected size of a pool's requests and responses."""

    bytes_per_token: float
    output_tokens: float


DEFAULT_ESTIMATES = Estimates(4.0, 256.0)


def largest_context(contexts: Sequence[int]) -> int:
    """Return the largest maximum context; 0: one is unknown (0), or there is none."""
    return max(contexts) if contexts and all(contexts) else 0


class PoolView:
    """Replicas of a pool as they were at the last read, kept up to date by ``LeaseChanges``."""

    def __init__(self) -> None:
        self.at = 0
        """Moment of the last read; 0: the next read is of all replicas."""
        self.blocks_at = ""
        """Position in the block changes; empty: prefixes are not followed."""
        self.replicas: Sequence[ReplicaInfo] = ()
        """Live replicas."""
        self._by_model: Mapping[str, Sequence[ReplicaInfo]] = {}
        self._by_lane: dict[tuple[str, Lane], Sequence[ReplicaInfo]] = {}
        """Replies of ``serving`` for regions since the replicas changed."""
        self.ready: Counter[str] = Counter()
        """Number of ready replicas by model."""
        self.contexts: Mapping[str, int] = {}
        """By model: the largest maximum context of its ready replicas, in tokens; 0: one of them does not tell its own.
        """
        self.slots = self.running = 0
        """Sequences that the ready replicas run at once, and those that they run or have waiting."""
        self.estimates = DEFAULT_ESTIMATES
        self.streams = 0
        """Streams in flight and queued: at the last read, with those that this gateway has begun and ended since."""
        self.has_older_agents = False
        """True if a replica's agent is older and numbers no changes: they show only in reads of all replicas."""
        self._reliefs: dict[tuple[float, tuple[ReplicaId, ...], Lane], float] = {}
        """Replies of ``relief`` since the replicas changed."""
        self._known: dict[ReplicaId, ReplicaInfo | None] = {}
        self._live: dict[ReplicaId, ReplicaInfo] = {}
        self._expired: frozenset[ReplicaId] = frozenset()
        self._prefixes: dict[ReplicaId, PrefixView] = {}
        self._index = PrefixIndex()
        """The same for pools of more than ``CANDIDATES_MAX`` replicas: where to look."""

    def apply(self, changes: LeaseChanges) -> bool:
        """Take the reply to a read. False: replicas are missing or left over, so all must be read."""
        if changes.whole:
            self._known = dict(changes.changed)
        else:
            for replica in changes.gone:
                self._known.pop(replica, None)
            self._known.update(changes.changed)
        self.streams = changes.streams
        expired = frozenset(changes.expired)
        if changes.whole or changes.changed or changes.gone or expired != self._expired:
            self._expired = expired
            self._renew_lists()
        matches = len(self._known) == changes.leases
        self.at = changes.at if matches else 0
        return matches

    def _renew_lists(self) -> None:
        infos = [info for replica, info in self._known.items() if info is not None and replica not in self._expired]
        self.replicas = sorted(infos, key=lambda info: info.replica)
        self._live = {info.replica: info for info in infos}
        by_model: dict[str, list[ReplicaInfo]] = {}
        for info in self.replicas:
            for model in info.models:
                by_model.setdefault(model, []).append(info)
        self._by_model = by_model
        self._by_lane.clear()
        self._reliefs.clear()
        self.has_older_agents = any(not info.generation for info in infos)
        ready = [info for info in infos if info.state == "ready"]
        self.ready = Counter(model for info in ready for model in info.models)
        told: dict[str, list[int]] = {}
        for info in ready:
            for model in info.models:
                told.setdefault(model, []).append(info.load.max_model_len)
        self.contexts = {model: largest_context(tokens) for model, tokens in told.items()}
        self.running = sum(info.load.running + info.load.waiting for info in ready)
        self.slots = sum(max(info.load.slots, 1) for info in ready)
        if infos:
            weights = service_weights(infos)
            self.estimates = Estimates(
                statistics.fmean((info.bytes_per_token for info in infos), weights),
                statistics.fmean((info.output_tokens_mean for info in infos), weights),
            )

    @property
    def models(self) -> Iterable[str]:
        """Models that a live replica serves."""
        return self._by_model.keys()

    def serving(self, model: str, regions: Lane) -> Sequence[ReplicaInfo]:
        """Return the live replicas that serve the model in these regions; in any if there are none."""
        infos = self._by_model.get(model, ())
        if not regions:
            return infos
        found = self._by_lane.get((model, regions))
        if found is None:
            found = self._by_lane[model, regions] = [info for info in infos if info.region in regions]
        return found

    def ready_count(self, model: str, regions: Lane) -> int:
        """Return the number of ready replicas that serve the model in these regions."""
        if not regions:
            return self.ready[model]
        return sum(info.state == "ready" for info in self.serving(model, regions))

    def context(self, model: str, regions: Lane) -> int | None:
        """Return the largest maximum context of the ready replicas of the model; 0: unknown; None: there are none."""
        if not regions:
            return self.contexts.get(model)
        told = [info.load.max_model_len for info in self.serving(model, regions) if info.state == "ready"]
        return largest_context(told) if told else None

    def relief(self, horizon_s: float, victims: tuple[ReplicaId, ...], regions: Lane = ()) -> float:
        """Return the standby replicas that come up within ``horizon_s`` (see ``overload.relief``); 0: no horizon.

        ``victims``: the replicas that are to leave. Replicas that start are not counted: their time is known to tens of
        seconds, and the horizon is shorter.
        """
        known = self._reliefs.get((horizon_s, victims, regions))
        if known is None:
            leaving = set(victims)
            standby = [info for info in self.replicas if info.replica not in leaving and admits(regions, info.region)]
            up_in_s = [PROMOTION_S for info in standby if info.state == "warm"]
            up_in_s += [PROMOTION_S + info.wake_s for info in standby if info.state == "sleeping" and info.wake_s]
            known = self._reliefs[horizon_s, victims, regions] = relief(up_in_s, horizon_s)
        return known

    @property
    def is_full(self) -> bool:
        return self.streams >= self.slots

    def cell_load(self, name: str, hashes: Sequence[int]) -> CellLoad:
        """Return what decides whether a request with this prompt comes to this cell."""
        return CellLoad(name, self.streams, self.slots, self._index.depth(hashes))

    def candidates(self, model: str, hashes: Sequence[int], turn: int, regions: Lane = ()) -> list[Candidate]:
        """Return the replicas of the model in these regions, each with its estimated cached prefix of the prompt.

        Of a large pool only some: those with the longest prefix, then little loaded ones. ``turn`` grows from call to
        call.
        """
        infos = self.serving(model, regions)
        if len(infos) > CANDIDATES_MAX:
            holders = self._index.find(hashes, _CACHED_MAX, turn)
            if regions:
                holders = [name for name in holders if name in self._live and self._live[name].region in regions]
            infos = self._preselect(infos, holders, turn)
        found: list[Candidate] = []
        for info in infos:
            prefix = self._prefixes.get(info.replica) if hashes else None
            blocks = prefix.match(hashes) if prefix is not None else 0
            found.append(Candidate(info.replica, int(blocks * PREFIX_BLOCK_BYTES / info.bytes_per_token)))
        return found

    def _preselect(
        self, infos: Sequence[ReplicaInfo], holders: Sequence[ReplicaId], turn: int
    ) -> Sequence[ReplicaInfo]:
        """Choose candidates of a large pool: ``holders``, which have a prefix cached, and others with little load.

        Their loads are a second old. So the others come from a window that moves with each request: otherwise all
        gateways would send to the same few replicas until the next refresh.
        """
        cached = [self._live[replica] for replica in holders if replica in self._live]
        start = turn % len(infos)
        window = [*infos[start : start + _WINDOW], *infos[: max(start + _WINDOW - len(infos), 0)]]
        others = [info for info in window if info.state == "ready" and info.replica not in holders]
        others.sort(key=lambda info: info.prefill_ms + info.decode_ms)
        return [*cached, *others][:CANDIDATES_MAX]

    # --- cached prefixes -----------------------------------------------------------------------------------

    def forget_prefixes(self) -> None:
        self.blocks_at = ""
        self._prefixes.clear()
        self._index = PrefixIndex()

    def outdated(self, blocks: Sequence[tuple[ReplicaId, BlockChange]]) -> list[ReplicaInfo]:
        """Return the replicas whose summary must be read before ``blocks`` are applied."""
        for replica in self._prefixes.keys() - self._live.keys():
            self._index.drop(replica, self._prefixes.pop(replica).held)
        published = {replica: change for replica, change in blocks if change.has_summary}
        return [info for info in self.replicas if self._is_outdated(info, published.get(info.replica))]

    def _is_outdated(self, info: ReplicaInfo, published: BlockChange | None) -> bool:
        """``published``: the change that came with a new summary."""
        known = self._prefixes.get(info.replica)
        if known is None:
            return True
        if not info.generation:
            return known.version != info.prefix_version
        if published is None:
            return False
        if known.complete:
            return published.version > known.version != published.since
        return published.version >= known.version

    def renew_prefix(self, info: ReplicaInfo, summary: bytes) -> None:
        """Take a summary that was read."""
        version, blocks = decode_summary(summary) if info.generation else (info.prefix_version, summary)
        view = self._prefixes.setdefault(info.replica, PrefixView())
        old = view.held
        view.renew(blocks, version)
        self._index.remove(info.replica, old - view.held)
        self._index.add(info.replica, view.held - old)

    def apply_change(self, replica: ReplicaId, change: BlockChange) -> None:
        """Apply a change of what a replica has cached; one that is not newer than what is known changes nothing."""
        view = self._prefixes.get(replica)
        if view is None or change.version <= view.version:
            return
        view.apply(change)
        self._index.remove(replica, unpack_blocks(change.removed))
        self._index.add(replica, unpack_blocks(change.added))

    def end_turn(self) -> None:
        """Take note that all changes that agents published until now have been applied."""
        self._index.end_turn()

    def ended(self) -> None:
        """Take note that a stream has ended that this gateway had placed."""
        self.streams = max(self.streams - 1, 0)

    def sent(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        """Record that a request with this prompt went to the replica, which will have cached its prefix."""
        self.streams += 1
        prefix = self._prefixes.get(replica)
        if prefix is not None and hashes:
            prefix.sent(hashes)
            self._index.sent(replica, hashes)


def has_capacity(cells: Iterable[PoolView], model: str, utilisation_max: float, regions: Lane = ()) -> bool:
    """Return whether those of a pool's cells that serve the model use less than this share of their slots.

    With ``regions``: whether the ready replicas there do.
    """
    if regions:
        ready = [info for view in cells for info in view.serving(model, regions) if info.state == "ready"]
        running = sum(info.load.running + info.load.waiting for info in ready)
        return running < utilisation_max * sum(max(info.load.slots, 1) for info in ready)
    views = [view for view in cells if view.ready[model]]
    return sum(view.running for view in views) < utilisation_max * sum(view.slots for view in views)
