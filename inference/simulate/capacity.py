"""Replicas, GPUs and dollars that a workload needs, with the arithmetic. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from inference.engines.sim.settings import SimSettings
from inference.simulate.hardware import GIB, Hardware
from inference.simulate.workload import Workload

HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Margins:
    """Reserves of a fleet."""

    aimed: float = 0.6
    """Utilisation of a replica at the peak; the rest is for bursts."""
    spare: int = 1
    """Replicas that may be dead at the peak."""
    warm_share: float = 0.05
    """Warm replicas as a share of serving ones."""
    itl_ms: float = 100.0
    """Longest gap between tokens at the peak."""

    def __post_init__(self) -> None:
        if not 0 < self.aimed <= 1:
            raise ValueError("a replica's utilisation must be more than 0 and at most 1")
        if self.spare < 0 or not 0 <= self.warm_share <= 1 or self.itl_ms <= 0:
            raise ValueError("spare replicas must be 0 or more, the warm share from 0 to 1, the gap more than 0")


@dataclass(frozen=True)
class Answer:
    """The fleet for a workload."""

    batch: int
    """Concurrent sequences of one replica."""
    batch_bound: str
    """Limit of the batch: slots, or KV memory."""
    replica_per_s: float
    """Requests per second of one full replica."""
    aimed_per_s: float
    """Requests per second of one replica at the peak."""
    itl_ms: float
    """Gap between tokens at the peak."""
    serving: int
    spare: int
    warm: int
    replicas: int
    """Replicas in total. A warm one replaces a dead one, so the larger of both margins counts."""
    gpus: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    running: float
    """Concurrent sequences of the whole fleet at the peak."""
    kv_tokens: float
    """KV tokens that these sequences hold."""
    kv_bytes: float
    dollars_per_month: float
    replicas_mean: float
    """Mean replicas of a pool that scales with its load."""
    dollars_per_month_elastic: float
    arithmetic: Mapping[str, tuple[str, ...]]
    """Lines of arithmetic by topic."""


@dataclass(frozen=True)
class _Cost:
    """Time that one mean request takes of a replica."""

    settings: SimSettings
    computed: float
    """Prompt tokens to compute."""
    output: float

    @property
    def prefill_s(self) -> float:
        return self.computed / self.settings.prefill_tokens_per_s

    def step_s(self, batch: float) -> float:
        """Seconds of a decode step of ``batch`` sequences."""
        return self.settings.itl_ms / 1e3 + (batch - 1) * self._added_sequence_s

    def decode_s(self, batch: int) -> float:
        """Replica time for the decode of one request in a batch of ``batch`` sequences."""
        return self.output * self.step_s(batch) / batch

    def extra_s(self, batch: int) -> float:
        """Seconds of additional steps, because one step holds a limited number of tokens."""
        steps = (self.computed + self.output) / self.settings.max_num_batched_tokens - self.output / batch
        return max(steps, 0.0) * self.settings.itl_ms / 1e3

    def request_s(self, batch: int) -> float:
        """Replica time for one request in a batch of ``batch`` sequences."""
        return self.prefill_s + self.decode_s(batch) + self.extra_s(batch)

    def per_s_within(self, itl_s: float) -> float:
        """Requests per second at which a token comes every ``itl_s`` seconds.

        A step then holds the running sequences and the prefills of requests that arrive meanwhile.
        """
        return (1 - (self.settings.itl_ms / 1e3 - self._added_sequence_s) / itl_s) / self._added_s

    def itl_s_at(self, per_s: float) -> float:
        """Inter-token latency at ``per_s`` requests per second; infinite above the replica's capacity."""
        free = 1 - per_s * self._added_s
        return max(self.settings.itl_ms / 1e3 - self._added_sequence_s, 0.0) / free if free > 0 else math.inf

    @property
    def _added_sequence_s(self) -> float:
        """Seconds that each further sequence adds to a decode step."""
        return self.settings.batch_slope_us / 1e6

    @property
    def _added_s(self) -> float:
        """Replica time that one request adds: its prefill, and its part of decode steps without their fixed time."""
        return self.prefill_s + self.output * self._added_sequence_s


def capacity(work: Workload, hardware: Hardware, margins: Margins) -> Answer:
    """Compute the fleet for a workload. Raises ValueError if one sequence alone is too slow or too large."""
    cost = _Cost(hardware.settings, work.prompt_tokens * (1 - work.cached_share), work.output_tokens)
    batch, bound, memory = _largest_batch(work, hardware)
    full_per_s = 1 / cost.request_s(batch)
    aimed_per_s, replica = _target_rate(work, hardware, margins, cost, batch)

    serving = math.ceil(work.peak_per_s / aimed_per_s - 1e-9)
    warm = round(margins.warm_share * serving)
    more = max(margins.spare, warm)
    replicas = serving + more
    gpus = replicas * hardware.gpus
    fleet = (
        f"{work.peak_per_s:,.2f} requests/s / {aimed_per_s:.2f} = {work.peak_per_s / aimed_per_s:.2f}: {serving} serve",
        f"{margins.spare} may be dead, and {margins.warm_share:.0%} of {serving} = {warm} are kept warm; a warm one "
        f"stands in for a dead one, so the larger of both counts: {more} more",
        f"{serving} + {more} = {replicas} replicas x {hardware.gpus} = {gpus} GPUs; with {margins.spare} dead the rest "
        f"is filled to {work.peak_per_s / full_per_s / (replicas - margins.spare):.0%}",
    )

    one_per_s = work.peak_per_s / serving
    itl_s = cost.itl_s_at(one_per_s)
    running = min(one_per_s * (cost.prefill_s + cost.output * itl_s), batch)
    held = work.held_tokens
    kv_tokens = serving * running * held
    in_gib = f" = {kv_tokens * hardware.kv_bytes_per_token / GIB:,.1f} GiB" if hardware.kv_bytes_per_token else ""
    peak = (
        f"{work.peak_per_s * work.prompt_tokens:,.0f} prompt tokens/s are read and "
        f"{work.peak_per_s * cost.output:,.0f} written; a token comes every {itl_s * 1e3:.1f} ms",
        f"each of those that serve runs {one_per_s:.2f} x ({cost.prefill_s * 1e3:.1f} + {cost.output:,.0f} x "
        f"{itl_s * 1e3:.1f} ms) = {running:.1f} sequences, all together {serving * running:,.0f}: {kv_tokens:,.0f} "
        f"tokens of KV{in_gib}",
    )

    mean_serving = max(work.mean_per_s / aimed_per_s, 1.0)
    mean_replicas = min(mean_serving + max(margins.spare, margins.warm_share * mean_serving), replicas)
    price = hardware.gpus * hardware.gpu_hour * HOURS_A_MONTH
    topics = {
        "workload": work.steps,
        "replica": (*hardware.steps, *memory, *replica),
        "fleet": fleet,
        "at the peak": peak,
    }
    if price:
        made = work.mean_per_s * cost.output * 3600 * HOURS_A_MONTH / 1e6
        topics["money"] = _price_lines(hardware, gpus, replicas * price, mean_replicas, mean_replicas * price, made)
    return Answer(
        batch=batch,
        batch_bound=bound,
        replica_per_s=full_per_s,
        aimed_per_s=aimed_per_s,
        itl_ms=itl_s * 1e3,
        serving=serving,
        spare=margins.spare,
        warm=warm,
        replicas=replicas,
        gpus=gpus,
        requests_per_s=work.peak_per_s,
        prompt_tokens_per_s=work.peak_per_s * work.prompt_tokens,
        output_tokens_per_s=work.peak_per_s * cost.output,
        running=serving * running,
        kv_tokens=kv_tokens,
        kv_bytes=kv_tokens * hardware.kv_bytes_per_token,
        dollars_per_month=replicas * price,
        replicas_mean=mean_replicas,
        dollars_per_month_elastic=mean_replicas * price,
        arithmetic=topics,
    )


def _price_lines(
    hardware: Hardware, gpus: int, dollars: float, mean_replicas: float, mean_dollars: float, million_tokens: float
) -> tuple[str, ...]:
    """Arithmetic of the price of the fixed fleet and of one that follows its load."""
    return (
        f"{gpus} GPUs x ${hardware.gpu_hour:g} x {HOURS_A_MONTH:g} h = ${dollars:,.0f} a month, "
        f"${dollars / million_tokens:,.2f} a million output tokens",
        f"a pool that follows its load has {mean_replicas:.1f} replicas on average: ${mean_dollars:,.0f} "
        f"a month, ${mean_dollars / million_tokens:,.2f} a million output tokens",
    )


def _largest_batch(work: Workload, hardware: Hardware) -> tuple[int, str, tuple[str, ...]]:
    """Largest batch of a replica, what bounds it (slots or KV memory), and the arithmetic."""
    slots, held = hardware.settings.max_num_seqs, work.held_tokens
    by_memory = int(hardware.kv_tokens / held)
    if not by_memory:
        raise ValueError(f"one sequence holds {held:,.0f} tokens, and a replica's KV cache {hardware.kv_tokens:,}")
    if hardware.kv_bytes_per_token:
        wanted_gib, room_gib = (
            tokens * hardware.kv_bytes_per_token / GIB for tokens in (slots * held, hardware.kv_tokens)
        )
        wants = f" x {hardware.kv_bytes_per_token:,} bytes = {wanted_gib:,.1f} GiB of KV"
        size = f"{wants}, and there is room for {room_gib:,.1f}"
    else:
        size = f" = {slots * held:,.0f} tokens of KV, and there is room for {hardware.kv_tokens:,}"
    if by_memory >= slots:
        return slots, "slots", (f"{slots} slots x {held:,.0f} tokens{size}: every slot can be used",)
    return (
        by_memory,
        "KV memory",
        (
            f"{slots} slots x {held:,.0f} tokens{size}: KV memory, not compute, bounds the batch, to "
            f"{hardware.kv_tokens:,} / {held:,.0f} = {by_memory} sequences",
        ),
    )


def _target_rate(
    work: Workload, hardware: Hardware, margins: Margins, cost: _Cost, batch: int
) -> tuple[float, tuple[str, ...]]:
    """Requests per second of one replica at the peak, and the arithmetic."""
    s = hardware.settings
    full_per_s, extra_s = 1 / cost.request_s(batch), cost.extra_s(batch)
    aimed_per_s, itl_s = full_per_s * margins.aimed, margins.itl_ms / 1e3
    cached = f" x (1 - {work.cached_share:g} cached)" if work.cached_share else ""
    steps = [
        f"a decode step of {batch} sequences takes {s.itl_ms:.2f} ms + {batch - 1} x {s.batch_slope_us:.0f} us = "
        f"{cost.step_s(batch) * 1e3:.1f} ms",
        f"a request takes {work.prompt_tokens:,.0f}{cached} / {s.prefill_tokens_per_s:,.0f} tokens/s = "
        f"{cost.prefill_s * 1e3:.1f} ms of prefill and {cost.output:,.0f} x {cost.step_s(batch) * 1e3:.1f} ms / "
        f"{batch} = {cost.decode_s(batch) * 1e3:.1f} ms of decode"
        + (
            f", and {extra_s * 1e3:.1f} ms of more steps: one holds {s.max_num_batched_tokens:,} tokens"
            if extra_s
            else ""
        ),
        f"1 / {cost.request_s(batch) * 1e3:.1f} ms = {full_per_s:.2f} requests/s at its fullest, which are "
        f"{full_per_s * work.prompt_tokens:,.0f} prompt and {full_per_s * cost.output:,.0f} output tokens/s",
        f"filled to {margins.aimed:.0%}: {aimed_per_s:.2f} requests/s, a token every "
        f"{cost.itl_s_at(aimed_per_s) * 1e3:.1f} ms",
    ]
    if cost.itl_s_at(aimed_per_s) > itl_s:
        aimed_per_s = cost.per_s_within(itl_s)
        if aimed_per_s <= 0:
            raise ValueError(f"one sequence alone gets a token every {s.itl_ms:.1f} ms, over {margins.itl_ms:g} ms")
        steps.append(
            f"for one every {margins.itl_ms:g} ms: {aimed_per_s:.2f} requests/s, which fill it to "
            f"{aimed_per_s / full_per_s:.0%}"
        )
    return aimed_per_s, tuple(steps)
