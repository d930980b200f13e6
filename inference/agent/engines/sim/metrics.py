"""The simulator's metrics under vLLM's names, so that what reads a replica's metrics can be tried on it."""

from __future__ import annotations

from bisect import bisect_left

from inference.agent.engines.sim.model import Replica
from stream_fabric.ids import StreamId

_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
_TTFT_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)


class SimMetrics:
    """Counts, and renders Prometheus text 0.0.4. Every HELP line says that the replica is simulated."""

    def __init__(self, replica: Replica[tuple[StreamId, int]]) -> None:
        self._replica = replica
        self._model = replica.settings.model
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._succeeded = 0
        self._ttft = [0] * (len(_TTFT_BUCKETS_S) + 1)
        self._ttft_sum = 0.0
        self._itl = [0] * (len(_ITL_BUCKETS_S) + 1)
        self._itl_sum = 0.0

    def first_token(self, ttft_s: float, prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._ttft_sum += ttft_s
        self._ttft[bisect_left(_TTFT_BUCKETS_S, ttft_s)] += 1

    def decoded(self, tokens: int, step_s: float) -> None:
        """A step gave so many sequences one more token each."""
        self._itl[bisect_left(_ITL_BUCKETS_S, step_s)] += tokens
        self._itl_sum += tokens * step_s

    def finished(self, tokens: int) -> None:
        self._generation_tokens += tokens
        self._succeeded += 1

    def render(self) -> str:
        replica = self._replica
        gauges = {
            "vllm:num_requests_running": len(replica.running),
            "vllm:num_requests_waiting": len(replica.waiting),
            "vllm:kv_cache_usage_perc": replica.blocks.used / replica.blocks.total,
        }
        counters = {
            "vllm:prefix_cache_queries_total": replica.prefix_queries,
            "vllm:prefix_cache_hits_total": replica.prefix_hits,
            "vllm:num_preemptions_total": replica.preemptions,
            "vllm:prompt_tokens_total": self._prompt_tokens,
            "vllm:generation_tokens_total": self._generation_tokens,
            "vllm:request_success_total": self._succeeded,
        }
        label = f'{{model_name="{self._model}",engine="simulated"}}'
        out = []
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                out.append(f"# HELP {name} Of a simulated replica.\n# TYPE {name} {kind}\n{name}{label} {value:g}\n")
        for name, edges, counts, whole in (
            ("vllm:time_to_first_token_seconds", _TTFT_BUCKETS_S, self._ttft, self._ttft_sum),
            ("vllm:inter_token_latency_seconds", _ITL_BUCKETS_S, self._itl, self._itl_sum),
        ):
            out.append(f"# HELP {name} Of a simulated replica.\n# TYPE {name} histogram\n")
            total = 0
            for edge, count in zip([*map(str, edges), "+Inf"], counts, strict=True):
                total += count
                out.append(f'{name}_bucket{{model_name="{self._model}",engine="simulated",le="{edge}"}} {total}\n')
            out.append(f"{name}_sum{label} {whole:g}\n{name}_count{label} {total}\n")
        return "".join(out)
