"""Warm-up of a model server: one token, or one answer of a model that makes no tokens, shows that it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from stream_fabric.errors import EngineFailed
from stream_fabric.limits import VLLM_WARM_UP_S_MAX
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import ErrorInfo, Frame, TerminalStatus, Usage
from stream_fabric.stream.ids import StreamId

log = logging.getLogger(__name__)

_Kind = Literal["completions", "embeddings", "rerank", "classify"]
_STREAM = StreamId("warm-up")
_OF_ANOTHER_KIND = (400, 404, 405)
"""HTTP statuses that mean that the model is of another kind."""


async def warm_up(
    submit: Callable[[EngineRequest, FrameSink], None],
    abort: Callable[[StreamId], None],
    model: str,
    *,
    with_logprobs: bool = False,
) -> None:
    """Send requests until one succeeds. Raises EngineFailed when the model serves none of them.

    ``with_logprobs``: one more token with logprobs. vLLM compiles a part of its sampler at the first such request, and
    all its streams wait meanwhile.
    """
    completion = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
    bodies: tuple[tuple[_Kind, dict[str, object]], ...] = (
        ("completions", completion),
        ("embeddings", {"input": "Hello"}),
        ("rerank", {"query": "Hello", "documents": ["Hello"]}),
        ("classify", {"input": "Hello"}),
    )
    refused: list[str] = []
    for kind, body in bodies:
        error = await _ask(submit, abort, model, kind, body)
        if error is None:
            break
        refused.append(error.message)
        if error.http_status not in _OF_ANOTHER_KIND:
            raise _serves_nothing(refused)
    else:
        raise _serves_nothing(refused)
    if with_logprobs and kind == "completions":
        error = await _ask(submit, abort, model, kind, {**completion, "logprobs": 1})
        if error is not None and error.http_status not in _OF_ANOTHER_KIND:  # --max-logprobs 0 refuses it
            log.warning("request for logprobs failed in the warm-up: model=%s error=%s", model, error.message)


async def _ask(
    submit: Callable[[EngineRequest, FrameSink], None],
    abort: Callable[[StreamId], None],
    model: str,
    kind: _Kind,
    body: Mapping[str, object],
) -> ErrorInfo | None:
    """Send one request and return its error. Raises EngineFailed when it does not end in time."""
    sink = _Listener()
    raw = msgspec.Raw(msgspec.json.encode({"model": model, **body}))
    submit(EngineRequest(_STREAM, kind, model, raw), sink)
    try:
        async with asyncio.timeout(VLLM_WARM_UP_S_MAX):
            return await sink.ended
    except TimeoutError:
        raise EngineFailed(f"vLLM produced no token within {VLLM_WARM_UP_S_MAX:g} s") from None
    finally:
        abort(_STREAM)


def _serves_nothing(refused: Sequence[str]) -> EngineFailed:
    return EngineFailed(f"vLLM does not serve the model it loaded: {'; '.join(refused)}")


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
