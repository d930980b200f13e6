"""The agent's metrics: attempts are counted as they end, the state of agent and engine is read at a scrape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from inference.agent.agent import Agent
from inference.agent.observe.gpus import Gpu
from stream_fabric.events import AttemptTrace, Event, FleetEvent, InputTimes
from stream_fabric.gap_histogram import ITL_BUCKETS, itl_bounds_us
from stream_fabric.moderation.metrics import ModerationMetrics
from stream_fabric.process import metric_names as listed
from stream_fabric.process.budget_events import KINDS as BUDGET_EVENT_KINDS
from stream_fabric.process.metric_names import ITL_BUCKETS_US
from stream_fabric.process.metrics_registry import MetricsRegistry, Page
from stream_fabric.stream.frames import passed_over

_MIDDLES_US = tuple(sum(itl_bounds_us(bucket)) / 2 for bucket in range(ITL_BUCKETS))


class ItlHistogram(Collector):
    """Histogram of inter-token latency, filled with whole sketches (``itl_bucket``) instead of single tokens.

    Its sum takes each gap for the middle of its bucket, with an error of at most an eighth.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._counts = [0] * ITL_BUCKETS

    def add(self, sketch: Sequence[int]) -> None:
        """Add the gaps that a sketch counts by bucket."""
        for bucket, count in enumerate(sketch):
            self._counts[bucket] += count

    def collect(self) -> Iterator[Family]:
        counts = tuple(self._counts)
        below = [0, *accumulate(counts)]
        bounds = [(f"{bound / 1e6!r}", below[_bucket_at(bound)]) for bound in ITL_BUCKETS_US]
        family = HistogramMetricFamily(listed.ITL.name, listed.ITL.help, labels=listed.ITL.labels)
        total_us = sum(count * middle for count, middle in zip(counts, _MIDDLES_US, strict=True))
        family.add_metric([self._label], [*bounds, ("+Inf", below[-1])], total_us / 1e6)
        yield family


_BUDGET_EVENTS = frozenset(what for what, _ in BUDGET_EVENT_KINDS)


def _bucket_at(bound_us: int) -> int:
    """The sketch bucket whose lower bound is ``bound_us``."""
    bucket = next(b for b in range(ITL_BUCKETS) if itl_bounds_us(b)[0] >= bound_us)
    assert itl_bounds_us(bucket)[0] == bound_us
    return bucket


class AgentMetrics:
    """Metrics of one agent. ``kv_bytes_per_token``: 0 when unknown, which leaves out the metrics in bytes."""

    def __init__(self, pool: str, kv_bytes_per_token: int = 0) -> None:
        self._pool = pool
        self._kv_bytes_per_token = kv_bytes_per_token
        self._metrics = make = MetricsRegistry("agent")
        self.moderation = ModerationMetrics(make, "answer")
        self._ready = make.gauge(listed.REPLICA_READY).labels(pool)
        self._running = make.gauge(listed.RUNNING_SEQS).labels(pool)
        self._waiting = make.gauge(listed.WAITING_SEQS).labels(pool)
        self._batch = make.gauge(listed.BATCH_SIZE).labels(pool)
        self._slots = make.gauge(listed.BATCH_SLOTS).labels(pool)
        self._kv_used = make.gauge(listed.KV_USED_TOKENS).labels(pool)
        self._kv_total = make.gauge(listed.KV_TOTAL_TOKENS).labels(pool)
        self._kv_used_bytes = make.gauge(listed.KV_USED_BYTES)
        self._kv_total_bytes = make.gauge(listed.KV_TOTAL_BYTES)
        self._gpu = make.gauge(listed.GPU_UTILIZATION)
        self._gpu_memory = make.gauge(listed.GPU_MEMORY)
        self._breaker = make.gauge(listed.BREAKER).labels(pool)
        self._queue_p99 = make.gauge(listed.QUEUE_P99).labels(pool)
        self._missing = make.gauge(listed.METRICS_MISSING).labels(pool)
        self._bills_at_risk = make.gauge(listed.BILLS_AT_RISK).labels(pool)
        self._generated = _Total(make.counter(listed.TOKENS_GENERATED).labels(pool))
        self._queries = _Total(make.counter(listed.PREFIX_QUERIES).labels(pool))
        self._hits = _Total(make.counter(listed.PREFIX_HITS).labels(pool))
        self._prompt = make.counter(listed.TOKENS_PROMPT).labels(pool)
        self._budget_events = make.counter(listed.BUDGET_EVENTS)
        for kind in BUDGET_EVENT_KINDS:
            self._budget_events.labels(*kind)
        self._attempts = make.counter(listed.ATTEMPTS)
        self._engine_queue = make.histogram(listed.ENGINE_QUEUE).labels(pool)
        self._prefill = make.histogram(listed.PREFILL).labels(pool)
        self._checked = make.counter(listed.STRUCTURED_REPLIES)
        self._repairs = make.counter(listed.STRUCTURED_REPAIRS)
        self._passed_over = _Total(make.counter(listed.FRAMES_PASSED_OVER))
        answered = make.counter(listed.INPUTS_ANSWERED)
        self._inputs = {result: answered.labels(pool, result) for result in ("applied", "refused")}
        self._input_wait = make.histogram(listed.INPUT_WAIT).labels(pool)
        self._steered = make.histogram(listed.STEERED_FIRST_TOKEN).labels(pool)
        self._wake = make.histogram(listed.WAKE).labels(pool)
        self._itl = ItlHistogram(pool)
        make.registry.register(self._itl)
        self._generated_by_ended = 0

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    def receive(self, event: Event) -> None:
        """Count an attempt that has ended, a wake of the engine or an event of a budget; ignore other events."""
        if isinstance(event, FleetEvent) and event.what in _BUDGET_EVENTS:
            self._budget_events.labels(event.what, event.state.partition(":")[0]).inc()
        if isinstance(event, FleetEvent) and "wake_s" in event.figures:
            self._wake.observe(event.figures["wake_s"])
        if not isinstance(event, AttemptTrace):
            return
        self._attempts.labels(self._pool, event.ended).inc()
        self._generated_by_ended += event.generated_tokens
        self._prompt.inc(event.prompt_tokens)
        self._itl.add(event.itl_sketch)
        if event.generated_tokens:
            self._engine_queue.observe(event.engine_queue_us / 1e6)
            self._prefill.observe(event.prefill_us / 1e6)
        for answered in (times for times in event.inputs if times.answered_us):
            self._steered.observe(answered.answered_us / 1e6)

    def receive_checked(self, result: str) -> None:
        """Count a reply that was checked against a JSON schema, or a ``repair`` that began."""
        if result == "repair":
            self._repairs.labels(self._pool).inc()
        else:
            self._checked.labels(self._pool, result).inc()

    def receive_input(self, times: InputTimes) -> None:
        """Count an input of a running stream that was applied or refused."""
        self._inputs[times.result].inc()
        if times.at_us:
            self._input_wait.observe(times.waited_us / 1e6)

    async def scraped(self, agent: Agent, gpus: Sequence[Gpu]) -> Page:
        """Return the metrics page, in the plain text format so that a simulated engine's metrics can follow."""
        self._read(agent, gpus)
        return await self._metrics.scraped()

    def _read(self, agent: Agent, gpus: Sequence[Gpu]) -> None:
        """Set the gauges from the state of the agent, its engine and its GPUs."""
        info = agent.lease.info()
        load = info.load
        self._ready.set(info.state == "ready")
        self._running.set(len(agent.running))
        self._waiting.set(load.waiting)
        self._batch.set(load.running)
        self._slots.set(load.slots)
        used = load.kv_used_ratio * load.kv_capacity_tokens
        self._kv_used.set(used)
        self._kv_total.set(load.kv_capacity_tokens)
        if self._kv_bytes_per_token:
            self._kv_used_bytes.labels(self._pool).set(used * self._kv_bytes_per_token)
            self._kv_total_bytes.labels(self._pool).set(load.kv_capacity_tokens * self._kv_bytes_per_token)
        for gpu in gpus:
            self._gpu.labels(self._pool, gpu.number).set(gpu.utilization)
            self._gpu_memory.labels(self._pool, gpu.number).set(gpu.memory)
        self._breaker.set(("closed", "half_open", "open").index(agent.breaker_state))
        self._queue_p99.set(info.queue_p99_ms / 1000)
        self._missing.set(load.metrics_missing)
        self._bills_at_risk.set(agent.status.bills is not None and agent.status.bills.at_risk)
        self._generated.set(self._generated_by_ended + sum(s.timing.generated for s in agent.running.values()))
        self._passed_over.set(passed_over.count)
        self._queries.set(load.prefix_queries_tokens)
        self._hits.set(load.prefix_hits_tokens)


class _Total:
    """Sets a counter to a total that was counted elsewhere."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._total = 0

    def set(self, total: int) -> None:
        if total > self._total:
            self._counter.inc(total - self._total)
            self._total = total
