"""``Pools`` and ``Inbox`` in memory, around ``PoolState``. ``test_memory_pools.py`` verifies them against Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from stream_fabric.limits import GONE_KEPT_S
from stream_fabric.pool.lease_changes import BlockChange, LeaseChanges
from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, OverloadTerms
from stream_fabric.pool.placement import Placed, PlacementRequest, Queued, Refused
from stream_fabric.pool.records import Arrival, Candidate, Inbound, LeaseReport, ReplicaInfo, Work
from stream_fabric.pool.state import PoolState
from stream_fabric.stream.ids import ReplicaId, StreamId


class Law(PoolState):
    """Remembers what it handed out, for the inboxes."""

    def __init__(self, queue_max: int) -> None:
        super().__init__(queue_max)
        self.handed: list[tuple[ReplicaId, StreamId]] = []

    def _hand(self, request: PlacementRequest, replica: ReplicaId, matched: int, now_ms: float) -> None:
        super()._hand(request, replica, matched, now_ms)
        self.handed.append((replica, request.stream))


class MemoryPool:
    """One pool. Methods do what those of ``RedisPools`` do in one script or command; time is an argument."""

    def __init__(self, queue_max: int) -> None:
        self.law = Law(queue_max)
        self.leases: dict[ReplicaId, float] = {}
        self.infos: dict[ReplicaId, ReplicaInfo] = {}
        self.works: dict[StreamId, Work] = {}
        self.inboxes: dict[ReplicaId, list[Arrival]] = {}
        self.desired: dict[ReplicaId, str] = {}
        self.prefixes: dict[ReplicaId, bytes] = {}
        self.claims: dict[ReplicaId, tuple[float, str]] = {}
        """Until when, and the nonce of the call that has it."""
        self.generations: dict[ReplicaId, tuple[int, int]] = {}
        """Generation of each replica, and the moment of its last change for routing in us."""
        self.gone: dict[ReplicaId, int] = {}
        self.blocks: list[tuple[int, ReplicaId, BlockChange]] = []
        self._entries = 0

    def report(
        self,
        info: ReplicaInfo,
        now_ms: float,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> LeaseReport:
        replica = info.replica
        expires_ms = now_ms + (ttl_s or 0.0) * 1000
        if ttl_s is not None:
            self.leases[replica] = expires_ms
            self.infos[replica] = info
            if self.generations.get(replica, (-1, 0))[0] != info.generation:
                self.generations[replica] = info.generation, int(now_ms * 1000)
                self.gone.pop(replica, None)
            running = running or {}
        seat = info.slot()._replace(expires_ms=expires_ms)
        listed = running if ttl_s is not None else None
        taken = self.law.report(replica, seat, info.models, ended, listed, now_ms, info.region)
        for stream in self.works.keys() - self.law.at.keys():
            del self.works[stream]
        self._deliver(now_ms)
        return LeaseReport(
            self.desired.get(replica, ""),
            len(taken),
            sum(map(len, self.law.queue.tiers)),
            yield_to=self.law.yield_to(now_ms, replica),
            lost=tuple(name for name in listed or () if self.law.at[name] == replica and name not in self.works),
        )

    def _deliver(self, now_ms: float) -> None:
        for replica, stream in self.law.handed:
            self._entries += 1
            entry_id = f"{int(now_ms)}-{self._entries}"  # as in Redis, after a failover no id comes a second time
            arrival = Arrival(entry_id, stream, self.works[stream], 0, int(now_ms) * 1000)
            self.inboxes.setdefault(replica, []).append(arrival)
        self.law.handed.clear()

    def replicas(self, now_ms: float) -> list[ReplicaInfo]:
        alive = sorted((expiry, replica) for replica, expiry in self.leases.items() if expiry >= now_ms)
        return [self.infos[replica] for _, replica in alive]

    def changes(self, since: int, blocks_after: str, now_ms: float) -> LeaseChanges:
        at = int(now_ms * 1000)
        whole = since == 0 or since < at - GONE_KEPT_S * 1_000_000
        names = [replica for replica in self.leases if whole or self.generations[replica][1] >= since]
        blocks: list[tuple[int, ReplicaId, BlockChange]] = []
        if blocks_after not in ("", "0"):
            blocks = [one for one in self.blocks if one[0] > int(blocks_after)]
        last = self.blocks[-1][0] if self.blocks else 0
        return LeaseChanges(
            at,
            whole,
            len(self.leases),
            len(self.law.at),
            [(replica, self.infos[replica]) for replica in names],
            [] if whole else [replica for replica, left in self.gone.items() if left >= since],
            self.expired(now_ms),
            str(last) if blocks_after else "",
            [(replica, change) for _, replica, change in blocks],
        )

    def put_block_change(self, replica: ReplicaId, change: BlockChange) -> None:
        self._entries += 1
        self.blocks.append((self._entries, replica, change))

    def expired(self, now_ms: float) -> list[ReplicaId]:
        return [replica for expiry, replica in sorted((e, r) for r, e in self.leases.items()) if expiry < now_ms]

    def place(
        self,
        work: Work,
        candidates: Sequence[Candidate],
        now_ms: float,
        wait_s: float,
        jitter: float,
        instead: ReplicaId | None = None,
        terms: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> Placed | Queued | Refused:
        ask = PlacementRequest(
            work.request.stream,
            work.tenant,
            work.rank,
            work.request.model,
            work.session,
            work.prompt_tokens,
            work.output_tokens,
            int(now_ms) + int(wait_s * 1000),
            jitter,
            tried=work.tried,
            regions=work.regions,
            share=work.share,
        )
        names, matched = [c.replica for c in candidates], [c.matched_tokens for c in candidates]
        held = self.law.at.get(ask.stream)
        known = ask.stream in self.law.at and (held is None or held != instead)
        before = self.works.get(ask.stream)
        self.works[ask.stream] = work
        placed = self.law.place(ask, names, matched, now_ms, instead, terms)
        if known or isinstance(placed, Refused):
            if before is not None:
                self.works[ask.stream] = before
            else:
                del self.works[ask.stream]
        self._deliver(now_ms)
        return placed

    def remove_queued(self, streams: Sequence[StreamId]) -> int:
        count = 0
        for stream in streams:
            if self.law.remove_queued(stream):
                self.works.pop(stream, None)
                count += 1
        return count

    def queue_positions(self, streams: Sequence[StreamId]) -> tuple[int, list[int]]:
        return sum(map(len, self.law.queue.tiers)), [self.law.queue.position(stream) for stream in streams]

    def waiting(self, now_ms: float, *, overdue: bool = False) -> list[StreamId]:
        late = sorted((w.request.wait_until_ms, stream) for tier in self.law.queue.tiers for stream, w in tier.items())
        return [stream for until_ms, stream in late if not overdue or until_ms <= int(now_ms)]

    def holder(self, stream: StreamId) -> ReplicaId | Literal["queue"] | None:
        return (self.law.at[stream] or "queue") if stream in self.law.at else None

    def work(self, stream: StreamId) -> Work | None:
        return self.works.get(stream)

    def restore(self, replica: ReplicaId, work: Work) -> None:
        if self.law.at.get(work.request.stream) == replica:
            self.works.setdefault(work.request.stream, work)

    def in_flight(self, replica: ReplicaId) -> list[StreamId]:
        return list(self.law.flights.get(replica, {}))

    def remove_in_flight(self, replica: ReplicaId, streams: Sequence[StreamId]) -> None:
        for stream in streams:
            self.law.flights.get(replica, {}).pop(stream, None)
            if self.law.at.get(stream, replica) == replica:
                self.law.at.pop(stream, None)
                self.works.pop(stream, None)

    def retire(self, replica: ReplicaId, now_ms: float, *, leaving: bool = False) -> bool:
        if not leaving and self.leases.get(replica, now_ms) > now_ms:
            return False
        if any(self.law.at.get(stream) == replica for stream in self.in_flight(replica)):
            return False
        self.law.retire(replica)
        self.gone[replica] = int(now_ms * 1000)
        for part in (self.leases, self.infos, self.inboxes, self.desired, self.prefixes, self.generations):
            part.pop(replica, None)
        return True

    def claim_recovery(self, replica: ReplicaId, now_ms: float, ttl_s: float, nonce: str) -> bool:
        ends_ms, held = self.claims.get(replica, (0.0, ""))
        if ends_ms > now_ms:
            return held == nonce
        self.claims[replica] = (now_ms + int(ttl_s * 1000), nonce)
        return True

    # --- a replica's inbox ---------------------------------------------------------------------------------

    def read(self, replica: ReplicaId) -> Inbound:
        called = replica in self.law.calls
        self.law.calls.discard(replica)
        return Inbound(list(self.inboxes.get(replica, ())), called)

    def done(self, replica: ReplicaId, entries: Sequence[tuple[str, StreamId]]) -> None:
        ids, streams = {entry_id for entry_id, _ in entries}, {stream for _, stream in entries}
        self.inboxes[replica] = [entry for entry in self.inboxes.get(replica, ()) if entry.entry not in ids]
        unread = self.law.inboxes.get(replica, [])
        self.law.inboxes[replica] = [stream for stream in unread if stream not in streams]
