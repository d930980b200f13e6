"""The run of a benchmark: stages of load, their requests, and the record of both."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from inference.simulate.traces import Request
from stream_gw.cli.bench.arrivals import Stage, allowed_at_once, poisson
from stream_gw.cli.bench.measures import Histogram
from stream_gw.cli.bench.reading import Disturbance, Outcome, Reading
from stream_gw.cli.bench.results import Record
from stream_gw.cli.bench.target import Facts, Transport, request_body
from stream_gw.cli.bench.workload import Turn, Workload

_LOOK_S = 0.05
_FAILED_PAUSE_S = 0.25
"""Pause of a closed loop's reader after a failure: a dead target would get as many requests as this process can send,
and each is kept for the report."""


class Chaos(msgspec.Struct, frozen=True):
    """Shares of requests that are disturbed, each at most once, and the piece of text at which it happens."""

    cut: float = 0.0
    cancel: float = 0.0
    slow: float = 0.0
    cancel_at: int = 20
    cut_at_most: int = 40
    """A cut comes after 1 to this number of pieces."""

    def draw(self, rng: random.Random) -> Disturbance:
        share = rng.random()
        if share < self.cut:
            return Disturbance(cut_at=rng.randint(1, self.cut_at_most))
        if share < self.cut + self.cancel:
            return Disturbance(cancel_at=self.cancel_at)
        return Disturbance(is_slow=share < self.cut + self.cancel + self.slow)


class Limits(msgspec.Struct, frozen=True):
    """``requests``: at most so many a stage, 0: no limit. ``at_once``: further requests are counted as failed."""

    timeout_s: float = 300.0
    requests: int = 0
    at_once: int = 10_000


class Run:
    """Loads the target stage by stage. ``record`` can be read at any time."""

    def __init__(
        self,
        transport: Transport,
        facts: Facts,
        workload: Workload,
        record: Record,
        *,
        seed: int,
        chaos: Chaos,
        limits: Limits,
        exact_lengths: bool,
        dressed: Callable[[dict[str, Any], Turn], dict[str, Any]] = lambda body, turn: body,
    ) -> None:
        self._transport, self._facts, self._workload, self.record = transport, facts, workload, record
        self._chaos, self._limits, self._exact_lengths, self._dressed = chaos, limits, exact_lengths, dressed
        self._arrivals, self._disturbances = random.Random(f"{seed} arrivals"), random.Random(f"{seed} chaos")
        self._digest = hashlib.sha256()
        self.first_prompt = ""
        self.running = 0
        self.begun = 0
        self.stage = 0
        self.lag = Histogram()
        self.started_s = 0.0
        self.took_s = 0.0
        self.cpu_s = 0.0

    @property
    def prompts_sha256(self) -> str:
        return self._digest.hexdigest()

    def now_s(self) -> float:
        """Return the seconds since the start."""
        return asyncio.get_running_loop().time() - self.started_s

    async def stages(self, stages: Sequence[Stage]) -> None:
        """Run all stages, each with the load of the one before as the start of its ramp."""

        async def load() -> None:
            before = Stage(0.0, 0, 0.0, 0.0)
            begin_s = self.now_s()
            async with asyncio.TaskGroup() as requests:
                for self.stage, stage in enumerate(stages):
                    self.record.begin_stage(begin_s)
                    if stage.rate:
                        await self._open_loop(stage, before, begin_s, requests)
                    else:
                        await self._closed_loop(stage, before, begin_s)
                    begin_s, before = self.now_s(), stage
                    self.record.end_stage(begin_s)

        await self._measured(load())

    async def replay(self, requests: Sequence[Request], speed: float) -> None:
        """Send a recorded trace's requests at their times, divided by ``speed``."""

        async def load() -> None:
            self.record.begin_stage(0.0)
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    await asyncio.sleep(max(request.at_s / speed - self.now_s(), 0))
                    self._begin(group, counted=True)

        await self._measured(load())

    async def _measured(self, load: Any) -> None:
        """Run the load beside a watch of this process's own delay."""
        self.started_s, cpu_s = asyncio.get_running_loop().time(), time.process_time()
        watch = asyncio.create_task(self._watch())
        try:
            await load
        finally:
            watch.cancel()
            self.took_s, self.cpu_s = self.now_s(), time.process_time() - cpu_s
            self.record.end_stage(self.took_s)

    async def _watch(self) -> None:
        """Note the event loop's own delay, which every measured time contains."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self.lag.add(max(loop.time() - due_s, 0.0))
            self.record.note_running(self.now_s(), self.running)

    async def _open_loop(self, stage: Stage, before: Stage, begin_s: float, group: asyncio.TaskGroup) -> None:
        sent = 0
        for at_s in self._limited(poisson(stage, before.rate, self._arrivals)):
            await asyncio.sleep(max(begin_s + at_s - self.now_s(), 0))
            sent += 1
            self._begin(group, counted=at_s >= stage.ramp_s)
        if not self._limits.requests or sent < self._limits.requests:
            await asyncio.sleep(max(begin_s + stage.length_s - self.now_s(), 0))

    async def _closed_loop(self, stage: Stage, before: Stage, begin_s: float) -> None:
        """Keep as many requests running as the stage allows. Ends with the last request that began in it."""
        free = asyncio.Event()
        sent, running = 0, 0

        def ended(_: asyncio.Task[None]) -> None:
            nonlocal running
            running -= 1
            free.set()

        async with asyncio.TaskGroup() as group:
            while (at_s := self.now_s() - begin_s) < stage.length_s:
                if running < allowed_at_once(stage, before.concurrency, at_s):
                    running += 1
                    sent += 1
                    task = self._begin(group, counted=at_s >= stage.ramp_s, pause_s=_FAILED_PAUSE_S)
                    task.add_done_callback(ended)
                    if sent == self._limits.requests:
                        return
                    await asyncio.sleep(0)
                    continue
                free.clear()
                left_s = stage.length_s - at_s
                try:
                    async with asyncio.timeout(min(left_s, _LOOK_S) if at_s < stage.ramp_s else left_s):
                        await free.wait()
                except TimeoutError:
                    continue

    def _limited(self, arrivals: Iterator[float]) -> Iterator[float]:
        for number, at_s in enumerate(arrivals):
            if self._limits.requests and number >= self._limits.requests:
                return
            yield at_s

    def _begin(self, group: asyncio.TaskGroup, *, counted: bool, pause_s: float = 0.0) -> asyncio.Task[None]:
        """Send the next request. ``pause_s``: its task ends so much later when the request fails."""
        turn = self._workload.next_turn()
        disturbance = self._chaos.draw(self._disturbances)
        outcome = Outcome(self.stage, turn.session, turn.number, self.now_s(), disturbance, counted)
        prompt = msgspec.json.encode(turn.messages)
        self._digest.update(prompt)
        self.first_prompt = self.first_prompt or prompt[:2000].decode("utf-8", "replace")
        self.begun += 1
        return group.create_task(self._serve(turn, outcome, pause_s))

    async def _serve(self, turn: Turn, outcome: Outcome, pause_s: float) -> None:
        gaps = Histogram()
        answer: str | None = None
        if self.running >= self._limits.at_once:
            outcome.error = "too many at once"
            outcome.message = f"{self._limits.at_once} requests were running; the target is slower than the load"
        else:
            reading = Reading(
                self._transport,
                self.begun,
                outcome,
                gaps,
                timeout_s=self._limits.timeout_s,
                on_piece=lambda: self.record.note_piece(self.now_s()),
            )
            body = request_body(self._facts.model, turn.messages, turn.tokens, exact=self._exact_lengths)
            self.running += 1
            try:
                answer = await reading.run(self._dressed(body, turn))
            finally:
                self.running -= 1
        self._workload.finish(turn, answer)
        self.record.add(outcome, gaps)
        if outcome.status == "failed":
            await asyncio.sleep(pause_s)
