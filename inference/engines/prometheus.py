"""Reads vLLM's ``/metrics``. Sans I/O; a value that is missing or unreadable counts as 0."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

CONTRACT = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info",
)
"""The metrics of vLLM that the agent relies on, as vLLM 0.33 shows them from its start."""
_EXACT_MAX = 1 << 53
"""Numbers from here on are no counts."""
_NAME = re.compile(rb"^(vllm[:_]\w+)[ {]", re.MULTILINE)
_READ = re.compile(
    rb"^vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc|prefix_cache_queries(?:_total)?"
    rb"|prefix_cache_hits(?:_total)?|cache_config_info|engine_sleep_state)[ {].*$",
    re.MULTILINE,
)


class VllmMetrics(msgspec.Struct, frozen=True):
    """One reading of vLLM's metrics.

    With several engines behind one server (data parallel): the sums, and the mean of the ratio.
    """

    shown: bool = False
    """True when the server shows its load at all."""
    running: int = 0
    waiting: int = 0
    kv_used_ratio: float = 0.0
    kv_capacity_tokens: int = 0
    block_size: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def read_metrics(text: bytes) -> VllmMetrics:
    """Read a metrics page in the Prometheus text format, from any server."""
    sums: dict[str, float] = {}
    ratios: list[float] = []
    capacity = block_size = 0
    for sample in samples(text):
        name = sample.name.removeprefix("vllm:").removesuffix("_total")
        if name == "cache_config_info":
            size, tokens = _cache_size(sample.labels)
            block_size, capacity = max(block_size, size), capacity + tokens
        elif name == "kv_cache_usage_perc":
            ratios.append(sample.value)
        else:
            sums[name] = sums.get(name, 0.0) + sample.value
    return VllmMetrics(
        shown="num_requests_running" in sums,
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_used_ratio=sum(ratios) / len(ratios) if ratios else 0.0,
        kv_capacity_tokens=capacity,
        block_size=block_size,
        prefix_queries=int(sums.get("prefix_cache_queries", 0)),
        prefix_hits=int(sums.get("prefix_cache_hits", 0)),
    )


def sleep_level(text: bytes) -> int:
    """Return the level at which a sleeping vLLM sleeps; 2 if unknown, because its weights may be gone."""
    states = {s.labels.get("sleep_state") for s in samples(text) if s.name.endswith("sleep_state") and s.value == 1}
    return 1 if "weights_offloaded" in states and "discard_all" not in states else 2


def missing_metrics(text: bytes) -> list[str]:
    """Return the names in ``CONTRACT`` that a page of vLLM lacks, with their probable new names.

    Empty for a page of another server.
    """
    shown = {name.decode() for name in _NAME.findall(text)}
    if not shown:
        return []
    lacks = []
    for name in CONTRACT:
        bare = name.removesuffix("_total")
        if name in shown or bare in shown:
            continue
        renamed = bare.replace(":", "_")
        other = next((known for known in (renamed, renamed + "_total") if known in shown), None)
        lacks.append(f"{name} (there is {other})" if other else name)
    return lacks


def samples(text: bytes) -> Iterator[Sample]:
    """Yield the samples with a sensible value of the metrics that this module reads.

    Only their lines are parsed, one by one: a page has thousands of lines and would hold up the event loop, and one
    unreadable line must not cost the others.
    """
    for line in _READ.findall(text):
        try:
            parsed = [sample for family in text_string_to_metric_families(line.decode()) for sample in family.samples]
        except ValueError:  # also UnicodeDecodeError
            continue
        yield from (sample for sample in parsed if abs(sample.value) < _EXACT_MAX)


def _cache_size(labels: dict[str, str]) -> tuple[int, int]:
    """Return the block size and the capacity of one engine's KV cache, in tokens."""
    size = _label_number(labels.get("block_size"))
    # With several kinds of layers a block is not block_size tokens of the whole model; newer versions say the capacity
    return size, _label_number(labels.get("kv_cache_size_tokens")) or size * _label_number(labels.get("num_gpu_blocks"))


def _label_number(value: str | None) -> int:
    """Return a label's value as a number; 0: missing, or ``None`` in words."""
    is_number = value is not None and value.isdecimal() and value.isascii() and len(value) < len(str(_EXACT_MAX))
    return int(value) if value is not None and is_number else 0


class RestartingCounter:
    """Total of a counter of another process, which starts at 0 again when that process restarts."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._before = 0
        self._last = 0

    @property
    def total(self) -> int:
        return self._before + self._last

    def receive(self, value: int) -> bool:
        """Take a reading. True: the reading is lower than the last one, so the process has restarted."""
        restarted = value < self._last
        if restarted:
            self._before += self._last
        self._last = value
        return restarted
