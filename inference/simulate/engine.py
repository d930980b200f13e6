"""Virtual time, and the simulated engine on it. Steps in which only decoding can happen are taken at once."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from inference.engines.sim.model import Replica, Step
from inference.engines.sim.settings import SimSettings
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, Request

SETTINGS = SimSettings(
    itl_ms=8.0,
    batch_slope_us=50.0,
    ttft_ms=0.0,
    prefill_tokens_per_s=30_000.0,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    block_size=ENGINE_BLOCK_TOKENS,
    num_blocks=500_000 // ENGINE_BLOCK_TOKENS,
)
"""Orders of magnitude of an 8B model in 16 bits on one H100 with 80 GB.

A step reads 16 GB of weights in 5 ms, plus overhead, plus 50 us for each sequence's KV. Prefill uses half the peak
FLOPS. A token's KV takes 128 KiB.
"""


def full_batch_tokens_per_s(settings: SimSettings) -> float:
    """Output tokens per second of a full batch."""
    step_s = settings.itl_ms / 1e3 + (settings.max_num_seqs - 1) * settings.batch_slope_us / 1e6
    return settings.max_num_seqs / step_s


def work_s(settings: SimSettings, computed_tokens: int, output_tokens: int) -> float:
    """Seconds of one replica for this many tokens, in steps that are as full as possible."""
    steps = max(
        (computed_tokens + output_tokens) / settings.max_num_batched_tokens, output_tokens / settings.max_num_seqs
    )
    return (
        computed_tokens / settings.prefill_tokens_per_s
        + steps * settings.itl_ms / 1e3
        + output_tokens * settings.batch_slope_us / 1e6
    )


def own_ids(number: int, blocks: int) -> list[int]:
    """Ids of a request's first ``blocks`` blocks, for content that no other request shares. No trace has such ids."""
    return [-(number << 20 | block) - 1 for block in range(blocks)]


class Clock:
    """Virtual time with its events. The fleets of one simulation share it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def schedule(self, at_s: float, event: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, event))

    def advance(self) -> None:
        """Run the next event at its time."""
        self.now_s, _, event = heapq.heappop(self._events)
        event()


class CoastingReplica(Replica[int]):
    """A replica that can take many decode steps in one call."""

    def quiet_steps(self) -> int:
        """Number of next steps that only give every running sequence one more token."""
        if self.waiting and len(self.running) < self.settings.max_num_seqs:
            return 0
        steps = 1 << 30
        for sequence in self.running:
            if sequence.computed < sequence.needed:
                return 0
            steps = min(steps, sequence.target - sequence.made - 1)
        while steps and self._blocks_for(steps) > self.blocks.free:
            steps //= 2
        return steps

    @property
    def quiet_step_s(self) -> float:
        """Duration of one quiet step."""
        return self.tokens_s(len(self.running))

    def coast(self, steps: int) -> None:
        """Take this many quiet steps."""
        for sequence in self.running:
            sequence.made += steps
            sequence.computed = sequence.needed
            self._grow(sequence, sequence.needed)

    def tokens_made(self, key: int) -> int:
        return self._by_key[key].made

    def abort_cached(self, key: int) -> list[int]:
        """Forget a request, and leave the full blocks that it computed in the prefix cache. Returns their ids."""
        sequence = self._by_key[key]
        own = own_ids(key, sequence.computed // self.settings.block_size)
        ids = [*sequence.hashes, *own[len(sequence.hashes) :]][: len(own)]
        for block, value in zip(sequence.blocks, ids, strict=False):
            self.blocks.publish(block, value)
        self.abort(key)
        return ids

    def _blocks_for(self, steps: int) -> int:
        size = self.settings.block_size
        return sum(max(0, -(-(s.needed + steps) // size) - len(s.blocks)) for s in self.running)


class Engine:
    """Simulates the engine of one replica: runs steps one after the other while there is work.

    ``schedule`` must call ``wake`` at a given time; of several calls the last one counts.
    """

    def __init__(self, settings: SimSettings, schedule: Callable[[float], None], *, coasts: bool = True) -> None:
        self.settings = settings
        self.replica = CoastingReplica(settings)
        self.busy_s = 0.0
        self.output_tokens = 0
        self._schedule = schedule
        self._coasts = coasts
        self._step: Step[int] | None = None
        self._quiet_left = 0
        self._since_s = 0.0
        """Time up to which quiet steps are counted."""
        self._due_s = -1.0
        self._known: dict[int, list[int]] = {}
        """Ids of the blocks of requests that were aborted here. A continued request finds them in the cache."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed, because they were not cached."""
        return self.replica.prefix_queries - self.replica.prefix_hits

    @property
    def running(self) -> bool:
        return self._step is not None or self._quiet_left > 0

    def add(self, request: Request, now_s: float) -> bool:
        """Add a request. False: it can never fit."""
        if self._quiet_left:
            self._cut_short(now_s)
        ids = self._known.get(request.number, request.engine_hashes)
        known = self.replica.add(request.number, request.prompt_tokens, ids, request.output_tokens)
        if known and not self.running:
            self._begin(now_s)
        return known

    def abort(self, request: Request, now_s: float) -> None:
        """Stop a request at once. Its token of the current step is dropped, and its full blocks stay cached."""
        number = request.number
        if self._quiet_left:
            self._cut_short(now_s)
        if number in self.replica:
            self._known[number] = self.replica.abort_cached(number)
        if self._step is not None:
            step = self._step
            step.first = [first for first in step.first if first[0] != number]
            step.tokens = [key for key in step.tokens if key != number]
            step.finished = [key for key in step.finished if key != number]

    def wake(self, now_s: float) -> Step[int] | None:
        """End the current step at the scheduled time. Returns its result; None for quiet steps or an outdated call."""
        if now_s != self._due_s:
            return None
        step, self._step = self._step, None
        if step is None:
            self._count_quiet(now_s)
        else:
            self.output_tokens += len(step.tokens)
        self._begin(now_s)
        return step

    def tokens_made(self, request: Request, now_s: float) -> int:
        """Output tokens of a decoding request so far, without the one that the current step makes."""
        self._count_quiet(now_s)
        made = self.replica.tokens_made(request.number) if request.number in self.replica else request.output_tokens
        return made - 1 if self._step is not None else made

    def tokens_streamed(self, request: Request, now_s: float) -> int:
        """Output tokens so far of any request that was added, decoding or not."""
        self._count_quiet(now_s)
        made = self.replica.tokens_made(request.number) if request.number in self.replica else request.output_tokens
        return made - (self._step is not None and request.number in self._step.tokens)

    def _begin(self, now_s: float) -> None:
        """Begin the next step, or all quiet steps together, and schedule their end."""
        if self.replica.idle:
            self._due_s = -1.0
            return
        self._since_s = now_s
        self._quiet_left = self.replica.quiet_steps() if self._coasts else 0
        if self._quiet_left:
            step_s, end_s = self.replica.quiet_step_s, now_s
            for _ in range(self._quiet_left):
                end_s += step_s
            self._wake_at(end_s)
            return
        self._step = self.replica.step()
        self.busy_s += self._step.duration_s
        self._wake_at(now_s + self._step.duration_s)

    def _wake_at(self, at_s: float) -> None:
        self._due_s = at_s
        self._schedule(at_s)

    def _cut_short(self, now_s: float) -> None:
        """End the quiet steps with the current one, so that new requests are considered after it."""
        self._count_quiet(now_s)
        if self._quiet_left:
            step_end_s = self._since_s + self.replica.quiet_step_s
            self._quiet_left = 1
            self._wake_at(step_end_s)

    def _count_quiet(self, now_s: float) -> None:
        """Count the quiet steps that have ended by now."""
        if not self._quiet_left:
            return
        step_s, steps = self.replica.quiet_step_s, 0
        while steps < self._quiet_left and self._since_s + step_s <= now_s:
            self._since_s += step_s
            self.busy_s += step_s
            steps += 1
        if steps:
            self.replica.coast(steps)
            self.output_tokens += steps * len(self.replica.running)
            self._quiet_left -= steps
