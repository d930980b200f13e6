"""The simulator's metrics under vLLM's names, so that readers of a replica's metrics can be tried on it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.engines.sim.model import Replica
from stream_fabric.stream.ids import StreamId

_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
_TTFT_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
_HELP = "Metric of a simulated replica."
_LABELS = ("model_name", "engine")


class SimMetrics(Collector):
    """Counts the simulator's tokens and latencies in plain numbers; a scrape renders them as metrics."""

    def __init__(self, replica: Replica[tuple[StreamId, int]]) -> None:
        self._replica = replica
        self._labels = (replica.settings.model, "simulated")
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._succeeded = 0
        self._ttft = [0] * (len(_TTFT_BUCKETS_S) + 1)
        self._ttft_sum = 0.0
        self._itl = [0] * (len(_ITL_BUCKETS_S) + 1)
        self._itl_sum = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def receive_first_token(self, ttft_s: float, prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._ttft_sum += ttft_s
        self._ttft[bisect_left(_TTFT_BUCKETS_S, ttft_s)] += 1

    def receive_step(self, tokens: int, step_s: float) -> None:
        """Count a step that produced one more token for each of ``tokens`` sequences."""
        self._itl[bisect_left(_ITL_BUCKETS_S, step_s)] += tokens
        self._itl_sum += tokens * step_s

    def receive_end(self, tokens: int) -> None:
        self._generation_tokens += tokens
        self._succeeded += 1

    def render(self) -> bytes:
        """The metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        replica = self._replica
        for name, value in (
            ("num_requests_running", len(replica.running)),
            ("num_requests_waiting", len(replica.waiting)),
            ("kv_cache_usage_perc", replica.blocks.used / replica.blocks.total),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", _HELP, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, value in (
            ("prefix_cache_queries", replica.prefix_queries),
            ("prefix_cache_hits", replica.prefix_hits),
            ("num_preemptions", replica.preemptions),
            ("prompt_tokens", self._prompt_tokens),
            ("generation_tokens", self._generation_tokens),
            ("request_success", self._succeeded),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", _HELP, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield self._histogram("time_to_first_token_seconds", _TTFT_BUCKETS_S, self._ttft, self._ttft_sum)
        yield self._histogram("inter_token_latency_seconds", _ITL_BUCKETS_S, self._itl, self._itl_sum)

    def _histogram(self, name: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", _HELP, labels=_LABELS)
        names = [*map(str, bounds), "+Inf"]
        family.add_metric(self._labels, list(zip(names, accumulate(counts), strict=True)), total)
        return family
