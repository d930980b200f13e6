"""A ``FrameSink`` between the engine and its stream: replies are checked before their choice ends in the log.

Without repair the text goes on as it comes, and only the end of a choice waits for its check. With repair the whole
reply waits: one that does not fit is dropped, and the engine is asked again with it and the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from inference.agent.running import RunningStream
from inference.agent.steering.layers import count_held
from inference.agent.structured.checker import Checker
from inference.agent.structured.schema import repairing_request, wanted_schema
from stream_fabric.errors import StreamTooLarge
from stream_fabric.limits import STREAM_BYTES_MAX
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import (
    SCHEMA_MISMATCH,
    Check,
    ChoiceEnd,
    Delta,
    ErrorInfo,
    Frame,
    Open,
    TerminalStatus,
    Usage,
)

Submit = Callable[[RunningStream, EngineRequest, FrameSink], None]
"""Asks the engine of this replica; its failure ends the stream."""
_End = tuple[TerminalStatus, ErrorInfo | None, Usage | None]


class ReplyChecks:
    """Puts the check between engine and streams whose request asks for a schema."""

    def __init__(self, checker: Checker | None, submit: Submit, tasks: asyncio.TaskGroup) -> None:
        """``checker`` None: nothing is checked."""
        self._checker = checker
        self._submit = submit
        self._tasks = tasks

    def sink_for(self, stream: RunningStream, request: EngineRequest, sink: FrameSink) -> FrameSink:
        """Return where the engine's output goes."""
        schema = None if self._checker is None else wanted_schema(request)
        if self._checker is None or schema is None:
            return sink
        if stream.work.repairs and request.kind == "chat" and request.choices == 1:
            return RepairedSink(stream, sink, schema, self._checker, self._submit, self._tasks, request)
        return CheckedSink(stream, sink, schema, self._checker, self._tasks)


class _Texts:
    """The text of each choice, as far as it has to be checked."""

    def __init__(self) -> None:
        self._choices: dict[int, int] = {}
        """Choice of each text block."""
        self._pieces: dict[int, list[str]] = {}
        self._barred: set[int] = set()
        """Choices with a tool call or a refusal, which are no structured reply."""
        self.chars = 0

    def open(self, frame: Open) -> None:
        if frame.kind == "text":
            self._choices[frame.block] = frame.choice
            self._pieces.setdefault(frame.choice, [])
        elif frame.kind != "reasoning":
            self._barred.add(frame.choice)

    def add(self, block: int, text: str) -> None:
        choice = self._choices.get(block)
        if choice is not None and self.chars <= STREAM_BYTES_MAX:
            self._pieces[choice].append(text)
            self.chars += len(text)

    def take(self, choice: int) -> str | None:
        """Remove and return the text of a choice that has ended; None: it is not checked."""
        pieces = self._pieces.pop(choice, None)
        return None if pieces is None or choice in self._barred else "".join(pieces)


class CheckedSink:
    """Passes output on. The end of a choice, and of the stream, waits for the check of the reply."""

    def __init__(
        self, stream: RunningStream, sink: FrameSink, schema: bytes, checker: Checker, tasks: asyncio.TaskGroup
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._schema = schema
        self._checker = checker
        self._tasks = tasks
        self._texts = _Texts()
        self._checking = 0
        self._mismatch = False
        self._ending: _End | None = None
        self._dropped = False

    def drop(self) -> None:
        """Check nothing more: an input has cut the reply."""
        self._dropped = True

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self._texts.add(block, text)
        self._sink.text(block, text, tokens)

    def frame(self, frame: Frame) -> None:
        match frame:
            case Open():
                self._texts.open(frame)
            case Delta(block=block, text=text):
                self._texts.add(block, text)
            case ChoiceEnd(choice=choice, finish_reason="stop"):
                reply = self._texts.take(choice)
                if reply is not None:
                    self._checking += 1
                    self._tasks.create_task(self._check(frame, reply))
                    return
        self._sink.frame(frame)

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self._sink.usage(prompt, cached, written, reasoning)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self._sink.computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        self._ending = (status, error, usage)
        if self._checking and not self._stream.closed:
            self._stream.timing.receive_reply_end()
        self._finish()

    async def _check(self, frame: ChoiceEnd, reply: str) -> None:
        check = await self._checker.check(self._schema, reply, self._stream.work.tenant)
        self._checking -= 1
        self._checker.on_result(check.result)
        self._mismatch = self._mismatch or check.result == "invalid"
        if not self._stream.closed and not self._dropped:
            self._sink.frame(msgspec.structs.replace(frame, check=check))
            self._finish()

    def _finish(self) -> None:
        if self._ending is not None and not self._checking:
            _end(self._stream, self._sink, self._ending, mismatch=self._mismatch)


class _Reply:
    """One whole reply of the engine, which waits."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.texts = _Texts()
        self.tokens = 0
        self.usage: Usage | None = None
        self.text: str | None = None
        """Text to be checked; None: it is none, or did not end by itself."""


class RepairedSink:
    """Holds the whole reply back. At most ``work.repairs`` further ones are asked for while they do not fit."""

    def __init__(
        self,
        stream: RunningStream,
        sink: FrameSink,
        schema: bytes,
        checker: Checker,
        submit: Submit,
        tasks: asyncio.TaskGroup,
        request: EngineRequest,
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._schema = schema
        self._checker = checker
        self._submit = submit
        self._tasks = tasks
        self._request = request
        self._reply = _Reply()
        self._before: tuple[_Reply, Check] | None = None
        """The last reply that did not fit, if a better one is being made."""
        self._repairs = 0
        self._spent = Usage()
        """Usage of the replies before this one."""
        self._dropped = False

    def drop(self) -> None:
        """Check nothing more: an input has cut the reply, of which nothing was said."""
        self._dropped = True

    # --- FrameSink -----------------------------------------------------------------------------------------

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self.frame(Delta(block, text, tokens))

    def frame(self, frame: Frame) -> None:
        reply = self._reply
        reply.frames.append(frame)
        match frame:
            case Open():
                reply.texts.open(frame)
            case Delta(block=block, text=text, tokens=tokens):
                reply.texts.add(block, text)
                self._take_tokens(reply, tokens)
            case ChoiceEnd(choice=choice, finish_reason="stop"):
                reply.text = reply.texts.take(choice)

    def _take_tokens(self, reply: _Reply, tokens: int) -> None:
        stream = self._stream
        count_held(stream, tokens)
        if self._repairs:
            stream.timing.generated += tokens  # the times are those of the first reply alone
        reply.tokens += tokens
        if reply.texts.chars > STREAM_BYTES_MAX and not stream.closed:
            stream.fail(StreamTooLarge(f"the reply exceeds {STREAM_BYTES_MAX >> 20} MiB; it waits whole for its check"))
            stream.owner.on_too_large(stream)

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        spent = self._spent
        self._sink.usage(
            spent.prompt + prompt, spent.cached + cached, spent.written + written, spent.reasoning + reasoning
        )

    def computed(self, queue_s: float, prefill_s: float) -> None:
        if not self._repairs:
            self._sink.computed(queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        reply = self._reply
        reply.usage = usage
        if self._stream.closed:
            return
        self._stream.timing.receive_reply_end()
        if status == "completed" and reply.text is not None:
            self._tasks.create_task(self._check(reply, reply.text))
        elif status == "completed":
            self._release(reply, None, (status, error, self._total(reply)))
        elif self._before is None:  # nothing was said of it, so another replica can begin again
            self._sink.end(status, error)
        else:  # the repair failed: the reply before it is better than none
            before, check = self._before
            lost = Usage(0, 0, 0, reply.tokens)
            self._spent = self._spent.plus(lost)
            self._release(before, check, ("completed", None, self._spent))

    # --- the check -----------------------------------------------------------------------------------------

    async def _check(self, reply: _Reply, text: str) -> None:
        check = await self._checker.check(self._schema, text, self._stream.work.tenant)
        if self._stream.closed or self._dropped:
            return
        check = msgspec.structs.replace(check, repairs=self._repairs)
        if check.result == "invalid" and self._repairs < self._stream.work.repairs and self._repair(reply, text, check):
            return
        self._release(reply, check, ("completed", None, self._total(reply)))

    def _repair(self, reply: _Reply, text: str, check: Check) -> bool:
        """Ask the engine for a better reply. False: this one is too long to be sent back."""
        request = repairing_request(self._request, text, check)
        if request is None:
            return False
        self._spent = self._total(reply)
        self._before, self._reply = (reply, check), _Reply()
        self._repairs += 1
        self._stream.timing.receive_repair()
        self._checker.on_result("repair")
        self._submit(self._stream, request, self)
        return True

    def _total(self, reply: _Reply) -> Usage:
        """Return the usage of all replies with this one."""
        own = reply.usage
        if own is None:
            known = self._stream.producer.usage  # the engine has counted the prompts
            return Usage(known.prompt, known.cached, known.written, self._spent.output + reply.tokens, known.reasoning)
        return self._spent.plus(own)

    def _release(self, reply: _Reply, check: Check | None, ending: _End) -> None:
        """Put the reply into the stream. Its first text counts the tokens of the replies that were dropped."""
        if check is not None:
            is_repaired = check.result == "valid" and check.repairs
            self._checker.on_result("repaired" if is_repaired else check.result)
        usage = ending[2]
        extra = max(usage.output - reply.tokens, 0) if usage is not None and self._repairs else 0
        for frame in reply.frames:
            match frame:
                case ChoiceEnd():
                    self._sink.frame(msgspec.structs.replace(frame, check=check))
                case Delta(block=block, text=text, tokens=tokens, logprobs=None):
                    self._sink.text(block, text, tokens + extra)
                    extra = 0
                case Delta(tokens=tokens):
                    self._sink.frame(msgspec.structs.replace(frame, tokens=tokens + extra))
                    extra = 0
                case _:
                    self._sink.frame(frame)
        self._before, self._reply = None, _Reply()
        _end(self._stream, self._sink, ending, mismatch=check is not None and check.result == "invalid")


def _end(stream: RunningStream, sink: FrameSink, ending: _End, *, mismatch: bool) -> None:
    """End the stream. A reply that does not fit leaves its mark in the attempt's trace."""
    if mismatch and not stream.closed:
        stream.error_code = SCHEMA_MISMATCH
    sink.end(*ending)
