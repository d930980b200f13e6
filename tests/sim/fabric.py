"""Redis as the simulation has it: shards that fail over and lose what was not replicated, a network that loses and
delays, and behind them the law of streams and of pools. Every script that runs is watched by the ``Witness``."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from stream_fabric.accounts.account import AccountState
from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import COMMAND_TIMEOUT_S
from stream_fabric.redis.client import Partitions
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import StreamId, TenantId
from stream_fabric.stream.log import StreamState
from tests.sim.loop import Handle, Process
from tests.sim.memory_pools import MemoryPool
from tests.support.memory_log import MemoryStreamLog, MemoryUnbilled

if TYPE_CHECKING:
    from tests.sim.ports import SubscriberDoor
    from tests.sim.world import World

T = TypeVar("T")
PARTITIONS = Partitions(2)
QUEUE_MAX = 10
EPOCH_S = 1_700_000_000
"""When the world began, of unix time."""


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("it waits")


class Shard:
    """One Redis primary with an older copy of it. ``generation`` counts who has served."""

    def __init__(self, world: World, number: int) -> None:
        self.w = world
        self.number = number
        self.up = True
        self.generation = 0
        self.losses = 0
        self.ended: list[tuple[TenantId, StreamId, Usage]] = []
        """Reserved streams that the script which runs has ended."""
        self.log = MemoryStreamLog(
            PARTITIONS.count, self._publish, lambda: world.now_ms, on_ended=lambda *each: self.ended.append(each)
        )
        self.account = AccountState()
        """The account of the one tenant."""
        self.unbilled = MemoryUnbilled(self.log)
        self.pools: dict[str, MemoryPool] = {}
        self.keys: dict[str, str] = {}
        self.settled: dict[StreamId, list[Usage]] = {}
        """Usage counted for the tenant at each settlement."""
        self.deleted: dict[StreamId, StreamState] = {}
        """Streams whose content is deleted, as they were before."""
        self.listening: dict[str, tuple[int, Callable[[bytes], None], Process]] = {}
        """Peer → the generation its subscription was made in, and who hears."""
        self.blocked: dict[str, list[Callable[[], None]]] = {}
        """Replica → who waits at its inbox."""
        self._kept = self._saved()

    def _saved(self) -> bytes:
        log = self.log
        parts = log.streams, log.pending, log._models, log.unbilled, self.pools, self.keys, self.settled, self.account
        return pickle.dumps(parts)

    def _load(self, saved: bytes) -> None:
        log = self.log
        parts = pickle.loads(saved)
        log.streams, log.pending, log._models, log.unbilled, self.pools, self.keys, self.settled, self.account = parts

    def replicate(self) -> None:
        if self.up:
            self._kept = self._saved()

    def fail_over(self, down_s: float, *, everything: bool = False) -> None:
        """The primary dies with what it did not replicate; after a while the replica serves."""
        if not self.up:
            return
        self.up = False
        self.generation += 1
        self.losses += 1
        before = self.log.streams
        if everything:
            self.log.streams, self.log.pending, self.log._models, self.log.unbilled = {}, {}, {}, {}
            self.pools, self.keys, self.settled, self.account = {}, {}, {}, AccountState()
        else:
            self._load(self._kept)
        self._kept = self._saved()
        self.blocked.clear()
        self.w.note(f"shard {self.number} {'loses everything' if everything else 'fails over'} for {down_s:.2f} s")
        self.w.witness.saw_loss(before, self.log.streams)
        self.w.after(down_s, self._serve)

    def _serve(self) -> None:
        self.up = True

    def pool(self, name: str) -> MemoryPool:
        if name not in self.pools:
            self.pools[name] = MemoryPool(QUEUE_MAX)
        return self.pools[name]

    def _publish(self, peer: str, payload: bytes) -> bool:
        generation, receive, owner = self.listening.get(peer, (-1, None, None))
        if generation != self.generation or receive is None or owner is None:
            return False
        self.w.network.publish(peer, owner, receive, payload)
        return True

    def wake(self, replica: str) -> None:
        """Something has come into the replica's inbox."""
        for read in self.blocked.pop(replica, ()):
            read()


class Fabric:
    def __init__(self, world: World, shards: int) -> None:
        self.shards = [Shard(world, number) for number in range(shards)]

    def of_partition(self, partition: int) -> Shard:
        return self.shards[partition % len(self.shards)]

    def of_pools(self) -> Shard:
        return self.shards[-1]

    def replicate(self) -> None:
        for shard in self.shards:
            shard.replicate()

    @property
    def losses(self) -> int:
        return sum(shard.losses for shard in self.shards)

    def streams(self) -> Iterable[tuple[StreamId, StreamState]]:
        """Every stream; one whose content is deleted as it was before."""
        for shard in self.shards:
            for name, state in shard.log.streams.items():
                yield name, shard.deleted[name] if state.forgotten else state

    def state(self, stream: StreamId) -> StreamState | None:
        return dict(self.streams()).get(stream)

    def is_deleted(self, stream: StreamId) -> bool:
        return any(stream in shard.deleted for shard in self.shards)

    def settled(self, stream: StreamId) -> list[Usage]:
        return [usage for shard in self.shards for usage in shard.settled.get(stream, ())]


class Network:
    """Between processes and shards."""

    def __init__(self, world: World) -> None:
        self.w = world
        self.latency_s = 0.0
        """One way to the shards or back, beside what is drawn."""
        self._heard: dict[str, float] = {}

    def unlucky(self) -> bool:
        w = self.w
        return "flaky" in w.faults and w.loop.now < w.faults_end_s and w.random.random() < 0.1

    def publish(self, peer: str, owner: Process, receive: Callable[[bytes], None], payload: bytes) -> None:
        w = self.w
        if "drop" in w.faults and w.loop.now < w.faults_end_s:
            for _ in range(w.random.choice((0, 1, 1, 1, 2))):
                w.loop.at(w.random.uniform(0.0002, 0.004), owner, receive, payload)
            return
        # One connection keeps the order
        at_s = max(w.loop.now + w.random.uniform(0.0002, 0.004), self._heard.get(peer, 0.0))
        self._heard[peer] = at_s
        w.loop.at(at_s - w.loop.now, owner, receive, payload)


class Link:
    """One process's way to the shards, as ``RedisClient`` is: a command is sent again until its deadline, and what
    became of one without an answer is unknown. Of those to one shard on one connection the order is kept."""

    def __init__(self, world: World, process: Process) -> None:
        self.w = world
        self.process = process
        self.stalled_until = 0.0
        """Out of the shards' reach until then."""
        self.subscriber: SubscriberDoor | None = None
        self._arrives: dict[tuple[int, bool], float] = {}
        self._returns: dict[tuple[int, bool], float] = {}

    async def refresh(self) -> None:
        """The topology does not change here."""

    async def execute(self, slot: int, *args: str) -> tuple[int, int]:
        """The one command that is no script and asked for by itself."""
        assert args == ("TIME",)
        seconds, ms = divmod(await self.call("time", self.w.fabric.of_pools(), lambda: self.w.now_ms), 1000)
        return EPOCH_S + seconds, ms * 1000

    def open_connection(self, slot: int) -> None: ...

    @property
    def stalled(self) -> bool:
        return self.w.loop.now < self.stalled_until

    def call(
        self,
        name: str,
        shard: Shard,
        step: Callable[[], T],
        timeout_s: float = COMMAND_TIMEOUT_S,
        *,
        dedicated: bool = False,
    ) -> asyncio.Future[T]:
        """Run a script there; the awaited future raises FabricUnavailable. ``name`` is the script's. ``dedicated``: on
        the connection of the inbox."""
        w, loop, r = self.w, self.w.loop, self.w.random
        future: asyncio.Future[T] = loop.create_future()
        if loop.closing:
            future.set_exception(FabricUnavailable("it is over"))
            return future
        deadline = loop.now + timeout_s
        connection = shard.number, dedicated

        def send() -> None:
            if not future.done():
                loop.at(self._delay(self._arrives, connection, 0.004), loop.outside, arrive, shard.generation)

        def arrive(generation: int) -> None:
            if self.stalled or not shard.up or generation != shard.generation or w.network.unlucky():
                loop.at(r.uniform(0.01, 0.1), self.process, again)
                return
            result = step()
            w.ran(name, self.process)
            if w.network.unlucky():
                loop.at(r.uniform(0.01, 0.1), self.process, again)  # done, and nobody knows
                return
            slow = r.choice((0.004, 0.004, 0.03))
            loop.at(self._delay(self._returns, connection, slow), self.process, answered, generation, result)

        def answered(generation: int, result: T) -> None:
            if generation != shard.generation:
                again()
            elif not future.done():
                future.set_result(result)

        def again() -> None:
            if future.done():
                return
            if loop.now > deadline:
                future.set_exception(FabricUnavailable(f"{name}: no answer in time"))
            else:
                send()

        send()
        return future

    def _delay(self, last: dict[tuple[int, bool], float], connection: tuple[int, bool], most_s: float) -> float:
        now = self.w.loop.now
        at_s = max(now + self.w.network.latency_s + self.w.random.uniform(0.0002, most_s), last.get(connection, 0.0))
        last[connection] = at_s
        return at_s - now

    def blocking(self, shard: Shard, key: str, step: Callable[[], list[T]], block_s: float) -> asyncio.Future[list[T]]:
        """Like a blocking read on a connection of its own; the awaited future raises FabricUnavailable."""
        loop = self.w.loop
        future: asyncio.Future[list[T]] = loop.create_future()
        if loop.closing:
            future.set_exception(FabricUnavailable("it is over"))
            return future
        generation = shard.generation
        gives_up: list[Handle] = []

        def arrive() -> None:
            if self.stalled or not shard.up or generation != shard.generation:
                loop.at(0.05, self.process, lost)
                return
            found = step()
            if found:
                answer(found)
                return
            shard.blocked.setdefault(key, []).append(woken)
            gives_up.append(loop.at(block_s, loop.outside, waited))

        def woken() -> None:
            if gives_up:
                gives_up.pop().cancel()
            found = step()
            if self.process.alive:
                answer(found)

        def waited() -> None:
            waiting = shard.blocked.get(key, [])
            if woken in waiting:
                waiting.remove(woken)
            answer([])

        def answer(found: list[T]) -> None:
            loop.at(self.w.random.uniform(0.0002, 0.004), self.process, answered, found)

        def answered(found: list[T]) -> None:
            if self.stalled or generation != shard.generation:
                lost()
            elif not future.done():
                future.set_result(found)

        def lost() -> None:
            if not future.done():
                future.set_exception(FabricUnavailable("the connection ended"))

        loop.at(self.w.random.uniform(0.0002, 0.004), loop.outside, arrive)
        return future
