"""How many replicas, GPUs and dollars a workload needs, by arithmetic that is shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from inference.agent.engines.sim.settings import SimSettings
from inference.simulate.hardware import GIB, Hardware
from inference.simulate.workload import Workload

HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class Margins:
    aimed: float = 0.6
    """What a replica is filled to by the peak; the rest is for bursts."""
    spare: int = 1
    """Replicas that may be dead at the peak."""
    warm_share: float = 0.05
    """Of those that serve, so many more are kept loaded."""
    itl_ms: float = 100.0
    """The gap between tokens at the peak, at most."""

    def __post_init__(self) -> None:
        if not 0 < self.aimed <= 1:
            raise ValueError("what a replica is filled to is more than 0 and at most 1")
        if self.spare < 0 or not 0 <= self.warm_share <= 1 or self.itl_ms <= 0:
            raise ValueError("spare replicas are 0 or more, the warm share is of 1, a gap more than 0")


@dataclass(frozen=True)
class Answer:
    batch: int
    """Sequences that one replica can run at once."""
    batch_bound: str
    """By what: slots, or KV memory."""
    replica_per_s: float
    """Requests that one replica serves at its fullest."""
    aimed_per_s: float
    """As many as it is to serve at the peak."""
    itl_ms: float
    """Then."""
    serving: int
    spare: int
    warm: int
    replicas: int
    """In all: a warm one stands in for a dead one, so the larger of both margins counts."""
    gpus: int
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    running: float
    """Sequences at once in the whole fleet at the peak."""
    kv_tokens: float
    """They hold so many."""
    kv_bytes: float
    dollars_per_month: float
    replicas_mean: float
    """Of a pool that follows its load."""
    dollars_per_month_elastic: float
    arithmetic: Mapping[str, tuple[str, ...]]
    """By topic."""


@dataclass(frozen=True)
class _Cost:
    """What one request takes of a replica."""

    settings: SimSettings
    computed: float
    """Prompt tokens that are not cached."""
    output: float

    @property
    def prefill_s(self) -> float:
        return self.computed / self.settings.prefill_tokens_per_s

    def step_s(self, batch: float) -> float:
        """A decode step of so many sequences."""
        return self.settings.itl_ms / 1e3 + (batch - 1) * self._further_s

    def decode_s(self, batch: int) -> float:
        return self.output * self.step_s(batch) / batch

    def extra_s(self, batch: int) -> float:
        """Steps beyond those that the batch makes anyway: one holds only so many tokens."""
        steps = (self.computed + self.output) / self.settings.max_num_batched_tokens - self.output / batch
        return max(steps, 0.0) * self.settings.itl_ms / 1e3

    def whole_s(self, batch: int) -> float:
        return self.prefill_s + self.decode_s(batch) + self.extra_s(batch)

    def per_s_within(self, itl_s: float) -> float:
        """Requests a second at which a token comes every ``itl_s``: a step of the sequences that then run, with the
        prefills of those that come meanwhile."""
        return (1 - (self.settings.itl_ms / 1e3 - self._further_s) / itl_s) / self._stretch_s

    def itl_s_at(self, per_s: float) -> float:
        free = 1 - per_s * self._stretch_s
        return max(self.settings.itl_ms / 1e3 - self._further_s, 0.0) / free if free > 0 else math.inf

    @property
    def _further_s(self) -> float:
        return self.settings.batch_slope_us / 1e6

    @property
    def _stretch_s(self) -> float:
        return self.prefill_s + self.output * self._further_s


def capacity(work: Workload, hardware: Hardware, margins: Margins) -> Answer:
    """Raises ValueError where one sequence alone is too slow or too large."""
    cost = _Cost(hardware.settings, work.prompt_tokens * (1 - work.cached_share), work.output_tokens)
    batch, bound, memory = _batch(work, hardware)
    full_per_s = 1 / cost.whole_s(batch)
    aimed_per_s, replica = _aimed(work, hardware, margins, cost, batch)

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
        topics["money"] = (
            f"{gpus} GPUs x ${hardware.gpu_hour:g} x {HOURS_A_MONTH:g} h = ${replicas * price:,.0f} a month, "
            f"${replicas * price / made:,.2f} a million output tokens",
            f"a pool that follows its load has {mean_replicas:.1f} replicas on average: ${mean_replicas * price:,.0f} "
            f"a month, ${mean_replicas * price / made:,.2f} a million output tokens",
        )
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


def _batch(work: Workload, hardware: Hardware) -> tuple[int, str, tuple[str, ...]]:
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


def _aimed(
    work: Workload, hardware: Hardware, margins: Margins, cost: _Cost, batch: int
) -> tuple[float, tuple[str, ...]]:
    """Requests a second that one replica is to serve at the peak, and the way there."""
    s = hardware.settings
    full_per_s, extra_s = 1 / cost.whole_s(batch), cost.extra_s(batch)
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
        f"1 / {cost.whole_s(batch) * 1e3:.1f} ms = {full_per_s:.2f} requests/s at its fullest, which are "
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
