"""The faults of a schedule, drawn from its seed, and those that wait for their moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stream_fabric.errors import StreamGwError
from stream_fabric.limits import LEASE_TTL_S
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.ids import StreamId
from tests.sim.client import WHO, Spec
from tests.sim.hosts import AgentHost, ControllerHost, GatewayHost, Host
from tests.sim.loop import Process

if TYPE_CHECKING:
    from tests.sim.world import World

FAULTS = (
    "drop", "cut", "flaky", "failover", "wipe", "gateway", "frozen gateway", "agent", "frozen agent", "stall", "drain",
    "engine", "dropped answer", "halfway", "again", "poison", "cancel", "slow", "leave", "deadline", "queue",
)  # fmt: skip
EXTRAS = {
    "sleep": 0.15,  # replicas are also asked to sleep, wake and become warm
    "yield": 0.15,  # requests are batch work, which yields time and again
    "input": 0.2,  # clients send inputs to running streams
    "budget": 0.2,  # the tenant has limits and budgets
    "moderation": 0.15,  # prompts, inputs and answers are moderated
    "checks": 0.15,  # requests ask for a JSON schema, most of them with repairs
    "zero": 0.1,  # the tenant's plan keeps no stream
}
"""Share of the schedules that have each of these beside their faults. The order tells which schedules: append only."""
DEATHS = (
    "agent", "frozen agent", "stall", "drain", "engine", "dropped answer", "halfway", "again", "poison",
)  # fmt: skip
"""After which another replica goes on."""
AGAIN_S = 10.0
"""Streams that kill their replicas, or lose each, stop doing so after so long."""
_KINDS: tuple[dict[str, Any], ...] = (
    {"n": 2, "seed": 1},
    {"response_format": {"type": "json_object"}},
    {"reasoning_effort": "low"},
    {"logprobs": True},
)
_OF_CHAT = {"response_format", "reasoning_effort", "logprobs"}


_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def _checked(apart: random.Random) -> dict[str, Any]:
    """Fields of a request for a reply that fits a schema. Only whole answers are repaired."""
    fields: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}}
    if apart.random() < 0.7:
        fields |= {"repair": apart.choice((1, 2, 3)), "stream": False, "n": 1}
    if apart.random() < 0.3:
        fields |= {"seed": 1}
    return fields


RESCUES = ("takeover", "drop", "claim", "place")
"""Scripts of a rescue; gateways also place what is new."""


class Chaos:
    def __init__(self, world: World) -> None:
        self.w = world
        self.random = world.random
        self.rescuers_stopped = 0
        """Processes killed or frozen half-way through a rescue."""
        self.drains = 0
        self._took_over_at: dict[Process, float] = {}
        """When a process last took a stream over: it may have others of the same replica in hand."""
        self.yielding: list[tuple[float, float]] = []
        """From when until when batch work was made to yield; a later one overrules the one before."""
        self.inputs: dict[StreamId, dict[str, str]] = {}
        """Results of the inputs of a stream, as gateways answered: id → result."""
        self.orphaned: list[tuple[float, StreamId]] = []
        """When which stream lost its producer."""

    @property
    def yields(self) -> int:
        """Times that batch work was made to yield."""
        return len(self.yielding)

    def yielding_s(self, from_s: float, until_s: float) -> float:
        """Part of this time in which batch work had to yield."""
        later = [*self.yielding[1:], (until_s, until_s)]
        spans = [(begin, min(end, after)) for (begin, end), (after, _) in zip(self.yielding, later, strict=False)]
        return sum(max(min(end, until_s) - max(begin, from_s), 0.0) for begin, end in spans)

    @property
    def over(self) -> bool:
        return self.w.loop.now > self.w.faults_end_s

    def has(self, fault: str, share: float = 1.0) -> bool:
        return fault in self.w.faults and (share == 1.0 or self.random.random() < share)

    # --- a schedule ----------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the processes, the requests and the faults of the schedule."""
        w, r = self.w, self.random
        for kind in (AgentHost, AgentHost, *((AgentHost,) * r.choice((0, 1))), GatewayHost, GatewayHost):
            w.start(kind)
        if r.random() < 0.5:
            w.start(ControllerHost)
        for number in range(r.choice((1, 1, 2, 3)) + 2 * self.has("queue")):
            w.ask(self._spec(number), r.uniform(0.3, 1.5))
        self._draw_faults()

    def _spec(self, number: int) -> Spec:
        r = self.random
        fields: dict[str, Any] = {}
        if r.random() < 0.6:
            fields["max_tokens"] = r.choice((1, 5, 40, 80, 120))
        elif r.random() < 0.3:  # beside a limit a token that was told in halves would be counted twice
            fields["stop"] = r.choice((["a gateway"], ["late.", " cursor so"], " the"))
        if r.random() < 0.2:
            fields["background"] = True
        if r.random() < 0.2:
            fields["session_id"] = "s"
        if self.has("deadline"):
            fields["deadline_s"] = r.choice((0.5, 2.0, 5.0, 20.0))
        fields |= r.choice(({}, {}, {}, {}, {}, *_KINDS))
        if self.has("yield"):
            fields["service_tier"] = "batch"
        if self.has("checks"):
            fields |= _checked(random.Random(r.random()))
        if "response_format" in fields:
            fields.pop("max_tokens", None)  # which the simulator minds in no JSON
        spec = Spec(number, fields, "chat" if fields.keys() & _OF_CHAT else r.choice(("chat", "chat", "completions")))
        if r.random() < 0.3:
            spec.key = f"key {number}"
        return spec

    def _draw_faults(self) -> None:
        r, end_s = self.random, self.w.faults_end_s - 2

        def some(fault: str, times: Sequence[int], what: Callable[..., None], *args: Any) -> None:
            if self.has(fault):
                for _ in range(r.choice(times)):
                    self.w.after(r.uniform(0.5, end_s), what, *args)

        some("cut", (3,), self.on, Host, self.cut)
        some("gateway", (1, 2, 4), self.on, GatewayHost, self.kill)
        some("frozen gateway", (1, 2), self.on, GatewayHost, self.hang)
        some("agent", (1, 1, 2), self.on, AgentHost, self.kill)
        some("again", (1, 1, 2), self.on, AgentHost, self.kill)
        some("halfway", (1, 2), self.on, AgentHost, lambda host: r.choice((self.kill, self.hang))(host))
        some("frozen agent", (1, 2), self.on, AgentHost, self.hang)
        some("stall", (1, 1, 2), self.on, AgentHost, self.stall)
        some("drain", (1, 1, 2), self.on, AgentHost, self.drain)
        some("engine", (1, 1, 2), self.on, AgentHost, self.kill_engine)
        some("dropped answer", (2, 5), self.on, AgentHost, self.drop_answer)
        if self.has("failover"):
            for n in range(20):
                self.w.after(end_s * (n + r.random()) / 20, self.w.fabric.replicate)
            for _ in range(r.choice((1, 1, 2))):
                at_s = r.uniform(0.6, end_s)
                self.w.after(max(0.0, at_s - r.choice((0.02, 0.1)) * r.random()), self.w.fabric.replicate)
                self.w.after(at_s, self.lose)
        some("wipe", (1,), lambda: self.lose(everything=True))
        if self.has("yield"):
            apart = random.Random(r.random())
            for _ in range(apart.choice((1, 3, 6))):
                self.w.after(apart.uniform(0.5, end_s), self.make_batch_yield, apart)
        if self.has("sleep"):
            for _ in range(r.choice((2, 6, 12))):
                self.w.after(r.uniform(0.1, end_s), self.on, AgentHost, self.wish)
            for n in range(400):  # as a controller does, until it is so
                self.w.after(end_s + n * 0.5, self.wake_all)

    # --- what waits for its moment -------------------------------------------------------------------------

    def appeared(self, stream: StreamId) -> None:
        """A gateway has given a request its id."""
        r = self.random
        if self.has("cancel"):
            for _ in range(r.choice((1, 1, 3))):
                self.w.after(r.choice((r.uniform(0.0, 0.01), r.uniform(0.0, 6.0), 60.0)), self.cancel, stream)
        if self.has("input"):
            apart = random.Random(r.random())
            for number in range(apart.choice((1, 1, 2, 4))):
                again = apart.choice((1, 1, 2))  # sent twice, through other gateways
                for _ in range(again):
                    self.w.after(apart.choice((0.02, 0.5, 3.0)) * apart.random(), self.steer, stream, f"i{number}")

    def ran(self, script: str, process: Process) -> None:
        """A script has run; whoever asked for it may die before it hears."""
        if self.over:
            return
        if script == "place":
            if self.has("failover", 0.15):
                self.w.after(0.02 * self.random.random(), self.lose)
            if self.has("frozen agent", 0.15):  # with it in its inbox, maybe
                self.on(AgentHost, self.hang)
        if script == "takeover":
            self._took_over_at[process] = self.w.loop.now
        if script in ("takeover", "place", "drop", "fence", "took", "claim") and self.has("halfway"):
            host = next((h for h in self.w.hosts if h.process is process), None)
            dice = self.random.random()
            if host is None or (script != "takeover" and dice > 0.1):
                return
            self.w.note(f"half-way after {script}:")
            if dice < 0.6:
                self.kill(host) if dice < 0.3 else self.hang(host)
                is_rescuer = not isinstance(host, GatewayHost) or (
                    self.w.loop.now - self._took_over_at.get(process, -LEASE_TTL_S) < LEASE_TTL_S
                )
                self.rescuers_stopped += script in RESCUES and (script != "place" or is_rescuer)

    def taken_over(self, stream: StreamId) -> None:
        """A stream's epoch has risen: what else happens, happens now."""
        w, r = self.w, self.random
        if self.has("cancel", 0.8):
            w.after(r.choice((0.01, 0.1, 1.0)) * r.random(), self.cancel, stream)
        if self.over:
            return
        if self.has("gateway", 0.3):
            w.after(r.uniform(0.0, 0.5), self.on, GatewayHost, self.kill)
        for host in w.agents:
            if host.process.frozen and r.random() < 0.5:
                w.after(r.choice((0.003, 0.1, 2.0)) * r.random(), w.loop.thaw, host.process)
        if self.has("failover", 0.3):
            w.after(r.choice((0.01, 0.1, 1.0)) * r.random(), self.lose)
        if self.has("wipe", 0.3):
            w.after(r.choice((0.01, 0.1, 1.0)) * r.random(), lambda: self.lose(everything=True))

    def submitted(self, host: AgentHost, request: EngineRequest) -> None:
        """An engine begins a request."""
        if self.w.loop.now > self.w.faults_end_s + AGAIN_S:
            return
        stream = next(name for name in self.w.of if request.stream.startswith(name))  # a part has its number behind it
        poison = self.has("poison") and self.w.of[stream].number == 0
        if poison or (stream in self.w.witness.takeovers and self.has("again", 0.5)):
            self.w.after(self.random.uniform(0.0, 1.0), self.kill, host)

    # --- what may happen -----------------------------------------------------------------------------------

    def on(self, kind: type[Host], what: Callable[[Any], None]) -> None:
        """To one of a kind that is alive."""
        alive = [host for host in self.w.hosts if isinstance(host, kind) and host.alive]
        if alive:
            what(self.random.choice(alive))

    def kill(self, host: Host) -> None:
        if not host.alive:
            return
        self.w.note(f"{host.name} is killed")
        if isinstance(host, AgentHost) and host.agent is not None:
            held = [name for name, stream in host.agent.running.items() if not stream.closed]
            self.orphaned += [(self.w.loop.now, name) for name in held]
            if self.has("failover", 0.8):  # the tail goes with its producer
                self.w.after(0.05 * self.random.random(), self.lose)
        host.process.alive = False
        self.w.gone(host)

    def hang(self, host: Host, for_s: float = 0.0) -> None:
        """It does nothing, and then goes on where it was."""
        if host.alive and not host.process.frozen:
            for_s = for_s or self.random.uniform(0.3, 8.0)
            self.w.note(f"{host.name} hangs for {for_s:.2f} s")
            self.w.loop.freeze(host.process, for_s)

    def stall(self, host: Host) -> None:
        """Out of Redis's reach, for longer than a lease maybe, and then back with what it was about to say."""
        for_s = self.random.uniform(0.5, 8.0)
        self.w.note(f"{host.name} cannot reach Redis for {for_s:.2f} s")
        host.link.stalled_until = self.w.loop.now + for_s

    def cut(self, host: Host) -> None:
        """Its subscriptions end."""
        if host.link.subscriber is not None:
            self.w.note(f"{host.name} is cut off")
            host.link.subscriber.cut(self.random.uniform(0.01, 1.0))

    def drain(self, host: AgentHost) -> None:
        if host.agent is not None:
            self.drains += 1
            self.w.note(f"{host.name} drains")
            self.w.loop.at(0.0, host.process, host.agent.drain)

    def wish(self, host: AgentHost, wish: str = "") -> None:
        """A controller, or several that do not agree, want it asleep or awake."""
        wish = wish or self.random.choice(("sleeping:1", "sleeping:1", "sleeping:2", "warm", "ready", "ready"))
        for pool in self.w.fabric.of_pools().pools.values():
            if pool.desired.get(host.replica) != wish:
                self.w.note(f"{host.name} is to be {wish}")
                pool.desired[host.replica] = wish

    def wake_all(self) -> None:
        for host in self.w.agents:
            if host.alive:
                self.wish(host, "ready")

    def kill_engine(self, host: AgentHost) -> None:
        if host.engine is not None:
            self.w.note(f"the engine of {host.name} dies")
            self.w.loop.at(0.0, host.process, host.engine.die)

    def make_batch_yield(self, apart: random.Random) -> None:
        """Make the pool yield for a while, to more requests than a replica has streams."""
        for_s = apart.choice((0.05, 0.5, 3.0))
        self.yielding.append((self.w.loop.now, self.w.loop.now + for_s))
        self.w.note(f"batch work yields for {for_s} s")
        for pool in self.w.fabric.of_pools().pools.values():
            pool.law.yields_until_ms = self.w.now_ms + for_s * 1000
        for host in self.w.agents:
            if host.alive and host.agent is not None and apart.random() < 0.7:
                self.w.loop.at(0.0, host.process, host.agent.status.request_yield, 100)

    def drop_answer(self, host: AgentHost) -> None:
        running = [] if host.agent is None else list(host.agent.running)
        if running and host.engine is not None:
            stream = self.random.choice(running)
            self.w.note(f"the engine of {host.name} drops {stream}")
            self.w.loop.at(0.0, host.process, host.engine.drop, stream)

    def lose(self, *, everything: bool = False) -> None:
        """One shard of Redis dies, with its tail or with all that it had."""
        shard = self.random.choice(self.w.fabric.shards)
        shard.fail_over(self.random.uniform(0.05, 1.5), everything=everything)
        for host in self.w.hosts:
            if host.alive and host.link.subscriber is not None:
                host.link.subscriber.wake()

    def cancel(self, stream: StreamId) -> None:
        host = self.w.any_gateway()
        if host is not None:
            host.serve(self._cancel(host, stream))

    async def _cancel(self, host: GatewayHost, stream: StreamId) -> None:
        assert host.gateway is not None
        try:
            reply = await host.gateway.commands.cancel(WHO, stream)
            self.w.note(f"cancel of {stream}: {reply.result} at {reply.at}")
        except StreamGwError as error:
            self.w.note(f"cancel of {stream}: {error.code}")

    def steer(self, stream: StreamId, name: str) -> None:
        host = self.w.any_gateway()
        if host is not None:
            host.serve(self._steer(host, stream, name))

    async def _steer(self, host: GatewayHost, stream: StreamId, name: str) -> None:
        assert host.gateway is not None
        try:
            result: str = await host.gateway.inputs.add(WHO, stream, name, f"input {name}")
        except StreamGwError as error:
            result = error.code
        self.w.note(f"input {name} of {stream}: {result}")
        told = self.inputs.setdefault(stream, {})
        told[name] = "accepted" if "accepted" in (result, told.get(name)) else result
