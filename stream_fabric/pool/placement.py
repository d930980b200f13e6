"""Choice of a replica for one request: constants, records and scoring. Pure.

``pool.state.PoolState`` is the whole algorithm of a pool. The scripts ``place.lua`` and ``report.lua`` implement the
same algorithm inside Redis, with the constants of this module; one contract suite runs on both.

Loads are milliseconds of work: a replica's pending prefill tokens divided by its prefill speed, plus its pending output
tokens divided by the speed of its full batch. Gateways bring hints (how much of the prompt each candidate has cached);
agents report what they run. Every report of an agent replaces what placement had added since the report before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId

TIERS = ("interactive", "standard", "batch", "free")
"""Priority classes, the highest first."""
BATCH_TIER = TIERS.index("batch")
"""The first of the tiers whose work yields to the others: batch and free."""
FREE_TIER = TIERS.index("free")
"""The tier whose requests are no demand: a pool does not grow for them."""
DEFAULT_SHARE = 100
"""Weight of a tenant whose plan sets no other."""
PINNED_QUEUE_SHARE = 0.5
"""Part of a pool's queue that requests bound to regions may fill, so that a region without room blocks no others."""
BOUND: float = 1.25
"""Load bound. A cached prefix or a pin never sends a request to a replica whose load exceeds BOUND times the pool's
mean load, plus the request's own cost, plus the prefill that the replica's cache saves (all in ms)."""
SPILL_AT: float = 0.85
"""Share of a replica's room in use above which cache hits go elsewhere; the fuller it is, the more of them."""
DECODE_WEIGHT: float = 0.3
"""Weight of one millisecond of other requests' pending output against one millisecond of waiting for the first token.
"""
REPEAT_WEIGHT: float = 3.0
"""Weight of one millisecond of prefill that another candidate would save, for the requests queued behind this one:
busy / (1 - busy) at three quarters busy. It is divided by the number of cached copies: one more copy of a prefix that
many replicas hold saves little."""
KV_PENDING_WEIGHT: float = 0.5
"""Share of the pending output that counts against a replica's free KV cache. Streams end at different times, so all of
it is never held at once: with 1 a batch stays smaller than it could be, with 0 the engine preempts streams."""
RATE_WINDOW_MS = 10_000
"""Window over which the rate of requests leaving the queue is measured."""
SCAN_MAX = 64
"""Queued requests of a tier that a replica with room looks at, for requests that it can serve."""
LOOK_AHEAD = 16
"""Requests that the replica can serve that are compared by how much of their prompts it has cached."""
LOCALITY = 16
"""Weight of one cached prompt token against one token of tenant fair share, when a replica takes a queued request: a
cached request may overtake requests worth LOCALITY times its cached tokens."""
PASSED_MAX = 16
"""Number of times the first request of a queue may be overtaken; then it goes next."""

ReplicaState = Literal["starting", "warming", "warm", "ready", "draining", "sleeping"]
Reason = Literal["pin", "prefix", "load", "spill", "only"]
"""Why a replica was chosen: the session's pin, its cached prefix, the least load, load despite a better cache
elsewhere, or no other candidate below the load bound."""
Barred = Literal["", "dead", "full", "over", "kv"]
"""Why a candidate cannot take a request: ``over``: above the load bound; ``kv``: its KV cache has no room for it."""


class ReplicaSlot(NamedTuple):
    """A replica in its pool's load table."""

    expires_ms: float
    """End of its lease, on Redis's clock."""
    ready: bool
    slots: int
    """Sequences that its engine runs at once."""
    room: int
    """Streams in flight above which placement goes elsewhere."""
    in_flight: int
    prefill_ms: float
    decode_ms: float
    prefill_per_s: float
    """Prompt tokens that it computes per second."""
    decode_per_s: float
    """Output tokens per second of its full batch."""
    kv_free: float = -1.0
    """Tokens that its KV cache could take at its last report; below 0: unknown."""
    yieldable: int = 0
    """Batch streams among those in flight that it would put back into the queue, at its last report."""

    def has_kv_for(self, prompt: int, output: int) -> bool:
        """True if its KV cache takes so many more tokens beside all pending work, so that none is preempted for them.

        An idle replica takes any request.
        """
        return (
            self.kv_free < 0
            or self.in_flight == 0
            or prompt + output
            <= self.kv_free
            - self.prefill_ms * self.prefill_per_s / 1000
            - KV_PENDING_WEIGHT * self.decode_ms * self.decode_per_s / 1000
        )

    @property
    def wait_ms(self) -> float:
        """Time until the prompt of one more request is begun: prompts before it, and a slot that has to become free."""
        return self._wait_ms(self.in_flight)

    @property
    def wait_after_yield_ms(self) -> float:
        """The same once its batch streams have yielded."""
        return self._wait_ms(self.in_flight - self.yieldable)

    def _wait_ms(self, streams: int) -> float:
        wait_ms = self.prefill_ms
        if streams >= self.slots:
            wait_ms += self.decode_ms * (streams - self.slots + 1) / self.in_flight
        return wait_ms

    @property
    def load_ms(self) -> float:
        """Pending work of the replica, in milliseconds."""
        return self.prefill_ms + self.decode_ms

    def takes_requests(self, now_ms: float) -> bool:
        """True while the replica is ready and its lease has not expired."""
        return self.ready and self.expires_ms > now_ms


class PlacementRequest(NamedTuple):
    """The parts of a request that placement uses."""

    stream: StreamId
    tenant: TenantId
    tier: int
    """Index into ``TIERS``."""
    model: str
    session: str
    """Name of the session within the pool; empty: none."""
    prompt_tokens: int
    output_tokens: int
    """Expected output, within the request's limit."""
    wait_until_ms: float
    """End of its time in the queue, on Redis's clock."""
    jitter: float
    """Uniform in [0, 1). Breaks ties, and decides which cache hits a full replica gives up."""
    size: int = 0
    """Bytes of the encoded request, which the pool keeps until the stream ends."""
    tried: tuple[ReplicaId, ...] = ()
    """Replicas that produced the stream before; in the queue it waits for another one while one serves the model."""
    regions: tuple[str, ...] = ()
    """Regions that it is bound to, sorted; empty: any. Candidates are of these regions already."""
    share: int = DEFAULT_SHARE
    """Weight of its tenant in the queue."""


class Scored(NamedTuple):
    """A candidate with its score."""

    replica: ReplicaId
    score_ms: float
    """Expected time to first token, plus a penalty for crowding; the lowest wins. -1: it cannot take the request."""
    matched_tokens: int
    in_flight: int
    load_ms: float
    barred: Barred
    """Reason why it cannot take the request."""


class Choice(NamedTuple):
    """The candidate that ``choose`` took, and the scores of all candidates."""

    taken: int
    """Index of the candidate; -1: none has room."""
    reason: Reason
    candidates: tuple[Scored, ...]


class Placed(NamedTuple):
    """The request went to a replica's inbox."""

    replica: ReplicaId
    reason: Reason
    candidates: tuple[Scored, ...]
    expected_ms: float = 0.0
    """Expected time to first token, if the request was placed at once; 0: it was in the queue, or was placed before."""


class Queued(NamedTuple):
    """The request waits in the pool's queue."""

    position: int
    """Position from 1."""
    candidates: tuple[Scored, ...]


class Refused(NamedTuple):
    """The pool did not take the request."""

    retry_after_s: int
    why: Literal["full", "shed", "elsewhere", "crowded", "bytes", "tenant_bytes", "busy"] = "full"
    """``full``: the queue is full. ``shed``: the backlog is too long for the request's tier. ``elsewhere``: the backlog
    is so long that an adjacent pool may take the request. ``crowded``: the request overflows from another pool, and
    this pool has no room to spare. ``bytes``, ``tenant_bytes``: the pool's or the tenant's requests take as much
    memory as they may. ``busy``: the request would have to wait, and it is to be placed at once or not at all."""
    backlog_s: float = 0.0
    """Backlog ahead of the request, in seconds; for ``crowded``, the share of slots in use; for bytes, their number."""
    lacks_kv: bool = False
    """True if all live candidates lacked room in their KV cache, and nothing else."""


def lacks_kv(candidates: Sequence[Scored]) -> bool:
    """Return ``Refused.lacks_kv`` of a request with these candidates."""
    return {scored.barred for scored in candidates} - {"dead"} == {"kv"}


def choose(
    replicas: Sequence[ReplicaId],
    slots: Sequence[ReplicaSlot | None],
    matched: Sequence[int],
    request: PlacementRequest,
    pin: str,
    now_ms: float,
) -> Choice:
    """Score the candidate replicas and choose one for the request.

    ``slots``: the candidates' entries in the load table. ``matched``: prompt tokens that each probably has cached.
    ``pin``: the replica that the session is bound to, or empty.
    """
    live = [slot is not None and slot.takes_requests(now_ms) for slot in slots]
    alive = sum(live)
    mean_ms = 0.0
    for slot in slots:
        if slot is not None and slot.takes_requests(now_ms):
            mean_ms += slot.load_ms / alive
    hits = [min(tokens, request.prompt_tokens) if lives else 0 for lives, tokens in zip(live, matched, strict=True)]
    most = max(hits, default=0)
    copies = sum(2 * hit >= most for hit in hits)  # candidates that hold at least half of the largest hit
    weight = REPEAT_WEIGHT / copies if most > 0 else 0.0
    scored: list[Scored] = []
    best = pinned = only = -1
    count = len(replicas)
    start = int(request.jitter * count)

    def rank(index: int) -> tuple[float, int]:
        """Sort key of a candidate: its score; the request's jitter decides which of equal scores comes first."""
        return scored[index].score_ms, (index - start) % count

    for index, (replica, slot) in enumerate(zip(replicas, slots, strict=True)):
        if slot is None or not live[index]:
            scored.append(Scored(replica, -1.0, 0, 0, 0.0, "dead"))
            continue
        hit = hits[index]
        if slot.in_flight >= slot.room:
            scored.append(Scored(replica, -1.0, hit, slot.in_flight, slot.load_ms, "full"))
            continue
        if not slot.has_kv_for(request.prompt_tokens - hit, request.output_tokens):
            scored.append(Scored(replica, -1.0, hit, slot.in_flight, slot.load_ms, "kv"))
            continue
        used = slot.in_flight / slot.room
        stays = used <= SPILL_AT or request.jitter < (1 - used) / (1 - SPILL_AT)
        score_ms, over = _score(slot, request, hit if stays else 0, most, weight, mean_ms)
        scored.append(Scored(replica, score_ms, hit, slot.in_flight, slot.load_ms, "over" if over else ""))
        if only < 0 or rank(index) < rank(only):
            only = index
        if over:
            continue
        if replica == pin and stays:
            pinned = index
        if best < 0 or rank(index) < rank(best):
            best = index
    if pinned >= 0:
        return Choice(pinned, "pin", tuple(scored))
    if best < 0:
        return Choice(only, "only", tuple(scored))
    hit = scored[best].matched_tokens
    reason: Reason = "spill" if hit < most else "prefix" if hit > 0 else "load"
    return Choice(best, reason, tuple(scored))


def is_short(slots: Sequence[ReplicaSlot | None], wait_ms_max: float, now_ms: float) -> bool:
    """Return True if fewer than half of the ready replicas begin a request within ``wait_ms_max``."""
    waits_ms = [slot.wait_ms for slot in slots if slot is not None and slot.takes_requests(now_ms)]
    return 2 * sum(wait_ms <= wait_ms_max for wait_ms in waits_ms) < len(waits_ms)


def take_in_time(
    choice: Choice, slots: Sequence[ReplicaSlot | None], request: PlacementRequest, wait_ms_max: float
) -> Choice:
    """Choose the best of the candidates that begin the request within ``wait_ms_max``; without one, ``choice`` stays.

    A request goes where its prompt is cached even if it waits there. It is not rejected for that wait while another
    replica would begin it in time.
    """
    count = len(slots)
    start = int(request.jitter * count)
    best = -1
    for index, (scored, slot) in enumerate(zip(choice.candidates, slots, strict=True)):
        if slot is None or scored.barred in ("dead", "full", "kv") or slot.wait_ms > wait_ms_max:
            continue
        rank = scored.score_ms, (index - start) % count
        if best < 0 or rank < (choice.candidates[best].score_ms, (best - start) % count):
            best = index
    if best < 0:
        return choice
    most = max(scored.matched_tokens for scored in choice.candidates)
    hit = choice.candidates[best].matched_tokens
    return Choice(best, "spill" if hit < most else "prefix" if hit > 0 else "load", choice.candidates)


def _score(
    slot: ReplicaSlot, request: PlacementRequest, kept: int, most: int, weight: float, mean_ms: float
) -> tuple[float, bool]:
    """Return a candidate's score in ms, and True if its load is above the load bound.

    ``kept``: prompt tokens that the candidate's cache saves. ``most``: the largest such number of any candidate.
    ``weight``: see ``REPEAT_WEIGHT``. ``mean_ms``: the candidates' mean load.
    """
    own_ms = request.prompt_tokens / slot.prefill_per_s * 1000 + request.output_tokens / slot.decode_per_s * 1000
    score_ms = (
        slot.wait_ms
        + (request.prompt_tokens - kept) / slot.prefill_per_s * 1000
        + weight * (most - kept) / slot.prefill_per_s * 1000
        + slot.decode_ms * DECODE_WEIGHT
    )
    return score_ms, slot.load_ms > BOUND * mean_ms + own_ms + weight * kept / slot.prefill_per_s * 1000
