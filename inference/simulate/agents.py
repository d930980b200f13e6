"""A simulated agent: the part of a real agent that placement depends on, with the same knowledge of its engine.

It knows the requests it gave to the engine, their first tokens, tokens and ends, and the engine's figures about its
cache. It does not know the progress of a prefill or the length of an answer.
"""

from __future__ import annotations

import zlib

from inference.simulate.engine import Engine, full_batch_tokens_per_s, own_ids
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, HINT_BLOCK_TOKENS, Request
from stream_fabric.limits import LEASE_TTL_S
from stream_fabric.pool.placement import BATCH_TIER, ReplicaSlot
from stream_fabric.pool.prefix import PrefixLedger
from stream_fabric.pool.replica_load import (
    PrefillSpeed,
    TypicalLength,
    pending_output_tokens,
    pending_prefill_s,
)
from stream_fabric.stream.ids import ReplicaId, StreamId

ROOM_RATIO = 1.25
"""Streams in flight before placement goes elsewhere, as a multiple of the slots: the agent's default."""
OUTPUT_LIMIT_TOKENS = 1024
"""``max_tokens`` of every request. No trace has a longer answer, so it reveals nothing about a single one."""


class Agent:
    """Simulates one replica's agent, with its engine."""

    def __init__(self, name: ReplicaId, engine: Engine) -> None:
        self.name = name
        self.engine = engine
        self._room = int(engine.settings.max_num_seqs * ROOM_RATIO)
        self.ledger = PrefixLedger()
        self.ledger.set_capacity(engine.settings.num_blocks * ENGINE_BLOCK_TOKENS / HINT_BLOCK_TOKENS)
        self.published = (self.ledger.version, self.ledger.summary())
        """Version and summary of its cached prompts, as gateways read them from its lease."""
        self.running: dict[StreamId, Request] = {}
        self._prefill: dict[StreamId, tuple[int, int]] = {}
        """Streams without a first token: blocks believed cached, tokens to compute."""
        self._prefill_tokens = 0
        self._prefill_since_s = 0.0
        """Earliest moment at which the computation of the first of them can have begun, in a free slot."""
        self._decoding: dict[StreamId, None] = {}  # in order, so that sums are the same in every process
        self.yielded: dict[StreamId, None] = {}
        """Running streams that were cut and are not back in the queue yet."""
        self._hints: dict[StreamId, list[int]] = {}
        """Ids of the prompts of streams that were cut here."""
        self._typical = TypicalLength()
        self._speed = PrefillSpeed(engine.settings.prefill_tokens_per_s)
        self._evicted = 0

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return len(self._prefill)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens still to compute, as far as the agent knows what is cached."""
        return self._prefill_tokens

    def take(self, stream: StreamId, request: Request, now_s: float) -> bool:
        """Give a request from the inbox to the engine. False: it can never fit."""
        if not self._prefill:
            self._prefill_since_s = now_s
        if not self.engine.add(request, now_s):
            return False
        hints = self._hints.get(stream, request.hint_hashes)
        believed = self.ledger.match(hints)
        to_compute = max(1, request.prompt_tokens - believed * HINT_BLOCK_TOKENS)
        self.running[stream] = request
        self._prefill[stream] = (believed, to_compute)
        self._prefill_tokens += to_compute
        # The next prompt with the same beginning waits behind this one, and finds it cached
        self.ledger.touch(hints)
        return True

    def receive_first_tokens(self, came: list[tuple[StreamId, int]], now_s: float) -> None:
        """Take the streams that got their first token in one step, each with its cached tokens."""
        computed = 0
        for stream, cached in came:
            believed, to_compute = self._prefill.pop(stream)
            self._prefill_tokens -= to_compute
            self._decoding[stream] = None
            self.ledger.adjust_limit(believed, cached / HINT_BLOCK_TOKENS)
            computed += self.running[stream].prompt_tokens - cached
        if came:
            goes_on = bool(self._prefill) and self._has_slot()
            self._speed.receive(computed, now_s - self._prefill_since_s, goes_on=goes_on)
            self._prefill_since_s = now_s

    def receive_end(self, stream: StreamId, now_s: float) -> None:
        request = self.running.pop(stream)
        self._free_slot(stream, now_s)
        # The engine releases the blocks now: they are its most recently used ones
        self.ledger.touch(self._hints.pop(stream, request.hint_hashes))
        self._typical.receive_end(request.said + request.output_tokens)

    def streams_to_cut(self, waiting: int, now_s: float) -> list[StreamId]:
        """Return the batch streams that yield, as ``BatchYield`` of a real agent chooses them.

        ``waiting``: queued requests of higher tiers.
        """
        slots = self.engine.settings.max_num_seqs
        needed = waiting + max(len(self.running) + 1 - slots, 0) - len(self.yielded)
        made: dict[StreamId, int] = {}
        for stream, request in self.running.items():
            if request.tier >= BATCH_TIER and stream not in self.yielded:
                made[stream] = request.said + self.engine.tokens_streamed(request, now_s)
        cut: list[StreamId] = []
        for stream in sorted(made, key=made.__getitem__):
            if len(cut) < needed or stream in self._prefill:
                cut.append(stream)
        return cut

    def cut(self, stream: StreamId, now_s: float) -> int:
        """Stop a stream in the engine. Returns the output tokens of this producer that reached the stream's log."""
        request = self.running[stream]
        tokens = self.engine.tokens_streamed(request, now_s)
        self.engine.abort(request, now_s)
        self.yielded[stream] = None
        if stream in self._prefill:
            if next(iter(self._prefill)) == stream:
                self._prefill_since_s = now_s
            self._prefill_tokens -= self._prefill.pop(stream)[1]
        self._free_slot(stream, now_s)
        hints = self._hints.get(stream) or request.hint_hashes
        self._hints[stream] = hints or own_hints(request)
        return tokens

    def _has_slot(self) -> bool:
        return len(self._decoding) < self.engine.settings.max_num_seqs

    def _free_slot(self, stream: StreamId, now_s: float) -> None:
        if stream in self._decoding:
            if not self._has_slot():  # the first prompt that waits gets this one
                self._prefill_since_s = now_s
            del self._decoding[stream]

    def forget_cut(self, stream: StreamId) -> None:
        """Take a stream off the list: it is in the pool's queue."""
        del self.running[stream], self.yielded[stream]
        self.ledger.touch(self._hints[stream])

    def renew(self) -> None:
        """Follow the engine's evictions, and publish the summary of cached prompts if it has changed."""
        evicted = self.engine.replica.blocks.evictions
        self.ledger.evict((evicted - self._evicted) * ENGINE_BLOCK_TOKENS // HINT_BLOCK_TOKENS)
        self._evicted = evicted
        if self.published[0] != self.ledger.version:
            self.published = (self.ledger.version, self.ledger.summary())

    def slot(self, now_s: float) -> ReplicaSlot:
        """Return the replica's load and speed, as placement compares them."""
        settings = self.engine.settings
        decode_per_s = full_batch_tokens_per_s(settings)
        return ReplicaSlot(
            expires_ms=(now_s + LEASE_TTL_S) * 1000,
            ready=True,
            slots=settings.max_num_seqs,
            room=self._room,
            in_flight=len(self.running),
            prefill_ms=self._pending_prefill_s(now_s) * 1000,
            decode_ms=self._pending_output_tokens(now_s) / decode_per_s * 1000,
            prefill_per_s=self._speed.per_s,
            decode_per_s=decode_per_s,
            yieldable=sum(r.tier >= BATCH_TIER for r in self.running.values()) - len(self.yielded),
        )

    def _pending_prefill_s(self, now_s: float) -> float:
        if not self._prefill:
            return 0.0
        _, first_tokens = next(iter(self._prefill.values()))
        spent_s = now_s - self._prefill_since_s if self._has_slot() else 0.0
        return pending_prefill_s(self._prefill_tokens, first_tokens, spent_s, self._speed.per_s)

    def _pending_output_tokens(self, now_s: float) -> float:
        typical = self._typical.tokens
        tokens = typical * len(self._prefill)
        for stream in self._decoding:
            tokens += pending_output_tokens(
                typical, OUTPUT_LIMIT_TOKENS, self.engine.tokens_made(self.running[stream], now_s)
            )
        return tokens


def own_hints(request: Request) -> list[int]:
    """Ids of the blocks of a prompt that no other request shares, in 32 bits as hashes of prompts are."""
    return [zlib.crc32(b"%d" % value) for value in own_ids(request.number, request.prompt_tokens // HINT_BLOCK_TOKENS)]
