"""A GPU replica as arithmetic: continuous batching with chunked prefill over paged KV blocks.

Pure: it asks for no time, it says how long a step takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from inference.engines.plugin.stream_gw_budget import prompt_tokens_in
from inference.engines.sim.blocks import BlockPool
from inference.engines.sim.settings import SimSettings

K = TypeVar("K")

_HELD_STEP_S = 50e-6


class Running(Generic[K]):
    """One sequence on its way through the replica."""

    __slots__ = ("blocks", "cached", "computed", "hashes", "key", "made", "prefill_s", "prompt", "stalled", "target")

    def __init__(self, key: K, prompt: int, hashes: Sequence[int], target: int) -> None:
        self.key = key
        self.prompt = prompt
        self.hashes = hashes
        """Hashes of the prompt's full blocks; each covers the blocks before it."""
        self.target = target
        self.made = 0
        self.computed = 0
        """Number of tokens whose KV is held: the prompt's first, then the output's."""
        self.cached = 0
        self.blocks: list[int] = []
        self.stalled = False
        self.prefill_s = 0.0
        """Duration of the prefill so far, compared with the minimum TTFT."""

    @property
    def needed(self) -> int:
        """Number of tokens that must be computed before the next output token; after a preemption the output too."""
        return self.prompt + self.made


class Step(Generic[K]):
    """Result of one step.

    ``first``: keys whose prefill has just ended, each with its cached tokens. ``tokens``: keys that got one more
    token. ``finished``: those for which it was the last. ``duration_s``: how long the step takes.
    """

    __slots__ = ("duration_s", "finished", "first", "tokens")

    def __init__(self) -> None:
        self.first: list[tuple[K, int]] = []
        self.tokens: list[K] = []
        self.finished: list[K] = []
        self.duration_s = 0.0


class Replica(Generic[K]):
    """The scheduler: first come first served, decode before prefill, preemption of the youngest by recomputation."""

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.blocks = BlockPool(settings.num_blocks)
        self.waiting: deque[Running[K]] = deque()
        self.running: list[Running[K]] = []
        self._by_key: dict[K, Running[K]] = {}
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.held_back = False
        """True: the newest step had a free slot and no room for the first prompt that waits."""
        self._stalled = 0

    def add(self, key: K, prompt: int, hashes: Sequence[int], target: int) -> bool:
        """Queue a request for ``target`` tokens; False when it could never fit."""
        size = self.settings.block_size
        if -(-(prompt + target) // size) > self.blocks.total:
            return False
        sequence = Running(key, max(prompt, 1), hashes, target)
        self._by_key[key] = sequence
        self.waiting.append(sequence)
        return True

    def abort(self, key: K) -> bool:
        """Forget a request and free its blocks at once."""
        sequence = self._by_key.pop(key, None)
        if sequence is None:
            return False
        self.blocks.release(sequence.blocks)
        self._stalled -= sequence.stalled
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        return True

    def __contains__(self, key: K) -> bool:
        return key in self._by_key

    def stall(self, key: K) -> None:
        """Stop producing tokens; the request keeps its slot and its blocks."""
        sequence = self._by_key.get(key)
        if sequence is not None and not sequence.stalled:
            sequence.stalled = True
            self._stalled += 1

    @property
    def idle(self) -> bool:
        return len(self._by_key) == self._stalled

    def step(self) -> Step[K]:
        """Run one step of the whole batch."""
        settings, step = self.settings, Step[K]()
        budget = settings.max_num_batched_tokens
        decoding = [s for s in self.running if s.computed >= s.needed and not s.stalled]
        for sequence in decoding:
            if sequence not in self.running:  # preempted by one before it
                continue
            if not self._grow(sequence, sequence.needed + 1):
                continue
            budget -= 1
            self._emit(sequence, step)
        if settings.itl_objective_ms and step.tokens:
            tokens_s = self.tokens_s(len(step.tokens))
            piece = prompt_tokens_in(settings.itl_objective_ms / 1e3, tokens_s, settings.prefill_tokens_per_s)
            budget = min(budget, piece)
        prefilled = 0
        for sequence in [s for s in self.running if s.computed < s.needed]:
            prefilled += self._prefill(sequence, budget - prefilled, step)
        self.held_back = False
        while self.waiting and len(self.running) < settings.max_num_seqs and prefilled < budget:
            if not self._admit(self.waiting[0]):
                self.held_back = True
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            prefilled += self._prefill(sequence, budget - prefilled, step)
        step.duration_s = prefilled / settings.prefill_tokens_per_s + self.tokens_s(len(step.tokens))
        held = [s for s in self.running if s.made == 0]
        if held:
            # A step without duration would never reach the minimum TTFT
            step.duration_s = max(step.duration_s, _HELD_STEP_S)
            if not step.tokens and not prefilled:
                step.duration_s = max(step.duration_s, min(settings.ttft_ms / 1e3 - s.prefill_s for s in held))
        for sequence in held:
            sequence.prefill_s += step.duration_s
        for key in step.finished:
            self.abort(key)
        return step

    def tokens_s(self, tokens: int) -> float:
        """Duration of a step that gives this number of sequences a token and computes no prompt."""
        return self.settings.itl_ms / 1e3 + max(0, tokens - 1) * self.settings.batch_slope_us / 1e6

    def _admit(self, sequence: Running[K]) -> bool:
        """Take the KV blocks for the prompt, cached ones first. False: too few blocks are free."""
        size = self.settings.block_size
        # The last prompt token is always computed, to produce the first output token
        usable = sequence.hashes[: (sequence.needed - 1) // size] if self.settings.prefix_cache else ()
        found = self.blocks.match(usable)
        rest = self.blocks.take(-(-sequence.needed // size) - len(found))
        if rest is None:
            self.blocks.release(found)
            return False
        sequence.blocks = found + rest
        sequence.cached = sequence.computed = len(found) * size
        self.prefix_queries += sequence.needed
        self.prefix_hits += sequence.cached
        return True

    def _prefill(self, sequence: Running[K], budget: int, step: Step[K]) -> int:
        """Compute at most ``budget`` tokens of the prompt, and return how many."""
        amount = min(budget, sequence.needed - sequence.computed)
        sequence.computed += amount
        if sequence.computed < sequence.needed:
            return amount
        if self.settings.prefix_cache:
            for block, value in zip(sequence.blocks, sequence.hashes, strict=False):
                self.blocks.publish(block, value)
        if sequence.made == 0 and sequence.prefill_s * 1e3 < self.settings.ttft_ms - self.settings.itl_ms:
            sequence.computed -= 1  # minimum TTFT not reached: compute the last prompt token in a later step
            return amount
        self._emit(sequence, step)
        return amount

    def _emit(self, sequence: Running[K], step: Step[K]) -> None:
        """Produce one output token of the sequence."""
        if sequence.made == 0:
            step.first.append((sequence.key, sequence.cached))
        sequence.made += 1
        # The KV of the new token is computed by the decode step of the next one
        sequence.computed = sequence.needed
        step.tokens.append(sequence.key)
        if sequence.made >= sequence.target:
            step.finished.append(sequence.key)

    def _grow(self, sequence: Running[K], tokens: int) -> bool:
        """Allocate KV blocks for ``tokens``, preempting the youngest. False: the sequence itself was preempted."""
        missing = -(-tokens // self.settings.block_size) - len(sequence.blocks)
        if missing <= 0:
            return True
        while (taken := self.blocks.take(missing)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += taken
        return True

    def _preempt(self, sequence: Running[K]) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1
