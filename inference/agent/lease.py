"""What a replica tells its pool: its lease with all that it runs, what has ended, what it holds of prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec

from inference.agent.chronicle import Chronicle
from inference.agent.meter import Breaker, Company, Meter
from inference.agent.running import RunningStream
from stream_fabric.errors import FabricUnavailable
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import PREFIX_BLOCK_BYTES
from stream_fabric.placement import TIERS, ReplicaState
from stream_fabric.ports import Engine, Loaded
from stream_fabric.prefix import PrefixLedger
from stream_fabric.redis.pool import PREFIX_TTL_S, RedisPools, ReplicaInfo

log = logging.getLogger(__name__)

_REPORT_SOON_S = 0.02
"""First tokens and ends within so long are reported together."""
_PUBLISH_AGAIN_S = PREFIX_TTL_S / 3
"""What a replica holds of prompts is published again, unchanged: it expires, and Redis may have lost it."""
_AGAIN_S = 0.05


class LeasePolicy(msgspec.Struct, frozen=True):
    pool: str
    engine: str
    models: tuple[str, ...]
    simulated: bool
    ttl_s: float
    room_ratio: float
    region: str = ""
    hardware: str = ""
    revision: str = ""
    loaded: Loaded = Loaded()


class Lease:
    """``running``, ``state`` and ``slept`` (how long its engine took to wake, why it does not sleep) are asked at each
    report; ``on_desired`` hears what somebody asked for, and who."""

    def __init__(
        self,
        policy: LeasePolicy,
        replica: ReplicaId,
        engine: Engine,
        pools: RedisPools,
        running: Callable[[], Collection[RunningStream]],
        state: Callable[[], ReplicaState],
        on_desired: Callable[[str, str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        chronicle: Chronicle,
        slept: Callable[[], tuple[float, str]] = lambda: (0.0, ""),
    ) -> None:
        self._policy = policy
        self._replica = replica
        self._engine = engine
        self._pools = pools
        self._running = running
        self._state = state
        self._on_desired = on_desired
        self._spawn = spawn
        self._chronicle = chronicle
        self._slept = slept
        self._loop = asyncio.get_running_loop()
        self.meter = Meter(self._loop.time())
        self.breaker = Breaker()
        self._ledger = PrefixLedger()
        self._published_version = 0
        self._published_at = 0.0
        self._evicted_tokens = 0
        self._clears = 0
        self._unsaid: dict[StreamId, int] = {}
        """Streams that have ended and that the pool has not been told of, each with the number of that end."""
        self._ends = 0
        self._reporting = False
        self._turn = asyncio.Lock()
        """Of two reports on their way the second would say again that a stream has ended which the first gave back."""
        self._prefilling: dict[StreamId, RunningStream] = {}
        """Streams that have no first token yet, in the order they came."""
        self._prefilling_since = 0.0
        """Since when the first of them is being computed, at most."""
        self._decoding: set[RunningStream] = set()
        self._company = Company(self._loop.time())

    # --- what becomes of a stream --------------------------------------------------------------------------

    def receive_start(self, stream: RunningStream) -> None:
        self._unsaid.pop(stream.work.request.stream, None)  # it has come back
        if stream.hashes:
            stream.believed_blocks = self._ledger.match(stream.hashes)
            stream.matched_tokens = int(stream.believed_blocks * PREFIX_BLOCK_BYTES / self.meter.bytes_per_token)
            # The next one with the same beginning waits behind this one, and finds it
            self._ledger.touch(stream.hashes)
        if not self._prefilling:
            self._prefilling_since = self._loop.time()
        stream.crowded = len(self._running()) > self._engine.load().slots
        self._prefilling[stream.work.request.stream] = stream

    def receive_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None:
        """The engine has told the prompt's length and how much of it was cached."""
        self.meter.receive_prompt(len(stream.work.request.body), tokens)
        if stream.first_at is None and cached:
            self._ledger.settle(stream.believed_blocks, cached * self.meter.bytes_per_token / PREFIX_BLOCK_BYTES)

    def receive_first_token(self, stream: RunningStream) -> None:
        now = self._loop.time()
        stream.first_at = now
        self._decoding.add(stream)
        self._company.receive(len(self._decoding), now)
        stream.company_s = self._company.upto(now)
        prompt = stream.producer.usage.prompt or stream.work.prompt_tokens
        computed = max(prompt - (stream.producer.usage.cached or stream.matched_tokens), 0)
        self._prefilling.pop(stream.work.request.stream, None)
        took_s = now - stream.started_at
        own_s = min(computed / self.meter.prefill.per_s, took_s)
        # Who has a slot is computed once nobody is before it; who has none waits for one, too
        stream.times.prefill_s = own_s if stream.crowded else max(own_s, min(now - self._prefilling_since, took_s))
        self.meter.prefill.receive(computed, now - self._prefilling_since, goes_on=bool(self._prefilling))
        self._prefilling_since = now
        self.meter.receive_wait(computed, took_s, now)
        if not stream.work.base and TIERS[stream.work.tier] != "batch":
            times = stream.times
            before_s = (times.waited_us + max(times.taken_us - times.handed_us, 0)) / 1e6
            self.meter.first_tokens.receive(before_s + took_s, now)
        self.breaker.receive_success()
        self._chronicle.look_at(self.breaker, now)
        self.report_soon()

    def receive_failure(self, code: str) -> None:
        """The engine has failed a request."""
        now = self._loop.time()
        self._chronicle.look_at(self.breaker, now)
        self.breaker.receive_failure(now)
        self._chronicle.look_at(self.breaker, now, code)

    def batch_of(self, stream: RunningStream) -> float:
        """How many sequences decoded beside the stream since its first token, itself counted; 0: it has had none."""
        if stream not in self._decoding or stream.first_at is None:
            return 0.0
        return self._company.mean(stream.company_s, stream.first_at, self._loop.time())

    def receive_end(self, stream: RunningStream, *, whole: bool, listed: bool = True) -> None:
        """The stream is none of this replica's any more; ``whole``: its log has its terminal. ``listed``: the pool may
        have it on this replica's list."""
        if self._prefilling.get(stream.work.request.stream) is stream:
            del self._prefilling[stream.work.request.stream]
        if stream in self._decoding:
            self._decoding.discard(stream)
            self._company.receive(len(self._decoding), self._loop.time())
        self.meter.receive_tokens(stream.tokens - stream.metered_tokens)
        if whole:
            self.meter.usual.receive_end(stream.tokens)
        if stream.hashes:
            # The engine lets go of its blocks now: they are its most recently used
            self._ledger.touch(stream.hashes)
        if listed:
            self.say_ended(stream.work.request.stream)
        else:
            self.report_soon()

    def say_ended(self, stream: StreamId) -> None:
        """Whatever the pool's lists say, the stream does not run here any more."""
        self._ends += 1
        self._unsaid[stream] = self._ends
        self.report_soon()

    # --- what is told --------------------------------------------------------------------------------------

    async def renew(self) -> None:
        """Renew the lease, and publish what this replica holds of prompts. Raises FabricUnavailable."""
        for stream in self._running():
            self.meter.receive_tokens(stream.tokens - stream.metered_tokens)
            stream.metered_tokens = stream.tokens
        self.meter.tick(sum(s.first_at is not None for s in self._running()), self._loop.time())
        self._tend_ledger()
        now, version = self._loop.time(), self._ledger.version
        if version != self._published_version or (version and now - self._published_at > _PUBLISH_AGAIN_S):
            await self._pools.put_prefix(self._policy.pool, self._replica, self._ledger.summary())
            self._published_version, self._published_at = version, now
        deadline = self._loop.time() + self._policy.ttl_s / 3
        while True:
            try:
                async with self._turn:
                    await self._report(renew=True)
                return
            except FabricUnavailable:
                if self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(_AGAIN_S)

    def report_soon(self) -> None:
        """Tell the pool what is done: who waits gets the room, and placement sees the load as it is."""
        if not self._reporting:
            self._reporting = True
            self._spawn(self._report_once())

    async def _report_once(self) -> None:
        await asyncio.sleep(_REPORT_SOON_S)
        try:
            async with self._turn:
                self._reporting = False
                await self._report(renew=False)
        except FabricUnavailable as error:
            log.warning("the pool cannot be told of room: %s", error)  # the next renewal tells it

    async def _report(self, *, renew: bool) -> None:
        ended = dict(self._unsaid)
        running = {s.work.request.stream: s.work.session for s in self._running()} if renew else None
        info = self.info()
        report = await self._pools.report(
            info, ttl_s=self._policy.ttl_s if renew else None, ended=list(ended), running=running
        )
        for name, number in ended.items():
            if self._unsaid.get(name) == number:  # else it was placed here again behind this report
                del self._unsaid[name]
        if running is not None:
            now = self._loop.time()
            self._chronicle.receive_renewal(info, len(running), now)
            self._chronicle.look_at(self.breaker, now)
        if report.desired:
            self._on_desired(report.desired, report.asked_by)

    def _tend_ledger(self) -> None:
        """Follow what the engine says of its cache."""
        load = self._engine.load()
        block_tokens = PREFIX_BLOCK_BYTES / self.meter.bytes_per_token
        self._ledger.bound(load.kv_capacity_tokens / block_tokens)
        if load.kv_clears > self._clears:
            self._ledger.clear()
        elif load.kv_evicted_tokens > self._evicted_tokens and load.kv_capacity_tokens:
            # Of what was thrown out, the ledger's share: the cache holds answers, too
            share = len(self._ledger) * block_tokens / load.kv_capacity_tokens
            evicted = (load.kv_evicted_tokens - self._evicted_tokens) / block_tokens
            self._ledger.evict(int(evicted * min(share, 1.0)))
        self._clears, self._evicted_tokens = load.kv_clears, load.kv_evicted_tokens

    def info(self) -> ReplicaInfo:
        """What the pool is told of this replica now."""
        policy, meter, load = self._policy, self.meter, self._engine.load()
        wake_s, sleepless = self._slept()
        decode_per_s = max(meter.sequence_per_s * load.slots, 1.0)
        return ReplicaInfo(
            self._replica,
            policy.pool,
            policy.engine,
            policy.models,
            self._state(),
            load,
            policy.simulated,
            room=self.breaker.room(max(1, int(load.slots * policy.room_ratio)), self._loop.time()),
            prefill_ms=self._pending_prefill_s() * 1000,
            decode_ms=self._pending_output_tokens() / decode_per_s * 1000,
            prefill_per_s=meter.prefill.per_s,
            decode_per_s=decode_per_s,
            tokens_per_s=meter.tokens_per_s,
            output_tokens_mean=meter.usual.tokens,
            bytes_per_token=meter.bytes_per_token,
            prefix_version=self._published_version,
            queue_p99_ms=max(meter.queue_p99_ms, self._standstill_s() * 1000),
            prefix_blocks=len(self._ledger),
            region=policy.region,
            hardware=policy.hardware,
            revision=policy.revision,
            ttft_counts=meter.first_tokens.counts(self._loop.time()),
            adapters=policy.loaded.adapters,
            artifact=policy.loaded.artifact,
            wake_s=wake_s,
            sleepless=sleepless,
        )

    def _pending_prefill_s(self) -> float:
        """Of the first prompt in line, what it has had of time is taken off."""
        if not self._prefilling:
            return 0.0
        speed = self.meter.prefill.per_s
        to_compute = [max(s.work.prompt_tokens - s.matched_tokens, 1) for s in self._prefilling.values()]
        return sum(to_compute) / speed - min(self._loop.time() - self._prefilling_since, to_compute[0] / speed)

    def _standstill_s(self) -> float:
        """How much longer than its computation takes the first prompt in line has waited since the last first token:
        an engine from which none comes at all has no wait to be measured."""
        first = next(iter(self._prefilling.values()), None)
        if first is None:
            return 0.0
        computes_s = max(first.work.prompt_tokens - first.matched_tokens, 1) / self.meter.prefill.per_s
        return max(self._loop.time() - self._prefilling_since - computes_s, 0.0)

    def _pending_output_tokens(self) -> float:
        """A running answer has as much to come as its like usually have in all, as whoever placed it knew, within its
        limit: the lengths of answers are spread so widely that a long one is no nearer to its end."""
        return sum(min(s.work.output_tokens, max(s.work.output_limit - s.tokens, 1)) for s in self._running())
