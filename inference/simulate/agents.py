"""The agent beside a replica, as far as placement goes: what it knows of its engine, and nothing more.

It knows what it has handed to the engine, which first tokens and ends have come, how many tokens, and what an engine
tells of its cache (``EngineLoad`` and a request's cached tokens). It does not know how far a prefill is, nor how long
an answer gets.
"""

from __future__ import annotations

from inference.agent.meter import PrefillSpeed, UsualLength
from inference.simulate.engine import Engine, full_batch_tokens_per_s
from inference.simulate.traces import ENGINE_BLOCK_TOKENS, HINT_BLOCK_TOKENS, Request
from stream_fabric.ids import ReplicaId, StreamId
from stream_fabric.limits import LEASE_TTL_S
from stream_fabric.placement import Seat
from stream_fabric.prefix import PrefixLedger

ROOM_RATIO = 4
"""What the agent's setting of that name does; its default is 1.25."""
OUTPUT_LIMIT_TOKENS = 1024
"""``max_tokens`` of every request: no trace has a longer answer, so it tells nothing of any one."""


class Agent:
    def __init__(self, name: ReplicaId, engine: Engine, room_ratio: float) -> None:
        self.name = name
        self.engine = engine
        self._room = int(engine.settings.max_num_seqs * room_ratio)
        self.ledger = PrefixLedger()
        self.ledger.bound(engine.settings.num_blocks * ENGINE_BLOCK_TOKENS / HINT_BLOCK_TOKENS)
        self.published = (self.ledger.version, self.ledger.summary())
        """What its lease says of its prompts: gateways read it."""
        self.running: dict[StreamId, Request] = {}
        self._prefill: dict[StreamId, tuple[int, int]] = {}
        """Of those that have no first token: blocks believed cached, tokens to compute."""
        self._prefill_tokens = 0
        self._prefill_since_s = 0.0
        """Since when the first of them is being computed, at most."""
        self._decoding: dict[StreamId, None] = {}  # in order, so that sums are the same in every process
        self._usual = UsualLength()
        self._speed = PrefillSpeed(engine.settings.prefill_tokens_per_s)
        self._evicted = 0

    def take(self, stream: StreamId, request: Request, now_s: float) -> bool:
        """A request from the inbox goes to the engine. False: it could never fit."""
        if not self._prefill:
            self._prefill_since_s = now_s
        if not self.engine.add(request, now_s):
            return False
        believed = self.ledger.match(request.hint_hashes)
        to_compute = max(1, request.prompt_tokens - believed * HINT_BLOCK_TOKENS)
        self.running[stream] = request
        self._prefill[stream] = (believed, to_compute)
        self._prefill_tokens += to_compute
        # The next one with the same beginning waits behind this one, and finds it
        self.ledger.touch(request.hint_hashes)
        return True

    def first_tokens(self, came: list[tuple[StreamId, int]], now_s: float) -> None:
        """Streams whose first token has come in one step, each with its cached tokens."""
        computed = 0
        for stream, cached in came:
            believed, to_compute = self._prefill.pop(stream)
            self._prefill_tokens -= to_compute
            self._decoding[stream] = None
            self.ledger.settle(believed, cached / HINT_BLOCK_TOKENS)
            computed += self.running[stream].prompt_tokens - cached
        if came:
            self._speed.receive(computed, now_s - self._prefill_since_s, goes_on=bool(self._prefill))
            self._prefill_since_s = now_s

    def ended(self, stream: StreamId) -> None:
        request = self.running.pop(stream)
        self._decoding.pop(stream, None)
        # The engine lets go of its blocks now: they are its most recently used
        self.ledger.touch(request.hint_hashes)
        self._usual.receive_end(request.output_tokens)

    def renew(self) -> None:
        """Once a second: what the engine says of its cache, and what gateways may know."""
        evicted = self.engine.replica.blocks.evictions
        self.ledger.evict((evicted - self._evicted) * ENGINE_BLOCK_TOKENS // HINT_BLOCK_TOKENS)
        self._evicted = evicted
        if self.published[0] != self.ledger.version:
            self.published = (self.ledger.version, self.ledger.summary())

    def seat(self, now_s: float) -> Seat:
        settings = self.engine.settings
        decode_per_s = full_batch_tokens_per_s(settings)
        return Seat(
            expires_ms=(now_s + LEASE_TTL_S) * 1000,
            ready=True,
            slots=settings.max_num_seqs,
            room=self._room,
            in_flight=len(self.running),
            prefill_ms=self._pending_prefill_s(now_s) * 1000,
            decode_ms=self._pending_output_tokens(now_s) / decode_per_s * 1000,
            prefill_per_s=self._speed.per_s,
            decode_per_s=decode_per_s,
        )

    def _pending_prefill_s(self, now_s: float) -> float:
        """Of the first one, what it has had of time is taken off."""
        if not self._prefill:
            return 0.0
        _, first_tokens = next(iter(self._prefill.values()))
        speed = self._speed.per_s
        return self._prefill_tokens / speed - min(now_s - self._prefill_since_s, first_tokens / speed)

    def _pending_output_tokens(self, now_s: float) -> float:
        """A running answer has as much to come as one usually has in all, within its limit: the lengths of answers
        are spread so widely that a long one is no nearer to its end."""
        usual = self._usual.tokens
        tokens = usual * len(self._prefill)
        for stream in self._decoding:
            made = self.engine.made(self.running[stream], now_s)
            tokens += min(usual, OUTPUT_LIMIT_TOKENS - made)
        return tokens
