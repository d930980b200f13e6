"""Schedules that the simulation once found a bug by, and some that a takeover must get right, each told step by step.

What must hold at the end of any schedule is checked here as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import pytest

import stream_gw.streams.create
import tests.sim.hosts
from stream_fabric.events import AttemptTrace
from stream_fabric.pool.placement import Placed
from stream_fabric.pool.records import EngineRequest, LeaseReport, ReplicaInfo
from stream_fabric.stream.frames import End, decode
from stream_fabric.stream.ids import ReplicaId, StreamId
from stream_fabric.stream.log import CreateCode, StreamState
from stream_gw.routing.place_request import Outcome
from tests.sim.client import Spec
from tests.sim.fakes import Planted
from tests.sim.hosts import POOL, AgentHost, ControllerHost, GatewayHost, engine_settings
from tests.sim.invariants import lines_of
from tests.sim.loop import Process
from tests.sim.ports import PoolsDoor, StreamDoor
from tests.sim.witness import Violation
from tests.sim.world import World

Kind = Literal["chat", "completions"]


class Stage:
    """A world in which only happens what is said."""

    def __init__(
        self,
        agents: int = 2,
        *,
        standby: int = 0,
        itl_ms: float = 20.0,
        seed: int = 0,
        planted: Planted = (),
        faults: Collection[str] = (),
    ) -> None:
        self._agents, self._standby = agents, standby
        self._do: list[Callable[[], None]] = []
        self.w = World(seed, planted, faults=faults, plan=self._plan)
        self.w.lease_ttl_s, self.w.drain_s = 1.0, 0.0
        self.w.engine = engine_settings(itl_ms, slots=8)

    def _plan(self) -> None:
        for kind in (*[AgentHost] * self._agents, GatewayHost, ControllerHost):
            self.w.start(kind)
        self.w.standby = True
        for _ in range(self._standby):
            self.w.start(AgentHost)
        for what in self._do:
            what()

    def ask(self, at_s: float, *, key: str | None = None, kind: Kind = "chat", **fields: Any) -> None:
        spec = Spec(len(self._do), fields, kind)
        spec.key = key
        self._do.append(lambda: self.w.ask(spec, at_s))

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        self._do.append(lambda: self.w.after(at_s, what))

    def on_takeover(self, what: Callable[[StreamId], None]) -> None:
        """The first takeover has just been made."""
        once = [what]
        self.w.taken_over = lambda stream: once.pop()(stream) if once else None  # type: ignore[method-assign]

    def producer(self) -> AgentHost:
        """The one replica that runs something."""
        (host,) = (h for h in self.w.agents if h.alive and h.agent is not None and h.agent.running)
        return host

    def run(self) -> tuple[StreamState, End]:
        """The last stream that was made, and how it ended."""
        self.w.run()
        *_, state = (self.w.fabric.state(stream) for stream in self.w.of)
        assert state is not None
        end = decode(lines_of(state)[-1])
        assert isinstance(end, End)
        return state, end


def test_a_dead_replicas_stream_goes_on_elsewhere() -> None:
    stage = Stage()
    stage.ask(0.3, max_tokens=120)
    stage.at(1.0, lambda: stage.w.chaos.kill(stage.producer()))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (2, "completed")
    assert end.usage is not None and end.usage.output == 120


@pytest.mark.parametrize("round_trip_s", (0.12, 0.2, 0.4))
def test_a_dead_replicas_stream_goes_on_elsewhere_while_redis_is_far_away(round_trip_s: float) -> None:
    """In another region, or overloaded. Nobody may end the stream while the reapers have not moved it."""
    stage = Stage()
    stage.w.network.latency_s = round_trip_s / 2
    stage.ask(1.0, max_tokens=600)
    stage.at(5.0, lambda: stage.w.chaos.kill(stage.producer()))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (2, "completed")
    assert end.usage is not None and end.usage.output == 600


class _LatePoolsDoor(PoolsDoor):
    """A renewal reaches its shard late. The inbox has a connection of its own, so what it sends later comes earlier."""

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> LeaseReport:
        if ttl_s is not None:
            await asyncio.sleep(0.1)
        return await super().report(info, ttl_s=ttl_s, ended=ended, running=running)


@pytest.mark.parametrize("at_ms", range(300, 650, 50))
def test_a_dead_replica_read_the_request_while_its_lease_was_renewed(at_ms: int) -> None:
    """The renewal does not name the stream, which the replica has read and acknowledged meanwhile. Another one can go
    on with it nevertheless."""
    stage = Stage(planted=[(tests.sim.hosts, "PoolsDoor", _LatePoolsDoor)])
    stage.ask(at_ms / 1000, max_tokens=120)
    stage.at(1.5, lambda: stage.w.chaos.kill(stage.producer()))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (2, "completed")
    assert end.usage is not None and end.usage.output == 120


@pytest.mark.parametrize("at_ms", range(1500, 3500, 250))
def test_a_dead_replicas_stream_waits_for_one_whose_lease_is_late(at_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only other replica stands still for a moment: nobody has found it dead yet."""
    stage = Stage()
    stage.ask(0.3, max_tokens=200)
    killed: list[AgentHost] = []

    def kill() -> None:
        killed.append(stage.producer())
        monkeypatch.setattr(stage.w, "start", lambda kind: None)
        stage.w.chaos.kill(killed[0])

    stage.at(1.0, kill)
    stage.at(at_ms / 1000, lambda: stage.w.chaos.hang(next(h for h in stage.w.agents if h is not killed[0]), 1.4))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (2, "completed")


@pytest.mark.parametrize("for_ms", range(1900, 2700, 100))
def test_a_machine_stands_still_under_all_replicas(for_ms: int) -> None:
    """One was found dead just before both go on. Nobody ends the stream, which its replica may keep."""
    stage = Stage(seed=for_ms)
    stage.ask(0.3, max_tokens=200)
    stage.at(1.0, lambda: stage.w.chaos.hang(stage.producer(), for_ms / 1000))
    stage.at(2.0, lambda: [stage.w.chaos.hang(host, for_ms / 1000 - 1.0) for host in stage.w.agents])
    _, end = stage.run()
    assert end.status == "completed"


def test_what_was_streamed_is_billed_also_when_it_cannot_go_on() -> None:
    stage = Stage()
    stage.ask(0.3, reasoning_effort="low", max_tokens=100)
    stage.at(1.0, lambda: stage.w.chaos.kill(stage.producer()))
    _, end = stage.run()
    assert end.status == "failed" and end.usage is not None
    assert end.usage.output > 20 and end.usage.prompt > 0


def test_a_stream_is_handed_over_twice_in_a_row() -> None:
    """The second replica, which continues it, hears that it is fenced by the third one's takeover, and leaves it be."""
    stage = Stage(3)
    stage.ask(0.3, max_tokens=120)
    for at_s in (1.0, 1.6):
        stage.at(at_s, lambda: stage.w.chaos.drain(stage.producer()))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (3, "completed")


def test_a_deploy_moves_a_stream_from_each_replica_to_the_next() -> None:
    """A replica that drains has not failed at it, so this counts as no attempt; those that die do."""
    stage = Stage(7)
    stage.ask(0.3, max_tokens=600)
    for number in range(4):
        stage.at(1.0 + 0.6 * number, lambda: stage.w.chaos.drain(stage.producer()))
    for at_s in (4.0, 9.0):
        stage.at(at_s, lambda: stage.w.chaos.kill(stage.producer()))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (7, "completed")


def test_a_rescuer_dies_half_way_and_the_replica_comes_back() -> None:
    """Its epoch is gone and nobody else has the stream: it is still on its list, and its own to place."""
    stage = Stage()
    stage.ask(0.3, max_tokens=200)

    def half_way(stream: StreamId) -> None:
        stage.w.chaos.kill(rescuers[-1])
        stage.w.after(0.05, stage.w.loop.thaw, frozen[0].process)

    rescuers: list[Any] = []
    stage.w.ran = lambda script, process: _note(stage.w, rescuers, script, process)  # type: ignore[method-assign]
    frozen: list[AgentHost] = []

    def freeze() -> None:
        frozen.append(stage.producer())
        stage.w.chaos.hang(frozen[0], 30.0)

    stage.at(1.0, freeze)
    stage.on_takeover(half_way)
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (2, "completed")


def _note(world: World, rescuers: list[Any], script: str, process: Process) -> None:
    if script == "in_flight":
        rescuers.append(next(host for host in world.hosts if host.process is process))


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_comes_back_to_its_replica_before_the_word_that_it_was_taken(seed: int) -> None:
    """It runs there once, in its newer epoch."""
    stage = Stage(1, standby=1, seed=seed)
    frozen: list[AgentHost] = []

    def freeze() -> None:
        frozen.append(stage.w.agents[0])
        stage.w.chaos.hang(frozen[0], 30.0)

    stage.at(0.5, freeze)
    stage.ask(0.6, max_tokens=100)  # into its inbox, and then into the queue: the other replica only stands by
    stage.on_takeover(lambda stream: stage.w.after(0.001 * (seed % 8), stage.w.loop.thaw, frozen[0].process))
    state, end = stage.run()
    assert end.status == "completed"
    assert state.replica == frozen[0].replica


@pytest.mark.parametrize("after_ms", range(0, 30, 2))
def test_a_cancel_comes_while_the_next_replica_reads_what_was_said(after_ms: int) -> None:
    stage = Stage(seed=after_ms)
    stage.ask(0.3, max_tokens=120)
    stage.at(1.0, lambda: stage.w.chaos.kill(stage.producer()))
    stage.on_takeover(lambda stream: stage.w.after(after_ms / 1000, stage.w.chaos.cancel, stream))
    _, end = stage.run()
    assert end.status == "cancelled"


@pytest.mark.parametrize("after_ms", range(0, 30, 2))
def test_a_deadline_passes_while_the_next_replica_reads_what_was_said(after_ms: int) -> None:
    stage = Stage(seed=3)
    stage.ask(0.3, max_tokens=120, deadline_s=2.40 + after_ms / 1000)
    stage.at(1.0, lambda: stage.w.chaos.kill(stage.producer()))
    _, end = stage.run()
    assert end.status == "failed" and end.error is not None and end.error.code == "deadline_exceeded"
    assert end.usage is not None and end.usage.output > 20


@pytest.mark.parametrize("seed", range(12))
def test_a_request_is_placed_again_after_its_end_for_the_answer_was_lost(seed: int) -> None:
    stage = Stage(1, itl_ms=1.0, seed=seed)
    stage.ask(0.3, max_tokens=1)
    lost = ["place"]
    unlucky: list[bool] = []

    def ran(script: str, process: Process) -> None:
        if script in lost:
            lost.remove(script)
            unlucky.append(True)

    stage.w.ran = ran  # type: ignore[method-assign]
    stage.w.network.unlucky = lambda: bool(unlucky) and unlucky.pop()  # type: ignore[method-assign]
    _, end = stage.run()
    assert end.status == "completed" and not lost


def _gateway_dies_between_the_pair(stage: Stage) -> None:
    """Once it has made its stream; what it sends at that moment does not arrive."""

    def ran(script: str, process: Process) -> None:
        if script == "create" and not lost:
            assert "place" not in stage.w.counts
            stage.w.chaos.kill(next(host for host in stage.w.hosts if host.process is process))
            lost.append(stage.w.loop.now + 0.01)
        stage.w.counts[script] = stage.w.counts.get(script, 0) + 1

    lost: list[float] = []
    stage.w.ran = ran  # type: ignore[method-assign]
    stage.w.network.unlucky = lambda: bool(lost) and stage.w.loop.now < lost[0]  # type: ignore[method-assign]


def test_a_gateway_dies_before_any_pool_has_heard_of_its_request() -> None:
    """Its client finds the stream by the key. Nobody has what was asked, so it gets a terminal that says so."""
    stage = Stage()
    stage.ask(0.3, key="k", max_tokens=20)
    _gateway_dies_between_the_pair(stage)
    state, end = stage.run()
    assert end.status == "failed" and end.error is not None and end.error.code == "replica_lost"
    assert end.error.retriable and end.usage is not None and end.usage.output == 0
    assert state.last == 1 and "place" not in stage.w.counts
    assert [client.done for client in stage.w.clients if not client.left] == ["end"] * len(stage.w.clients)


class _LateCreateDoor(StreamDoor):
    """A gateway's ``create`` reaches its shard late."""

    async def create(self, *args: Any, **more: Any) -> CreateCode:
        await asyncio.sleep(0.3)
        return await super().create(*args, **more)


@pytest.mark.parametrize("after_ms", range(0, 40, 10))
def test_an_engine_fails_before_its_request_has_a_stream(after_ms: int) -> None:
    """Placement and stream travel side by side: the replica waits for the stream before it hands it over."""
    stage = Stage(seed=after_ms, planted=[(tests.sim.hosts, "StreamDoor", _LateCreateDoor)])
    stage.ask(0.3, max_tokens=20)
    failed: list[AgentHost] = []

    def submitted(host: AgentHost, request: EngineRequest) -> None:
        if not failed:
            assert host.engine is not None and "create" not in stage.w.counts
            failed.append(host)
            stage.w.loop.at(after_ms / 1000, host.process, host.engine.drop, request.stream)

    stage.w.submitted = submitted  # type: ignore[method-assign]
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (2, "completed")
    assert state.replica != failed[0].replica


async def _place_nothing(*args: Any, **more: Any) -> Outcome:
    return Outcome(Placed(ReplicaId("r"), "only", ()), "pool")


@pytest.mark.parametrize("dies", (True, False))
def test_a_gateway_that_asked_for_no_place_has_no_such_excuse(dies: bool) -> None:
    stage = Stage(planted=[(stream_gw.streams.create, "place", _place_nothing)])
    stage.ask(0.3, key="k", max_tokens=20)
    if dies:
        _gateway_dies_between_the_pair(stage)
    with pytest.raises(Violation, match=r"6: .* failed: .*replica_lost"):
        stage.run()


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_comes_back_to_its_replica_and_a_report_of_that_is_sent_again(seed: int) -> None:
    """The pool keeps what was asked: the replica fails at it a second time, and it goes on once more."""
    stage = Stage(seed=seed)
    w, start = stage.w, stage.w.start
    w.engine = engine_settings(20.0, slots=1)
    stage.ask(0.3, max_tokens=100)
    stage.ask(0.4, max_tokens=100)  # which keeps the other replica busy, so that the first waits in the queue
    lost: list[bool] = []
    hosts: list[AgentHost] = []

    def drop() -> None:
        stream = next(iter(stage.w.of))
        host = next(h for h in stage.w.agents if h.agent is not None and stream in h.agent.running)
        assert host.engine is not None
        stage.w.loop.at(0.0, host.process, host.engine.drop, stream)
        hosts.append(host)

    def lose_the_other() -> None:  # then no replica is left that has not failed at it
        w.start = lambda kind: None if kind is AgentHost else start(kind)  # type: ignore[method-assign]
        w.chaos.kill(next(host for host in w.agents if host is not hosts[0]))

    def ran(script: str, process: Process) -> None:
        if script == "report" and hosts and process is hosts[0].process and stage.w.loop.now < 1.1:
            lost.append(True)

    stage.w.ran = ran  # type: ignore[method-assign]
    stage.w.network.unlucky = lambda: bool(lost) and lost.pop()  # type: ignore[method-assign]
    stage.at(1.0, drop)
    stage.at(1.2, lose_the_other)
    stage.at(1.2 + w.lease_ttl_s + 1.0, drop)
    stage.run()
    state = stage.w.fabric.state(next(iter(stage.w.of)))
    assert state is not None and (state.status, state.epoch.n) == ("completed", 3)
    assert hosts[0] is hosts[1]


@pytest.mark.parametrize("seed", range(4))
def test_a_rescuer_dies_half_way_and_the_next_finds_no_other_replica(seed: int) -> None:
    """The next ends the stream in the epoch that the first one made: it has no reader whose watchdog would."""
    stage = Stage(seed=seed)
    stage.ask(0.3, max_tokens=200, background=True)
    rescuers: list[Any] = []
    w, start = stage.w, stage.w.start

    def kill() -> None:
        w.start = lambda kind: None if kind is AgentHost else start(kind)  # type: ignore[method-assign]
        w.chaos.kill(stage.producer())
        for client in w.clients:
            client.leave()

    def half_way(stream: StreamId) -> None:
        for host in (rescuers[-1], *w.agents):
            w.chaos.kill(host)

    w.ran = lambda script, process: _note(w, rescuers, script, process)  # type: ignore[method-assign]
    stage.at(1.0, kill)
    stage.on_takeover(half_way)
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (3, "failed")
    assert end.error is not None and end.error.code == "replica_lost"


@pytest.mark.parametrize("early", (True, False))
@pytest.mark.parametrize("seed", range(4))
def test_a_rescuer_stands_still_until_the_next_ones_replica_has_ended_the_stream(seed: int, early: bool) -> None:
    """It places the stream again, in the same epoch on the same replica, which has forgotten it by then. ``early``: the
    first replica dies before it has read its inbox."""
    stage = Stage(seed=seed)
    stage.ask(0.3, max_tokens=100)
    rescuers: list[Any] = []
    begun: list[AgentHost] = []
    w = stage.w

    def kill(host: AgentHost) -> None:
        w.start = lambda kind: None  # type: ignore[method-assign]
        w.chaos.kill(host)

    def ran(script: str, process: Process) -> None:
        _note(w, rescuers, script, process)
        if early and script == "place" and not rescuers:
            (holder,) = w.fabric.of_pools().pools[POOL].law.at.values()
            kill(next(host for host in w.agents if host.replica == holder))

    w.ran = ran  # type: ignore[method-assign]
    w.submitted = lambda host, request: begun.append(host)  # type: ignore[method-assign]
    if not early:
        stage.at(1.0, lambda: kill(stage.producer()))
    stage.on_takeover(lambda stream: w.chaos.hang(rescuers[-1], 25.0))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (2, "completed")
    assert len(begun) == (1 if early else 2), "an engine made the ended stream again"
    attempts = [event for event in w.events.events if isinstance(event, AttemptTrace)]
    assert [each.ended for each in attempts if each.billed] == ["completed"]


@pytest.mark.parametrize("seed", range(4))
def test_a_rescuer_stands_still_and_then_places_a_stream_that_has_ended(seed: int) -> None:
    """The next rescuer's replica died too, so the stream was ended and billed. The queue's sweep bills the same."""
    stage = Stage(seed=seed)
    stage.ask(0.3, max_tokens=400)
    rescuers: list[Any] = []
    w, start = stage.w, stage.w.start

    def kill() -> None:
        w.start = lambda kind: None if kind is AgentHost else start(kind)  # type: ignore[method-assign]
        w.chaos.kill(stage.producer())

    w.ran = lambda script, process: _note(w, rescuers, script, process)  # type: ignore[method-assign]
    for at_s in (1.0, 8.0):
        stage.at(at_s, kill)
    stage.on_takeover(lambda stream: w.chaos.hang(rescuers[-1], 25.0))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (3, "failed")
    bills = [event for event in w.events.events if isinstance(event, AttemptTrace) and event.billed]
    assert len(bills) == 2 and bills[1].at_us - bills[0].at_us > 10e6


@pytest.mark.parametrize("seed", (7, 9, 10, 13))  # a look of a reaper is answered in each of the pauses
def test_failovers_in_a_row_leave_a_stream_with_its_living_replica(seed: int) -> None:
    """Redis answers for 50 ms between them, and each loses a renewal of the lease. No outage counts as time in which
    the replica could have renewed it."""
    stage = Stage(1, seed=seed)
    stage.ask(0.3, max_tokens=300)
    stage.at(1.19, stage.w.fabric.replicate)
    for at_s, down_s in ((1.2, 1.4), (2.65, 0.7), (3.4, 0.7)):
        stage.at(at_s, partial(_fail_over, stage.w, down_s))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (1, "completed")


@pytest.mark.parametrize("after_s", (0.5, 2.0))
def test_a_replica_dies_after_redis_has_lost_everything(after_s: float) -> None:
    """The replica has given the pool its requests again, so another one goes on with them."""
    stage = Stage()
    for number in range(3):
        stage.ask(0.3, max_tokens=200 + number)
    stage.at(1.0, partial(_fail_over, stage.w, 0.3, everything=True))
    killed: list[AgentHost] = []

    def kill() -> None:
        killed.extend(host for host in stage.w.agents if host.alive and host.agent is not None and host.agent.running)
        stage.w.chaos.kill(killed[0])

    stage.at(1.3 + after_s, kill)
    stage.run()
    states = [state for _, state in stage.w.fabric.streams()]
    assert [state.status for state in states] == ["completed"] * 3
    assert 2 in [state.epoch.n for state in states]


@pytest.mark.parametrize("deaths", (1, 2))
def test_redis_loses_everything_after_a_takeover(deaths: int) -> None:
    """The replica that goes on with the stream has read what came before, and writes it again."""
    stage = Stage(3)
    stage.ask(0.3, max_tokens=600)
    for number in range(deaths):
        stage.at(1.0 + 3.5 * number, lambda: stage.w.chaos.kill(stage.producer()))
    stage.at(8.0, partial(_fail_over, stage.w, 0.3, everything=True))
    state, end = stage.run()
    assert (state.epoch.n, end.status) == (1 + deaths, "completed")
    assert end.usage is not None and end.usage.output == 600
    (client,) = stage.w.clients
    assert not client.told


def _fail_over(world: World, down_s: float, *, everything: bool = False) -> None:
    for shard in world.fabric.shards:
        shard.fail_over(down_s, everything=everything)
    for host in world.hosts:
        if host.alive and host.link.subscriber is not None:
            host.link.subscriber.wake()
