"""Engine ``sim``: a simulated replica. One loop serves all requests and calls their sinks for each token."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

import msgspec

from inference.engines.sim.answer import Answer
from inference.engines.sim.metrics import SimMetrics
from inference.engines.sim.model import Replica
from inference.engines.sim.settings import SimSettings
from inference.engines.sim.text import Prompt, prompts_of
from inference.engines.sim.whole import Part, Whole, whole_answer
from inference.engines.upstream.answers import put_item
from stream_fabric.errors import ContextLengthExceeded, EngineFailed, EngineLost, Unsupported
from stream_fabric.pool.records import EngineLoad, EngineRequest, Loaded
from stream_fabric.ports import FrameSink, SleepLevel
from stream_fabric.stream.frames import ErrorInfo, Note, Usage
from stream_fabric.stream.ids import StreamId

log = logging.getLogger(__name__)

_YIELD_EVERY_S = 0.002
_BEHIND_S_MAX = 1.0

Key = tuple[StreamId, int]


class _Request:
    """One request on the engine.

    ``fails_at``: fail after this number of tokens; None: never. ``whole``: the answer that is one document.
    ``since_step``: the newest step when it came. A step's results are not for requests that came during it.
    """

    __slots__ = ("answers", "cached", "fails_at", "left", "made", "prompt", "since_step", "sink", "started_at", "whole")

    def __init__(
        self,
        prompt: Prompt,
        sink: FrameSink,
        answers: Sequence[Answer | Part],
        whole: Whole | None,
        fails_at: int | None,
        started_at: float,
        since_step: int,
    ) -> None:
        self.prompt = prompt
        self.sink = sink
        self.answers = answers
        self.whole = whole
        self.left = len(answers)
        self.fails_at = fails_at
        self.made = 0
        self.cached: int | None = None
        self.started_at = started_at
        self.since_step = since_step


class SimEngine:
    """The ``Engine`` of the simulator.

    ``on_abort`` is called for every abort of a known request; ``crash`` ends the process.
    """

    def __init__(
        self,
        settings: SimSettings,
        *,
        on_abort: Callable[[StreamId], None] | None = None,
        crash: Callable[[], None] = lambda: os._exit(70),
    ) -> None:
        self.settings = settings
        self.replica: Replica[Key] = Replica(settings)
        self.metrics = SimMetrics(self.replica)
        self._on_abort = on_abort
        self._crash = crash
        self._requests: dict[StreamId, _Request] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._made = 0
        self._step = 0
        """Number of the newest step."""
        self._asleep = 0
        self._clears = 0

    async def start(self) -> Sequence[str]:
        self._task = asyncio.create_task(self._run(), name="sim")
        return [self.settings.model]

    async def serving(self) -> None:
        assert self._task is not None, "start comes first"
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        if self._asleep:
            sink.end("failed", ErrorInfo.of(EngineLost("the simulator sleeps; try again soon")))
            return
        try:
            prompt, answers, whole = self._parse_request(request)
        except (msgspec.MsgspecError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError) as error:
            sink.end(
                "failed",
                ErrorInfo(
                    "invalid_request", f"the simulator cannot read this: {error!r}", "invalid_request_error", 400
                ),
            )
            return
        if (exceeded := self._check_context(prompt, answers, whole)) is not None:
            sink.end("failed", ErrorInfo.of(exceeded))
            return
        fails_at = sum(answer.length for answer in answers) // 2
        if whole is None:
            fails_at = max(1, fails_at)
        failing = prompt.number("fail", self.settings.seed) % 10_000 < self.settings.fail_rate * 10_000
        now = asyncio.get_running_loop().time()
        item = _Request(prompt, sink, answers, whole, fails_at if failing else None, now, self._step)
        for answer in answers:
            hashes = answer.hashes(self.settings.block_size)
            if not self.replica.add((request.stream, answer.choice), answer.prompt_tokens, hashes, answer.length):
                for other in answers:
                    self.replica.abort((request.stream, other.choice))
                sink.end("failed", ErrorInfo.of(ContextLengthExceeded("prompt and output exceed the KV cache")))
                return
        sink.usage(prompt.tokens)
        self._requests[request.stream] = item
        self._work.set()

    def _parse_request(self, request: EngineRequest) -> tuple[Prompt, Sequence[Answer | Part], Whole | None]:
        """Return the request's prompt, its answers or inputs, and the document of an answer that is one."""
        body = msgspec.json.decode(request.body)
        whole: Whole | None = whole_answer(request, body)
        if whole is not None:
            return whole.prompt, whole.parts, whole
        prompts, n = prompts_of(body, request.own_chars), int(body.get("n") or 1)
        choices = len(prompts) * n
        answers = [Answer(request.stream, prompts[k // n], k, choices, self.settings, n) for k in range(choices)]
        prompt = prompts[0] if len(prompts) == 1 else Prompt(body)
        prompt.tokens = sum(each.tokens for each in prompts)
        return prompt, answers, None

    def _check_context(
        self, prompt: Prompt, answers: Sequence[Answer | Part], whole: Whole | None
    ) -> ContextLengthExceeded | None:
        """Return the error of a request that exceeds the maximum context, as vLLM's; None: it fits."""
        context = self.settings.context
        if not context:
            return None
        start = f"This model's maximum context length is {context} tokens. However, "
        longest = max(answer.prompt_tokens for answer in answers)
        if longest > context or (longest == context and whole is None):
            return ContextLengthExceeded(f"{start}your prompt contains {longest} input tokens")
        asked = prompt.body.get("max_completion_tokens") or prompt.body.get("max_tokens") or 0
        return ContextLengthExceeded(f"{start}you requested {asked} output tokens") if asked > context else None

    def abort(self, stream: StreamId) -> None:
        request = self._requests.pop(stream, None)
        if request is None:
            return
        for answer in request.answers:
            self.replica.abort((stream, answer.choice))
        if self._on_abort is not None:
            self._on_abort(stream)

    def loaded(self) -> Loaded:
        return Loaded()

    def load(self) -> EngineLoad:
        pool = self.replica.blocks
        return EngineLoad(
            len(self.replica.running),
            len(self.replica.waiting),
            self.settings.max_num_seqs,
            ready=not self._asleep,
            waits_beside_slots=self.replica.held_back and bool(self.replica.waiting),
            kv_used_ratio=pool.used / pool.total,
            kv_capacity_tokens=pool.total * self.settings.block_size,
            kv_evicted_tokens=pool.evictions * self.settings.block_size,
            prefix_queries_tokens=self.replica.prefix_queries,
            prefix_hits_tokens=self.replica.prefix_hits,
            kv_clears=self._clears,
            asleep=self._asleep,
            itl_objective_ms=self.settings.itl_objective_ms,
            max_model_len=self.settings.context,
        )

    async def sleep(self, level: SleepLevel) -> bool:
        if level > self.settings.sleep_levels:
            raise Unsupported(
                f"the simulator does not sleep at level {level}; its setting sleep_levels allows none deeper"
            )
        if self._requests:
            return False
        if not self._asleep:
            self._asleep = level
            await asyncio.sleep(self.settings.sleep_ms / 1e3)
            self.replica.blocks.clear()
            self._clears += 1
        return True

    async def wake(self) -> None:
        if self._asleep:
            reload_ms = self.settings.reload_ms if self._asleep == 2 else 0.0
            await asyncio.sleep((self.settings.wake_ms + reload_ms) / 1e3)
        self._asleep = 0

    async def close(self) -> None:
        for stream in list(self._requests):
            self.abort(stream)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = yielded = loop.time()
        while True:
            if self.replica.idle:
                self._work.clear()
                await self._work.wait()
                due = yielded = loop.time()
            self._step += 1
            step = self.replica.step()
            now = loop.time()
            if not step.duration_s:  # without delays there is no schedule to keep
                due = max(due, now)
            due += step.duration_s
            if due > now:
                # Wait until a moment, not for a time: a late step does not delay the next ones
                await asyncio.sleep(due - now)
                yielded = loop.time()
            elif now - yielded > _YIELD_EVERY_S or not step.tokens:
                await asyncio.sleep(0)
                yielded = loop.time()
                due = max(due, yielded - _BEHIND_S_MAX)
            for (stream, _), cached in step.first:
                self._report_prompt(stream, cached)
            for stream, choice in step.tokens:
                try:
                    self._emit_token(stream, choice)
                except Exception as error:  # a request's content must not end the others
                    log.exception("simulation of a request failed: stream=%s", stream)
                    self._fail(stream, f"the simulator failed at this request: {error!r}")
            if step.duration_s:
                self.metrics.receive_step(len(step.tokens) - len(step.first), step.duration_s)

    def _in_step(self, stream: StreamId) -> _Request | None:
        """Return the request that the newest step has computed; None: it was aborted since the step began."""
        request = self._requests.get(stream)
        return None if request is None or request.since_step >= self._step else request

    def _report_prompt(self, stream: StreamId, cached: int) -> None:
        """Report the prompt's length and its cached tokens, at the first token of the stream."""
        request = self._in_step(stream)
        if request is None or request.cached is not None:
            return
        request.cached = cached
        self.metrics.receive_first_token(asyncio.get_running_loop().time() - request.started_at, request.prompt.tokens)
        request.sink.usage(request.prompt.tokens, cached)
        request.sink.frame(Note("prompt", prompt_tokens=request.prompt.tokens, cached_tokens=cached))

    def _emit_token(self, stream: StreamId, choice: int) -> None:
        """Put the next token of one choice into the stream, and end the stream after its last token."""
        request = self._in_step(stream)
        if request is None:
            return
        settings = self.settings
        request.made += 1
        self._made += 1
        if request.fails_at is not None and request.made > request.fails_at:
            self._fail(stream, "the simulator fails this request, as its setting fail_rate demands")
            return
        answer, sink = request.answers[choice], request.sink
        for piece in answer.token():
            if isinstance(piece, str):
                sink.text(answer.block, piece, answer.tokens_since_text())
            elif piece is not None:
                sink.frame(piece)
        if stream not in self._requests:  # aborted by its sink
            return
        if answer.ended:
            self.replica.abort((stream, choice))  # a stop string may have come before its last token
            request.left -= 1
            if not request.left:
                document = None if request.whole is None else request.whole.body()
                output = request.made if document is None else 0
                del self._requests[stream]
                self.metrics.receive_end(output)
                if document is not None:
                    put_item(sink, document)
                thought = sum(each.thought for each in request.answers)
                sink.end("completed", usage=Usage(request.prompt.tokens, request.cached or 0, 0, output, thought))
        elif settings.stall_after_tokens and answer.tokens_made >= settings.stall_after_tokens:
            self.replica.stall((stream, choice))
        if settings.crash_after_tokens and self._made >= settings.crash_after_tokens:
            self._crash()

    def _fail(self, stream: StreamId, message: str) -> None:
        request = self._requests.pop(stream, None)
        if request is None:
            return
        for answer in request.answers:
            self.replica.abort((stream, answer.choice))
        request.sink.end(
            "failed", ErrorInfo(EngineFailed.code, message, EngineFailed.type, EngineFailed.http_status, True)
        )
