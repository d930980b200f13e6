"""An agent between a real Redis and an engine that fails: nobody is left without a terminal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from inference.agent.agent import Agent
from inference.agent.continuation import CannotContinue
from inference.agent.log_check import Doorbell
from inference.agent.replica import AgentPolicy, LeasePolicy
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.errors import DeadlineExceeded, EngineFailed, EngineLost, FabricUnavailable, ReplicaLost
from stream_fabric.events import AttemptTrace, Prices
from stream_fabric.limits import ATTEMPTS_MAX, PAGE_ENTRIES_MAX
from stream_fabric.pool.lease_changes import decode_summary
from stream_fabric.pool.overload import NO_OVERLOAD_TERMS, YIELD_MS, OverloadTerms
from stream_fabric.pool.placement import BATCH_TIER, Placed, Queued
from stream_fabric.pool.records import Candidate, EngineLoad, EngineRequest, Work
from stream_fabric.ports import Clock, FrameSink, SleepLevel
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.recovery.lease_reaper import LOST, SEEN_DEAD_S, LeaseReaper
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.clock import FabricClock
from stream_fabric.redis.pools import RedisPools, pool_prefix, pool_slot
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.tenancy.unbilled import RedisUnbilled
from stream_fabric.redis_url import RedisUrl
from stream_fabric.stream.cursor import BEGINNING, Cursor, Epoch
from stream_fabric.stream.frames import Delta, End, ErrorInfo, Open, Usage, decode, encode, encode_text
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId, new_stream_id
from stream_fabric.stream.log import Append
from tests.support.agents import make_agent
from tests.support.events import Heard
from tests.support.proxy import Proxy
from tests.support.waiting import eventually

ACME = TenantId("acme")
PARTITIONS = Partitions(4)
PRICES = Prices(1_000_000, 500_000, 2_000_000)  # a micro-unit a prompt token, two an output token


class Fragile(SimEngine):
    """A simulator that can be broken as a whole or lose one request, fails at requests of model ``poison``, ends those
    of ``sick`` as failed and never answers ``mute``."""

    def __init__(self, settings: SimSettings) -> None:
        super().__init__(settings)
        self.told: list[tuple[str, StreamId]] = []
        """Calls in order."""
        self.slept = 0
        self.refuses: ErrorInfo | None = None
        """Error of every request; None: it serves requests."""
        self.sleep_error: EngineFailed | None = None
        self.wake_error: EngineFailed | None = None
        self._away = False

    async def sleep(self, level: SleepLevel) -> bool:
        self.slept += 1
        if self.sleep_error is not None:
            raise self.sleep_error
        return await super().sleep(level)

    async def wake(self) -> None:
        if self.wake_error is not None:
            self._away, self._asleep = True, 0
            raise self.wake_error
        await super().wake()

    def start_again(self) -> None:
        self._away, self._asleep = False, 0

    def load(self) -> EngineLoad:
        found = super().load()
        return msgspec.structs.replace(found, ready=False) if self._away else found

    def break_down(self) -> None:
        self.replica.step = None  # type: ignore[assignment,method-assign]
        self._work.set()

    def lose(self, stream: StreamId) -> None:
        self._requests[stream].sink.end("failed", ErrorInfo.of(EngineLost("the engine lost this one")))

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        self.told.append(("submit", request.stream))
        if self.refuses is not None:
            sink.end("failed", self.refuses)
            return
        if request.model == "poison":
            raise RuntimeError("never seen such a request")
        if request.model == "mute":
            return
        if request.model == "sick":
            sink.end("failed", ErrorInfo("engine_error", "not well", http_status=502))
            return
        super().submit(request, sink)

    def abort(self, stream: StreamId) -> None:
        self.told.append(("abort", stream))
        super().abort(stream)


class Bench:
    def __init__(self, client: RedisClient, pool: str, agent: Agent, engine: Fragile, heard: Heard) -> None:
        self.client = client
        self.heard = heard
        self.log = RedisStreamLog(client, PARTITIONS)
        self.unbilled = RedisUnbilled(client, PARTITIONS)
        self.pools = RedisPools(client)
        self.pool = pool
        self.agent = agent
        self.engine = engine
        self.yielding: asyncio.Task[None] | None = None

    async def ask(
        self,
        *,
        model: str = "sim-small",
        max_tokens: int = 100_000,
        prompt: list[int] | None = None,
        min_tokens: object = None,
        n: object = None,
        deadline_s: float = 0.0,
        prefix: bytes = b"",
        gateway: GatewayId | None = None,
        unwatched_s: float | None = None,
        tier: int = 1,
        terms: OverloadTerms = NO_OVERLOAD_TERMS,
    ) -> StreamId:
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        asked = {"messages": [{"role": "user", "content": "Hi"}]} if prompt is None else {"prompt": prompt}
        body = msgspec.json.encode({**asked, "max_tokens": max_tokens, "min_tokens": min_tokens, "n": n})
        deadline_unix_ms = int((time.time() + deadline_s) * 1000) if deadline_s else 0
        request = EngineRequest(
            stream, "chat" if prompt is None else "completions", model, msgspec.Raw(body), deadline_unix_ms
        )
        work = Work(request, str(Epoch(1, "aa")), ACME, b"{}", unwatched_s, tier, prefix=prefix, prices=PRICES)
        await self.log.create(stream, work.parsed_epoch(), ACME, b"{}", gateway)
        await self.place(work, terms)
        return stream

    async def place(self, work: Work, terms: OverloadTerms = NO_OVERLOAD_TERMS) -> None:
        """Into the agent's inbox."""
        candidates = [Candidate(self.agent.replica, 0)]
        reply = await self.pools.place(self.pool, work, candidates, wait_s=60, jitter=0.0, terms=terms)
        assert isinstance(reply, Placed)

    async def yields(self, stream: StreamId, *, tokens: int = 20, waiting: int = 1) -> None:
        """The stream yields to so many requests when it has so many tokens; the pool yields until batch may run."""
        await eventually(lambda: _above(self, stream, tokens), "tokens")
        if self.yielding is None:
            self.yielding = asyncio.create_task(self._keep_yielding())
        await eventually(self._pool_yields, "the pool to yield")
        self.agent.status.request_yield(waiting)
        await eventually(lambda: stream not in self.agent.running, "the stream to yield")

    async def _keep_yielding(self) -> None:
        while True:
            until = str(int(time.time() * 1000 + YIELD_MS - 100))
            await self.client.execute(pool_slot(self.pool), "HSET", pool_prefix(self.pool) + "stat", "yields", until)
            await asyncio.sleep(1.0)

    async def _pool_yields(self) -> bool:
        key = pool_prefix(self.pool) + "stat"
        return bool(await self.client.execute(pool_slot(self.pool), "HEXISTS", key, "yields"))

    async def stop_yielding(self) -> None:
        if self.yielding is not None:
            self.yielding.cancel()
            await asyncio.gather(self.yielding, return_exceptions=True)
            self.yielding = None

    async def let_batch_run(self) -> None:
        """The pool yields no more."""
        await self.stop_yielding()
        await self.client.execute(pool_slot(self.pool), "HDEL", pool_prefix(self.pool) + "stat", "yields")

    async def text(self, stream: StreamId) -> str:
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        found, after = "", BEGINNING
        while page is not None and page.entries:
            for line in b"\n".join(entry.frames for entry in page.entries).split(b"\n"):
                frame = decode(line)
                found += frame.text if isinstance(frame, Delta) else ""
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)
            page = await self.log.watch(stream, ACME, None, after)
        return found

    async def rescue(self, stream: StreamId) -> None:
        """As a reaper that takes this replica for dead."""
        failover = Failover(self.pools, self.log, HostClock(), HostRandom())
        await failover.rescue(self.pool, self.agent.replica, stream, LOST)

    async def epoch(self, stream: StreamId) -> int:
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        return page.epoch.n

    async def head(self, stream: StreamId) -> int:
        page = await self.log.watch(stream, ACME, None, BEGINNING)
        assert page is not None
        return page.head

    async def end(self, stream: StreamId) -> End:
        async def ended() -> End | None:
            page = await self.log.watch(stream, ACME, None, BEGINNING)
            assert page is not None
            if page.status == "live":
                return None
            last = await self.log.watch(stream, ACME, None, Cursor(page.epoch.n, page.head - 1))
            assert last is not None
            frame = decode(last.entries[-1].frames.split(b"\n")[-1])
            assert isinstance(frame, End)
            return frame

        found: End = await eventually(ended, "the stream's terminal")
        return found


@asynccontextmanager
async def running(
    redis_url: str,
    sim: str = "itl_ms=5,ttft_ms=0",
    *,
    pool: str = "",
    proxy: Proxy | None = None,
    lease_ttl_s: float = 3.0,
    lease_renew_s: float = 1.0,
    drain_s: float = 2.0,
    trace_tokens_one_in: int = 0,
    standby: bool = False,
    asleep: SleepLevel | None = None,
    clock: Clock | None = None,
) -> AsyncIterator[tuple[Bench, asyncio.Task[None]]]:
    """``proxy``: between the agent and Redis, which the bench asks directly. ``asleep``: how its agent finds the
    engine."""
    engine, heard = Fragile(SimSettings.parse(sim)), Heard()
    models = tuple(await engine.start())
    if asleep is not None:
        assert await engine.sleep(asleep)
    direct, client = RedisClient(redis_url), RedisClient(proxy.url if proxy else redis_url, timeout_s=1.5)
    await direct.start()
    await client.start()
    pool = pool or f"pool-{os.urandom(4).hex()}"
    agent = make_agent(
        AgentPolicy(
            LeasePolicy(pool, "sim", models, True, lease_ttl_s, 4.0),
            lease_renew_s,
            drain_s,
            standby=standby,
            trace_tokens_one_in=trace_tokens_one_in,
        ),
        engine,
        client,
        PARTITIONS,
        heard,
        clock,
    )
    task = asyncio.create_task(agent.run())
    try:
        await asyncio.wait_for(agent.ready.wait(), 10)
        bench = Bench(direct, pool, agent, engine, heard)
        yield bench, task
        await bench.stop_yielding()
    finally:
        agent.drain()
        await asyncio.wait([task])
        await client.close()
        await direct.close()


async def test_invariant_6_an_engine_that_fails_as_a_whole_leaves_no_stream_without_a_terminal(redis_url: str) -> None:
    async with running(redis_url) as (bench, task):
        streams = [await bench.ask() for _ in range(5)]
        for stream in streams:
            await eventually(lambda stream=stream: _above(bench, stream, 3), "tokens")
        bench.engine.break_down()
        for stream in streams:
            end = await bench.end(stream)
            assert end.status == "failed"
            assert end.error is not None
            assert (end.error.code, end.error.retriable) == (EngineLost.code, True)
            assert end.usage is not None
            assert end.usage.output > 0
        # The replica leaves its pool, and the process says why
        with pytest.raises(EngineLost, match="the engine failed"):
            await asyncio.wait_for(asyncio.shield(task), 5)
        assert await bench.pools.replicas(bench.pool) == []


async def test_a_request_that_the_engine_chokes_on_ends_alone(redis_url: str) -> None:
    async with running(redis_url) as (bench, task):
        other = await bench.ask(max_tokens=100)
        end = await bench.end(await bench.ask(model="poison"))
        assert end.error is not None
        assert (end.status, end.error.code, end.error.retriable) == ("failed", EngineFailed.code, False)
        assert (await bench.end(other)).status == "completed"
        assert (await bench.end(await bench.ask(max_tokens=3))).status == "completed"
        assert not task.done()


@pytest.mark.parametrize("n", ["x", 1.5, True, [2]])
async def test_a_wrong_number_of_choices_does_not_end_the_agent(redis_url: str, n: object) -> None:
    """Gateways of earlier releases let one of Anthropic's dialect pass."""
    async with running(redis_url) as (bench, task):
        await bench.end(await bench.ask(max_tokens=3, n=n))
        assert (await bench.end(await bench.ask(max_tokens=3))).status == "completed"
        assert not task.done()


async def test_a_stream_that_nobody_watches_is_cancelled_at_the_end_of_its_grace_period(redis_url: str) -> None:
    """Also before its first token, which no append tells of."""
    gateway = GatewayId("g")
    async with running(redis_url) as (bench, _):
        left, back = [await bench.ask(model="mute", gateway=gateway, unwatched_s=0.3) for _ in range(2)]
        await eventually(lambda: _above(bench, left, 0), "the note of its start")
        await eventually(lambda: _above(bench, back, 0), "the note of its start")
        began = time.monotonic()
        for stream in (left, back):
            await bench.log.unwatch(stream, gateway)
        await bench.log.watch(back, ACME, gateway, BEGINNING)
        assert (await bench.end(left)).status == "cancelled"
        assert 0.3 <= time.monotonic() - began < 4.0
        await eventually(lambda: ("abort", left) in bench.engine.told, "its abort", 20)
        assert ("abort", back) not in bench.engine.told and back in bench.agent.running
        await bench.log.unwatch(back, gateway)
        assert (await bench.end(back)).status == "cancelled"


async def test_a_reader_who_comes_back_and_leaves_again_begins_a_new_grace_period(redis_url: str) -> None:
    """Before the first token and within the first grace period; the log check comes only seconds later."""
    gateway = GatewayId("g")
    async with running(redis_url) as (bench, _):
        stream = await bench.ask(model="mute", gateway=gateway, unwatched_s=0.5)
        await eventually(lambda: _above(bench, stream, 0), "the note of its start")
        await bench.log.unwatch(stream, gateway)
        await asyncio.sleep(0.2)
        await bench.log.watch(stream, ACME, gateway, BEGINNING)
        began = time.monotonic()
        await bench.log.unwatch(stream, gateway)
        assert (await bench.end(stream)).status == "cancelled"
        assert 0.5 <= time.monotonic() - began < 4.0


async def test_an_append_tells_that_nobody_watches(redis_url: str) -> None:
    """No doorbell rang: this stream never had a reader."""
    async with running(redis_url) as (bench, _):
        began = time.monotonic()
        ended = await bench.end(await bench.ask(unwatched_s=0.2))
        assert ended.status == "cancelled" and 0.2 <= time.monotonic() - began < 4.0


async def test_a_replica_of_which_no_first_token_comes_tells_how_long_it_stands_still(redis_url: str) -> None:
    async with running(redis_url) as (bench, _):
        await bench.end(await bench.ask(max_tokens=3))
        (info,) = await bench.pools.replicas(bench.pool)
        assert info.queue_p99_ms < 500
        began = time.monotonic()
        stream = await bench.ask(model="mute")

        async def told() -> bool:
            (info,) = await bench.pools.replicas(bench.pool)
            return 1000 < info.queue_p99_ms <= (time.monotonic() - began) * 1000

        await eventually(told, "how long it stands still")
        await bench.log.cancel(stream, ACME)

        async def told_no_more() -> bool:
            (info,) = await bench.pools.replicas(bench.pool)
            return info.queue_p99_ms < 500

        await eventually(told_no_more, "that nobody waits")


async def test_every_try_is_told_once_and_a_stream_has_one_bill(redis_url: str) -> None:
    """Completed, cancelled in the middle, failed, and taken from a replica that was thought dead."""
    async with running(redis_url, "itl_ms=3,ttft_ms=50") as (bench, _):
        whole = await bench.ask(max_tokens=20)
        assert (await bench.end(whole)).status == "completed"
        cut = await bench.ask()
        await eventually(lambda: _above(bench, cut, 5), "tokens")
        await bench.log.cancel(cut, ACME)
        poison = await bench.ask(model="poison")
        await bench.end(poison)
        again = await bench.ask()
        await eventually(lambda: _above(bench, again, 5), "tokens")
        rescue = Failover(bench.pools, bench.log, HostClock(), HostRandom())
        await rescue.rescue(bench.pool, bench.agent.replica, again, LOST, comes_back=True)
        found = await eventually(lambda: _told(bench, {whole, cut, poison, again}), "the tries are told")
        by_stream = {trace.stream: trace for trace in found}
        done = by_stream[whole]
        settled = await bench.log.settled(whole)
        assert settled is not None
        assert (done.ended, done.billed, done.finish_reason) == ("completed", True, "length")
        assert done.output_tokens == done.generated_tokens == settled[1].output == 20
        assert done.price_micro == done.prompt_tokens + 40
        assert sum(done.itl_sketch) == 19
        # All tokens of a stalled machine come in one turn: only the sum of the phases has a lower bound.
        assert done.prefill_us + done.engine_queue_us >= 50_000
        assert 50_000 + 19 * 2500 < done.prefill_us + done.engine_queue_us + done.decode_us < 2_000_000
        assert done.decode_us > 0
        assert done.trace_id == whole[5:]
        stopped = by_stream[cut]
        settled = await bench.log.settled(cut)
        assert settled is not None
        assert (stopped.ended, stopped.billed) == ("cancelled", True)
        assert stopped.output_tokens == settled[1].output <= stopped.generated_tokens
        assert (by_stream[poison].ended, by_stream[poison].error_code) == ("failed", EngineFailed.code)
        assert (by_stream[again].ended, by_stream[again].billed, by_stream[again].epoch) == ("lost", False, 1)
        head = await bench.head(again)
        await eventually(lambda: _above(bench, again, head + 5), "tokens of the second try")
        await bench.log.cancel(again, ACME)
        bills = await eventually(lambda: _bills(bench, again), "the bill of the second try")
        assert [(bill.ended, bill.epoch) for bill in bills] == [("cancelled", 2)]
        ids = [trace.id for trace in bench.heard.attempts]
        assert len(ids) == len(set(ids))


async def test_a_try_tells_how_many_decoded_beside_it(redis_url: str) -> None:
    async with running(redis_url, "itl_ms=20,ttft_ms=5,max_num_seqs=8") as (bench, _):
        together = [await bench.ask(max_tokens=40) for _ in range(4)]
        found = await eventually(lambda: _told(bench, set(together)), "the tries are told")
        shared = sorted(trace.decoding_us / trace.decode_us for trace in found)
        assert 3 < shared[1] <= 4.05, shared
        alone = await bench.ask(max_tokens=20)
        (trace,) = await eventually(lambda: _bills(bench, alone), "the try is told")
        assert trace.decoding_us == trace.decode_us > 0
        poison = await bench.ask(model="poison")
        (failed,) = await eventually(lambda: _bills(bench, poison), "the failure is told")
        assert failed.ended == "failed" and failed.decoding_us == 0, "it had no first token"


async def test_a_drain_that_is_hurried_waits_for_nothing(redis_url: str) -> None:
    async with running(redis_url, drain_s=600) as (bench, task):
        stream = await bench.ask()
        await eventually(lambda: _above(bench, stream, 3), "tokens")
        bench.agent.drain()
        bench.agent.drain()  # as an operator's wish is said again with each report
        await eventually(lambda: bench.agent.state == "draining")
        head = await bench.head(stream)
        await eventually(lambda: _above(bench, stream, head + 100), "what runs to go on")
        bench.agent.end_grace_period()
        end = await bench.end(stream)
        assert end.error is not None
        assert (end.status, end.error.code, end.error.retriable) == ("failed", ReplicaLost.code, True)
        await asyncio.wait_for(asyncio.shield(task), 10)


async def test_a_stream_whose_request_redis_has_lost_is_handed_over_all_the_same(redis_url: str) -> None:
    async with running(redis_url) as (one, _), running(redis_url, pool=one.pool) as (two, _):
        stream = await one.ask(max_tokens=150)
        await eventually(lambda: _above(one, stream, 3), "tokens")
        await one.client.execute(pool_slot(one.pool), "HDEL", pool_prefix(one.pool) + "work", stream)
        one.engine.lose(stream)
        end = await two.end(stream)
        assert (end.status, end.error) == ("completed", None)
        assert end.usage is not None and end.usage.output == 150
        assert await two.epoch(stream) == 2


async def test_a_stream_that_was_handed_over_is_not_waited_for(redis_url: str) -> None:
    """The takeover fences this replica's own epoch, which looks as if another process had taken the stream."""
    async with running(redis_url, drain_s=0.0) as (one, task), running(redis_url, pool=one.pool) as (two, _):
        stream = await one.ask(max_tokens=1000)
        await eventually(lambda: _above(one, stream, 3), "tokens")
        one.agent.drain()
        waits: set[str] = set()
        while not task.done():
            waits |= {getattr(each.get_coro(), "__qualname__", "") for each in asyncio.all_tasks()}
            await asyncio.sleep(0.01)
        assert "Handover._finish_release" not in waits
        await eventually(lambda: stream in two.agent.running, "the second producer")


async def _told(bench: Bench, streams: set[StreamId]) -> list[AttemptTrace] | None:
    first = [trace for trace in bench.heard.attempts if trace.epoch == 1]
    return first if {trace.stream for trace in first} == streams else None


async def _bills(bench: Bench, stream: StreamId) -> list[AttemptTrace]:
    return [trace for trace in bench.heard.attempts if trace.stream == stream and trace.billed]


async def test_who_ends_a_dead_replicas_stream_tells_its_bill(redis_url: str) -> None:
    async with running(redis_url, "itl_ms=3,ttft_ms=0") as (bench, _):
        stream = await bench.ask()
        await eventually(lambda: _above(bench, stream, 5), "tokens")
        work = await bench.pools.work(bench.pool, stream)
        assert work is not None
        heard = Heard()
        witness = FailoverReporter(
            heard, FabricClock(bench.client, HostClock(), HostRandom()), bench.log, bench.unbilled
        )
        hopeless = msgspec.structs.replace(work, attempt=ATTEMPTS_MAX)
        rescue = Failover(bench.pools, bench.log, HostClock(), HostRandom(), witness)
        await rescue.end(bench.pool, bench.agent.replica, stream, LOST, hopeless.parsed_epoch(), hopeless)
        await rescue.end(bench.pool, bench.agent.replica, stream, LOST, hopeless.parsed_epoch(), hopeless)
        settled = await bench.log.settled(stream)
        assert settled is not None
        (bill,) = heard.attempts
        assert (bill.ended, bill.billed, bill.error_code) == ("failed", True, LOST.code)
        assert bill.output_tokens == settled[1].output > 0
        assert bill.price_micro == bill.prompt_tokens + 2 * bill.output_tokens
        await eventually(lambda: _told(bench, {stream}), "the agent hears of it")
        assert [trace.billed for trace in bench.heard.attempts] == [False]


async def _above(bench: Bench, stream: StreamId, seq: int) -> bool:
    return await bench.head(stream) > seq


# --- streams that change replicas --------------------------------------------------------------------------


async def test_a_stream_that_is_handed_on_a_second_time_is_not_ended_by_the_one_that_lost_it(redis_url: str) -> None:
    """A replica that took a stream over stops when a third takes it, and leaves it to that one."""
    async with running(redis_url) as (one, _), running(redis_url, pool=one.pool) as (two, _):
        stream = await one.ask(max_tokens=200)
        await eventually(lambda: _above(one, stream, 3), "tokens")
        await one.rescue(stream)
        await eventually(lambda: stream in two.agent.running, "the second producer")
        before = await two.head(stream)
        await eventually(lambda: _above(two, stream, before + 3), "tokens of the second producer")
        await two.rescue(stream)
        end = await two.end(stream)
        assert (end.status, end.error) == ("completed", None)
        assert end.usage is not None and end.usage.output == 200
        assert await two.epoch(stream) == 3


NO_ROOM = [
    ErrorInfo("too_many", "the queue is full", "rate_limit_error", 429, True),
    ErrorInfo("engine_error", "the queue is full", http_status=503, retriable=True),
]
NO_ADAPTER = ErrorInfo("model_not_found", "The model `french` does not exist.", "invalid_request_error", 404)
LACKING = pytest.mark.parametrize("refusal", [*NO_ROOM, NO_ADAPTER], ids=["429", "503", "adapter"])


@LACKING
async def test_a_request_for_which_an_engine_lacks_room_or_its_adapter_moves_to_another_replica(
    redis_url: str, refusal: ErrorInfo
) -> None:
    async with running(redis_url) as (one, _), running(redis_url, pool=one.pool) as (two, _):
        one.engine.refuses = refusal
        stream = await one.ask(max_tokens=20)
        end = await two.end(stream)
        assert (end.status, end.error) == ("completed", None)
        assert end.usage is not None and end.usage.output == 20
        await eventually(lambda: one.heard.attempts and two.heard.attempts, "the events of both attempts")
        (lost,), (billed,) = one.heard.attempts, two.heard.attempts
        assert (lost.attempt, lost.billed, lost.output_tokens) == (1, False, 0)
        assert (billed.attempt, billed.billed, billed.output_tokens) == (2, True, 20)


@pytest.mark.parametrize("replicas", [1, 2])
@LACKING
async def test_a_request_that_no_engine_can_take_fails_with_the_engines_error(
    redis_url: str, refusal: ErrorInfo, replicas: int
) -> None:
    """A pool's only replica is asked once: it would refuse the request again at once."""
    async with AsyncExitStack() as stack:
        one, _ = await stack.enter_async_context(running(redis_url))
        benches = [one]
        for _ in range(replicas - 1):
            benches.append((await stack.enter_async_context(running(redis_url, pool=one.pool)))[0])
        for bench in benches:
            bench.engine.refuses = refusal
        stream = await one.ask(max_tokens=20)
        end = await one.end(stream)
        assert (end.status, end.error) == ("failed", refusal)
        asked = sum(what == "submit" for bench in benches for what, _ in bench.engine.told)
        assert asked == (1 if replicas == 1 else ATTEMPTS_MAX)


async def test_an_engine_that_says_429_after_the_first_token_ends_the_stream(redis_url: str) -> None:
    async with running(redis_url) as (one, _), running(redis_url, pool=one.pool):
        stream = await one.ask(max_tokens=200)
        await eventually(lambda: _above(one, stream, 3), "tokens")
        one.engine._requests[stream].sink.end("failed", NO_ROOM[0])
        assert (await one.end(stream)).error == NO_ROOM[0]


async def test_an_engine_that_refuses_to_continue_refuses_no_request_of_the_client(redis_url: str) -> None:
    """As vLLM does where the chat template leaves out a part of the text."""
    async with running(redis_url) as (one, _), running(redis_url, pool=one.pool) as (two, _):
        two.engine.refuses = ErrorInfo("invalid_request", "the message does not appear", "invalid_request_error", 400)
        stream = await one.ask()
        await eventually(lambda: _above(one, stream, 3), "tokens")
        await one.rescue(stream)
        end = await two.end(stream)
        assert end.error is not None and "the message does not appear" in end.error.message
        assert (end.error.code, end.error.http_status, end.error.retriable) == ("replica_lost", 502, True)
        assert two.agent.load.breaker.failures == 0, "its engine is well"


async def test_a_prompt_of_token_ids_cannot_be_continued_and_costs_nobody_else_their_agent(redis_url: str) -> None:
    async with running(redis_url) as (one, _), running(redis_url, pool=one.pool) as (two, task):
        stream = await one.ask(prompt=[5, 6, 7])
        await eventually(lambda: _above(one, stream, 3), "tokens")
        await one.rescue(stream)
        end = await two.end(stream)
        assert end.error is not None
        assert (end.status, end.error.code) == ("failed", "replica_lost")
        assert not task.done()
        assert (await two.end(await two.ask(max_tokens=3))).status == "completed"


async def test_what_ends_while_it_is_being_taken_over_never_reaches_the_engine(redis_url: str) -> None:
    """A cancel that comes while the log is read for what was said."""
    async with (
        Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy,
        running(redis_url, proxy=proxy) as (bench, _),
    ):
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        await bench.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        partition, pages = bench.log.partition(stream), 12
        for seq in range(1, pages * PAGE_ENTRIES_MAX + 1):
            item = Append(stream, "1.aa", seq, seq, encode_text(0, "x"), Usage(output=seq))
            await bench.log.append(partition, [item])
        taken = await bench.log.takeover(stream, Epoch(1, "aa"), "bb")
        assert taken is not None
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}]})
        request = EngineRequest(stream, "chat", "sim-small", msgspec.Raw(body))
        proxy.delay_s = 0.1
        await bench.place(Work(request, str(taken.epoch), ACME, b"{}", None, base=taken.base, attempt=2))
        await eventually(lambda: stream in bench.agent.running, "the takeover to begin")
        await bench.log.cancel(stream, ACME)
        assert _taking_over(), "it is still read"
        await eventually(lambda: not _taking_over(), "all to be read")
        assert stream not in bench.agent.running
        assert ("submit", stream) not in bench.engine.told


def _taking_over() -> bool:
    return any("_take_over" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_a_deadline_that_passes_during_a_takeover_ends_the_stream_with_what_was_used(redis_url: str) -> None:
    async with running(redis_url) as (bench, _):
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        await bench.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        lines = [encode(Open(0, 0, "text")), encode_text(0, "x", 7)]
        item = Append(stream, "1.aa", 1, 2, b"\n".join(lines), Usage(output=7))
        await bench.log.append(bench.log.partition(stream), [item])
        taken = await bench.log.takeover(stream, Epoch(1, "aa"), "bb")
        assert taken is not None
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "Hi"}]})
        request = EngineRequest(stream, "chat", "sim-small", msgspec.Raw(body), deadline_unix_ms=1)
        await bench.place(Work(request, str(taken.epoch), ACME, b"{}", None, base=taken.base, attempt=2))
        end = await bench.end(stream)
        assert end.error is not None and end.error.code == "deadline_exceeded"
        assert end.usage is not None and end.usage.output == 7
        assert (await bench.end(await bench.ask(max_tokens=3))).status == "completed"
        assert bench.engine.load().running + bench.engine.load().waiting == 0


async def test_a_stream_that_comes_back_before_its_loss_was_heard_of_runs_once(redis_url: str) -> None:
    """The doorbell of the takeover was lost, and the queue gave the stream to the replica that had it."""
    async with running(redis_url, "itl_ms=300,ttft_ms=0") as (bench, _):
        stream = await bench.ask(max_tokens=8)
        await eventually(lambda: _above(bench, stream, 3), "tokens")
        work = await bench.pools.work(bench.pool, stream)
        assert work is not None
        partition, base = bench.log.partition(stream), await bench.head(stream)
        meta = f"sg:{{p{partition}}}:{stream}:m"
        await bench.client.execute(0, "HSET", meta, "e", "2.bb", "b", f"2:{base} ", "r", "", "x", "0")
        again = msgspec.structs.replace(work, epoch="2.bb", base=base, attempt=2)
        await bench.pools.place(
            bench.pool, again, [Candidate(bench.agent.replica, 0)], wait_s=60, jitter=0.0, instead=bench.agent.replica
        )
        end = await bench.end(stream)
        assert end.status == "completed"
        assert end.usage is not None and end.usage.output == 8
        told = [what for what, name in bench.engine.told if name == stream]
        assert told == ["submit", "abort", "submit"]


async def test_what_another_has_used_is_billed_also_of_a_stream_that_cannot_be_continued(redis_url: str) -> None:
    async with running(redis_url) as (bench, _):
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        await bench.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        used = Usage(5, 0, 0, 7)
        await bench.log.append(
            bench.log.partition(stream),
            [Append(stream, "1.aa", 1, 1, encode(Open(0, 0, "tool", "function", "c", "f")), used)],
        )
        taken = await bench.log.takeover(stream, Epoch(1, "aa"), "bb")
        assert taken is not None
        request = EngineRequest(stream, "chat", "sim-small", msgspec.Raw(b'{"messages":[{"role":"user"}]}'))
        await bench.place(Work(request, str(taken.epoch), ACME, b"{}", None, base=taken.base, attempt=2))
        end = await bench.end(stream)
        assert end.error is not None and end.error.code == "replica_lost"
        assert end.usage == used
        await eventually(lambda: not bench.agent.running)


async def test_reports_that_cross_do_not_take_a_stream_away_that_was_given_back(redis_url: str) -> None:
    """The first one says that it has ended here and brings it from the queue; the second must not say so again."""
    async with running(redis_url) as (bench, _):
        stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
        await bench.log.create(stream, Epoch(1, "aa"), ACME, b"{}", None)
        body = msgspec.json.encode(
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000, "ignore_eos": True}
        )
        work = Work(EngineRequest(stream, "chat", "sim-small", msgspec.Raw(body)), "1.aa", ACME, b"{}", None)
        assert isinstance(await bench.pools.place(bench.pool, work, [], wait_s=60, jitter=0.0), Queued)
        lease = bench.agent.lease
        lease._unreported_ends[stream] = 1
        await asyncio.gather(lease.renew(), lease.renew())
        await eventually(lambda: _above(bench, stream, 3), "tokens")
        assert await bench.pools.holder(bench.pool, stream) == bench.agent.replica
        assert await bench.pools.work(bench.pool, stream) == work, "another could take it over"


# --- the fabric goes away and comes back -------------------------------------------------------------------


async def test_invariant_6_a_stream_that_the_engine_loses_during_a_long_outage_goes_on_after_it(
    redis_url: str,
) -> None:
    async with (
        Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy,
        running(redis_url, proxy=proxy, lease_ttl_s=1.0, lease_renew_s=0.3) as (bench, _),
    ):
        stream = await bench.ask(max_tokens=400)
        await eventually(lambda: _above(bench, stream, 3), "tokens")
        proxy.refuse = True
        proxy.cut_all()
        bench.engine.lose(stream)
        # For longer than its lease lives, twice
        lost_at = asyncio.get_running_loop().time()
        await eventually(lambda: asyncio.get_running_loop().time() - lost_at > 4.0)
        proxy.refuse = False
        end = await bench.end(stream)
        assert (end.status, end.error) == ("completed", None)
        assert end.usage is not None and end.usage.output == 400


async def test_invariant_9_a_drain_while_the_fabric_is_away_still_lets_streams_end(redis_url: str) -> None:
    async with (
        Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy,
        running(redis_url, proxy=proxy, drain_s=60.0) as (bench, task),
    ):
        stream = await bench.ask(max_tokens=600)
        await eventually(lambda: _above(bench, stream, 3), "tokens")
        proxy.refuse = True
        proxy.cut_all()
        bench.agent.drain()
        cut_at = asyncio.get_running_loop().time()
        await eventually(lambda: asyncio.get_running_loop().time() - cut_at > 2.0)  # until the report is given up
        proxy.refuse = False
        end = await bench.end(stream)
        assert (end.status, await bench.epoch(stream)) == ("completed", 1)
        await asyncio.wait_for(asyncio.shield(task), 5)
        assert await bench.pools.replicas(bench.pool) == []


async def test_a_drain_ends_while_the_fabric_is_away(redis_url: str) -> None:
    """Frames that the log does not take, and reads of inputs, are repeated no more after the drain."""
    async with (
        Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy,
        running(redis_url, proxy=proxy, lease_ttl_s=0.5, drain_s=0.1) as (bench, task),
    ):
        runs, ended = [await bench.ask() for _ in range(2)]
        for stream in (runs, ended):
            await eventually(lambda stream=stream: _above(bench, stream, 3), "tokens")
        proxy.refuse = True
        proxy.cut_all()
        for stream in (runs, ended):
            bench.agent.steering.read_soon(bench.agent.running[stream])
        bench.agent.running[ended].end("completed")
        bench.agent.drain()
        try:
            await asyncio.wait_for(asyncio.shield(task), 10)
        finally:
            proxy.refuse = False
        for stream in (runs, ended):
            await bench.rescue(stream)
            assert (await bench.end(stream)).status == "failed", "the log has it until here; its recovery ends it"


async def test_a_stream_that_runs_after_the_drain_takes_no_output(redis_url: str) -> None:
    """One that arrives after the handover still runs then. It would append, and ask for its budget, until Redis is
    back."""
    async with running(redis_url, lease_ttl_s=0.5) as (bench, _):
        name = await bench.ask()
        await eventually(lambda: _above(bench, name, 3), "tokens")
        stream = bench.agent.running[name]
        bench.agent._requests.stop_retries()
        last = stream.producer.last
        stream.text(0, "more")
        assert stream.closed and stream.producer.last == last


async def test_a_lease_is_renewed_right_after_an_outage(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before the reapers, who have waited for it too, take the replica for dead."""
    async with (
        Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy,
        running(redis_url, proxy=proxy, lease_ttl_s=1.0, lease_renew_s=2.0) as (bench, _),
    ):
        proxy.refuse = True
        proxy.cut_all()
        await eventually(lambda: "lease renewal failed" in caplog.text)
        assert await bench.pools.expired(bench.pool) == [bench.agent.replica]
        proxy.refuse = False
        await eventually(lambda: _alive(bench), "the lease", SEEN_DEAD_S)


async def test_an_agent_asks_and_logs_seldom_while_redis_is_away(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look at the inbox is a connection and a line of the log, on every replica of the fleet."""
    async with (
        Proxy.before(RedisUrl.parse(redis_url).addresses[0].port) as proxy,
        running(redis_url, proxy=proxy) as (bench, _),
    ):
        proxy.refuse = True
        proxy.cut_all()
        cut_at = asyncio.get_running_loop().time()
        await eventually(lambda: asyncio.get_running_loop().time() - cut_at > 2.0)
        assert 1 <= caplog.text.count("read of the inbox failed") <= 15
        proxy.refuse = False
        end = await bench.end(await bench.ask(max_tokens=3))
        assert end.status == "completed"


async def _alive(bench: Bench) -> bool:
    return not await bench.pools.expired(bench.pool)


async def test_what_an_idle_replica_holds_of_prompts_stays_known(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its summary does not change, but expires, and Redis may lose it."""
    monkeypatch.setattr("inference.agent.lease._PUBLISH_AGAIN_S", 0.1, raising=False)
    async with running(redis_url, lease_renew_s=0.1) as (bench, _):
        await bench.end(await bench.ask(max_tokens=3, prefix=b"12345678"))
        summary: bytes = await eventually(lambda: bench.pools.prefix(bench.pool, bench.agent.replica))
        _, blocks = decode_summary(summary)  # its version may still grow: the request ends after its blocks are known
        key = f"sg:{{pool:{bench.pool}}}:{bench.agent.replica}:prefix"
        await bench.client.execute(0, "DEL", key)
        summary = await eventually(lambda: bench.pools.prefix(bench.pool, bench.agent.replica))
        assert decode_summary(summary)[1] == blocks != b""


class SkewedClock(HostClock):
    """The fabric's clock, as a host sees it whose own clock is wrong."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_us = int(ahead_s * 1e6)

    def now_us(self) -> int:
        return super().now_us() + self._ahead_us


@pytest.mark.parametrize(("ahead_s", "deadline_s", "status"), [(-30.0, -20.0, "completed"), (30.0, 20.0, "failed")])
async def test_a_deadline_is_compared_on_the_fabrics_clock(
    redis_url: str, ahead_s: float, deadline_s: float, status: str
) -> None:
    """The gateway that set it runs on another host: 30 s of difference to this host's clock must not matter."""
    async with running(redis_url, clock=SkewedClock(ahead_s)) as (bench, _):
        end = await bench.end(await bench.ask(max_tokens=3, deadline_s=deadline_s))
        assert end.status == status
        assert end.error is None or end.error.code == DeadlineExceeded.code


async def test_a_deadline_does_not_keep_what_has_ended(redis_url: str) -> None:
    async with running(redis_url) as (bench, _):
        stream = await bench.ask(max_tokens=60, deadline_s=3600)
        await eventually(lambda: stream in bench.agent.running)
        timer = bench.agent.running[stream].deadline
        assert timer is not None
        assert (await bench.end(stream)).status == "completed"
        await eventually(timer.cancelled, "the timer to be let go")


async def test_a_replicas_life_is_told_from_its_first_lease_until_it_has_left(redis_url: str) -> None:
    async with running(redis_url) as (bench, task):
        await bench.pools.request_state(bench.pool, bench.agent.replica, "draining")
        await asyncio.wait_for(asyncio.shield(task), 10)
    told = [(event.what, event.state, event.asked_by) for event in bench.heard.fleet]
    assert told == [
        ("lease", "ready", ""), ("drain", "", "operator"), ("lease", "draining", "operator"), ("lease", "gone", ""),
    ]  # fmt: skip
    assert {(event.pool, event.replica) for event in bench.heard.fleet} == {(bench.pool, bench.agent.replica)}


async def test_requests_that_fail_one_after_another_open_the_breaker_and_it_is_told(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(redis_url, lease_renew_s=0.2) as (bench, _):
        for _ in range(5):
            await bench.end(await bench.ask(model="sick"))

        def told() -> list[str]:
            return [event.state for event in bench.heard.fleet if event.what == "breaker"]

        async def why() -> str:
            return "".join([info.blocked for info in await bench.pools.replicas(bench.pool)])

        assert await eventually(why, "operators to see why") == (
            "its engine failed 5 requests in a row, the last one with engine_error"
        )
        await eventually(lambda: told() == ["open", "half_open"], "it to open, and to let one try")

        async def has_room() -> bool:
            return [info.room for info in await bench.pools.replicas(bench.pool)] == [1]

        await eventually(has_room, "room for one")
        assert await why() == ""
        await bench.end(await bench.ask(max_tokens=3))
        await eventually(lambda: told() == ["open", "half_open", "closed"], "it to close")
    opened = next(event for event in bench.heard.fleet if event.what == "breaker")
    assert (opened.reason, opened.figures) == ("engine_error", {"failures": 5, "open_s": 2.0})
    logged = [record.getMessage() for record in caplog.records if "circuit breaker" in record.getMessage()]
    failed = "its engine failed 5 requests in a row, the last one with engine_error"
    assert logged == [
        f"circuit breaker open, taking no requests: {failed}",
        "circuit breaker closed, taking requests: the engine has answered",
    ]


async def test_each_tokens_time_is_told_of_those_tries_that_are_sampled(redis_url: str) -> None:
    for one_in, told in ((0, 0), (1, 30)):
        async with running(redis_url, trace_tokens_one_in=one_in) as (bench, _):
            stream = await bench.ask(max_tokens=30)
            await bench.end(stream)
            (trace,) = await eventually(lambda b=bench, s=stream: _bills(b, s), "the try to be told")
        assert len(trace.token_us) == told
        if told:
            assert sum(trace.token_us[1:]) == pytest.approx(trace.decode_us, rel=0.05, abs=3000)
            assert max(trace.token_us[1:]) == pytest.approx(trace.itl_max_us, abs=2)


# --- batch work that yields --------------------------------------------------------------------------------


async def test_a_batch_stream_yields_and_another_replica_goes_on_with_the_same_text(redis_url: str) -> None:
    async with running(redis_url, drain_s=0.0) as (one, _):
        whole = await one.ask(max_tokens=150)
        assert (await one.end(whole)).status == "completed"
        cut = await one.ask(max_tokens=150, tier=BATCH_TIER)
        await one.yields(cut)
        assert await one.pools.holder(one.pool, cut) == "queue"
        head = await one.head(cut)
        work = await one.pools.work(one.pool, cut)
        assert work is not None and (work.base, work.attempt, work.tried, work.parsed_epoch().n) == (head, 1, (), 2)
        async with running(redis_url, pool=one.pool) as (two, _):
            one.agent.drain()
            await eventually(lambda: two.agent.state == "ready", "the other replica")
            await asyncio.sleep(0.1)
            assert await one.head(cut) == head, "it waits while the pool yields"
            await one.let_batch_run()
            end = await two.end(cut)
            assert end.status == "completed" and end.usage is not None and end.usage.output == 150
            assert await two.text(cut) == await two.text(whole)
            assert [trace.ended for trace in one.heard.attempts if trace.stream == cut] == ["yielded"]
            (bill,) = [trace for trace in two.heard.attempts if trace.stream == cut]
            assert (bill.billed, bill.attempt, bill.epoch, bill.output_tokens) == (True, 1, 2, 150)
            assert bill.waited_us > 100_000, "the time that it yielded is its wait in the queue"


async def test_only_batch_streams_that_can_go_on_yield_and_no_more_than_are_needed(redis_url: str) -> None:
    async with running(redis_url) as (bench, _):
        standard, ids = await bench.ask(), await bench.ask(prompt=[5, 6, 7], tier=BATCH_TIER)
        await eventually(lambda: _above(bench, ids, 3), "tokens")
        older = await bench.ask(tier=BATCH_TIER)
        await eventually(lambda: _above(bench, older, 40), "tokens")
        newer = await bench.ask(tier=BATCH_TIER)
        await bench.yields(newer)
        assert set(bench.agent.running) == {standard, ids, older}, "the newer one has less to compute again"
        await bench.yields(older)
        bench.agent.status.request_yield(2)
        await asyncio.sleep(0.1)
        assert set(bench.agent.running) == {standard, ids}, "these two run on"


async def test_a_batch_stream_that_cannot_go_on_costs_nobody_else_their_agent(redis_url: str) -> None:
    async with running(redis_url) as (bench, task):
        kept, cut = await bench.ask(tier=BATCH_TIER, min_tokens="5"), await bench.ask(tier=BATCH_TIER)
        await eventually(lambda: _above(bench, kept, 3), "tokens")
        await bench.yields(cut, waiting=2)
        assert not task.done() and set(bench.agent.running) == {kept}


async def test_full_slots_give_one_though_nobody_waits(redis_url: str) -> None:
    """A request that came to full slots may have been refused, and is in no queue."""
    async with running(redis_url, "itl_ms=5,ttft_ms=0,max_num_seqs=2") as (bench, _):
        standard, stream = await bench.ask(), await bench.ask(tier=BATCH_TIER)
        await bench.yields(stream, waiting=0)
        assert set(bench.agent.running) == {standard}


async def test_a_request_that_batch_streams_yield_to_waits_for_no_renewal(redis_url: str) -> None:
    sim = "itl_ms=5,ttft_ms=0,max_num_seqs=2"
    async with running(redis_url, sim, lease_ttl_s=120.0, lease_renew_s=60.0) as (bench, _):
        batch = {await bench.ask(tier=BATCH_TIER) for _ in range(2)}

        async def pool_knows() -> bool:
            board = await bench.client.execute(
                pool_slot(bench.pool), "HGET", pool_prefix(bench.pool) + "board", bench.agent.replica
            )
            return int.from_bytes(board[-4:], "little") == 2

        await eventually(pool_knows, "the pool to know what would yield")
        urgent = await bench.ask(max_tokens=3, tier=0, terms=OverloadTerms(0.01, batch_yields=True))
        assert (await bench.end(urgent)).status == "completed"
        attempts = bench.heard.attempts
        yielded = "both to yield: one slot was for it, and one is kept for the next"
        await eventually(lambda: {each.stream for each in attempts if each.ended == "yielded"} == batch, yielded)


async def test_the_time_of_a_prompt_that_yields_slows_no_other(redis_url: str) -> None:
    async with running(redis_url, "itl_ms=5,ttft_ms=600") as (bench, _):
        load = bench.agent.load
        stream = await bench.ask(tier=BATCH_TIER)
        await eventually(lambda: stream in bench.agent.running, "its start")
        await asyncio.sleep(0.3)
        await bench.yields(stream, tokens=0, waiting=0)
        assert asyncio.get_running_loop().time() - load._prefilling_since < 0.25


async def test_a_batch_stream_without_output_yields_and_begins_again(redis_url: str) -> None:
    async with running(redis_url, "itl_ms=2,ttft_ms=300") as (bench, _):
        stream = await bench.ask(max_tokens=20, tier=BATCH_TIER)
        await eventually(lambda: stream in bench.agent.running, "its start")
        await bench.yields(stream, tokens=0, waiting=0)
        await bench.let_batch_run()
        end = await bench.end(stream)
        assert end.status == "completed" and end.usage is not None and end.usage.output == 20


async def test_a_cancel_of_a_stream_that_has_yielded_is_exact(redis_url: str) -> None:
    async with running(redis_url) as (bench, _):
        stream = await bench.ask(tier=BATCH_TIER)
        await bench.yields(stream)
        head = await bench.head(stream)
        reply = await bench.log.cancel(stream, ACME)
        assert (reply.result, reply.at.seq) == ("accepted", head)
        await bench.let_batch_run()
        await eventually(lambda: _is_nowhere(bench, stream), "the pool to forget it")
        assert await bench.head(stream) == head + 1
        assert bench.engine.told.count(("submit", stream)) == 1
        (bill,) = await eventually(lambda: _bills(bench, stream), "its bill")
        settled = await bench.log.settled(stream)
        assert settled is not None and settled[1].output > 0
        assert bill.ended == "cancelled"
        assert (bill.prompt_tokens, bill.output_tokens) == (settled[1].prompt, settled[1].output)


@pytest.mark.parametrize("how", ["cancelled", "overdue", "cancelled, and a reply is lost"])
async def test_a_stream_that_ends_in_the_queue_after_it_has_yielded_is_billed_once(redis_url: str, how: str) -> None:
    async with running(redis_url) as (bench, _):
        stream = await bench.ask(tier=BATCH_TIER)
        await bench.yields(stream)
        if how != "overdue":
            await bench.log.cancel(stream, ACME)
        makes = {"cancelled": RedisPools, "overdue": ImpatientPools}
        heard, pools = Heard(), makes.get(how, LossyPools)(bench.client)
        reporter = FailoverReporter(
            heard, FabricClock(bench.client, HostClock(), HostRandom()), bench.log, bench.unbilled
        )
        reaper = LeaseReaper(pools, bench.log, HostClock(), HostRandom(), reporter)
        if isinstance(pools, LossyPools):
            with pytest.raises(FabricUnavailable):
                await reaper._sweep_queue(bench.pool)
        else:
            await reaper._sweep_queue(bench.pool)
        assert await bench.pools.holder(bench.pool, stream) is None
        settled = await bench.log.settled(stream)
        assert settled is not None and settled[1].output > 0
        (bill,) = heard.attempts
        status = "failed" if how == "overdue" else "cancelled"
        assert (bill.ended, settled[0], bill.billed, bill.replica) == (status, status, True, "")
        assert (bill.prompt_tokens, bill.output_tokens) == (settled[1].prompt, settled[1].output)
        assert bill.price_micro == bill.prompt_tokens + 2 * bill.output_tokens
        assert not await _bills(bench, stream)


@pytest.mark.parametrize("step", ["yield_stream", "rescue"])
async def test_a_cancel_just_before_its_stream_leaves_the_replica_is_billed(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The doorbell of the cancel is lost, or comes too late."""
    monkeypatch.setattr(Doorbell, "receive", lambda *_: None)
    async with running(redis_url) as (bench, _):
        stream = await bench.ask(tier=BATCH_TIER)
        await eventually(lambda: _above(bench, stream, 20), "tokens")
        failover = bench.agent._handover._failover
        leave = getattr(failover, step)

        async def cancelled_before(*args: Any, **more: Any) -> None:
            await bench.log.cancel(stream, ACME)
            await leave(*args, **more)

        monkeypatch.setattr(failover, step, cancelled_before)
        if step == "rescue":
            bench.engine.lose(stream)
        else:
            await bench.yields(stream)
        (bill,) = await eventually(lambda: _bills(bench, stream), "its bill")
        settled = await bench.log.settled(stream)
        assert settled is not None and settled[1].output > 0
        assert (bill.ended, bill.output_tokens) == ("cancelled", settled[1].output)
        await eventually(lambda: _is_nowhere(bench, stream), "the pool to forget it")


async def test_a_cancel_of_a_stream_that_cannot_be_continued_is_billed(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(redis_url) as (bench, _):
        stream = await bench.ask(tier=BATCH_TIER)
        await bench.yields(stream)

        async def cancelled(_: object) -> list[bytes]:
            await bench.log.cancel(stream, ACME)
            raise CannotContinue("its output is lost")

        monkeypatch.setattr(bench.agent._handover, "read_earlier_frames", cancelled)
        await bench.let_batch_run()
        (bill,) = await eventually(lambda: _bills(bench, stream), "its bill")
        settled = await bench.log.settled(stream)
        assert settled is not None and settled[1].output > 0
        assert (bill.ended, bill.output_tokens) == ("cancelled", settled[1].output)
        await eventually(lambda: _is_nowhere(bench, stream), "the pool to forget it")


class LossyPools(RedisPools):
    """Pools whose replies to the removal of a begun stream from the queue are lost."""

    async def remove_queued(self, pool: str, streams: Sequence[StreamId]) -> int:
        if await super().remove_queued(pool, streams):
            raise FabricUnavailable("the reply is lost")
        return 0


class ImpatientPools(RedisPools):
    """Pools where each queued stream has waited as long as it may."""

    async def waiting(self, pool: str, *, overdue: bool = False) -> list[StreamId]:
        return await super().waiting(pool)


async def test_a_replica_that_dies_while_its_stream_yields_is_rescued(redis_url: str) -> None:
    """It had begun a new epoch, and not yet put the stream into the queue."""
    async with running(redis_url) as (one, _), running(redis_url, pool=one.pool) as (two, _):
        stream = await one.ask(max_tokens=150, tier=BATCH_TIER)
        await eventually(lambda: _above(one, stream, 20), "tokens")
        pools = one.agent._handover._failover._pools
        placed = asyncio.Event()

        async def place(*args: object, **more: object) -> Placed:
            placed.set()
            await asyncio.Event().wait()
            raise AssertionError

        pools.place = place  # type: ignore[method-assign,assignment]
        one.agent.status.request_yield(1)
        await asyncio.wait_for(placed.wait(), 5)
        rescue = Failover(one.pools, one.log, HostClock(), HostRandom())
        await rescue.rescue(one.pool, one.agent.replica, stream, LOST)
        end = await two.end(stream)
        assert end.status == "completed" and end.usage is not None and end.usage.output == 150
        assert await two.epoch(stream) == 2
        for task in asyncio.all_tasks():
            if "_requeue" in repr(task.get_coro()):
                task.cancel()


async def _is_nowhere(bench: Bench, stream: StreamId) -> bool:
    return await bench.pools.holder(bench.pool, stream) is None
