"""Timing of one attempt at a stream: waiting, prefill, and the gaps between tokens."""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

from stream_fabric.events import TOKEN_TIMES_MAX, InputTimes, Timing
from stream_fabric.gap_histogram import ITL_BUCKETS, itl_bucket
from stream_fabric.ports import Clock

_GAP_US_MAX = (1 << 32) - 1


class AttemptTiming:
    """Timing of one attempt, which begins now.

    ``waited_us`` (time in the queue) and ``handed_us`` (moment of placement) come from the pool.
    """

    __slots__ = (
        "_began_us",
        "_check_us",
        "_cut_us",
        "_early_us",
        "_ended_us",
        "_engine_us",
        "_first_us",
        "_gaps",
        "_is_held",
        "_last_us",
        "_monotonic_us",
        "_reply_us",
        "_steer_us",
        "_unanswered",
        "generated",
        "handed_us",
        "inputs",
        "itl_max_us",
        "prefill_s",
        "repairs",
        "taken_us",
        "waited_us",
    )  # fmt: skip

    def __init__(self, clock: Clock, waited_us: int, handed_us: int) -> None:
        self.waited_us = waited_us
        self.handed_us = handed_us
        self.taken_us = clock.now_us()
        self.prefill_s = 0.0
        """Estimated duration of the prompt's computation."""
        self._engine_us: tuple[int, int] | None = None
        """The engine's own figures: time in its queue, and from then to the first token."""
        self.generated = 0
        """Tokens that the engine has generated."""
        self.repairs = 0
        """Replies that were made again because one did not fit its schema."""
        self.itl_max_us = 0
        self._monotonic_us = clock.monotonic_us
        self._began_us = self._monotonic_us()
        self._first_us = self._last_us = self._ended_us = 0
        self._reply_us = 0
        """End of the engine's first reply, if the stream's end waits for a check of it; 0: it does not."""
        self._gaps = array("I", bytes(4 * ITL_BUCKETS))
        self._is_held = False
        """The tokens of this answer are counted when a layer holds them back, not when they go on."""
        self.inputs: tuple[InputTimes, ...] = ()
        """Inputs that were applied or refused."""
        self._unanswered: tuple[tuple[int, int], ...] = ()
        """Inputs whose answer has no token yet: number in ``inputs``, moment of the cut."""
        self._cut_us = 0
        """First cut after which no token has come; 0: there is none."""
        self._early_us = 0
        """First cut, if it came before the first token; else 0."""
        self._steer_us = self._check_us = 0
        """Time between cuts and the tokens after them; of the checks of answers that an input has cut."""

    def receive_tokens(self, tokens: int) -> None:
        """Count ``tokens`` that go on together, unless they were counted by ``receive_held``. Called for each delta."""
        if not self._is_held:
            self._count(tokens)

    def receive_held(self, tokens: int) -> None:
        """Count ``tokens`` that the engine returned together, and that a layer holds back."""
        self._is_held = True
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        """Count tokens and the gap before them. After the reply's end another layer holds what was counted."""
        if self._reply_us:
            return
        now_us = self._monotonic_us()
        self.generated += tokens
        if self._cut_us:
            self._receive_next_answer(now_us)
            return
        if not self._first_us:
            self._first_us = self._last_us = now_us
            return
        gap_us = now_us - self._last_us
        self._last_us = now_us
        if gap_us > self.itl_max_us:
            self.itl_max_us = gap_us
        self._gaps[itl_bucket(gap_us)] += 1
        if tokens > 1:  # the others came together with the first
            self._gaps[0] += tokens - 1

    def receive_reply_end(self) -> None:
        """Set the end of the engine's reply to now, unless it is already set. The check of the reply follows."""
        self._reply_us = self._reply_us or self._monotonic_us()

    def receive_repair(self) -> None:
        """Count a reply that is made again."""
        self.repairs += 1

    def receive_end(self) -> None:
        """Set the end of the attempt to now, unless it is already set."""
        self._ended_us = self._ended_us or self._monotonic_us()

    def receive_cut(self) -> None:
        """Record that the answer is cut, and another one follows. An end that was recorded is taken back."""
        cut_us = self._ended_us or self._monotonic_us()
        self._ended_us = 0
        self._is_held = False
        if self._reply_us:
            self._check_us += cut_us - self._reply_us
            self._reply_us = 0
        if not self._first_us:
            self._early_us = self._early_us or cut_us
        self._cut_us = self._cut_us or cut_us

    def receive_input(self, at_us: int, result: Literal["applied", "refused"], reason: str = "") -> InputTimes:
        """Record an input that a gateway received at ``at_us``. If it was applied, ``receive_cut`` comes before."""
        passed_us = self._monotonic_us()
        now_us = self.taken_us + passed_us - self._began_us
        times = InputTimes(at_us, result, reason, max(now_us - at_us, 0) if at_us else 0)
        if result == "applied":
            self._unanswered += ((len(self.inputs), passed_us),)
        self.inputs += (times,)
        return times

    def _receive_next_answer(self, now_us: int) -> None:
        """Record the first token after a cut. The time before it is no gap between tokens."""
        inputs = list(self.inputs)
        for number, applied_us in self._unanswered:
            inputs[number] = msgspec.structs.replace(inputs[number], answered_us=max(now_us - applied_us, 1))
        self.inputs, self._unanswered = tuple(inputs), ()
        self._steer_us += now_us - self._cut_us
        self._cut_us = 0
        self._first_us = self._first_us or now_us
        self._last_us = now_us

    def receive_computed(self, queue_s: float, prefill_s: float) -> None:
        """Take the engine's own figures: time in its queue, and from then to the first token."""
        self._engine_us = int(queue_s * 1e6), int(prefill_s * 1e6)

    @property
    def estimated(self) -> bool:
        """Whether the time in the engine's queue is this agent's estimate."""
        return self._engine_us is None or not self._first_us

    def summary(self) -> Timing:
        """Return the attempt's durations so far. The engine's own figures exclude the network round trip."""
        ended_us = self._ended_us or self._monotonic_us()
        answering_us = self._early_us or self._first_us or ended_us
        first_us = answering_us - self._began_us
        prefill_us = min(int(self.prefill_s * 1e6), first_us) if self._first_us else first_us
        steer_us = self._steer_us + (ended_us - self._cut_us if self._cut_us else 0)
        check_us = decode_us = 0
        if self._first_us:
            check_us = self._check_us + (max(ended_us - self._reply_us, 0) if self._reply_us else 0)
            decode_us = ended_us - answering_us - steer_us - check_us
        if self._engine_us is not None and self._first_us:
            queue_us = min(self._engine_us[0], first_us)
            prefill_us = min(self._engine_us[1], first_us - queue_us)
        else:
            queue_us = first_us - prefill_us
        return Timing(
            self.waited_us, self.handed_us, self.taken_us, queue_us, prefill_us, decode_us, check_us, steer_us
        )

    def sketch(self) -> tuple[int, ...]:
        """Number of inter-token gaps in each ``itl_bucket``, without the empty buckets at the end."""
        used = len(self._gaps.tobytes().rstrip(b"\0"))
        return tuple(self._gaps[: -(-used // self._gaps.itemsize)])

    def token_us(self) -> tuple[int, ...]:
        """Microseconds from one token to the next; empty when the attempt is not sampled."""
        return ()


class TokenTiming(AttemptTiming):
    """Timing of a sampled attempt, with the time of each of the first ``TOKEN_TIMES_MAX`` tokens."""

    __slots__ = ("_before_us", "_each")

    def __init__(self, clock: Clock, waited_us: int, handed_us: int) -> None:
        super().__init__(clock, waited_us, handed_us)
        self._each = array("I")
        self._before_us = self._began_us

    def _count(self, tokens: int) -> None:
        super()._count(tokens)
        if len(self._each) < TOKEN_TIMES_MAX and not self._reply_us:
            gap_us, self._before_us = self._last_us - self._before_us, self._last_us
            # Tokens that came together have no time between them
            self._each.extend([min(gap_us, _GAP_US_MAX), *[0] * (min(tokens, TOKEN_TIMES_MAX - len(self._each)) - 1)])

    def token_us(self) -> tuple[int, ...]:
        return tuple(self._each)
