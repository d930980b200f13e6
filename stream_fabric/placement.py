"""Which replica gets a request, and who waits: the law of a pool, sans I/O.

``PoolState`` is the law. ``redis/lua/place.lua`` and ``report.lua`` implement the same law inside Redis, float for
float; one contract suite runs on both, and the routing benchmark runs on this one.

Loads are milliseconds of work: a replica's pending prefill tokens by its prefill speed, its pending output tokens by
the speed of its whole batch. Gateways bring hints (which share of the prompt each candidate holds), agents the truth
(what they run); every report of an agent replaces what placement had added since the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from stream_fabric.ids import ReplicaId, StreamId, TenantId
from stream_fabric.limits import PIN_S
from stream_fabric.surge import MISS, NO_SURGE, UNDER_SHARE, Surge, drawn, is_refused, retry_after_s

BOUND: float = 1.25
"""No stickiness sends a request to a replica whose load is so many times the pool's mean, and its own cost and what the
replica's cache saves more."""
SPILL_AT: float = 0.85
"""Share of a replica's room above which cache hits go elsewhere, more of them the fuller it is."""
DECODE_WEIGHT: float = 0.3
"""What a millisecond of others' pending output counts beside one of waiting for the first token."""
REPEAT_WEIGHT: float = 3.0
"""What a millisecond of prefill that another candidate would save counts besides itself, for all who come behind it:
busy / (1 - busy) at three quarters busy. Divided by the copies there are: one more of what many hold is soon of use."""
TIERS = ("interactive", "standard", "batch")
RATE_WINDOW_MS = 10_000
SCAN_MAX = 64
"""How far an agent looks down a line for a request that it can serve."""
LOOK_AHEAD = 16
"""Of those that it can serve, how many it compares by what it holds of their prompts."""
LOCALITY = 16
"""What a token of a waiting prompt that the replica holds counts beside one of its tenant's share: so many times its
own cost a request goes ahead of its turn, for what it spares all who wait."""
PASSED_MAX = 16
"""How often the first in line is passed over for another before it must go."""

ReplicaState = Literal["starting", "warming", "warm", "ready", "draining", "sleeping"]
Reason = Literal["pin", "prefix", "load", "spill", "only"]


class Seat(NamedTuple):
    """A replica as placement sees it."""

    expires_ms: float
    """When its lease ends, on Redis's clock."""
    ready: bool
    slots: int
    """Sequences it runs at once."""
    room: int
    """Streams in flight before placement goes elsewhere."""
    in_flight: int
    prefill_ms: float
    decode_ms: float
    prefill_per_s: float
    """Prompt tokens it computes in a second."""
    decode_per_s: float
    """Output tokens its full batch makes in a second."""

    @property
    def load_ms(self) -> float:
        return self.prefill_ms + self.decode_ms


class Ask(NamedTuple):
    """What placement knows of a request."""

    stream: StreamId
    tenant: TenantId
    tier: int
    """Index into ``TIERS``: a lower one goes first."""
    model: str
    session: str
    """Names the session within the pool; empty: none."""
    prompt_tokens: int
    output_tokens: int
    """As many as it may make, or as many as requests here usually do."""
    wait_until_ms: float
    """When it gives up waiting in the queue, on Redis's clock."""
    jitter: float
    """Uniform in [0, 1): breaks ties, and decides who spills."""


class Scored(NamedTuple):
    """A candidate, and why it was or was not taken."""

    replica: ReplicaId
    score_ms: float
    """Expected time to the first token, and a little for crowding; the least wins. -1: could not be taken."""
    matched_tokens: int
    in_flight: int
    load_ms: float
    barred: Literal["", "dead", "full", "over"]
    """``over``: above the bound that holds whatever it has cached."""


class Choice(NamedTuple):
    taken: int
    """Index of the candidate; -1: nobody has room."""
    reason: Reason
    candidates: tuple[Scored, ...]


def choose(
    replicas: Sequence[ReplicaId],
    seats: Sequence[Seat | None],
    matched: Sequence[int],
    ask: Ask,
    pin: str,
    now_ms: float,
) -> Choice:
    """Score the candidates. ``matched``: tokens of the prompt that each is believed to hold. ``pin``: the replica that
    the session is bound to, or empty."""
    alive = [s for s in seats if s is not None and s.ready and s.expires_ms > now_ms]
    mean_ms = 0.0
    for s in alive:
        mean_ms += s.load_ms / len(alive)
    hits = [
        0 if s is None or not s.ready or s.expires_ms <= now_ms else min(tokens, ask.prompt_tokens)
        for s, tokens in zip(seats, matched, strict=True)
    ]
    most = max(hits, default=0)
    copies = sum(2 * hit >= most for hit in hits)  # those that hold at least half of what can be held
    weight = REPEAT_WEIGHT / copies if most > 0 else 0.0
    scored: list[Scored] = []
    best = pinned = only = -1
    best_ms = only_ms = 0.0
    count = len(replicas)
    start = int(ask.jitter * count)
    for index, (replica, seat) in enumerate(zip(replicas, seats, strict=True)):
        if seat is None or not seat.ready or seat.expires_ms <= now_ms:
            scored.append(Scored(replica, -1.0, 0, 0, 0.0, "dead"))
            continue
        hit = hits[index]
        if seat.in_flight >= seat.room:
            scored.append(Scored(replica, -1.0, hit, seat.in_flight, seat.load_ms, "full"))
            continue
        used = seat.in_flight / seat.room
        stays = used <= SPILL_AT or ask.jitter < (1 - used) / (1 - SPILL_AT)
        wait_ms = seat.prefill_ms
        if seat.in_flight >= seat.slots:
            wait_ms += seat.decode_ms * (seat.in_flight - seat.slots + 1) / seat.in_flight
        own_ms = ask.prompt_tokens / seat.prefill_per_s * 1000 + ask.output_tokens / seat.decode_per_s * 1000
        kept = hit if stays else 0
        score_ms = (
            wait_ms
            + (ask.prompt_tokens - kept) / seat.prefill_per_s * 1000
            + weight * (most - kept) / seat.prefill_per_s * 1000
            + seat.decode_ms * DECODE_WEIGHT
        )
        over = seat.load_ms > BOUND * mean_ms + own_ms + weight * kept / seat.prefill_per_s * 1000
        scored.append(Scored(replica, score_ms, hit, seat.in_flight, seat.load_ms, "over" if over else ""))
        # Of equals the first from the jitter's place on
        turn = (index - start) % count
        if only < 0 or (score_ms, turn) < (only_ms, (only - start) % count):
            only, only_ms = index, score_ms
        if over:
            continue
        if replica == pin and stays:
            pinned = index
        if best < 0 or (score_ms, turn) < (best_ms, (best - start) % count):
            best, best_ms = index, score_ms
    if pinned >= 0:
        return Choice(pinned, "pin", tuple(scored))
    if best < 0:
        return Choice(only, "only", tuple(scored))
    hit = scored[best].matched_tokens
    reason: Reason = "spill" if hit < most else "prefix" if hit > 0 else "load"
    return Choice(best, reason, tuple(scored))


class Placed(NamedTuple):
    replica: ReplicaId
    reason: Reason
    candidates: tuple[Scored, ...]


class Queued(NamedTuple):
    position: int
    """From 1."""
    candidates: tuple[Scored, ...]


class Refused(NamedTuple):
    """Nothing of the request is kept."""

    retry_after_s: int
    why: Literal["full", "shed", "elsewhere", "crowded"] = "full"
    """``full``: the queue holds as many as it may. ``shed``: too much is ahead of it for its tier. ``elsewhere``: so
    much that another pool may take it. ``crowded``: it is another pool's, and there is no room to spare."""
    backlog_s: float = 0.0
    """What is ahead of it; of a guest, the share of the slots in use."""


@dataclass
class Waiting:
    ask: Ask
    start: float
    """Where its tenant's share of the tier's virtual time puts it, in tokens."""
    held: dict[ReplicaId, int]
    """Tokens of its prompt that replicas held when it came."""
    pin: str
    """The replica its session was bound to, or empty."""
    passed: int = 0
    """How often another went before it although it was first."""

    def key(self, replica: ReplicaId) -> float:
        """Its place in line as this replica sees it: earlier for what it holds of the prompt, and later for what
        another holds more."""
        here = self.ask.prompt_tokens if replica == self.pin else self.held.get(replica, 0)
        most = self.ask.prompt_tokens if self.pin else max(self.held.values(), default=0)
        return self.start - LOCALITY * (2 * here - most)


@dataclass
class Flight:
    """A stream on its way or running at a replica, with what placement added for it."""

    prefill_ms: float
    decode_ms: float
    session: str


@dataclass
class PoolState:
    """One pool. Methods do what the scripts of the same names do."""

    queue_max: int
    seats: dict[ReplicaId, Seat] = field(default_factory=dict)
    models: dict[ReplicaId, tuple[str, ...]] = field(default_factory=dict)
    flights: dict[ReplicaId, dict[StreamId, Flight]] = field(default_factory=dict)
    inboxes: dict[ReplicaId, list[StreamId]] = field(default_factory=dict)
    at: dict[StreamId, ReplicaId | None] = field(default_factory=dict)
    """Where each stream of the pool is; None: in the queue."""
    pins: dict[str, tuple[ReplicaId, float]] = field(default_factory=dict)
    tiers: list[dict[StreamId, Waiting]] = field(default_factory=lambda: [{} for _ in TIERS])
    finish: list[dict[TenantId, float]] = field(default_factory=lambda: [{} for _ in TIERS])
    virtual: list[float] = field(default_factory=lambda: [0.0 for _ in TIERS])
    popped: int = 0
    popped_since_ms: float = 0.0
    rate_per_s: float = 0.0
    arrived: tuple[int, int, int] = (0, 0, 0)
    """Requests, prompt tokens that no replica held, and output tokens asked of the pool so far."""
    shed: list[int] = field(default_factory=lambda: [0 for _ in TIERS])
    """Requests refused for the backlog ahead of them so far, by tier."""
    sent: int = 0
    """Told to go to another pool."""
    back: int = 0
    """Of them, those that no other pool took."""

    # --- a gateway's call ----------------------------------------------------------------------------------

    def place(
        self,
        ask: Ask,
        replicas: Sequence[ReplicaId],
        matched: Sequence[int],
        now_ms: float,
        instead: ReplicaId | None = None,
        surge: Surge = NO_SURGE,
    ) -> Placed | Queued | Refused:
        """Hand the request to the best candidate with room, or let it wait, or refuse it. Asked again, it answers where
        the stream is. ``instead``: take it from this replica, which can run it no more; where it has to wait it is the
        first of its tier, for somebody is in the middle of reading it."""
        if ask.stream in self.at:
            held = self.at[ask.stream]
            if held is None:
                return Queued(self.position(ask.stream), ())
            if held != instead:
                return Placed(held, "only", ())
            del self.at[ask.stream]
            self.flights[held].pop(ask.stream, None)
        pin, until_ms = self.pins.get(ask.session, ("", 0.0))
        seats = [self.seats.get(r) for r in replicas]
        choice = choose(replicas, seats, matched, ask, pin if until_ms > now_ms else "", now_ms)
        if instead is None and surge.counts:
            hits = [c.matched_tokens for c in choice.candidates]
            hit = hits[choice.taken] if choice.taken >= 0 else max(hits, default=0)
            requests, prompt, output = self.arrived
            self.arrived = requests + 1, prompt + ask.prompt_tokens - hit, output + ask.output_tokens
        refused = self._surges(ask, seats, choice, pin if until_ms > now_ms else "", now_ms, surge)
        if refused is not None:
            return refused
        if choice.taken >= 0 and not any(self.tiers[: ask.tier + 1]):
            self._hand(ask, replicas[choice.taken], min(matched[choice.taken], ask.prompt_tokens), now_ms)
            return Placed(replicas[choice.taken], choice.reason, choice.candidates)
        if instead is None and sum(map(len, self.tiers)) >= self.queue_max:
            return Refused(self._retry_after_s())
        known = {r: min(tokens, ask.prompt_tokens) for r, tokens in zip(replicas, matched, strict=True) if tokens > 0}
        self._enqueue(ask, known, pin if until_ms > now_ms else "", first=instead is not None)
        if choice.taken >= 0:  # room has come up while others wait: whoever is first gets it
            self._pull(replicas[choice.taken], now_ms)
        replica = self.at[ask.stream]
        if replica is not None:
            return Placed(replica, choice.reason, choice.candidates)
        return Queued(self.position(ask.stream), choice.candidates)

    def _surges(
        self, ask: Ask, seats: Sequence[Seat | None], choice: Choice, pin: str, now_ms: float, surge: Surge
    ) -> Refused | None:
        """Whether the request is not for this pool to take now."""
        self.back += surge.again
        if not surge.shed_s and not surge.shift_s and not surge.guest_max:
            return None
        alive = [s for s in seats if s is not None and s.ready and s.expires_ms > now_ms]
        if surge.guest_max:
            return self._guest(alive, choice, surge)
        pinned = any(
            c.replica == pin and s is not None and s.ready and s.expires_ms > now_ms
            for c, s in zip(choice.candidates, seats, strict=True)
        )
        if not alive:  # whoever asks waits for one to start
            if not surge.shift_s:
                return None
            self.sent += 1
            return Refused(0, "elsewhere")
        prefill_ms = prefill_per_s = decode_per_s = 0.0
        for s in alive:
            prefill_ms += s.prefill_ms
            prefill_per_s += s.prefill_per_s
            decode_per_s += s.decode_per_s
        count = len(alive)
        replicas = count * max(surge.replicas / len(seats), 1)
        waiting = [w.ask for tier in self.tiers[: ask.tier + 1] for w in tier.values()]
        prompt, output = sum(a.prompt_tokens for a in waiting), sum(a.output_tokens for a in waiting)
        waits_s = prompt / (prefill_per_s / count) + output / (decode_per_s / count)
        backlog_s = prefill_ms / count / 1000 + waits_s / replicas
        hit = max((c.matched_tokens for c in choice.candidates), default=0)
        spared_s = hit / (prefill_per_s / count)
        shifts = bool(surge.shift_s) and backlog_s >= surge.shift_s and not pinned and spared_s < MISS * backlog_s
        if not shifts or (surge.shed_s and surge.shed_s < surge.shift_s):
            mark_s = surge.shed_s
            if surge.shed_s and backlog_s > mark_s and self._under_share(ask):
                mark_s *= UNDER_SHARE
            draw = drawn(ask.jitter)
            if mark_s and is_refused(backlog_s, mark_s, draw):
                self.shed[ask.tier] += 1
                return Refused(retry_after_s(backlog_s, mark_s, draw), "shed", backlog_s)
        if shifts:
            self.sent += 1
            return Refused(0, "elsewhere", backlog_s)
        return None

    def _guest(self, alive: Sequence[Seat], choice: Choice, surge: Surge) -> Refused | None:
        prefill_ms, slots, flight = 0.0, 0, 0
        for s in alive:
            prefill_ms += s.prefill_ms
            slots += s.slots
            flight += s.in_flight
        free = choice.taken >= 0 and not any(self.tiers) and flight + 1 <= surge.guest_max * slots
        if free and prefill_ms / len(alive) / 1000 < surge.shed_s:
            return None
        return Refused(0, "crowded", flight / slots if slots else 1.0)

    def _under_share(self, ask: Ask) -> bool:
        """Whether the request's tenant has less in its tier's line than the mean of those that were in it since it was
        last empty."""
        finish = self.finish[ask.tier]
        held = max(finish.get(ask.tenant, 0.0) - self.virtual[ask.tier], 0.0)
        tokens = sum(w.ask.prompt_tokens + w.ask.output_tokens for w in self.tiers[ask.tier].values())
        return held * len(finish) < tokens

    def _hand(self, ask: Ask, replica: ReplicaId, matched: int, now_ms: float) -> None:
        seat = self.seats[replica]
        prefill_ms = (ask.prompt_tokens - matched) / seat.prefill_per_s * 1000
        decode_ms = ask.output_tokens / seat.decode_per_s * 1000
        flight = self.flights.setdefault(replica, {})
        flight[ask.stream] = Flight(prefill_ms, decode_ms, ask.session)
        self.inboxes.setdefault(replica, []).append(ask.stream)
        self.at[ask.stream] = replica
        self.seats[replica] = seat._replace(
            in_flight=len(flight), prefill_ms=seat.prefill_ms + prefill_ms, decode_ms=seat.decode_ms + decode_ms
        )
        if ask.session:
            self.pins[ask.session] = (replica, now_ms + PIN_S * 1000)

    def _enqueue(self, ask: Ask, held: dict[ReplicaId, int], pin: str, *, first: bool) -> None:
        start, finish = 0.0, self.finish[ask.tier]
        if not first:
            start = max(self.virtual[ask.tier], finish.get(ask.tenant, 0.0))
            finish[ask.tenant] = start + ask.prompt_tokens + ask.output_tokens
        self.tiers[ask.tier][ask.stream] = Waiting(ask, start, held, pin)
        self.at[ask.stream] = None

    def _retry_after_s(self) -> int:
        waiting = sum(map(len, self.tiers))
        return 1 if self.rate_per_s <= 0 else max(1, min(60, -int(-(waiting + 1) // self.rate_per_s)))

    def position(self, stream: StreamId) -> int:
        """A waiting stream's place in the line, from 1; 0: it does not wait."""
        before = 0
        for tier in self.tiers:
            if stream in tier:
                mine = (tier[stream].start, stream)
                return before + 1 + sum((w.start, s) < mine for s, w in tier.items())
            before += len(tier)
        return 0

    # --- an agent's call -----------------------------------------------------------------------------------

    def report(
        self,
        replica: ReplicaId,
        seat: Seat,
        models: Sequence[str],
        ended: Sequence[StreamId],
        running: Mapping[StreamId, str] | None,
        now_ms: float,
    ) -> list[StreamId]:
        """What an agent says of itself: which streams have ended, and, when it renews its lease, all that it runs
        (stream → session). ``seat``: its own loads, without what it has not read from its inbox yet. Returns the
        streams that leave the queue for it."""
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
            for stream in flight:  # of what its list names no more nothing is left, also after a failover
                if stream not in running and stream not in unread and self.at.get(stream) == replica:
                    del self.at[stream]
            flight.clear()
            flight.update({stream: Flight(0.0, 0.0, session) for stream, session in running.items()})
            flight.update({stream: kept for stream, kept in unread.items() if stream not in running})
            for stream in running:
                self.at.setdefault(stream, replica)  # the pool may have been lost meanwhile
        held = self.seats.get(replica)
        if running is None:
            if held is None:  # the pool has been lost, and the next renewal makes it again
                return []
            seat = seat._replace(expires_ms=held.expires_ms)
        else:
            self.models[replica] = tuple(models)
        pending = [flight[stream] for stream in dict.fromkeys(inbox) if stream in flight]  # it may have come back
        self.seats[replica] = seat._replace(
            in_flight=len(flight),
            prefill_ms=seat.prefill_ms + sum(f.prefill_ms for f in pending),
            decode_ms=seat.decode_ms + sum(f.decode_ms for f in pending),
        )
        return self._pull(replica, now_ms)

    def _pull(self, replica: ReplicaId, now_ms: float) -> list[StreamId]:
        taken: list[StreamId] = []
        while self.seats[replica].ready and self.seats[replica].in_flight < self.seats[replica].room:
            found = self._next(replica, now_ms)
            if found is None:
                break
            tier, first, waiting = found
            self._forget(waiting.ask.stream, tier)
            # Who goes ahead of its turn must not take the line's time with it: who comes now starts behind the first
            self.virtual[tier] = max(self.virtual[tier], first.start) if self.tiers[tier] else 0.0
            self._count_popped(now_ms)
            self._hand(waiting.ask, replica, waiting.held.get(replica, 0), now_ms)
            taken.append(waiting.ask.stream)
        return taken

    def _next(self, replica: ReplicaId, now_ms: float) -> tuple[int, Waiting, Waiting] | None:
        """Who goes to a replica that has room: of the first in line, the one whose prompt it holds most of. Returns
        the tier, the first in line, and who goes."""
        models = self.models[replica]
        for number, tier in enumerate(self.tiers):
            line = sorted(tier.values(), key=lambda w: (w.start, w.ask.stream))[:SCAN_MAX]
            able = [w for w in line if w.ask.model in models and w.ask.wait_until_ms > now_ms][:LOOK_AHEAD]
            if able:
                first = able[0]
                taken = first if first.passed >= PASSED_MAX else min(able, key=lambda w: w.key(replica))
                if taken is not first:
                    first.passed += 1
                return number, first, taken
        return None

    def _count_popped(self, now_ms: float) -> None:
        self.popped += 1
        if now_ms - self.popped_since_ms >= RATE_WINDOW_MS:
            if self.popped_since_ms:
                self.rate_per_s = self.popped * 1000 / (now_ms - self.popped_since_ms)
            self.popped, self.popped_since_ms = 0, now_ms

    def _forget(self, stream: StreamId, tier: int) -> None:
        del self.tiers[tier][stream]
        del self.at[stream]
        if not self.tiers[tier]:
            self.finish[tier].clear()

    # --- upkeep --------------------------------------------------------------------------------------------

    def leave(self, stream: StreamId) -> bool:
        """Take a stream out of the queue: it was cancelled, or waited too long."""
        for number, tier in enumerate(self.tiers):
            if stream in tier:
                self._forget(stream, number)
                if not tier:
                    self.virtual[number] = 0.0
                return True
        return False

    def overdue(self, now_ms: float) -> list[StreamId]:
        return sorted(s for tier in self.tiers for s, w in tier.items() if w.ask.wait_until_ms <= now_ms)

    def retire(self, replica: ReplicaId) -> list[StreamId]:
        """Forget a replica; returns what it had in flight."""
        self.seats.pop(replica, None)
        self.models.pop(replica, None)
        self.inboxes.pop(replica, None)
        streams = sorted(self.flights.pop(replica, {}))
        for stream in streams:
            if self.at.get(stream) == replica:
                del self.at[stream]
        return streams
