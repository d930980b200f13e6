"""State of one pool: placement of requests, the queue and the replicas' reports, sans I/O.

``PoolState`` defines what a pool does. ``redis/lua/place.lua`` and ``report.lua`` do the same inside Redis, float for
float; one contract suite runs on both, and the simulations run on this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stream_fabric.limits import PIN_S, REQUEST_BYTES_MAX, TENANT_REQUEST_BYTES_MAX
from stream_fabric.pool.demand import Demand
from stream_fabric.pool.overload import (
    BATCH_AHEAD_MS,
    MISS,
    NO_OVERLOAD_TERMS,
    UNDER_SHARE,
    YIELD_MS,
    OverloadTerms,
    PrefillDuty,
    duty_retry_after_s,
    is_rejected,
    rejection_draw,
    retry_after_s,
)
from stream_fabric.pool.placement import (
    BATCH_TIER,
    TIERS,
    Choice,
    Placed,
    PlacementRequest,
    Queued,
    Refused,
    ReplicaSlot,
    choose,
    is_short,
    lacks_kv,
    take_in_time,
)
from stream_fabric.pool.queue import PoolQueue, admits
from stream_fabric.pool.refusals import (
    called_to_yield,
    check_bytes,
    check_overflow_in,
    goes_first_in,
    is_late,
    least_wait_ms,
    own_prefill_ms,
    requests_ahead,
)
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId


@dataclass
class Flight:
    """A stream on its way to a replica or running there, with the load that placement added for it."""

    prefill_ms: float
    decode_ms: float
    session: str

    @property
    def is_reported(self) -> bool:
        """Whether a report of the replica came after the stream was read there."""
        return not (self.prefill_ms or self.decode_ms)


@dataclass
class PoolState:
    """One pool. Its methods do what the scripts of the same names do."""

    queue_max: int
    bytes_max: int = REQUEST_BYTES_MAX
    tenant_bytes_max: int = TENANT_REQUEST_BYTES_MAX
    replicas: dict[ReplicaId, ReplicaSlot] = field(default_factory=dict)
    """The load table."""
    models: dict[ReplicaId, tuple[str, ...]] = field(default_factory=dict)
    regions: dict[ReplicaId, str] = field(default_factory=dict)
    flights: dict[ReplicaId, dict[StreamId, Flight]] = field(default_factory=dict)
    inboxes: dict[ReplicaId, list[StreamId]] = field(default_factory=dict)
    at: dict[StreamId, ReplicaId | None] = field(default_factory=dict)
    """The replica that has each stream of the pool; None: the stream is queued."""
    pins: dict[str, tuple[ReplicaId, float]] = field(default_factory=dict)
    """By session: the replica, and until when the session is bound to it."""
    queue: PoolQueue = field(default_factory=PoolQueue)
    sizes: dict[StreamId, tuple[TenantId, int]] = field(default_factory=dict)
    """Tenant and bytes of the requests in ``at``; of others the entry means nothing."""
    demand: Demand = field(default_factory=Demand)
    rejected: list[int] = field(default_factory=lambda: [0 for _ in TIERS])
    """Total of requests rejected for the backlog ahead of them, by tier."""
    overflowed: int = 0
    """Total of requests told to go to an adjacent pool."""
    returned: int = 0
    """Total of these that no adjacent pool took."""
    duty: PrefillDuty = field(default_factory=PrefillDuty)
    yields_until_ms: float = 0.0
    """Until then batch work yields."""
    yielded_to: int = 0
    """Total of requests that batch work yielded to."""
    calls: set[ReplicaId] = field(default_factory=set)
    """Replicas that are to report now, because their batch streams have to yield. Their agents take them out."""

    # --- gateways ------------------------------------------------------------------------------------------

    def place(
        self,
        request: PlacementRequest,
        replicas: Sequence[ReplicaId],
        matched: Sequence[int],
        now_ms: float,
        instead: ReplicaId | None = None,
        terms: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> Placed | Queued | Refused:
        """Hand the request to the best candidate with room, or queue it, or refuse it.

        A repeated call returns where the stream is. ``instead``: the replica that loses the stream to this placement;
        the stream then queues before all others of its tier, because somebody is in the middle of reading it.
        """
        if request.stream in self.at:
            holder = self.at[request.stream]
            if holder is None:
                return Queued(self.queue.position(request.stream), ())
            if holder != instead:
                return Placed(holder, "only", ())
        bound_to, until_ms = self.pins.get(request.session, ("", 0.0))
        pin = bound_to if until_ms > now_ms else ""
        slots = [self.replicas.get(replica) for replica in replicas]
        choice = choose(replicas, slots, matched, request, pin, now_ms)
        if request.tier >= BATCH_TIER and self.yields(now_ms):
            choice = choice._replace(taken=-1)
        goes_first = goes_first_in(request, choice, self.queue, self.regions)
        if goes_first and is_late(request, slots, choice, terms) and not is_short(slots, terms.reject_s * 1000, now_ms):
            choice = take_in_time(choice, slots, request, terms.reject_s * 1000)
            goes_first = goes_first_in(request, choice, self.queue, self.regions)
        if instead is None and terms.counts_as_demand:
            self.demand.count(request, choice, now_ms, retried=terms.retried)
        refused = self._check_overload(request, slots, choice, pin, now_ms, terms)
        if refused is None and terms.at_once and (choice.taken < 0 or not goes_first):
            refused = Refused(0, "busy")
        if refused is None and instead is None:
            self.sizes = {stream: kept for stream, kept in self.sizes.items() if stream in self.at}
            refused = check_bytes(request, self.sizes, self.bytes_max, self.tenant_bytes_max)
        if refused is not None:
            if refused.why == "shed":
                self.demand.refused_at_ms = now_ms
            return refused._replace(lacks_kv=lacks_kv(choice.candidates))
        if instead is not None and self.at.get(request.stream) == instead:  # a refused one stays on its replica's list
            del self.at[request.stream]
            self.flights[instead].pop(request.stream, None)
        if terms.duty_max:
            self.duty.admit(own_prefill_ms(request, slots, choice, now_ms), now_ms)
        if request.size:
            self.sizes[request.stream] = request.tenant, request.size
        if choice.taken >= 0 and goes_first:
            replica, hit = replicas[choice.taken], min(matched[choice.taken], request.prompt_tokens)
            slot = self.replicas[replica]
            expected_ms = slot.wait_ms + (request.prompt_tokens - hit) / slot.prefill_per_s * 1000
            self._hand(request, replica, hit, now_ms)
            return Placed(replica, choice.reason, choice.candidates, expected_ms)
        if instead is None and self.queue.is_full(request, self.queue_max):
            self.demand.refused_at_ms = now_ms
            return Refused(self.queue.retry_after_s(), lacks_kv=lacks_kv(choice.candidates))
        hits = {replica: min(tokens, request.prompt_tokens) for replica, tokens in zip(replicas, matched, strict=True)}
        cached = {replica: tokens for replica, tokens in hits.items() if tokens > 0}
        self.queue.push(request, cached, pin, first=instead is not None)
        self.at[request.stream] = None
        if choice.taken >= 0:  # room has come up while others wait: the first in the queue gets it
            self._pull(replicas[choice.taken], now_ms)
        if (pulled_by := self.at[request.stream]) is not None:
            return Placed(pulled_by, choice.reason, choice.candidates)
        return Queued(self.queue.position(request.stream), choice.candidates)

    def _check_overload(
        self,
        request: PlacementRequest,
        slots: Sequence[ReplicaSlot | None],
        choice: Choice,
        pin: str,
        now_ms: float,
        terms: OverloadTerms,
    ) -> Refused | None:
        """Refuse the request if the backlog ahead of it is too long; None: the backlog is short enough."""
        self.returned += terms.again
        if not terms.reject_s and not terms.overflow_s and not terms.overflow_in_max and not terms.duty_max:
            return None
        alive = [slot for slot in slots if slot is not None and slot.takes_requests(now_ms)]
        if terms.overflow_in_max:
            return check_overflow_in(alive, choice, len(self.queue), self.duty, now_ms, terms)
        pinned = any(
            candidate.replica == pin and slot is not None and slot.takes_requests(now_ms)
            for candidate, slot in zip(choice.candidates, slots, strict=True)
        )
        if not alive:  # without adjacent pools the request waits until a replica starts
            if not terms.overflow_s:
                return None
            self.overflowed += 1
            return Refused(0, "elsewhere")
        prefill_ms = prefill_per_s = decode_per_s = 0.0
        for slot in alive:
            prefill_ms += slot.prefill_ms
            prefill_per_s += slot.prefill_per_s
            decode_per_s += slot.decode_per_s
        count = len(alive)
        replicas = count * max(terms.replicas / len(slots), 1)
        ahead = list(requests_ahead(request, choice, self.queue, self.regions))
        prompt, output = sum(r.prompt_tokens for r in ahead), sum(r.output_tokens for r in ahead)
        waits_s = prompt / (prefill_per_s / count) + output / (decode_per_s / count)
        queue_s = waits_s / (replicas + terms.relief)
        may_yield = terms.batch_yields and request.tier < BATCH_TIER
        late_s = max(prefill_ms / count, least_wait_ms(alive)) / 1000 + queue_s
        backlog_s = max(prefill_ms / count, least_wait_ms(alive, after_yield=may_yield)) / 1000 + queue_s
        spared_s = max((scored.matched_tokens for scored in choice.candidates), default=0) / (prefill_per_s / count)
        duty = self.duty.share(now_ms, replicas) if terms.duty_max else 0.0
        is_over = duty > terms.duty_max
        held_s = max(backlog_s, terms.overflow_s) if is_over else backlog_s
        taken = slots[choice.taken] if choice.taken >= 0 and not ahead else None
        wait_s = backlog_s
        if taken is not None:
            short = is_short(slots, terms.reject_s * 1000, now_ms)
            late_s = taken.wait_ms / 1000 if short else 0.0
            wait_s = least_wait_ms([taken], after_yield=may_yield and short) / 1000
        if terms.make_batch_yield(request.tier, late_s, is_over=is_over):
            self.yields_until_ms = now_ms + YIELD_MS
            self.yielded_to += 1
            called = called_to_yield(slots, choice, taken, now_ms)
            self.calls.update([called] if called is not None else [])
        overflows = 0 < terms.overflow_s <= held_s and not pinned and spared_s < MISS * held_s
        if not overflows or (terms.reject_s and terms.reject_s < terms.overflow_s):
            under_share = wait_s > terms.reject_s and self.queue.is_under_share(request)
            mark_s = terms.reject_s * (UNDER_SHARE if under_share else 1)
            draw = rejection_draw(request.jitter)
            if mark_s and is_rejected(wait_s, mark_s, draw):
                self.rejected[request.tier] += 1
                return Refused(retry_after_s(wait_s, mark_s, draw), "shed", wait_s)
        if is_over and not overflows:
            self.rejected[request.tier] += 1
            return Refused(duty_retry_after_s(duty, terms.duty_max, rejection_draw(request.jitter)), "shed", backlog_s)
        if overflows:
            self.overflowed += 1
            return Refused(0, "elsewhere", backlog_s)
        return None

    def _hand(self, request: PlacementRequest, replica: ReplicaId, matched: int, now_ms: float) -> None:
        """Put the request into the replica's inbox, and add its load to the replica's."""
        slot = self.replicas[replica]
        prefill_ms = (request.prompt_tokens - matched) / slot.prefill_per_s * 1000
        decode_ms = request.output_tokens / slot.decode_per_s * 1000
        flight = self.flights.setdefault(replica, {})
        flight[request.stream] = Flight(prefill_ms, decode_ms, request.session)
        self.inboxes.setdefault(replica, []).append(request.stream)
        self.at[request.stream] = replica
        self.replicas[replica] = slot._replace(
            in_flight=len(flight), prefill_ms=slot.prefill_ms + prefill_ms, decode_ms=slot.decode_ms + decode_ms
        )
        if request.session:
            self.pins[request.session] = (replica, now_ms + PIN_S * 1000)

    # --- agents --------------------------------------------------------------------------------------------

    def report(
        self,
        replica: ReplicaId,
        slot: ReplicaSlot,
        models: Sequence[str],
        ended: Sequence[StreamId],
        running: Mapping[StreamId, str] | None,
        now_ms: float,
        region: str = "",
    ) -> list[StreamId]:
        """Apply an agent's report; return the streams that moved from the queue to its replica.

        ``slot``: the replica's load, without requests that it has not read from its inbox yet. ``running``: all
        streams that it runs (stream → session) when it renews its lease, otherwise None.
        """
        flight = self.flights.setdefault(replica, {})
        inbox = self.inboxes.setdefault(replica, [])
        for stream in ended:
            gone = flight.pop(stream, None)
            if self.at.get(stream) == replica:
                del self.at[stream]
            if gone is not None and gone.session and self.pins.get(gone.session, ("", 0))[0] == replica:
                self.pins[gone.session] = (replica, now_ms + PIN_S * 1000)
        if running is not None:
            unread = {stream: flight[stream] for stream in inbox if stream in flight}
            left = {stream: each for stream, each in flight.items() if stream not in running and stream not in unread}
            # The list may have been made before the replica read its inbox: it has to lack a stream twice
            began = {stream: each.session for stream, each in left.items() if not each.is_reported}
            for stream in left.keys() - began.keys():  # forgotten, also after a failover of Redis
                if self.at.get(stream) == replica:
                    del self.at[stream]
            flight.clear()
            flight.update({stream: Flight(0.0, 0.0, session) for stream, session in (began | dict(running)).items()})
            flight.update({stream: kept for stream, kept in unread.items() if stream not in running})
            for stream in running:
                self.at.setdefault(stream, replica)  # the pool may have been lost meanwhile
        known = self.replicas.get(replica)
        if running is None:
            if known is None:  # the pool has been lost; the next renewal restores it
                return []
            slot = slot._replace(expires_ms=known.expires_ms)
        else:
            self.models[replica], self.regions[replica] = tuple(models), region
        pending = [flight[stream] for stream in dict.fromkeys(inbox) if stream in flight]  # each stream once
        self.replicas[replica] = slot._replace(
            in_flight=len(flight),
            prefill_ms=slot.prefill_ms + sum(f.prefill_ms for f in pending),
            decode_ms=slot.decode_ms + sum(f.decode_ms for f in pending),
        )
        return self._pull(replica, now_ms)

    def _pull(self, replica: ReplicaId, now_ms: float) -> list[StreamId]:
        """Hand queued requests to the replica while it has room; return their streams."""
        taken: list[StreamId] = []
        yields, region = self.yields(now_ms), self.regions.get(replica, "")
        while (slot := self.replicas[replica]).ready and slot.in_flight < slot.room:
            tiers = BATCH_TIER if yields or slot.prefill_ms > BATCH_AHEAD_MS else len(TIERS)
            found = self.queue.next_for(
                slot, replica, region, lambda asked: self._may_take(replica, asked, now_ms), tiers
            )
            if found is None:
                break
            request = self.queue.pop(found, now_ms)
            self._hand(request, replica, found.taken.cached.get(replica, 0), now_ms)
            taken.append(request.stream)
        return taken

    def _may_take(self, replica: ReplicaId, request: PlacementRequest, now_ms: float) -> bool:
        if request.model not in self.models[replica] or request.wait_until_ms <= now_ms:
            return False
        return replica not in request.tried or not any(
            slot.takes_requests(now_ms)
            and request.model in self.models.get(other, ())
            and admits(request.regions, self.regions.get(other, ""))
            for other, slot in self.replicas.items()
            if other not in request.tried
        )

    def yields(self, now_ms: float) -> bool:
        return 0 < self.yields_until_ms - now_ms <= YIELD_MS  # more: the clock has gone back

    def yield_to(self, now_ms: float, replica: ReplicaId | None = None) -> int | None:
        """Return the queued requests of higher tiers that the replica's batch work yields to; None: it does not."""
        region = "" if replica is None else self.regions.get(replica, "")
        return self.queue.waiting_for(region, BATCH_TIER) if self.yields(now_ms) else None

    # --- recovery ------------------------------------------------------------------------------------------

    def remove_queued(self, stream: StreamId) -> bool:
        """Take a stream out of the queue. False: it was not queued."""
        if not self.queue.remove(stream):
            return False
        del self.at[stream]
        return True

    def retire(self, replica: ReplicaId) -> list[StreamId]:
        """Forget a replica; return the streams that it had in flight."""
        self.replicas.pop(replica, None)
        self.models.pop(replica, None)
        self.regions.pop(replica, None)
        self.inboxes.pop(replica, None)
        streams = sorted(self.flights.pop(replica, {}))
        for stream in streams:
            if self.at.get(stream) == replica:
                del self.at[stream]
        return streams
