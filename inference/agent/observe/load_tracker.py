"""The replica's load, measured from the streams that pass the agent: what placement needs to compare replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from inference.agent.observe.gpu_time import GpuTime
from inference.agent.observe.meter import Breaker, DecodeConcurrency, Meter
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.running import RunningStream
from stream_fabric.limits import PREFIX_BLOCK_BYTES
from stream_fabric.pool.placement import BATCH_TIER, TIERS
from stream_fabric.pool.prefix import PrefixLedger
from stream_fabric.pool.records import EngineLoad
from stream_fabric.pool.replica_load import pending_output_tokens, pending_prefill_s
from stream_fabric.ports import Engine
from stream_fabric.stream.ids import StreamId

_IMAGE = b"data:image/"


class LoadTracker:
    """Follows ``running``, the streams of this replica, from their start to their end."""

    def __init__(self, engine: Engine, running: Mapping[StreamId, RunningStream], events: ReplicaEvents) -> None:
        self.engine = engine
        self._running = running
        self._events = events
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self.meter = Meter(now)
        self.breaker = Breaker()
        self.prefixes = PrefixLedger()
        """The prompt blocks that the engine's cache is believed to hold."""
        self._evicted_tokens = 0
        self._cache_clears = 0
        self._prefilling: dict[StreamId, RunningStream] = {}
        """Streams without a first token, in the order they started."""
        self._prefilling_since = 0.0
        """Earliest moment at which the engine can have begun to compute the first of them, if it had a free slot."""
        self._computing_since = 0.0
        """The same, or later: the time in which the first of them waited for a slot is no computation."""
        self._lacked_kv = False
        """True: prompts have waited for room in the KV cache since the replica last had none without a first token."""
        self._decoding: set[RunningStream] = set()
        self._concurrency = DecodeConcurrency(now)
        self._gpu_time = GpuTime(now)

    # --- a stream's life -----------------------------------------------------------------------------------

    def receive_start(self, stream: RunningStream) -> None:
        if stream.hashes:
            stream.believed_blocks = self.prefixes.match(stream.hashes)
            stream.matched_tokens = int(stream.believed_blocks * PREFIX_BLOCK_BYTES / self.meter.bytes_per_token)
            # A later stream with the same beginning is computed after this one and finds its blocks
            self.prefixes.touch(stream.hashes)
        if not self._prefilling:
            self._prefilling_since = self._computing_since = self._loop.time()
            self._lacked_kv = False
        load = self.engine.load()
        stream.waits_in_engine = len(self._running) > load.slots
        self._prefilling[stream.name] = stream
        self._look_for_kv(load)
        self._gpu_time.begin(stream, load.slots, self._loop.time())

    def end_gpu_time(self, stream: RunningStream) -> float:
        """Return the stream's share of the replica's busy time in seconds, and count no more. Later calls return 0."""
        return self._gpu_time.end(stream, self.engine.load().slots, self._loop.time())

    def receive_prompt(self, stream: RunningStream, tokens: int, cached: int) -> None:
        """Take the length of the prompt and how much of it was cached, as the engine reported."""
        request = stream.work.request
        if request.plain or _IMAGE not in bytes(request.body):  # its bytes say nothing about the tokens of texts
            self.meter.receive_prompt(memoryview(request.body).nbytes, tokens)
        if stream.first_at is None and cached:
            self.prefixes.adjust_limit(stream.believed_blocks, cached * self.meter.bytes_per_token / PREFIX_BLOCK_BYTES)

    def receive_first_token(self, stream: RunningStream) -> None:
        now = self._loop.time()
        stream.first_at = now
        load = self.engine.load()
        self._look_for_kv(load)
        self._decoding.add(stream)
        self._concurrency.receive(len(self._decoding), now)
        stream.decode_seconds_before = self._concurrency.sequence_seconds(now)
        prompt = stream.producer.usage.prompt or stream.work.prompt_tokens
        computed = max(prompt - (stream.producer.usage.cached or stream.matched_tokens), 0)
        self._prefilling.pop(stream.name, None)
        took_s = now - stream.started_at
        own_s = min(computed / self.meter.prefill.per_s, took_s)
        # With a slot, the engine computes it once no other is before it; without one, part of the time is waiting
        in_a_row_s = min(now - self._prefilling_since, took_s)
        stream.timing.prefill_s = own_s if stream.waits_in_engine else max(own_s, in_a_row_s)
        goes_on = bool(self._prefilling) and self._has_slot(load)
        if self._lacked_kv:
            self.meter.prefill.drop_sample()
        else:
            self.meter.prefill.receive(computed, now - self._computing_since, goes_on=goes_on)
        self._prefilling_since = self._computing_since = now
        self.meter.receive_wait(computed, took_s, now)
        if not stream.work.base and TIERS[stream.work.tier] != "batch":
            timing = stream.timing
            before_s = (timing.waited_us + max(timing.taken_us - timing.handed_us, 0)) / 1e6
            self.meter.first_tokens.receive(before_s + took_s, now)
        self.breaker.receive_success()
        self._events.receive_breaker(self.breaker, now)

    def receive_failure(self, code: str) -> None:
        """Count a request that the engine has failed, and report the breaker if its state changes."""
        now = self._loop.time()
        self._events.receive_breaker(self.breaker, now)
        self.breaker.receive_failure(now, code)
        self._events.receive_breaker(self.breaker, now, code)

    def decode_concurrency(self, stream: RunningStream) -> float:
        """Mean number of sequences decoding since the stream's first token, itself included; 0: it had no token."""
        if stream not in self._decoding or stream.first_at is None:
            return 0.0
        return self._concurrency.mean(stream.decode_seconds_before, stream.first_at, self._loop.time())

    def receive_end(self, stream: RunningStream, *, whole: bool) -> None:
        """Stop following a stream that no longer runs here. ``whole``: the log has the stream's terminal."""
        load = self.engine.load()
        self._look_for_kv(load)
        if self._prefilling.get(stream.name) is stream:
            if next(iter(self._prefilling)) == stream.name:  # the time before belongs to no prompt that is counted
                self._prefilling_since = self._computing_since = self._loop.time()
            del self._prefilling[stream.name]
        if stream in self._decoding:
            if not self._has_slot(load):  # the first prompt that waits gets this one
                self._computing_since = self._loop.time()
            self._decoding.discard(stream)
            self._concurrency.receive(len(self._decoding), self._loop.time())
        self.meter.receive_tokens(stream.tokens - stream.metered_tokens)
        if whole:
            self.meter.typical_length.receive_end(stream.tokens)
        if stream.hashes:
            # The engine frees its blocks now, which makes them its most recently used
            self.prefixes.touch(stream.hashes)

    def _has_slot(self, load: EngineLoad) -> bool:
        """Return whether the engine can compute a prompt: fewer sequences decode than it has slots."""
        return not load.slots or len(self._decoding) < load.slots

    def _look_for_kv(self, load: EngineLoad) -> None:
        """Notice that prompts wait for room in the KV cache: some wait beside free slots, and all that run decode.

        The engine's figures may be a second old, so the length of the wait is unknown, and nothing is measured until no
        prompt is pending. The prompts behind it share steps with it: without its time they would look too fast.
        """
        if self._prefilling and load.waits_beside_slots and load.running <= len(self._decoding):
            self._lacked_kv = True
            for stream in self._prefilling.values():
                stream.waits_in_engine = True

    # --- figures -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Close a measuring period. Called at each renewal of the lease."""
        load = self.engine.load()
        self._look_for_kv(load)
        for stream in self._running.values():
            self.meter.receive_tokens(stream.tokens - stream.metered_tokens)
            stream.metered_tokens = stream.tokens
        self.meter.tick(sum(s.first_at is not None for s in self._running.values()), self._loop.time())
        self._remove_evicted_prefixes(load)

    def _remove_evicted_prefixes(self, load: EngineLoad) -> None:
        """Remove from the ledger of cached prompts what the engine has evicted from its cache."""
        block_tokens = PREFIX_BLOCK_BYTES / self.meter.bytes_per_token
        self.prefixes.set_capacity(load.kv_capacity_tokens / block_tokens)
        if load.kv_clears > self._cache_clears:
            self.prefixes.clear()
        elif load.kv_evicted_tokens > self._evicted_tokens and load.kv_capacity_tokens:
            # The cache holds outputs too: only the ledger's share of the evicted tokens was prompt
            share = len(self.prefixes) * block_tokens / load.kv_capacity_tokens
            evicted = (load.kv_evicted_tokens - self._evicted_tokens) / block_tokens
            self.prefixes.evict(int(evicted * min(share, 1.0)))
        self._cache_clears, self._evicted_tokens = load.kv_clears, load.kv_evicted_tokens

    def pending_prefill_s(self) -> float:
        """Seconds the engine needs for the prompts it has, less the time already spent on the first of them."""
        if not self._prefilling:
            return 0.0
        to_compute = [max(s.work.prompt_tokens - s.matched_tokens, 1) for s in self._prefilling.values()]
        computes = self._has_slot(self.engine.load()) and not self._lacked_kv
        spent_s = self._loop.time() - self._computing_since if computes else 0.0
        return pending_prefill_s(sum(to_compute), to_compute[0], spent_s, self.meter.prefill.per_s)

    def standstill_s(self) -> float:
        """Seconds by which the first prompt has waited longer than it takes to compute, since the last first token.

        An engine that produces no token at all has no finished wait that could be measured.
        """
        first = next(iter(self._prefilling.values()), None)
        if first is None:
            return 0.0
        computes_s = max(first.work.prompt_tokens - first.matched_tokens, 1) / self.meter.prefill.per_s
        return max(self._loop.time() - self._prefilling_since - computes_s, 0.0)

    def pending_output_tokens(self) -> float:
        """Output tokens that the running streams are expected to produce yet, by their gateways' estimates."""
        running = self._running.values()
        return sum(pending_output_tokens(s.work.output_tokens, s.work.output_limit, s.tokens) for s in running)

    def yieldable_streams(self) -> int:
        """Batch streams that run here and can be cut. A few kinds that cannot go on elsewhere are among them."""
        return sum(s.work.tier == BATCH_TIER and not s.closed for s in self._running.values())
