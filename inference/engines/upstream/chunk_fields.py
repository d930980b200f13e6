"""Fields of OpenAI's streaming chunks, as servers in the field send them.

A module of its own: mypyc, which compiles the reader of the chunks, knows no ``msgspec.Struct``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from stream_fabric.stream.frames import MaybeRaw

TokenCount = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Any other number would end the agent, or a counter in Redis, and all streams with it: it fails its own stream."""


class ChunkFunction(msgspec.Struct):
    name: str | None = None
    arguments: MaybeRaw = None
    """A JSON string as in OpenAI's API; some servers send the object itself."""


class ChunkToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: ChunkFunction | None = None


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChunkToolCall] | None = None


class ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: ChunkDelta | None = None
    message: ChunkDelta | None = None
    """Instead of ``delta``, from a server that does not stream."""
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: MaybeRaw = None
    logprobs: MaybeRaw = None


class ChunkDetails(msgspec.Struct):
    cached_tokens: TokenCount | None = None
    reasoning_tokens: TokenCount | None = None


class ChunkUsage(msgspec.Struct):
    prompt_tokens: TokenCount | None = None
    completion_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None
    prompt_tokens_details: ChunkDetails | None = None
    completion_tokens_details: ChunkDetails | None = None


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] | None = None
    usage: ChunkUsage | None = None
    error: MaybeRaw = None
    metrics: MaybeRaw = None
    """vLLM's own times of the request, in its last chunk; other servers may send anything here."""


class ChunkMetrics(msgspec.Struct):
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    """Counted from the end of the queue time."""
