"""The whole platform on virtual time: production's gateways, agents and reapers, a Redis that fails over, readers that
come back.

Everything random comes from one seed, so a seed is a schedule. ``World(seed).run()`` raises ``Violation``, which names
the invariant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from inference.engines.sim.answer import Answer
from inference.engines.sim.text import Prompt
from inference.engines.sim.whole import Part
from stream_fabric.events import Event
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.ids import ReplicaId, StreamId
from tests.sim import invariants as verdict
from tests.sim.chaos import DEATHS, EXTRAS, FAULTS, Chaos
from tests.sim.checks import checker_of, flagged_in, moderator_of
from tests.sim.client import Client, Spec
from tests.sim.fabric import Fabric, Network
from tests.sim.fakes import Planted, SeededRandom, WorldClock, planted_bugs
from tests.sim.hosts import AgentHost, ControllerHost, GatewayHost, Host, engine_settings
from tests.sim.loop import Loop, Process
from tests.sim.witness import Witness

HORIZON_S = 60.0
THAWED_S = 2.0
"""Time that a process which stood still gets for what it was about to do."""
_LETTERS: dict[type[Host], str] = {GatewayHost: "g", AgentHost: "r", ControllerHost: "c"}


class Told:
    """An ``EventSink`` that keeps the events of readers and attempts."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)


class World:
    """``faults``: beside those that the seed draws. ``plan``: what happens, in place of what the seed draws."""

    def __init__(
        self,
        seed: int,
        planted: Planted = (),
        *,
        faults: Collection[str] = (),
        plan: Callable[[], None] | None = None,
        trace: bool = False,
    ) -> None:
        self._seed = seed
        self._planted = planted
        self.entropy = SeededRandom(seed + 1)
        """The randomness of all production code."""
        self.random = r = random.Random(seed)
        self.trace: list[str] | None = [] if trace else None
        # Each schedule has few of the faults, so that strict claims are made about what the others must not disturb
        drawn = set(r.sample(FAULTS, r.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 6))))
        if r.random() < 0.5:
            drawn.add(r.choice(DEATHS))
        for number, (fault, share) in enumerate(EXTRAS.items()):
            # apart, so that no other schedule becomes another
            if random.Random(-(number * 1_000_000_000 + 7 if number else 1) - seed).random() < share:
                drawn.add(fault)
        self.faults = {*faults} if plan else {*drawn, *faults}
        self.faults_end_s = 8.0 if self.faults & {*DEATHS, "queue", "deadline"} else 4.0
        self.lease_ttl_s = r.choice((1.0, 1.0, 3.0))
        self.drain_s = r.choice((0.0, 0.3, 2.0))
        self.standby = False
        """Replicas that start now are warm and take nothing."""
        self.engine = engine_settings(r.choice((10.0, 20.0, 50.0)), slots=1 if "queue" in self.faults else 8)
        self.loop = Loop()  # type: ignore[abstract]
        self.clock = WorldClock(self.loop.time)
        self.witness = Witness(self)
        self.network = Network(self)
        self.fabric = Fabric(self, shards=r.choice((1, 1, 2)))
        self.chaos = Chaos(self)
        self.flagged = flagged_in(self)
        self.moderator = moderator_of(self)
        self.checker = checker_of(self)
        self._plan = plan or self.chaos.draw
        self.hosts: list[Host] = []
        self.agents: list[AgentHost] = []
        self.clients: list[Client] = []
        self.of: dict[StreamId, Spec] = {}
        """The request of each stream."""
        self.made: dict[StreamId, list[tuple[ReplicaId, Prompt, Sequence[Answer | Part]]]] = {}
        """Prompts that replicas' engines got in each stream's name, with their answers."""
        self.counts: dict[str, int] = {}
        """How often each script ran."""
        self.events = Told()
        self._unique = 0
        self._failure: BaseException | None = None

    # --- what the parts ask --------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return int(self.loop.now * 1000)

    def unique(self) -> int:
        self._unique += 1
        return self._unique

    def note(self, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.loop.now:8.4f} {what}")

    def after(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        """Outside of all processes."""
        self.loop.at(delay_s, self.loop.outside, what, *args)

    def fail(self, error: BaseException) -> None:
        """A process met what it must not."""
        self._failure = self._failure or error

    def start(self, kind: type[Host]) -> None:
        host = kind(self, _LETTERS[kind])
        self.hosts.append(host)
        if isinstance(host, AgentHost):
            self.agents.append(host)

    def gone(self, host: Host) -> None:
        """A process is no more; another takes its place."""
        for shard in self.fabric.shards:
            shard.listening.pop(host.name, None)
        for client in self.clients:
            if client.reading is not None and client.reading.host is host:
                client.disconnected()
        self.after(self.random.uniform(0.1, 2.0), self.start, type(host))

    def any_gateway(self) -> GatewayHost | None:
        ready = [h for h in self.hosts if isinstance(h, GatewayHost) and h.alive and h.gateway is not None]
        return self.random.choice(ready) if ready else None

    def ask(self, spec: Spec, after_s: float) -> None:
        """A client asks for something, after a while."""
        self.clients.append(self._client(spec, None))
        self.after(after_s, self.clients[-1].connect)

    def _client(self, spec: Spec, stream: StreamId | None) -> Client:
        r = self.random
        slow = "slow" in self.faults and r.random() < 0.5
        client = Client(self, spec, stream, slow=slow, plain=r.random() < 0.3)
        if "leave" in self.faults and r.random() < 0.6:
            self.after(r.uniform(1.0, 5.0), client.leave)
        return client

    def known(self, spec: Spec, stream: StreamId) -> None:
        """A client has learned its stream's id, and tells others."""
        for _ in range(self.random.choice((0, 1, 2))):
            self.clients.append(self._client(spec, stream))
            self.after(self.random.uniform(0.1, 4.0), self.clients[-1].connect)

    # --- what the parts tell -------------------------------------------------------------------------------

    def appeared(self, stream: StreamId, spec: Spec) -> None:
        """A gateway has given a request its id."""
        self.of[stream] = spec
        self.chaos.appeared(stream)

    def ran(self, script: str, process: Process) -> None:
        """A script has run for a process."""
        self.counts[script] = self.counts.get(script, 0) + 1
        self.chaos.ran(script, process)

    def taken_over(self, stream: StreamId) -> None:
        self.chaos.taken_over(stream)

    def submitted(self, host: AgentHost, request: EngineRequest) -> None:
        """An engine begins a request."""
        self.chaos.submitted(host, request)

    # --- the run -------------------------------------------------------------------------------------------

    def run(self) -> World:
        with planted_bugs(self._planted):
            try:
                self._plan()
                self.loop.run(HORIZON_S, self._settled)
                # A stream that nobody reads, and whose request or producer or end was lost, waits for its next reader
                for stream, state in list(self.fabric.streams()):
                    if state.status == "live" and verdict.may_be_forgotten(self):
                        self.clients.append(Client(self, self.of[stream], stream, slow=False, plain=False))
                        self.clients[-1].connect()
                self.loop.run(HORIZON_S * 2, self._settled)
                if self._failure is not None:
                    raise self._failure
                verdict.check(self)
            finally:
                self.loop.close()
        return self

    def _settled(self) -> bool:
        if self._failure is not None:
            raise self._failure
        if self.loop.now < self.faults_end_s and self.faults & {"failover", "wipe"}:
            return False  # what has ended may yet be lost
        if self.loop.now < self.loop.thawed_at_s + THAWED_S:
            return False  # it goes on with what it believed
        return (
            all(client.done or client.left for client in self.clients)
            and all(state.status != "live" for _, state in self.fabric.streams())
            and not any(host.agent.running for host in self.agents if host.alive and host.agent is not None)
            and not verdict.unsaid(self)
            and not verdict.left_in_pools(self)
            and not any(shard.log.unbilled for shard in self.fabric.shards)
        )
