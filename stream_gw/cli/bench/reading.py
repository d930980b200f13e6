"""One request: sent, read with its times, and disturbed as the run demands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import aiohttp
import msgspec

from stream_fabric.system_errors import reason
from stream_gw.cli.bench.events import BadAnswer, ChunkError, ChunkUsage, Event
from stream_gw.cli.bench.measures import Histogram
from stream_gw.cli.bench.target import Answer, Cancelled, Refused, Transport

_SLOW_PAUSE_S = 0.25
_RESUMES_MAX = 8
_RESUME_PAUSE_S, _RESUME_PAUSE_S_MAX = 0.1, 2.0

Status = Literal["completed", "cancelled", "failed"]


class Disturbance(msgspec.Struct, frozen=True):
    """Chaos for one request. ``cut_at`` and ``cancel_at`` are pieces of text; 0: not at all."""

    cut_at: int = 0
    cancel_at: int = 0
    is_slow: bool = False

    def __bool__(self) -> bool:
        return bool(self.cut_at or self.cancel_at or self.is_slow)


class Outcome(msgspec.Struct):
    """The measured request. Times are in seconds; ``began_s`` is from the run's start."""

    stage: int
    session: int
    turn: int
    began_s: float
    disturbance: Disturbance
    is_counted: bool
    """It began while its stage held the load."""
    status: Status = "failed"
    error: str = ""
    """Short name of the failure, the same for the same failure."""
    message: str = ""
    stream: str = ""
    ttft_s: float | None = None
    duration_s: float = 0.0
    generation_s: float = 0.0
    """From the first piece of text to the last."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them; the pieces of text where it does not."""
    pieces: int = 0
    """Pieces of text; a server may put several tokens into one."""
    cuts: int = 0
    resume_s: float | None = None
    """From the last resume's request to its first event."""
    is_exact: bool | None = None
    """After a cut: the pieces that were read equal a replay of the whole stream. None: not compared."""
    cancel_s: float | None = None
    """From the cancel to the end of the answer."""
    is_cancel_exact: bool | None = None
    """The last event that was read is the one which the cancel's answer names. None: the server named none."""

    @property
    def itl_s(self) -> float | None:
        """Mean time of a token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2 or not self.generation_s:
            return None
        return self.generation_s / (self.output_tokens - 1)


class _Cut(Exception):
    """The reader leaves, as the run demands."""


class _EndedEarly(Exception):
    """The answer carried an error. ``is_final``: the stream has ended with it."""

    def __init__(self, error: ChunkError, cursor: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.is_final = bool(cursor)


class _Text:
    """The text so far. A piece counts once its cursor has come: before that it may come again after a resume."""

    def __init__(self) -> None:
        self.cursor = ""
        self.count = 0
        self._pieces: list[tuple[int, str, str]] = []
        """Number of the frame, all that the piece shows, and the part of it that the next turn repeats."""
        self._open: list[tuple[str, str]] = []

    def receive(self, event: Event) -> str:
        """Take an event; return the text in it."""
        if event.reset:
            self.go_back(event.cursor)
            return ""
        output = event.chunk.output if event.chunk is not None else ""
        if output and event.chunk is not None:
            self._open.append((output, event.chunk.said))
            self.count += 1
        if event.cursor:
            self.cursor = event.cursor
            self._pieces += ((_seq_of(event.cursor), *piece) for piece in self._open)
            self._open.clear()
        return output

    def go_back(self, cursor: str) -> None:
        """Forget what came after the cursor, and what has no cursor."""
        seq = _seq_of(cursor)
        self.cursor = cursor
        while self._pieces and self._pieces[-1][0] > seq:
            self._pieces.pop()
        self._open.clear()

    @property
    def last_seq(self) -> int:
        """Number of the frame that brought the last piece."""
        return self._pieces[-1][0] if self._pieces else 0

    @property
    def said(self) -> str:
        return "".join([*(said for _, _, said in self._pieces), *(said for _, said in self._open)])

    def __str__(self) -> str:
        return "".join([*(output for _, output, _ in self._pieces), *(output for output, _ in self._open)])


class Reading:
    """Sends one request and reads its answer into ``outcome``.

    ``gaps`` gets the time between two pieces of text. ``on_piece`` is called for each of them. ``index`` chooses the
    address; a resume takes the next one. ``timeout_s``: for the whole answer, without the pauses of a slow reader.
    """

    def __init__(
        self,
        transport: Transport,
        index: int,
        outcome: Outcome,
        gaps: Histogram,
        *,
        timeout_s: float,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport, self._index, self._timeout_s = transport, index, timeout_s
        self._outcome, self._gaps, self._on_piece = outcome, gaps, on_piece
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(timeout_s)
        self._text = _Text()
        self._usage: ChunkUsage | None = None
        self._began_s = self._loop.time()
        self._first_s = self._last_s = 0.0
        self._cancel: asyncio.Task[Cancelled] | None = None
        self._cancelled_s = 0.0

    async def run(self, body: dict[str, Any]) -> str | None:
        """Serve the request to its end. Returns the answer without its reasoning; None: it failed or was cancelled."""
        outcome = self._outcome
        try:
            async with self._limit:
                await self._read(body)
            outcome.status = "completed" if self._cancel is None else "cancelled"
        except _EndedEarly as ended:
            if ended.error.code == "cancelled" and self._cancel is not None:
                outcome.status = "cancelled"
            else:
                outcome.error, outcome.message = str(ended.error.code or "error"), ended.error.message
        except Refused as refused:
            outcome.error, outcome.message = refused.label, str(refused)
        except BadAnswer as bad:
            outcome.error, outcome.message = "bad answer", str(bad)
        except TimeoutError as late:
            outcome.error, outcome.message = "timeout", str(late) or f"no whole answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as lost:
            outcome.error, outcome.message = "connection lost", str(lost) or type(lost).__name__
        self._note_times()
        if self._cancel is not None:
            await self._note_cancel(self._cancel)
        if outcome.cuts and outcome.status != "failed":
            await self._compare_with_replay()
        return self._text.said if outcome.status == "completed" else None

    async def _read(self, body: dict[str, Any]) -> None:
        """Read the answer, and go on with it after each cut."""
        outcome = self._outcome
        try:
            async with self._transport.create(self._index, body, slow=outcome.disturbance.is_slow) as answer:
                await self._read_answer(answer)
                return
        except _Cut:
            if not outcome.stream:
                raise BadAnswer("the reader was cut off, and this server cannot resume an answer") from None
        except _EndedEarly as ended:
            if not self._can_resume(ended):
                raise
        except (aiohttp.ClientError, OSError):
            if not outcome.stream or not self._text.cursor:
                raise
        for tried in range(1, _RESUMES_MAX + 1):
            self._text.go_back(self._text.cursor or "1-0")
            began_s = self._loop.time()
            try:
                async with self._transport.resume(self._index + tried, outcome.stream, self._text.cursor) as answer:
                    self._last_s = 0.0  # the pause of a cut is no gap between tokens
                    await self._read_answer(answer, resumed_at_s=began_s)
                    return
            except _EndedEarly as ended:
                if not self._can_resume(ended) or tried == _RESUMES_MAX:
                    raise
            except (aiohttp.ClientError, OSError):
                if tried == _RESUMES_MAX:
                    raise
            await asyncio.sleep(min(_RESUME_PAUSE_S * 2**tried, _RESUME_PAUSE_S_MAX))

    def _can_resume(self, ended: _EndedEarly) -> bool:
        """Whether the stream may go on behind an error; it names the cursor to resume at."""
        if ended.is_final or not self._outcome.stream or not ended.error.cursor:
            return False
        self._text.go_back(ended.error.cursor)
        return True

    async def _read_answer(self, answer: Answer, resumed_at_s: float = 0.0) -> None:
        outcome, disturbance = self._outcome, self._outcome.disturbance
        async for event in answer.events():
            outcome.stream = answer.stream
            if resumed_at_s:
                outcome.resume_s, resumed_at_s = self._loop.time() - resumed_at_s, 0.0
            if event.chunk is not None:
                if event.chunk.error is not None:
                    raise _EndedEarly(event.chunk.error, event.cursor)
                self._usage = event.chunk.usage or self._usage
            if self._text.receive(event):
                self._note_piece()
            if disturbance.cut_at and not outcome.cuts and self._text.count >= disturbance.cut_at:
                outcome.cuts += 1
                raise _Cut
            if disturbance.cancel_at and self._cancel is None and self._text.count >= disturbance.cancel_at:
                self._cancelled_s = self._loop.time()
                if not outcome.stream:  # another server: it learns of a cancel by the closed connection
                    self._cancel = asyncio.create_task(_no_answer())
                    return
                self._cancel = asyncio.create_task(self._transport.cancel(self._index, outcome.stream))
            if disturbance.is_slow:
                await self._pause()

    async def _pause(self) -> None:
        """Wait as a slow reader does. The time limit is the server's, so it moves by the pause."""
        due_s = self._limit.when()
        assert due_s is not None
        self._limit.reschedule(due_s + _SLOW_PAUSE_S)
        await asyncio.sleep(_SLOW_PAUSE_S)

    def _note_piece(self) -> None:
        now_s = self._loop.time()
        if not self._first_s:
            self._first_s = now_s
            self._outcome.ttft_s = now_s - self._began_s
        elif self._last_s and not self._outcome.disturbance.is_slow:
            self._gaps.add(now_s - self._last_s)
        self._last_s = now_s
        self._on_piece()

    def _note_times(self) -> None:
        outcome, usage = self._outcome, self._usage
        outcome.duration_s = self._loop.time() - self._began_s
        outcome.generation_s = max(self._last_s - self._first_s, 0.0)
        outcome.output_tokens = outcome.pieces = self._text.count
        if usage is not None:
            outcome.prompt_tokens = usage.prompt_tokens or 0
            outcome.output_tokens = usage.completion_tokens or outcome.output_tokens
            if usage.prompt_tokens_details is not None:
                outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0

    async def _note_cancel(self, cancel: asyncio.Task[Cancelled]) -> None:
        outcome = self._outcome
        outcome.cancel_s = self._loop.time() - self._cancelled_s
        try:
            async with asyncio.timeout(self._timeout_s):
                told = await cancel
            at = None if told.at is None else _seq_of(told.at)
        except (Refused, BadAnswer, aiohttp.ClientError, OSError, msgspec.MsgspecError) as failed:
            outcome.status, outcome.error, outcome.message = "failed", "cancel failed", reason(failed)
            return
        if outcome.status == "cancelled" and told.result == "terminal":
            outcome.status = "completed"  # the answer had ended before
        if at is not None and told.result == "accepted":
            outcome.is_cancel_exact = self._text.last_seq <= at <= _seq_of(self._text.cursor or "1-0")

    async def _compare_with_replay(self) -> None:
        """Read the whole stream once more, and compare its text with the text that came in parts."""
        text = _Text()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._transport.resume(self._index, self._outcome.stream, "") as answer,
            ):
                async for event in answer.events():
                    text.receive(event)
            self._outcome.is_exact = str(text) == str(self._text)
        except (Refused, BadAnswer, aiohttp.ClientError, OSError) as failed:
            self._outcome.is_exact = False
            self._outcome.message = f"the replay failed: {reason(failed)}"


async def _no_answer() -> Cancelled:
    return Cancelled("accepted")


def _seq_of(cursor: str) -> int:
    """Return the number of the last frame that a cursor covers. Raises BadAnswer for what is no cursor."""
    seq = cursor.rpartition("-")[2]
    if not seq.isdecimal():
        raise BadAnswer(f"{cursor[:64]!r} is not a cursor of the gateway")
    return int(seq)
