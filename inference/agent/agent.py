"""The agent: takes requests from its replica's inbox, runs them on the engine, and pumps their frames to the log.

It dials out only. What it runs is its own list; leases, placement counts and the watchdog are told from it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict

import msgspec

from inference.agent.pump import Pump
from inference.agent.running import RunningStream
from stream_fabric.errors import EngineFailed, EngineLost, FabricUnavailable
from stream_fabric.frames import Note
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import ENDED_KEPT_S
from stream_fabric.log import UNIT, CreateCode, Head
from stream_fabric.ports import Engine
from stream_fabric.producer import Outcome
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.pool import ConnectionLost, Inbox, RedisPools, ReplicaInfo, ReplicaState, ReplyError, Work
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.subscriber import Subscriber, partition_channels

log = logging.getLogger(__name__)

_CHECK_S = 0.5
_VANISHED_S = 30.0
"""Readers whose gateway died get so long to come back elsewhere, whatever the stream's own grace."""
_ENDED_BYTES_MAX = 64 << 20
_INBOX_BLOCK_S = 1.0


class AgentPolicy(msgspec.Struct, frozen=True):
    pool: str
    engine: str
    models: tuple[str, ...]
    simulated: bool
    lease_ttl_s: float
    lease_renew_s: float
    room_ratio: float
    drain_s: float


class Agent:
    """Run with ``run``; ``drain`` makes it finish what runs and return."""

    def __init__(
        self, policy: AgentPolicy, replica: ReplicaId, engine: Engine, client: RedisClient, partitions: Partitions
    ) -> None:
        self.policy = policy
        self.replica = replica
        self._engine = engine
        self._client = client
        self._partitions = partitions
        self._log = RedisStreamLog(client, partitions, replica)
        self._pools = RedisPools(client)
        self._inbox = Inbox(client, policy.pool, replica)
        self.running: dict[StreamId, RunningStream] = {}
        self._ended: OrderedDict[StreamId, tuple[float, RunningStream]] = OrderedDict()
        self._ended_bytes = 0
        self._state: ReplicaState = "starting"
        self._draining = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._broken: EngineLost | None = None
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Serve until drained. Raises FabricUnavailable when Redis is out of reach at the start, and EngineFailed once
        the engine can serve no more; its streams have then been ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._pump = Pump(self._log, tasks, self._on_outcome)
                subscriber = Subscriber(
                    self._client,
                    partition_channels(self.replica, self._partitions.slots),
                    self._on_doorbell,
                    lambda names: None,  # a doorbell missed meanwhile is found by the check
                )
                background = [
                    tasks.create_task(subscriber.run(), name="doorbell"),
                ]
                await subscriber.wait_ready()
                self._state = "ready"
                await self._renew()
                background += [
                    tasks.create_task(self._renew_loop(), name="renew"),
                    tasks.create_task(self._check_loop(), name="check"),
                    tasks.create_task(self._inbox_loop(), name="inbox"),
                    tasks.create_task(self._watch_engine(), name="engine"),
                ]
                self.ready.set()
                await self._draining.wait()
                await self._finish()
                for task in background:
                    task.cancel()
        finally:
            self._inbox.close()
            await self._engine.close()
        if self._broken is not None:
            raise self._broken

    async def _watch_engine(self) -> None:
        """An engine that fails as a whole tells its requests nothing: they are ended here, and the replica leaves."""
        try:
            await self._engine.serving()
        except Exception as error:  # the engine is a guest: whatever it dies of, its streams get their terminals
            log.exception("the engine failed")
            self._broken = EngineLost(f"the engine failed: {error!r}")
            for stream in list(self.running.values()):
                stream.fail(self._broken)
            self._draining.set()

    def drain(self) -> None:
        """Take nothing new, finish what runs within the grace, leave."""
        self._draining.set()

    # --- requests ------------------------------------------------------------------------------------------

    async def _inbox_loop(self) -> None:
        while True:
            try:
                entries = await self._inbox.read(_INBOX_BLOCK_S)
                for _, work in entries:
                    self._start(work)
                if entries:
                    await self._inbox.done([entry_id for entry_id, _ in entries])
            except (ConnectionLost, ReplyError, FabricUnavailable) as error:
                log.warning("the inbox cannot be read: %s", error)
                await asyncio.sleep(0.05)
                await self._client.refresh()

    def _start(self, work: Work) -> None:
        stream = work.request.stream
        if stream in self.running or stream in self._ended:  # read again, because its deletion was lost
            return
        running = RunningStream(work, self._log.partition(stream), self._pump.dirty, self._engine.abort)
        self.running[stream] = running
        # The first append also asks whether the stream exists and has not been cancelled
        running.frame(Note("started"))
        if self._broken is not None:
            running.fail(self._broken)
            return
        try:
            self._engine.submit(work.request, running)
        except Exception as error:  # one request must not cost the others their agent
            log.exception("request %s cannot be given to the engine", stream)
            running.fail(EngineFailed(f"the engine failed at this request: {error!r}"))

    def _on_outcome(self, stream: RunningStream, outcome: Outcome) -> None:
        match outcome:
            case "ended":
                self._forget(stream, keep=True)
            case "stop":
                self._stop(stream)
            case "create":
                assert self._tasks is not None
                self._tasks.create_task(self._create_again(stream))

    def _stop(self, stream: RunningStream) -> None:
        """Somebody else ended the stream."""
        stream.closed = True
        self._engine.abort(stream.work.request.stream)
        self._forget(stream, keep=stream.producer.ended)

    def _forget(self, stream: RunningStream, *, keep: bool) -> None:
        name = stream.work.request.stream
        if self.running.pop(name, None) is None or not keep:
            return
        self._ended[name] = (asyncio.get_running_loop().time() + ENDED_KEPT_S, stream)
        self._ended_bytes += stream.producer.bytes_held
        while self._ended_bytes > _ENDED_BYTES_MAX:
            self._release(next(iter(self._ended)))

    def _release(self, name: StreamId) -> None:
        _, stream = self._ended.pop(name)
        self._ended_bytes -= stream.producer.bytes_held

    async def _create_again(self, stream: RunningStream) -> None:
        """The log lost the stream whole: make it again and send everything again."""
        work = stream.work
        try:
            code = await self._log.create(work.request.stream, work.parsed_epoch(), work.tenant, work.facts, None)
        except FabricUnavailable as error:
            log.warning("stream %s cannot be made again yet: %s", work.request.stream, error)
        else:
            if code in (CreateCode.TAKEN, CreateCode.CANCELLED):  # cancelled while it was lost, or another's by now
                stream.producer.stopped = True
                self._stop(stream)
                return
        self._pump.dirty(stream, True)

    # --- doorbell and watchdog -----------------------------------------------------------------------------

    def _on_doorbell(self, payload: bytes) -> None:
        what, name, epoch, at = payload.split(UNIT)
        stream = self.running.get(StreamId(name.decode()))
        if stream is None or stream.producer.epoch != epoch.decode():
            return
        match what:
            case b"cancel":
                stream.producer.receive_cancel(int(at))
                self._stop(stream)
            case b"fence":
                stream.producer.stopped = True
                self._stop(stream)
            case b"input":
                assert self._tasks is not None
                self._tasks.create_task(self._take_inputs(stream))

    async def _check_loop(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self._check()
            except FabricUnavailable as error:
                log.warning("the streams' heads cannot be read: %s", error)

    async def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._ended and next(iter(self._ended.values()))[0] < now:
            self._release(next(iter(self._ended)))
        by_partition: dict[int, list[RunningStream]] = {}
        for stream in [*self.running.values(), *(stream for _, stream in self._ended.values())]:
            by_partition.setdefault(stream.partition, []).append(stream)
        for partition, streams in by_partition.items():
            heads = await self._log.heads(partition, [s.work.request.stream for s in streams], None)
            for stream, head in zip(streams, heads, strict=True):
                await self._check_one(stream, head)

    async def _check_one(self, stream: RunningStream, head: Head | None) -> None:
        outcome = stream.producer.receive_head(head)
        if outcome:
            self._on_outcome(stream, outcome)
        elif stream.producer.pending:
            self._pump.dirty(stream, True)
        grace_s = stream.work.unwatched_s
        if head is None or head.status != "live" or not head.unwatched or grace_s is None:
            return
        if head.unwatched == "V":
            grace_s = max(grace_s, _VANISHED_S)
        if head.unwatched_ms >= grace_s * 1000:
            # Its answer comes by the doorbell; the script looks again whether nobody watches
            await self._log.cancel(stream.work.request.stream, stream.work.tenant, int(grace_s * 1000))

    async def _take_inputs(self, stream: RunningStream) -> None:
        try:
            inputs = await self._log.inputs(stream.work.request.stream)
        except FabricUnavailable as error:
            log.warning("inputs of %s cannot be read: %s", stream.work.request.stream, error)
            return
        for name, _ in inputs:
            if name not in stream.inputs_seen:
                stream.inputs_seen.add(name)
                body = msgspec.json.encode({"id": name, "result": "refused", "reason": "engine_takes_no_input"})
                stream.frame(Note("input", body=msgspec.Raw(body)))

    # --- lease ---------------------------------------------------------------------------------------------

    async def _renew_loop(self) -> None:
        while True:
            await asyncio.sleep(self.policy.lease_renew_s)
            try:
                await self._renew()
            except FabricUnavailable as error:
                log.warning("the lease cannot be renewed: %s", error)

    async def _renew(self) -> None:
        load = self._engine.load()
        policy = self.policy
        info = ReplicaInfo(self.replica, policy.pool, policy.engine, policy.models, self._state, load, policy.simulated)
        room = max(1, int(load.slots * policy.room_ratio))
        await self._pools.renew(info, policy.lease_ttl_s, room, list(self.running))

    async def _finish(self) -> None:
        """Drain: placement stops with the next renewal; what runs ends by itself or is handed back."""
        self._state = "draining"
        loop = asyncio.get_running_loop()
        try:
            await self._renew()
            deadline = loop.time() + self.policy.drain_s
            quiet_since = loop.time()
            # A request placed just before the renewal may still come in
            while loop.time() < deadline and loop.time() - quiet_since < _INBOX_BLOCK_S / 4:
                if self.running:
                    quiet_since = loop.time()
                await asyncio.sleep(0.02)
            for stream in list(self.running.values()):
                self._engine.abort(stream.work.request.stream)
            if not self.running:
                await self._pools.retire(self.policy.pool, self.replica, leaving=True)
        except FabricUnavailable as error:
            log.warning("left without telling the pool: %s", error)


def new_replica_id(name: str) -> ReplicaId:
    """A name that no earlier process had."""
    return ReplicaId(f"{name}-{int(time.time()):x}{secrets.token_hex(3)}")
