"""A fleet on virtual time: gateways with stale hints, the law of the pool, agents, and simulated replicas.

Nothing here is random: who arrives at which gateway, and every jitter, is drawn from the seed before the run, the same
for all policies.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

from inference.agent.engines.sim.settings import SimSettings
from inference.agent.meter import UsualLength
from inference.simulate.agents import OUTPUT_LIMIT_TOKENS, ROOM_RATIO, Agent
from inference.simulate.engine import SETTINGS, Engine
from inference.simulate.traces import HINT_BLOCK_TOKENS, Request
from stream_fabric.ids import ReplicaId, StreamId, TenantId
from stream_fabric.limits import LEASE_RENEW_S, QUEUE_MAX, QUEUE_WAIT_S_MAX
from stream_fabric.placement import Ask, Placed, PoolState, Queued, Refused, Seat
from stream_fabric.prefix import PrefixView
from stream_fabric.surge import NO_SURGE, Surge

GATEWAYS = 4
HINTS_EVERY_S = 1.0
INBOX_S = 0.002
"""From placement to the engine."""
MODEL = "model"


class Asked(NamedTuple):
    """What a gateway knows when it asks."""

    request: Request
    gateway: int
    matched_tokens: Sequence[int]
    """Of the prompt, by replica, as its hints say; all 0 for a policy that takes no hints."""
    in_flight: Sequence[int]
    """Streams by replica, exact over all gateways."""


class Policy(Protocol):
    takes_hints: bool

    def candidates(self, asked: Asked) -> Sequence[int]:
        """The replicas that the pool may choose from."""


class Everyone:
    """All of them: the law of ``stream_fabric.placement`` chooses."""

    takes_hints = True

    def candidates(self, asked: Asked) -> Sequence[int]:
        return range(len(asked.in_flight))


Fate = Literal["arrived", "placed", "queued", "refused", "expired", "impossible", "lost", "done"]
"""The last five end a request; ``impossible``: it exceeds a replica's whole cache; ``lost``: its replica died, and no
other could go on with it."""


@dataclass
class Life:
    """What became of a request."""

    request: Request
    gateway: int
    jitter: float
    fate: Fate = "arrived"
    waited: bool = False
    replica: int = -1
    first_s: float = -1.0
    end_s: float = -1.0
    cached_tokens: int = 0
    attempt: int = 1
    left: Request = field(init=False)
    """What a replica is asked for: after a death the rest of the answer, behind what was said of it."""
    paused_s: float = 0.0
    """From the last death of its replica until another went on with it, where some of the answer had come."""
    died_s: float = -1.0

    def __post_init__(self) -> None:
        self.left = self.request

    @property
    def ttft_s(self) -> float:
        """Of a request that was not served: for ever."""
        return self.first_s - self.request.at_s if self.first_s >= 0 else float("inf")

    @property
    def mean_itl_s(self) -> float:
        steps = self.request.output_tokens - 1
        return (self.end_s - self.first_s) / steps if steps else 0.0


class Gateway:
    def __init__(self) -> None:
        self.views: list[PrefixView] = []
        self.usual = UsualLength()

    def refresh(self, agents: Sequence[Agent]) -> None:
        for index, agent in enumerate(agents):
            version, summary = agent.published
            if self.views[index].version != version:
                self.views[index].renew(summary, version)

    def matched_tokens(self, request: Request) -> list[int]:
        return [view.match(request.hint_hashes) * HINT_BLOCK_TOKENS for view in self.views]


@dataclass
class Run:
    """A run's outcome."""

    lives: list[Life]
    engines: list[Engine]
    pool: PoolState
    end_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


class World:
    def __init__(
        self,
        requests: Sequence[Request],
        replicas: int,
        policy: Policy,
        seed: int,
        settings: SimSettings = SETTINGS,
        *,
        coasts: bool = True,
        room_ratio: float = ROOM_RATIO,
        blind_queue: bool = False,
    ) -> None:
        """``blind_queue``: who waits is taken in turn, whatever the replica that has room holds of its prompt."""
        rng = random.Random(f"world {seed}")
        self._lives = [Life(request, rng.randrange(GATEWAYS), rng.random()) for request in requests]
        self._policy = policy
        self._settings = settings
        self._coasts = coasts
        self._room_ratio = room_ratio
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.now_s = 0.0
        self._open = len(self._lives)
        self.pool = PoolState(QUEUE_MAX)
        self._names: list[ReplicaId] = []
        self._engines: list[Engine] = []
        self._blind_queue = blind_queue
        self.agents: list[Agent] = []
        self.gateways = [Gateway() for _ in range(GATEWAYS)]
        self._rung: list[bool] = []
        self._by_stream = {stream_of(life): life for life in self._lives}
        self.first_tokens: deque[Life] = deque(maxlen=100_000)
        """Whose first token has come, for whoever takes them out."""
        self.outcome = Run(self._lives, self._engines, self.pool)
        for _ in range(replicas):
            self.add_replica()

    def add_replica(self) -> int:
        """Its index. It is not in its pool before its first report."""
        index = len(self.agents)
        name = ReplicaId(f"r{index:02}")
        engine = Engine(self._settings, partial(self._at_wake, index), coasts=self._coasts)
        self._names.append(name)
        self._engines.append(engine)
        self.agents.append(Agent(name, engine, self._room_ratio))
        self._rung.append(False)
        for gateway in self.gateways:
            gateway.views.append(PrefixView())
        return index

    def run(self) -> Run:
        for life in self._lives:
            self._at(life.request.at_s, partial(self._arrive, life))
        for index in range(len(self.agents)):
            self._report(index, [], renews=True)
            self._at(LEASE_RENEW_S * (index + 1) / len(self.agents), partial(self._renew, index))
        for index in range(GATEWAYS):
            self._at(HINTS_EVERY_S * (index + 0.5) / GATEWAYS, partial(self._refresh, index))
        self._at(1.0, self._expire)
        while self._open:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.outcome.end_s = self.now_s
        return self.outcome

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, event))

    # --- gateways ------------------------------------------------------------------------------------------

    def _arrive(self, life: Life) -> None:
        request, gateway = life.request, self.gateways[life.gateway]
        hints = self._policy.takes_hints
        matched = gateway.matched_tokens(request) if hints else [0] * len(self._names)
        in_flight = [seat.in_flight if (seat := self.pool.seats.get(name)) else 0 for name in self._names]
        chosen = [
            i for i in self._policy.candidates(Asked(request, life.gateway, matched, in_flight)) if self._takes(i)
        ]
        ask = self._ask(life, self._wait_s())
        names, hits = [self._names[i] for i in chosen], [matched[i] for i in chosen]
        answer = self.pool.place(ask, names, hits, self.now_s * 1000, surge=self._surge(ask.tier, len(names)))
        match answer:
            case Placed(replica, reason, _):
                self.outcome.reasons[reason] = self.outcome.reasons.get(reason, 0) + 1
                if hints:
                    gateway.views[self._names.index(replica)].sent(request.hint_hashes)
                life.fate = "placed"
            case Queued():
                life.fate, life.waited = "queued", True
                if self._blind_queue:
                    waiting = self.pool.tiers[ask.tier][ask.stream]
                    waiting.held, waiting.pin = {}, ""
            case Refused():
                self._close(life, "refused")
        self._ring()

    def _ask(self, life: Life, wait_s: float) -> Ask:
        request = life.request
        return Ask(
            stream_of(life),
            TenantId(request.tenant),
            tier=1,
            model=MODEL,
            session=request.session,
            prompt_tokens=request.prompt_tokens,
            output_tokens=round(min(self.gateways[life.gateway].usual.tokens, OUTPUT_LIMIT_TOKENS)),
            wait_until_ms=(self.now_s + wait_s) * 1000,
            jitter=life.jitter,
        )

    def _surge(self, tier: int, candidates: int) -> Surge:
        """What a gateway tells the pool to do where too much is asked of it."""
        return NO_SURGE

    def _wait_s(self) -> float:
        """How long a request that comes now may wait for room."""
        return QUEUE_WAIT_S_MAX

    def _takes(self, index: int) -> bool:
        """Whether a gateway believes that the replica takes requests."""
        return True

    def _refresh(self, index: int) -> None:
        self.gateways[index].refresh(self.agents)
        self._at(self.now_s + HINTS_EVERY_S, partial(self._refresh, index))

    def _expire(self) -> None:
        for stream in self.pool.overdue(self.now_s * 1000):
            self.pool.leave(stream)
            self._close(self._by_stream[stream], "expired")
        self._at(self.now_s + 1.0, self._expire)

    def _close(self, life: Life, fate: Fate) -> None:
        life.fate, life.end_s = fate, self.now_s
        self._open -= 1

    # --- agents --------------------------------------------------------------------------------------------

    def _ring(self) -> None:
        """Whoever has something in its inbox reads it soon."""
        for index, name in enumerate(self._names):
            if self.pool.inboxes.get(name) and not self._rung[index]:
                self._rung[index] = True
                self._at(self.now_s + INBOX_S, partial(self._read, index))

    def _read(self, index: int) -> None:
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
                self._close(life, "impossible")
        if impossible:
            self._report(index, impossible)

    def _renew(self, index: int) -> None:
        self.agents[index].renew()
        self._report(index, [], renews=True)
        self._at(self.now_s + LEASE_RENEW_S, partial(self._renew, index))

    def _report(self, index: int, ended: Sequence[StreamId], *, renews: bool = False) -> None:
        agent = self.agents[index]
        running = {stream: request.session for stream, request in agent.running.items()} if renews else None
        self.pool.report(agent.name, self._seat(index), (MODEL,), ended, running, self.now_s * 1000)
        self._ring()

    def _seat(self, index: int) -> Seat:
        return self.agents[index].seat(self.now_s)

    # --- replicas ------------------------------------------------------------------------------------------

    def _at_wake(self, index: int, at_s: float) -> None:
        self._at(at_s, partial(self._wake, index))

    def _wake(self, index: int) -> None:
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
        agent.first_tokens(came, self.now_s)
        ended: list[StreamId] = []
        for number in step.finished:
            life = self._lives[number]
            agent.ended(stream_of(life))
            self.gateways[life.gateway].usual.receive_end(life.request.output_tokens)
            self._close(life, "done")
            ended.append(stream_of(life))
        if ended:
            self._report(index, ended)


def stream_of(life: Life) -> StreamId:
    return StreamId(f"{life.request.number:08}")
