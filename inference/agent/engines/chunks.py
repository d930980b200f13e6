"""OpenAI's streaming chunks into frames. Sans I/O; forgiving of what servers in the field do."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.frames import BlockKind, ChoiceEnd, Close, Delta, ErrorInfo, Open, Usage
from stream_fabric.ids import StreamId, derived_id
from stream_fabric.ports import FrameSink


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: msgspec.Raw | None = None
    logprobs: msgspec.Raw | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class _ChatLogprobs(msgspec.Struct):
    content: msgspec.Raw | None = None
    refusal: msgspec.Raw | None = None


_decoder = msgspec.json.Decoder(_Chunk)
_logprobs_decoder = msgspec.json.Decoder(_ChatLogprobs)
_NULL = b"null"


class _Open:
    """The blocks of a choice that are open: one of text kind, and the tool calls by the server's index."""

    __slots__ = ("block", "finished", "kind", "tool", "tools")

    def __init__(self) -> None:
        self.kind: BlockKind | None = None
        self.block = -1
        self.tools: dict[int, int] = {}
        self.tool = -1
        self.finished = False


class ChunkReader:
    """One response's chunks. ``receive`` puts frames into the sink; ``end`` says whether the response was whole."""

    def __init__(self, stream: StreamId, sink: FrameSink, choices: int) -> None:
        self._stream = stream
        self._sink = sink
        self._choices = [_Open() for _ in range(choices)]
        self._next_block = 0
        self._usage: Usage | None = None
        self._done = False
        self.error: ErrorInfo | None = None

    def receive(self, data: bytes) -> None:
        """One event's data. Raises msgspec.MsgspecError on what is no chunk."""
        if data == b"[DONE]":
            self._done = True
            return
        chunk = _decoder.decode(data)
        if chunk.error is not None and bytes(chunk.error) != _NULL:
            self.error = upstream_error(chunk.error, 502)
            return
        for choice in chunk.choices or ():
            if 0 <= choice.index < len(self._choices):
                self._choice(self._choices[choice.index], choice)
        if chunk.usage is not None:
            self._take_usage(chunk.usage)

    def end(self) -> ErrorInfo | None:
        """The bytes have ended: put the terminal's usage in place, or say what is missing."""
        if self.error is not None:
            return self.error
        if not all(choice.finished for choice in self._choices):
            return ErrorInfo(
                "upstream_truncated",
                "the model server ended its answer before it was whole",
                retriable=True,
                http_status=502,
            )
        return None

    @property
    def usage(self) -> Usage | None:
        return self._usage

    def _take_usage(self, usage: _Usage) -> None:
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        reasoning = (usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens) or 0
        prompt = usage.prompt_tokens or 0
        if self._usage is None:
            self._sink.usage(prompt, cached, 0, reasoning)
        self._usage = Usage(prompt, cached, 0, usage.completion_tokens or 0, reasoning)

    def _choice(self, state: _Open, choice: _Choice) -> None:
        delta = choice.delta
        if choice.text:
            self._text(state, choice.index, "text", choice.text, choice.logprobs)
        elif delta is not None:
            thought = delta.reasoning_content or delta.reasoning
            if thought:
                self._text(state, choice.index, "reasoning", thought, None)
            if delta.content:
                self._text(state, choice.index, "text", delta.content, choice.logprobs)
            if delta.refusal:
                self._text(state, choice.index, "refusal", delta.refusal, choice.logprobs)
            for call in delta.tool_calls or ():
                self._tool(state, choice.index, call)
        if choice.finish_reason and not state.finished:
            state.finished = True
            self._close(state)
            for block in state.tools.values():
                self._sink.frame(Close(block))
            detail = choice.stop_reason
            self._sink.frame(
                ChoiceEnd(
                    choice.index, choice.finish_reason, None if detail is None or bytes(detail) == _NULL else detail
                )
            )

    def _text(self, state: _Open, index: int, kind: BlockKind, text: str, logprobs: msgspec.Raw | None) -> None:
        if state.kind != kind:
            self._close(state)
            state.kind, state.block = kind, self._take_block()
            self._sink.frame(Open(state.block, index, kind, "raw" if kind == "reasoning" else None))
        if logprobs is None or bytes(logprobs) == _NULL:
            self._sink.text(state.block, text)
            return
        raw = logprobs
        if any(key in bytes(logprobs) for key in (b'"content"', b'"refusal"')):
            parsed = _logprobs_decoder.decode(logprobs)
            raw = (parsed.refusal if kind == "refusal" else parsed.content) or msgspec.Raw(b"[]")
        self._sink.frame(Delta(state.block, text, 1, raw))

    def _tool(self, state: _Open, index: int, call: _ToolCall) -> None:
        function = call.function or _Function()
        number = call.index
        if number is None:  # some servers leave it out: an id begins a call, what has none continues the last
            number = state.tool + 1 if call.id and function.name else max(state.tool, 0)
        block = state.tools.get(number)
        if block is None:
            self._close(state)
            block = state.tools[number] = self._take_block()
            state.tool = number
            name = call.id or derived_id("call_", self._stream, block + 1)
            self._sink.frame(Open(block, index, "tool", "function", name, function.name or ""))
        if function.arguments:
            self._sink.text(block, function.arguments)

    def _close(self, state: _Open) -> None:
        if state.kind is not None:
            self._sink.frame(Close(state.block))
            state.kind = None

    def _take_block(self) -> int:
        self._next_block += 1
        return self._next_block - 1


def upstream_error(raw: bytes | msgspec.Raw, status: int) -> ErrorInfo:
    """An error object of a server, whatever its shape."""
    message, code = bytes(raw).decode("utf-8", "replace")[:500], "engine_error"
    try:
        parsed: Any = msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        parsed = None
    if isinstance(parsed, dict):
        inner = parsed.get("error", parsed)
        if isinstance(inner, dict):
            message = str(inner.get("message") or message)[:2000]
            code = str(inner.get("code") or code)
    type_ = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return ErrorInfo(code, message, type_, status, retriable=status >= 500 or status == 429)
