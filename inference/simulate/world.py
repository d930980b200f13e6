"""A fleet on virtual time: gateways with stale hints, the pool's placement, agents, and simulated replicas.

A run is deterministic: the gateway and the jitter of each request are drawn from the seed before the run, the same for
all policies.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

from inference.engines.sim.settings import SimSettings
from inference.simulate.agents import OUTPUT_LIMIT_TOKENS, Agent
from inference.simulate.engine import SETTINGS, Clock, Engine
from inference.simulate.traces import HINT_BLOCK_TOKENS, Request
from stream_fabric.limits import LEASE_RENEW_S, QUEUE_MAX, QUEUE_WAIT_S_MAX
from stream_fabric.pool.overload import BATCH_HOST_TERMS, NO_OVERLOAD_TERMS, OverloadTerms
from stream_fabric.pool.placement import BATCH_TIER, Placed, PlacementRequest, Queued, Refused, ReplicaSlot
from stream_fabric.pool.prefix import PrefixView
from stream_fabric.pool.replica_load import TypicalLength
from stream_fabric.pool.state import PoolState
from stream_fabric.stream.ids import ReplicaId, StreamId, TenantId

GATEWAYS = 4
HINTS_EVERY_S = 1.0
INBOX_S = 0.002
"""Time from placement to the engine."""
REPORT_SOON_S = 0.02
"""Time from the pool's call to the agent's report."""
MODEL = "model"


class PlacementView(NamedTuple):
    """A gateway's knowledge when it places a request."""

    request: Request
    gateway: int
    matched_tokens: Sequence[int]
    """Cached tokens of the prompt by replica, by its hints; all 0 for a policy without hints."""
    in_flight: Sequence[int]
    """Streams by replica, exact over all gateways."""
    agents: Sequence[Agent]
    """Agents of the replicas, with what they know at this moment; gateways have it later."""


class Policy(Protocol):
    """Chooses candidates for a request."""

    takes_hints: bool

    def candidates(self, view: PlacementView) -> Sequence[int]:
        """Return the indices of the replicas that the pool may choose from."""


class AllReplicas:
    """Every replica is a candidate, and ``stream_fabric.pool.placement`` chooses."""

    takes_hints = True

    def candidates(self, view: PlacementView) -> Sequence[int]:
        return range(len(view.in_flight))


Fate = Literal["arrived", "placed", "queued", "refused", "expired", "impossible", "lost", "done"]
"""The last five end a request. ``impossible``: it exceeds a replica's cache. ``lost``: its replica died, and no other
could continue it."""


@dataclass
class RequestLife:
    """One request through the simulation."""

    request: Request
    gateway: int
    jitter: float
    fate: Fate = "arrived"
    waited: bool = False
    replica: int = -1
    expected_s: float = 0.0
    """Time to first token that placement expected; 0: it was in the queue first."""
    first_s: float = -1.0
    end_s: float = -1.0
    cached_tokens: int = 0
    attempt: int = 1
    yields: int = 0
    """Number of times the stream was cut to give its slot to a higher tier."""
    left: Request = field(init=False)
    """Request to the replica; after a death or a yield it asks for the rest of the answer, with the part so far as
    prompt."""
    paused_s: float = 0.0
    """Time from the last death of its replica to the next token, for an answer that had begun."""
    died_s: float = -1.0
    hosted: bool = False
    """The batch host took it."""
    went_home: bool = False
    """The batch host lost it, and its home pool took it back."""

    def __post_init__(self) -> None:
        self.left = self.request

    @property
    def ttft_s(self) -> float:
        """Time to first token; infinite for a request that was not served."""
        return self.first_s - self.request.at_s if self.first_s >= 0 else float("inf")

    @property
    def mean_itl_s(self) -> float:
        steps = self.request.output_tokens - 1
        return (self.end_s - self.first_s) / steps if steps else 0.0


class Gateway:
    """One gateway with its own, possibly outdated, prefix hints."""

    def __init__(self) -> None:
        self.views: list[PrefixView] = []
        self.typical = TypicalLength()

    def refresh(self, agents: Sequence[Agent]) -> None:
        """Read the prefix summaries that have changed."""
        for index, agent in enumerate(agents):
            version, summary = agent.published
            if self.views[index].version != version:
                self.views[index].renew(summary, version)

    def matched_tokens(self, request: Request) -> list[int]:
        """Prompt tokens that each replica has cached, by the gateway's hints."""
        return [view.match(request.hint_hashes) * HINT_BLOCK_TOKENS for view in self.views]


@dataclass
class Run:
    """Outcome of a simulation."""

    lives: list[RequestLife]
    engines: list[Engine]
    pool: PoolState
    end_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


class World:
    """Simulates a fleet of fixed size that serves recorded requests."""

    NAMES = "r"
    """Beginning of its replicas' names."""

    def __init__(
        self,
        requests: Sequence[Request],
        replicas: int,
        policy: Policy,
        seed: int,
        settings: SimSettings = SETTINGS,
        *,
        coasts: bool = True,
        blind_queue: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """``coasts``: engines skip uneventful steps. ``blind_queue``: the queue ignores cached prompts. ``clock``: that
        of another fleet; None: its own."""
        rng = random.Random(f"world {seed}")
        self._lives = [RequestLife(request, rng.randrange(GATEWAYS), rng.random()) for request in requests]
        self._policy = policy
        self._settings = settings
        self._coasts = coasts
        self._clock = clock or Clock()
        self.batch_host: World | None = None
        """Pool that batch requests try before this one."""
        self._open = len(self._lives)
        self.pool = PoolState(QUEUE_MAX)
        self._names: list[ReplicaId] = []
        self._engines: list[Engine] = []
        self._blind_queue = blind_queue
        self.agents: list[Agent] = []
        self.gateways = [Gateway() for _ in range(GATEWAYS)]
        self._rung: list[bool] = []
        self._by_stream = {stream_of(life): life for life in self._lives}
        self.first_tokens: deque[RequestLife] = deque(maxlen=100_000)
        """Requests whose first token has come, until a scaler takes them out."""
        self.outcome = Run(self._lives, self._engines, self.pool)
        for _ in range(replicas):
            self.add_replica()

    def add_replica(self) -> int:
        """Add a replica and return its index. It joins its pool with its first report."""
        index = len(self.agents)
        name = ReplicaId(f"{self.NAMES}{index:02}")
        engine = Engine(self._settings, partial(self._schedule_wake, index), coasts=self._coasts)
        self._names.append(name)
        self._engines.append(engine)
        self.agents.append(Agent(name, engine))
        self._rung.append(False)
        for gateway in self.gateways:
            gateway.views.append(PrefixView())
        return index

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def run(self) -> Run:
        for life in self._lives:
            self._clock.schedule(life.request.at_s, partial(self._arrive, life))
        self.start()
        if self.batch_host is not None:
            self.batch_host.start()
        self._clock.schedule(1.0, self._expire_queued)
        while self._open:
            self._clock.advance()
        self.outcome.end_s = self.now_s
        return self.outcome

    def start(self) -> None:
        """Begin the reports of the replicas, and the gateways' reads of them."""
        for index in range(len(self.agents)):
            self._report(index, [], renews=True)
            self._clock.schedule(LEASE_RENEW_S * (index + 1) / len(self.agents), partial(self._renew, index))
        for index in range(GATEWAYS):
            self._clock.schedule(HINTS_EVERY_S * (index + 0.5) / GATEWAYS, partial(self._refresh, index))

    # --- gateways ------------------------------------------------------------------------------------------

    def _arrive(self, life: RequestLife) -> None:
        """Place a request that has arrived at its gateway. A batch request tries the batch host first."""
        if life.request.tier == BATCH_TIER and self.batch_host is not None and self.batch_host.take(life):
            return
        match self._place(life, self._wait_s()):
            case Queued():
                life.fate, life.waited = "queued", True
                if self._blind_queue:
                    waiting = self.pool.queue.tiers[life.request.tier][stream_of(life)]
                    waiting.cached, waiting.pin = {}, ""
            case Refused():
                self._close_request(life, "refused")
        self._ring_doorbells()

    def take(self, life: RequestLife) -> bool:
        """Begin a batch request of another pool at once, as a batch host does. False: no slot is free."""
        life.hosted = isinstance(self._place(life, 0.0, BATCH_HOST_TERMS), Placed)
        self._ring_doorbells()
        return life.hosted

    def _place(self, life: RequestLife, wait_s: float, terms: OverloadTerms | None = None) -> Placed | Queued | Refused:
        """Place a request by what its gateway knows. ``terms``: None: those of the pool itself."""
        request, gateway = life.request, self.gateways[life.gateway]
        hints = self._policy.takes_hints
        matched = gateway.matched_tokens(request) if hints else [0] * len(self._names)
        in_flight = [slot.in_flight if (slot := self.pool.replicas.get(name)) else 0 for name in self._names]
        chosen = [
            i
            for i in self._policy.candidates(PlacementView(request, life.gateway, matched, in_flight, self.agents))
            if self._takes_requests(i)
        ]
        ask = self._placement_request(life, wait_s)
        names, hits = [self._names[i] for i in chosen], [matched[i] for i in chosen]
        if terms is None:
            terms = self._overload_terms(ask.tier, len(names))
        answer = self.pool.place(ask, names, hits, self.now_s * 1000, terms=terms)
        if isinstance(answer, Placed):
            life.expected_s = answer.expected_ms / 1000
            self.outcome.reasons[answer.reason] = self.outcome.reasons.get(answer.reason, 0) + 1
            if hints:
                gateway.views[self._names.index(answer.replica)].sent(request.hint_hashes)
            life.fate = "placed"
        return answer

    def _placement_request(self, life: RequestLife, wait_s: float) -> PlacementRequest:
        request = life.request
        return PlacementRequest(
            stream_of(life),
            TenantId(request.tenant),
            tier=request.tier,
            model=MODEL,
            session=request.session,
            prompt_tokens=request.prompt_tokens,
            output_tokens=round(min(self.gateways[life.gateway].typical.tokens, OUTPUT_LIMIT_TOKENS)),
            wait_until_ms=(self.now_s + wait_s) * 1000,
            jitter=life.jitter,
        )

    def _overload_terms(self, tier: int, candidates: int) -> OverloadTerms:
        """Overload terms that a gateway sends with a request."""
        return NO_OVERLOAD_TERMS

    def _wait_s(self) -> float:
        """Longest wait of a new request in the queue."""
        return QUEUE_WAIT_S_MAX

    def _takes_requests(self, index: int) -> bool:
        """Whether gateways believe that the replica takes requests."""
        return True

    def _refresh(self, index: int) -> None:
        self.gateways[index].refresh(self.agents)
        self._clock.schedule(self.now_s + HINTS_EVERY_S, partial(self._refresh, index))

    def _expire_queued(self) -> None:
        for stream in self.pool.queue.overdue(self.now_s * 1000):
            self.pool.remove_queued(stream)
            self._close_request(self._by_stream[stream], "expired")
        self._clock.schedule(self.now_s + 1.0, self._expire_queued)

    def _close_request(self, life: RequestLife, fate: Fate) -> None:
        """End a request with this fate."""
        life.fate, life.end_s = fate, self.now_s
        self._open -= 1

    # --- agents --------------------------------------------------------------------------------------------

    def _ring_doorbells(self) -> None:
        """Let every agent with requests in its inbox read them soon, and those that the pool calls report."""
        for index, name in enumerate(self._names):
            if name in self.pool.calls:
                self._clock.schedule(self.now_s + INBOX_S + REPORT_SOON_S, partial(self._report, index, []))
            if self.pool.inboxes.get(name) and not self._rung[index]:
                self._rung[index] = True
                self._clock.schedule(self.now_s + INBOX_S, partial(self._read_inbox, index))
        self.pool.calls.clear()

    def _read_inbox(self, index: int) -> None:
        """Give the requests in a replica's inbox to its engine."""
        self._rung[index] = False
        inbox = self.pool.inboxes[self._names[index]]
        streams = list(inbox)
        inbox.clear()
        impossible: list[StreamId] = []
        for stream in streams:
            life = self._by_stream[stream]
            life.fate, life.replica = "placed", index
            if not self.agents[index].take(stream, life.left, self.now_s):
                impossible.append(stream)
                self._close_request(life, "impossible")
        if impossible:
            self._report(index, impossible)

    def _renew(self, index: int) -> None:
        self.agents[index].renew()
        self._report(index, [], renews=True)
        self._clock.schedule(self.now_s + LEASE_RENEW_S, partial(self._renew, index))

    def _report(self, index: int, ended: Sequence[StreamId], *, renews: bool = False) -> None:
        """Send the report of one replica to its pool. ``renews``: with all running streams, as at a renewal."""
        agent = self.agents[index]
        running = {stream: request.session for stream, request in agent.running.items()} if renews else None
        self.pool.report(agent.name, self._slot(index), (MODEL,), ended, running, self.now_s * 1000)
        self._ring_doorbells()

    def _slot(self, index: int) -> ReplicaSlot:
        return self.agents[index].slot(self.now_s)

    # --- replicas ------------------------------------------------------------------------------------------

    def _schedule_wake(self, index: int, at_s: float) -> None:
        self._clock.schedule(at_s, partial(self._wake, index))

    def _wake(self, index: int) -> None:
        """End the engine's step, and record first tokens and ended requests."""
        step = self._engines[index].wake(self.now_s)
        if step is None:
            return
        agent = self.agents[index]
        came: list[tuple[StreamId, int]] = []
        for number, cached in step.first:
            life = self._lives[number]
            if life.first_s < 0:
                life.first_s, life.cached_tokens = self.now_s, cached
                self.first_tokens.append(life)
            elif life.died_s >= 0:
                life.paused_s = self.now_s - life.died_s
            came.append((stream_of(life), cached))
        agent.receive_first_tokens(came, self.now_s)
        ended: list[StreamId] = []
        for number in step.finished:
            life = self._lives[number]
            agent.receive_end(stream_of(life), self.now_s)
            self.gateways[life.gateway].typical.receive_end(life.request.output_tokens)
            self._close_request(life, "done")
            ended.append(stream_of(life))
        if ended:
            self._report(index, ended)


def stream_of(life: RequestLife) -> StreamId:
    return StreamId(f"{life.request.number:08}")
