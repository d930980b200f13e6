"""Warm-up of a model server: one token, or one answer of a model that makes no tokens, shows that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec

from stream_fabric.errors import EngineFailed
from stream_fabric.limits import VLLM_WARM_UP_S_MAX
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import ErrorInfo, Frame, TerminalStatus, Usage
from stream_fabric.stream.ids import StreamId

_STREAM = StreamId("warm-up")


async def warm_up(
    submit: Callable[[EngineRequest, FrameSink], None], abort: Callable[[StreamId], None], model: str
) -> None:
    """Send requests until one succeeds. Raises EngineFailed when the model serves none of them."""
    bodies: tuple[tuple[Literal["completions", "embeddings", "rerank"], dict[str, object]], ...] = (
        ("completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0}),
        ("embeddings", {"input": "Hello"}),
        ("rerank", {"query": "Hello", "documents": ["Hello"]}),
    )
    refused: list[str] = []
    for kind, body in bodies:
        sink = _Listener()
        raw = msgspec.Raw(msgspec.json.encode({"model": model, **body}))
        submit(EngineRequest(_STREAM, kind, model, raw), sink)
        try:
            async with asyncio.timeout(VLLM_WARM_UP_S_MAX):
                error = await sink.ended
        except TimeoutError:
            raise EngineFailed(f"vLLM produced no token within {VLLM_WARM_UP_S_MAX:g} s") from None
        finally:
            abort(_STREAM)
        if error is None:
            return
        refused.append(error.message)
        if error.http_status not in (400, 404, 405):  # these mean that the model is of another kind
            break
    raise EngineFailed(f"vLLM does not serve the model it loaded: {'; '.join(refused)}")


class _Listener:
    """A ``FrameSink`` that only waits for the end."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[ErrorInfo | None] = asyncio.get_running_loop().create_future()

    def text(self, block: int, text: str, tokens: int = 1) -> None:
        pass

    def frame(self, frame: Frame) -> None:
        pass

    def usage(self, prompt: int, cached: int = 0, written: int = 0, reasoning: int = 0) -> None:
        pass

    def computed(self, queue_s: float, prefill_s: float) -> None:
        pass

    def end(self, status: TerminalStatus, error: ErrorInfo | None = None, usage: Usage | None = None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)
