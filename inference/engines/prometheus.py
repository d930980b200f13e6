"""What vLLM's ``/metrics`` tells of its load. Sans I/O; what is missing or unreadable is 0."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

_SAMPLE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|prefix_cache_queries(?:_total)?"
    rb"|prefix_cache_hits(?:_total)?|cache_config_info)(?:\{(.*)\})? (\S+)",
    re.MULTILINE,
)
_NAME = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)[ {]", re.MULTILINE)
CONTRACT = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info",
)
"""What we rely on of vLLM's metrics, as it shows them from its start (read in 0.33)."""
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')


class VllmMetrics(msgspec.Struct, frozen=True):
    """One reading. Of several engines behind one server (data parallel): their sums, and the mean of the ratio."""

    told: bool = False
    """Whether the server tells its load at all."""
    running: int = 0
    waiting: int = 0
    kv_used_ratio: float = 0.0
    kv_capacity_tokens: int = 0
    block_size: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


def read_metrics(text: bytes) -> VllmMetrics:
    """``text``: the Prometheus text format, whoever's."""
    sums: dict[str, float] = {}
    ratios: list[float] = []
    capacity = block_size = 0
    for name, labels, value in _samples(text):
        if name == "cache_config_info":
            size, tokens = _cache(labels)
            block_size, capacity = max(block_size, size), capacity + tokens
        elif name == "kv_cache_usage_perc":
            ratios.append(value)
        else:
            sums[name] = sums.get(name, 0.0) + value
    return VllmMetrics(
        told="num_requests_running" in sums,
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_used_ratio=sum(ratios) / len(ratios) if ratios else 0.0,
        kv_capacity_tokens=capacity,
        block_size=block_size,
        prefix_queries=int(sums.get("prefix_cache_queries", 0)),
        prefix_hits=int(sums.get("prefix_cache_hits", 0)),
    )


def missing(text: bytes) -> list[str]:
    """Of the contract, what a page of vLLM's metrics lacks, with what it seems to be called now; of a page that is not
    vLLM's, nothing."""
    shown = {name.decode() for name in _NAME.findall(text)}
    if not any(name.startswith(("vllm:", "vllm_")) for name in shown):
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


def _samples(text: bytes) -> Iterator[tuple[str, bytes, float]]:
    for name, labels, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            yield name.decode().removesuffix("_total"), labels, number


def _cache(labels: bytes) -> tuple[int, int]:
    """Block size and capacity in tokens, of one engine."""
    found: dict[bytes, bytes] = dict(_LABEL.findall(labels))
    size = _whole(found.get(b"block_size"))
    # With layers of several kinds a block is not block_size tokens of the whole model: newer versions say what it holds
    return size, _whole(found.get(b"kv_cache_size_tokens")) or size * _whole(found.get(b"num_gpu_blocks"))


def _whole(value: bytes | None) -> int:
    """Labels may say ``None``."""
    return int(value) if value is not None and value.isdigit() else 0


class Rising:
    """A counter of another process as one that only grows. A drop means that the process began anew."""

    __slots__ = ("_before", "_last")

    def __init__(self) -> None:
        self._before = 0
        self._last = 0

    @property
    def total(self) -> int:
        return self._before + self._last

    def receive(self, value: int) -> bool:
        """Whether it began anew."""
        anew = value < self._last
        if anew:
            self._before += self._last
        self._last = value
        return anew
