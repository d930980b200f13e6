"""The agent: takes requests from its replica's inbox, runs them on the engine, and pumps their frames to the log.

It dials out only. What it runs is its own list; leases, placement's counts and the watchdog are told from it. A stream
that its engine fails goes to another replica (``stream_fabric.redis.rescue``), and one that comes from another is
continued from what its log holds (``inference.agent.continuation``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any

import msgspec

from inference.agent.chronicle import Chronicle
from inference.agent.continuation import CannotContinue, ContinuingSink, Said, continued, may_continue, said, spent
from inference.agent.lease import Lease, LeasePolicy
from inference.agent.meter import BreakerState
from inference.agent.pump import Pump
from inference.agent.running import RunningStream
from inference.agent.sleeper import Sleeper
from inference.agent.times import EachTime, Times
from inference.agent.tries import Tries
from stream_fabric.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineLost,
    FabricUnavailable,
    ReplicaLost,
    StreamGwError,
)
from stream_fabric.events import AttemptEnd, sampled
from stream_fabric.frames import ChoiceEnd, Close, ErrorInfo, Note, Usage
from stream_fabric.herald import Herald
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import ATTEMPTS_MAX, ENDED_KEPT_S
from stream_fabric.log import UNIT, CreateCode, Head
from stream_fabric.placement import ReplicaState
from stream_fabric.ports import Engine, EngineRequest, EventSink, FrameSink, SleepLevel
from stream_fabric.producer import Outcome
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.pool import DESIRE, Arrival, ConnectionLost, Inbox, RedisPools, ReplyError, Work
from stream_fabric.redis.reaper import LOST
from stream_fabric.redis.rescue import Rescue, Witness
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.subscriber import Subscriber, partition_channels

log = logging.getLogger(__name__)

_CHECK_S = 0.5
_VANISHED_S = 30.0
"""Readers whose gateway died get so long to come back elsewhere, whatever the stream's own grace."""
_ENDED_BYTES_MAX = 64 << 20
_INBOX_BLOCK_S = 1.0
_RETRY_S = 0.25
_TAKEN_S = 1.0
"""From a takeover to its placement at most, unless who took it over has died."""
_LOST_CODES = frozenset({EngineLost.code, "upstream_truncated"})
"""Failures that are the replica's, not the request's: another may do better."""


class AgentPolicy(msgspec.Struct, frozen=True):
    lease: LeasePolicy
    lease_renew_s: float
    drain_s: float
    standby: bool = False
    """Join the pool warm, and take requests only once an operator or a controller activates the replica."""
    trace_tokens_one_in: int = 0
    """Of one try in so many each token's time is told; 0: of none."""


class Agent:
    """Run with ``run``; ``drain`` makes it finish what runs, hand over what does not end in time, and return; ``hurry``
    thereafter makes it wait for nothing."""

    def __init__(
        self,
        policy: AgentPolicy,
        replica: ReplicaId,
        engine: Engine,
        client: RedisClient,
        partitions: Partitions,
        sink: EventSink,
    ) -> None:
        self.policy = policy
        self.replica = replica
        self._engine = engine
        self._client = client
        self._partitions = partitions
        self._log = RedisStreamLog(client, partitions, replica)
        self._pools = RedisPools(client)
        self._clock = FabricClock(client)
        self._tries = Tries(sink, self._clock, replica, policy.lease)
        self._rescue = Rescue(self._pools, self._log, Witness(sink, self._clock, self._log))
        self._inbox = Inbox(client, policy.lease.pool, replica)
        self.running: dict[StreamId, RunningStream] = {}
        self._ended: OrderedDict[StreamId, tuple[float, RunningStream]] = OrderedDict()
        self._ended_bytes = 0
        self._leaving: set[RunningStream] = set()
        """Streams that another has taken: on our list, where the pool finds them, until they are on another's."""
        self._started = False
        self._active = not policy.standby
        self._draining = asyncio.Event()
        self._hurried = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._chronicle = Chronicle(
            Herald(sink, self._clock, "agent"),
            policy.lease.pool,
            replica,
            policy.lease.ttl_s,
            standby=policy.standby,
        )
        self._lease = Lease(
            policy.lease,
            replica,
            engine,
            self._pools,
            self.running.values,
            lambda: self.state,
            self._on_desired,
            self._spawn,
            self._chronicle,
            lambda: (self._sleeper.wake_s, self._sleeper.refused),
        )
        self._sleeper = Sleeper(engine, self._is_free, self._renew_once, self._chronicle.receive_woken, self._lose)
        self._broken: EngineLost | None = None
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Serve until drained. Raises FabricUnavailable when Redis is out of reach at the start, and EngineLost once
        the engine can serve no more; its streams are then elsewhere, or have been ended."""
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
                    tasks.create_task(self._clock.run(), name="clock"),
                ]
                await subscriber.wait_ready()
                self._started = True
                if asleep := self._engine.load().asleep:  # a server by URL, left so by the agent before us
                    self._sleeper.want(None if self._active else (1 if asleep == 1 else 2))
                await self._lease.renew()
                background += [
                    tasks.create_task(self._renew_loop(), name="renew"),
                    tasks.create_task(self._check_loop(), name="check"),
                    tasks.create_task(self._inbox_loop(), name="inbox"),
                    tasks.create_task(self._watch_engine(), name="engine"),
                    tasks.create_task(self._sleeper.run(), name="sleeper"),
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
        """An engine that fails as a whole tells its requests nothing: they go elsewhere, and the replica leaves."""
        try:
            await self._engine.serving()
        except Exception as error:  # the engine is a guest: whatever it dies of, its streams are looked after
            log.exception("the engine failed")
            self._lose(EngineLost(f"the engine failed: {error!r}"))

    def _lose(self, error: EngineLost) -> None:
        """The engine serves no more."""
        self._broken = self._broken or error
        self._drain("", "its engine failed")

    def drain(self, asked_by: str = "SIGTERM") -> None:
        """Take nothing new, finish what runs within the grace, hand over the rest, leave."""
        self._drain(asked_by)

    def _drain(self, asked_by: str, reason: str = "") -> None:
        if not self._draining.is_set():
            self._chronicle.receive_wish("draining", asked_by, reason)
            self._draining.set()

    def hurry(self) -> None:
        """What runs does not get the grace that it was to have."""
        self._hurried.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    # --- requests ------------------------------------------------------------------------------------------

    async def _inbox_loop(self) -> None:
        while True:
            try:
                entries = await self._inbox.read(_INBOX_BLOCK_S)
                for arrival in entries:
                    self._start(arrival)
                if entries:
                    await self._inbox.done([(arrival.entry, arrival.stream) for arrival in entries])
            except (ConnectionLost, ReplyError, FabricUnavailable) as error:
                log.warning("the inbox cannot be read: %s", error)
                await asyncio.sleep(0.05)
                await self._client.refresh()

    def _start(self, arrival: Arrival) -> None:
        name, work = arrival.stream, arrival.work
        if work is None:
            log.error("the work of %s cannot be read; do gateways and agents run the same version?", name)
            self._spawn(self._give_up(name, EngineFailed("this replica cannot read the request; ask again")))
            return
        held = self.running.get(name) or self._ended.get(name, (0.0, None))[1]
        if held is not None:
            if held.work.epoch == work.epoch or held.work.parsed_epoch().n > work.parsed_epoch().n:
                # Read again, because its deletion was lost; or placed again after its end, because the answer was
                if name not in self.running:
                    self._lease.say_ended(name)
                return
            if name in self.running:  # taken from here and given back before that was done with
                held.producer.stopped = True
                self._stop(held)
        one_in = self.policy.trace_tokens_one_in
        kind = EachTime if one_in and sampled(name, one_in) else Times
        times = kind(arrival.waited_us, arrival.handed_us, self._clock.now_us())
        stream = RunningStream(work, self._log.partition(name), self._pump.dirty, self, self._loop.time(), times)
        self.running[name] = stream
        self._lease.receive_start(stream)
        if work.base:
            self._spawn(self._take_over(stream))
            return
        if self._in_time(stream):
            # The first append also asks whether the stream exists and has not been cancelled
            stream.frame(self._started_note(work))
            self._submit(stream, work.request, stream)

    def _started_note(self, work: Work) -> Note:
        told = {"replica": self.replica, "attempt": work.attempt}
        return Note("started", body=msgspec.Raw(msgspec.json.encode(told)))

    def _submit(self, stream: RunningStream, request: EngineRequest, sink: FrameSink) -> None:
        if self._broken is not None:
            self._hand_over(stream, self._broken)
            return
        if self._sleeper.state is not None:  # a failover of the fabric's can bring one here all the same
            self._hand_over(stream, EngineLost("the replica's engine sleeps"))
            return
        try:
            self._engine.submit(request, sink)
        except Exception as error:  # one request must not cost the others their agent
            log.exception("request %s cannot be given to the engine", request.stream)
            stream.fail(EngineFailed(f"the engine failed at this request: {error!r}"))

    async def _give_up(
        self, stream: StreamId, error: StreamGwError, epoch: Epoch | None = None, work: Work | None = None
    ) -> None:
        """The log knows what has been used of a stream that this replica has not begun."""
        await self._until_done(self._rescue.end, self.policy.lease.pool, self.replica, stream, error, epoch, work)

    def _in_time(self, stream: RunningStream) -> bool:
        """Whether it is not too late to begin; from then on its deadline is minded."""
        if stream.work.request.deadline_unix_ms:
            left_s = stream.work.request.deadline_unix_ms / 1000 - time.time()
            if left_s <= 0:
                self._overdue(stream)
                return False
            stream.deadline = self._loop.call_later(left_s, self._overdue, stream)
        return True

    def _overdue(self, stream: RunningStream) -> None:
        if not stream.closed and self.running.get(stream.work.request.stream) is stream:
            stream.fail(DeadlineExceeded("the request's deadline has passed"))
            self._engine.abort(stream.work.request.stream)

    def _on_outcome(self, stream: RunningStream, outcome: Outcome) -> None:
        match outcome:
            case "ended":
                self._forget(stream, keep=True)
            case "stop":
                self._stop(stream)
            case "fenced":
                self._let_go(stream)
            case "create":
                self._spawn(self._create_again(stream))

    def _stop(self, stream: RunningStream) -> None:
        """Somebody else ended the stream, or it cannot go on here."""
        stream.closed = True
        name = stream.work.request.stream
        if self.running.get(name) is stream:  # it may have come back, and the engine is at it again
            self._engine.abort(name)
        if stream.work.base and not stream.producer.ended:
            # It may be ours still: the log lost what was before our epoch, which we cannot make again
            epoch = stream.work.parsed_epoch()
            self._spawn(self._fence(name, epoch))
        self._forget(stream, keep=stream.producer.ended)

    async def _fence(self, stream: StreamId, epoch: Epoch) -> None:
        await self._until_done(self._log.fence, stream, None, secrets.token_hex(4), ErrorInfo.of(LOST), epoch)

    def _forget(self, stream: RunningStream, *, keep: bool, listed: bool = True) -> None:
        if stream.deadline is not None:  # or it would keep the stream, for hours
            stream.deadline.cancel()
        name = stream.work.request.stream
        if self.running.get(name) is not stream:
            return
        stream.times.receive_end()
        self._tries.tell(stream, _ended_as(stream), self._lease.batch_of(stream))
        del self.running[name]
        self._lease.receive_end(stream, whole=keep, listed=listed)
        if not keep:
            return
        self._ended[name] = (self._loop.time() + ENDED_KEPT_S, stream)
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
            code = await self._log.create(
                work.request.stream, work.parsed_epoch(), work.tenant, work.facts, None, work.request.model
            )
        except FabricUnavailable as error:
            log.warning("stream %s cannot be made again yet: %s", work.request.stream, error)
        else:
            if code in (CreateCode.TAKEN, CreateCode.CANCELLED):  # cancelled while it was lost, or another's by now
                stream.producer.stopped = True
                self._stop(stream)
                return
        self._pump.dirty(stream, True)

    # --- to and from other replicas ------------------------------------------------------------------------

    def on_failure(self, stream: RunningStream, error: ErrorInfo) -> bool:
        if error.http_status < 500:
            return False
        self._lease.receive_failure(error.code)
        if error.code not in _LOST_CODES or stream.work.attempt >= ATTEMPTS_MAX:
            return False
        structure = [line for _, line in stream.producer.structure]
        if stream.tokens and not may_continue(stream.work.request, structure):
            return False  # told at once, not after another replica has looked
        self._hand_over(stream, EngineLost(error.message))
        return True

    def _hand_over(self, stream: RunningStream, error: EngineLost | ReplicaLost) -> None:
        """Another replica goes on with the stream from what the log has of it."""
        if not stream.closed:
            stream.closed = stream.handed_over = True
            self._spawn(self._handed_over(stream, error))

    def _let_go(self, stream: RunningStream) -> None:
        """Somebody else has taken the stream, for this replica was thought dead, or has ended it."""
        name = stream.work.request.stream
        if self.running.get(name) is stream and stream not in self._leaving:
            stream.closed = True
            self._engine.abort(name)
            self._leaving.add(stream)
            self._spawn(self._let_gone(stream))

    async def _let_gone(self, stream: RunningStream) -> None:
        """Who took it may have died before it was on another's list: then it is still on ours, and ours to place."""
        await asyncio.sleep(_TAKEN_S)
        await self._handed_over(stream, LOST)
        if stream.work.base and not stream.producer.ended:
            # Or it is ours: the log lost our epoch, and what was before it we cannot make again
            await self._fence(stream.work.request.stream, stream.work.parsed_epoch())

    async def _handed_over(self, stream: RunningStream, error: EngineLost | ReplicaLost) -> None:
        name = stream.work.request.stream
        if self.running.get(name) is stream:
            self._engine.abort(name)

        async def rescue() -> None:
            if self.running.get(name) is stream:  # not ended meanwhile, nor here again in a newer epoch
                comes_back = self._broken is None and not self._draining.is_set()
                await self._rescue.rescue(self.policy.lease.pool, self.replica, name, error, comes_back=comes_back)

        done = await self._until_done(rescue)
        self._leaving.discard(stream)
        if done and self.running.get(name) is stream:
            stream.producer.stopped = True
            # The rescue has taken it off our list, and the pool may have given it back since: a report that calls it
            # ended, and is sent again for want of an answer, would take that from the pool, and the work with it
            self._forget(stream, keep=False, listed=False)

    async def _until_done(self, call: Any, *args: Any) -> bool:
        """Call until the fabric takes it. False: it has been away for longer than this replica's lease lives, and the
        process leaves; what is on its list is then others' to look after."""
        deadline = self._loop.time() + self.policy.lease.ttl_s * 2
        while True:
            try:
                await call(*args)
                return True
            except FabricUnavailable as error:
                log.warning("cannot be done yet: %s", error)
                if self._draining.is_set() and self._loop.time() > deadline:
                    return False
            await asyncio.sleep(_RETRY_S)

    async def _take_over(self, stream: RunningStream) -> None:
        """Go on with a stream of another replica's."""
        work = stream.work
        try:
            body = msgspec.json.decode(work.request.body, type=dict[str, msgspec.Raw])
            choices = int(msgspec.json.decode(body["n"]) or 1) if "n" in body else 1
            before = said(await self._lines_before(stream), choices)
            if stream.closed:  # cancelled meanwhile, or another's
                return
            stream.take_over(Usage(before.prompt_tokens or 0, output=before.tokens))
            if not self._in_time(stream):
                return
            if before.nothing:
                stream.frame(self._started_note(work))
                self._submit(stream, work.request, stream)
            elif before.complete or spent(work.request, before):
                self._complete(stream, before)
            else:
                request = continued(work.request, before)
                stream.frame(self._started_note(work))
                self._submit(stream, request, ContinuingSink(stream, before))
        except CannotContinue as why:
            error = ReplicaLost(f"the replica that produced this stream died, and {why}; ask again")
            await self._leave_be(stream, error)
        except FabricUnavailable as away:
            self._hand_over(stream, ReplicaLost(away.message))
        except Exception as fault:  # one request must not cost the others their agent
            log.exception("stream %s cannot be taken over", work.request.stream)
            await self._leave_be(stream, EngineFailed(f"the replica failed at continuing this request: {fault!r}"))

    async def _leave_be(self, stream: RunningStream, error: StreamGwError) -> None:
        """End a stream that cannot be taken over."""
        if not stream.closed:
            stream.closed = True
            await self._give_up(stream.work.request.stream, error, stream.work.parsed_epoch(), stream.work)
            stream.producer.stopped = True
            self._forget(stream, keep=False)

    def _complete(self, stream: RunningStream, before: Said) -> None:
        if not before.complete:
            stream.frame(Close(before.block))
            stream.frame(ChoiceEnd(0, "length"))
        stream.end("completed")

    async def _lines_before(self, stream: RunningStream) -> list[bytes]:
        """The stream's frames up to its new epoch. Raises FabricUnavailable or CannotContinue."""
        lines: list[bytes] = []
        after = BEGINNING
        while len(lines) < stream.work.base:
            page = await self._log.watch(stream.work.request.stream, stream.work.tenant, None, after)
            if page is None or not page.entries or page.entries[0].first != len(lines) + 1:
                raise CannotContinue("what it had said is lost")
            for entry in page.entries:
                lines += entry.frames.split(b"\n")
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)
        return lines[: stream.work.base]

    # --- what the engine tells -----------------------------------------------------------------------------

    def on_first_token(self, stream: RunningStream) -> None:
        self._lease.receive_first_token(stream)

    def on_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None:
        self._lease.receive_prompt(stream, tokens, cached)

    def on_too_large(self, stream: RunningStream) -> None:
        self._engine.abort(stream.work.request.stream)

    # --- doorbell and watchdog -----------------------------------------------------------------------------

    def _on_doorbell(self, payload: bytes) -> None:
        if payload == DESIRE:
            self._lease.report_soon()
            return
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
                self._let_go(stream)
            case b"input":
                self._spawn(self._take_inputs(stream))

    async def _check_loop(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                await self._check()
            except FabricUnavailable as error:
                log.warning("the streams' heads cannot be read: %s", error)

    async def _check(self) -> None:
        now = self._loop.time()
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

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def sleeper(self) -> Sleeper:
        return self._sleeper

    @property
    def breaker_state(self) -> BreakerState:
        return self._lease.breaker.state(self._loop.time())

    @property
    def state(self) -> ReplicaState:
        if not self._started:
            return "starting"
        if self._draining.is_set():
            return "draining"
        if (resting := self._sleeper.state) is not None:
            return resting
        if not self._engine.load().ready:
            return "warming"
        return "ready" if self._active else "warm"

    async def _renew_loop(self) -> None:
        pause_s = self.policy.lease_renew_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = self.policy.lease_renew_s
            self._sleeper.look()
            try:
                await self._lease.renew()
            except FabricUnavailable as error:
                log.warning("the lease cannot be renewed: %s", error)
                pause_s = min(pause_s, _RETRY_S)  # who renews late after an outage is taken for dead

    def _on_desired(self, wish: str, asked_by: str) -> None:
        level: SleepLevel | None = None
        state: ReplicaState
        match wish:
            case "draining":
                self.drain(asked_by)
                return
            case "warm" | "ready":
                state = "warm" if wish == "warm" else "ready"
            case "sleeping:1" | "sleeping:2":
                state, level = "sleeping", 1 if wish == "sleeping:1" else 2
            case _:  # of a newer controller
                return
        if (state == "ready", level) == (self._active, self._sleeper.wanted):
            return
        self._chronicle.receive_wish(state, asked_by)
        self._active = state == "ready"  # of one that is not, what runs goes on, and nothing comes
        self._sleeper.want(level)
        self._spawn(self._renew_once())

    async def _is_free(self) -> bool:
        """Whether nothing is here, nor on its way: asked after the pool has heard that this replica takes nothing."""
        if self.running:
            return False
        await self._lease.renew()
        return not self.running and not await self._pools.in_flight(self.policy.lease.pool, self.replica)

    async def _renew_once(self) -> None:
        """Placement is to know at once."""
        try:
            await self._lease.renew()
        except FabricUnavailable as error:
            log.warning("the lease cannot be renewed: %s", error)  # the next renewal tells it

    async def _finish(self) -> None:
        """Placement stops with the next report; what runs ends by itself or goes elsewhere."""
        try:
            await self._lease.renew()
        except FabricUnavailable as error:
            log.warning("the pool cannot be told yet: %s", error)  # the next renewals try again
        grace_s = 0.0 if self._broken is not None else self.policy.drain_s
        await self._until_quiet(self._loop.time() + grace_s, self._hurried)
        lost = self._broken or ReplicaLost("the replica that produced this stream went away; ask again")
        for stream in list(self.running.values()):
            if not stream.producer.status:
                self._hand_over(stream, lost)
        await self._until_quiet(self._loop.time() + self.policy.lease.ttl_s)
        try:
            await self._lease.renew()
            if await self._pools.retire(self.policy.lease.pool, self.replica, leaving=True):
                self._chronicle.receive_gone(len(self.running))
        except FabricUnavailable as error:
            log.warning("left without telling the pool: %s", error)

    async def _until_quiet(self, deadline: float, unless: asyncio.Event | None = None) -> None:
        """A request placed just before the pool heard that this replica leaves may still come in."""
        quiet_since = self._loop.time()
        while self._loop.time() < deadline and self._loop.time() - quiet_since < _INBOX_BLOCK_S / 4:
            if unless is not None and unless.is_set():
                break
            if self.running:
                quiet_since = self._loop.time()
            await asyncio.sleep(0.02)


def _ended_as(stream: RunningStream) -> AttemptEnd:
    producer = stream.producer
    if producer.ended and producer.status:
        return producer.status
    return "handed_over" if stream.handed_over else "lost"


def new_replica_id(name: str) -> ReplicaId:
    """A name that no earlier process had."""
    return ReplicaId(f"{name}-{int(time.time()):x}{secrets.token_hex(3)}")
