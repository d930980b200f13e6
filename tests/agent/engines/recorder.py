"""A sink that keeps what an engine says and checks the law of frames while it listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, ErrorInfo, Frame, Note, Open, TerminalStatus, Usage
from stream_fabric.stream.ids import StreamId


class Recorder:
    """``FrameSink``. ``on_token`` is called after each delta, inside the engine's call. ``choices``: those asked."""

    def __init__(self, on_token: Callable[[], None] | None = None, choices: int = 1) -> None:
        self.frames: list[Frame] = []
        self.times: list[float] = []
        """When each delta came."""
        self.prompt: tuple[int, int] | None = None
        self.own: tuple[float, float] | None = None
        """The engine's own times."""
        self.status: TerminalStatus | None = None
        self.error: ErrorInfo | None = None
        self.end_usage: Usage | None = None
        self.ended = asyncio.Event()
        self.calls = 0
        self._on_token = on_token
        self._open: dict[int, Open] = {}
        self._finished: set[int] = set()
        self._blocks = 0
        self._choices = choices

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        self.frame(Delta(block, text, tokens))

    def frame(self, frame: Frame) -> None:
        self.calls += 1
        assert self.status is None, f"{frame} after the end"
        match frame:
            case Open(block=block, choice=choice):
                assert block == self._blocks, "blocks are numbered in the order they open"
                assert choice not in self._finished
                self._blocks += 1
                self._open[block] = frame
            case Delta(block=block):
                assert block in self._open, f"{frame} outside its block"
                self.times.append(asyncio.get_running_loop().time())
            case Close(block=block):
                del self._open[block]
            case ChoiceEnd(choice=choice):
                assert all(block.choice != choice for block in self._open.values()), "a block was left open"
                assert choice not in self._finished
                self._finished.add(choice)
            case Note(kind="prompt"):
                assert self._blocks < self._choices, "the prompts are told before the output of the last one"
        self.frames.append(frame)
        if isinstance(frame, Delta) and self._on_token is not None:
            self._on_token()

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        self.calls += 1
        self.prompt = (prompt, cached)

    def computed(self, queue_s: float, prefill_s: float) -> None:
        self.calls += 1
        assert self.status is None, "told after the end"
        self.own = (queue_s, prefill_s)

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        self.calls += 1
        assert self.status is None, "two ends"
        self.status, self.error, self.end_usage = status, error, usage
        self.ended.set()
        if status == "completed":
            assert not self._open

    def body(self, kind: str = "text", choice: int = 0) -> str:
        blocks = {f.block for f in self.frames if isinstance(f, Open) and (f.kind, f.choice) == (kind, choice)}
        return "".join(f.text for f in self.frames if isinstance(f, Delta) and f.block in blocks)

    def opens(self) -> list[Open]:
        return [frame for frame in self.frames if isinstance(frame, Open)]

    def deltas(self) -> list[Delta]:
        return [frame for frame in self.frames if isinstance(frame, Delta)]

    def choice_ends(self) -> dict[int, ChoiceEnd]:
        return {frame.choice: frame for frame in self.frames if isinstance(frame, ChoiceEnd)}

    def tokens(self) -> int:
        return sum(delta.tokens for delta in self.deltas())

    async def wait(self) -> Recorder:
        async with asyncio.timeout(20):
            await self.ended.wait()
        return self


def stream_id(number: int) -> StreamId:
    return StreamId(f"resp_{number:032x}")


def chat(number: int, text: str = "Tell me about rivers", **more: Any) -> EngineRequest:
    body = {"model": "sim-small", "messages": [{"role": "user", "content": text}], **more}
    return EngineRequest(stream_id(number), "chat", "sim-small", msgspec.Raw(msgspec.json.encode(body)))


def completion(number: int, text: str | list[Any] = "Once", **more: Any) -> EngineRequest:
    body = {"model": "sim-small", "prompt": text, **more}
    return EngineRequest(stream_id(number), "completions", "sim-small", msgspec.Raw(msgspec.json.encode(body)))
