"""OpenAI's streaming chunks into frames. Sans I/O; forgiving of what servers in the field do."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import EngineLost
from stream_fabric.frames import BlockKind, ChoiceEnd, Close, Delta, ErrorInfo, MaybeRaw, Note, Open, Usage
from stream_fabric.ids import StreamId, derived_id
from stream_fabric.limits import ITEM_CHARS_MAX
from stream_fabric.ports import FrameSink


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: MaybeRaw = None
    """A string, as OpenAI has it; of some servers the object itself."""


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
    message: _Delta | None = None
    """In place of the delta, of a server that answers whole."""
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: MaybeRaw = None
    logprobs: MaybeRaw = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: MaybeRaw = None
    metrics: MaybeRaw = None
    """vLLM's own times of a request, with its last usage; of other servers anything."""


class _Metrics(msgspec.Struct):
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    """From the moment that it was its turn."""


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Chunk)
_metrics_decoder = msgspec.json.Decoder(_Metrics)
_OWN_MS_MAX = 86_400_000
_whole_decoder = msgspec.json.Decoder(_Whole)
_NULL = b"null"
_ENGINE_DEAD = "EngineCore encountered an issue"
"""vLLM's words when its engine has died under its server, in a stream as in an answer."""


class _Call:
    """A tool call; it opens when its name is known, and what came before waits."""

    __slots__ = ("block", "held", "id")

    def __init__(self, id: str | None) -> None:
        self.id = id
        self.block = -1
        self.held = ""


class _Open:
    """The blocks of a choice that are open: one of text kind, and the tool calls by the server's index."""

    __slots__ = ("block", "by_index", "calls", "counted", "finished", "held", "kind", "last", "made")

    def __init__(self) -> None:
        self.kind: BlockKind | None = None
        self.block = -1
        self.by_index: dict[int, _Call] = {}
        self.calls: list[_Call] = []
        self.last = -1
        self.finished = False
        self.held: list[msgspec.Raw] = []
        """Logprobs of tokens without a text so far (half a character), to come with the first that has one."""
        self.made: int | None = None
        """Tokens so far, where the server says it with each chunk."""
        self.counted = 0
        """Of them, those that a text has been told for."""

    def take_tokens(self, otherwise: int) -> int:
        """How many tokens the next text stands for. A chunk may hold several, and some have no text."""
        if self.made is None:
            return otherwise
        tokens, self.counted = self.made - self.counted, self.made
        return tokens


class ChunkReader:
    """One response's chunks. ``receive`` puts frames into the sink; ``end`` says whether the response was whole.
    ``counts``: each chunk tells the prompt's tokens and its choice's so far (``continuous_usage_stats`` of vLLM)."""

    def __init__(self, stream: StreamId, sink: FrameSink, choices: int, *, counts: bool = False) -> None:
        self._stream = stream
        self._sink = sink
        self._choices = [_Open() for _ in range(choices)]
        self._next_block = 0
        self._usage: Usage | None = None
        self._counts = counts
        self._prompt_tokens: int | None = None
        self._done = False
        self.error: ErrorInfo | None = None

    def receive(self, data: bytes) -> None:
        """One event's data, or an answer that is whole. Raises msgspec.MsgspecError on what is neither."""
        data = data.strip()
        if not data:  # of some servers a sign of life
            return
        if data == b"[DONE]":
            self._done = True
            return
        chunk = _decoder.decode(data)
        error = _given(chunk.error)
        if error is not None:
            self.error = upstream_error(error, 502)
            return
        usage = chunk.usage
        if self._counts and chunk.choices:
            if usage is not None:
                self._take_counts(usage, chunk.choices)
            usage = None
        for choice in chunk.choices or ():
            # What comes after a choice's end belongs to nothing
            if 0 <= choice.index < len(self._choices) and not self._choices[choice.index].finished:
                self._choice(self._choices[choice.index], choice)
        if usage is not None:
            self._take_usage(usage)
        if chunk.metrics is not None:
            self._take_metrics(chunk.metrics)

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
    def done(self) -> bool:
        """The server has said that nothing follows."""
        return self._done or self.error is not None

    @property
    def usage(self) -> Usage | None:
        return self._usage

    def _take_counts(self, usage: _Usage, choices: list[_Choice]) -> None:
        if self._prompt_tokens is None and usage.prompt_tokens:
            self._prompt_tokens = usage.prompt_tokens
            self._sink.usage(usage.prompt_tokens)
        for choice in choices:
            if 0 <= choice.index < len(self._choices):
                self._choices[choice.index].made = usage.completion_tokens

    def _take_usage(self, usage: _Usage) -> None:
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        reasoning = (usage.completion_tokens_details and usage.completion_tokens_details.reasoning_tokens) or 0
        prompt = usage.prompt_tokens or 0
        if self._usage is None and (self._prompt_tokens is None or cached or reasoning):
            self._sink.usage(prompt, cached, 0, reasoning)
        self._usage = Usage(prompt, cached, 0, usage.completion_tokens or 0, reasoning)

    def _take_metrics(self, raw: msgspec.Raw) -> None:
        try:
            told = _metrics_decoder.decode(raw)
        except msgspec.MsgspecError:  # another server's word
            return
        queue_ms, prefill_ms = told.queue_time_ms, told.time_to_first_token_ms
        if queue_ms is None or prefill_ms is None or len(self._choices) != 1:
            return
        if 0 <= queue_ms <= _OWN_MS_MAX and 0 <= prefill_ms <= _OWN_MS_MAX:
            self._sink.computed(queue_ms / 1000, prefill_ms / 1000)

    def _choice(self, state: _Open, choice: _Choice) -> None:
        delta = choice.delta or choice.message
        if choice.text is not None:
            self._text(state, choice.index, "text", choice.text, choice.logprobs)
        elif delta is not None:
            thought = delta.reasoning_content or delta.reasoning
            if thought:
                self._text(state, choice.index, "reasoning", thought, None)
            if delta.content or not (thought or delta.refusal or delta.tool_calls):
                self._text(state, choice.index, "text", delta.content or "", choice.logprobs)
            if delta.refusal:
                self._text(state, choice.index, "refusal", delta.refusal, choice.logprobs)
            for part in delta.tool_calls or ():
                self._tool(state, choice.index, part)
        if choice.finish_reason:
            state.finished = True
            if state.held and not state.calls:  # all that it said was the end
                self._put(state, choice.index, "text", "", *_joined(state.held))
            self._close(state)
            for call in state.calls:
                if call.block < 0:
                    self._open_call(state, choice.index, call, "")
                self._sink.frame(Close(call.block))
            self._sink.frame(ChoiceEnd(choice.index, choice.finish_reason, _given(choice.stop_reason)))

    def _text(self, state: _Open, index: int, kind: BlockKind, text: str, logprobs: msgspec.Raw | None) -> None:
        given = _given(logprobs)
        raw, tokens = (None, 1) if given is None else _logprobs(given, kind)
        if not text:  # half a character, or a token that is none: told for its logprobs alone
            if raw is None or not tokens or state.kind == "reasoning" or state.calls:
                return
            if state.kind is None and bytes(raw).startswith(b"["):
                state.held.append(raw)
                return
        elif raw is not None and state.held:
            raw, tokens = _joined([*state.held, raw])
        self._put(state, index, kind, text, raw, tokens)

    def _put(
        self, state: _Open, index: int, kind: BlockKind, text: str, logprobs: msgspec.Raw | None, tokens: int
    ) -> None:
        state.held.clear()
        if state.kind != kind:
            self._close(state)
            state.kind, state.block = kind, self._take_block()
            self._sink.frame(Open(state.block, index, kind, "raw" if kind == "reasoning" else None))
        if logprobs is None:
            self._sink.text(state.block, text, state.take_tokens(1))
        else:
            self._sink.frame(Delta(state.block, text, state.take_tokens(max(1, tokens)), logprobs))

    def _tool(self, state: _Open, index: int, part: _ToolCall) -> None:
        function = part.function or _Function()
        number = part.index
        if number is None:  # some servers leave it out: an id begins a call, what has none continues the last
            number = state.last + 1 if part.id and function.name else max(state.last, 0)
        state.last = number
        call = state.by_index.get(number)
        if call is None or (part.id and call.id and part.id != call.id):  # some number every call 0
            call = state.by_index[number] = _Call(part.id)
            state.calls.append(call)
        call.id = call.id or part.id
        arguments = _arguments(function.arguments)
        if call.block < 0 and function.name:
            self._open_call(state, index, call, function.name)
        if call.block < 0:
            call.held += arguments
        elif arguments:
            self._sink.text(call.block, arguments, state.take_tokens(1))

    def _open_call(self, state: _Open, index: int, call: _Call, name: str) -> None:
        self._close(state)
        call.block = self._take_block()
        call.id = call.id or derived_id("call_", self._stream, call.block + 1)
        self._sink.frame(Open(call.block, index, "tool", "function", call.id, name))
        if call.held:
            self._sink.text(call.block, call.held, state.take_tokens(1))

    def _close(self, state: _Open) -> None:
        if state.kind is not None:
            self._sink.frame(Close(state.block))
            state.kind = None

    def _take_block(self) -> int:
        if not self._next_block and self._prompt_tokens is not None:
            # Only now: by itself it would be an append before the first token's
            self._sink.frame(Note("prompt", prompt_tokens=self._prompt_tokens))
        self._next_block += 1
        return self._next_block - 1


def _given(raw: msgspec.Raw | None) -> msgspec.Raw | None:
    return None if raw is None or bytes(raw) == _NULL else raw


def _arguments(raw: msgspec.Raw | None) -> str:
    given = _given(raw)
    if given is None:
        return ""
    text = bytes(given)
    return msgspec.json.decode(text, type=str) if text[:1] == b'"' else text.decode()


def _logprobs(raw: msgspec.Raw, kind: BlockKind) -> tuple[msgspec.Raw, int]:
    """The list of a chunk's tokens, or the older object whole, and how many tokens it is of."""
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    if "tokens" in fields:
        return raw, len(msgspec.json.decode(fields["tokens"], type=list[msgspec.Raw]))
    items = _given(fields.get("refusal" if kind == "refusal" else "content")) or msgspec.Raw(b"[]")
    return items, len(msgspec.json.decode(items, type=list[msgspec.Raw]))


def _joined(lists: list[msgspec.Raw]) -> tuple[msgspec.Raw, int]:
    """JSON lists as one, and its length."""
    items = [item for raw in lists for item in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    return msgspec.Raw(msgspec.json.encode(items)), len(items)


def put_item(sink: FrameSink, body: bytes) -> Usage:
    """An answer that is one JSON document, as a block whose text is the document. Raises msgspec.MsgspecError on what
    is none, before the sink hears anything."""
    told = _whole_decoder.decode(body).usage or _Usage()
    try:
        text = body.decode()
    except UnicodeDecodeError as wrong:  # in a part that the decoder passed over
        raise msgspec.DecodeError(str(wrong)) from wrong
    sink.frame(Open(0, 0, "item"))
    for at in range(0, len(text), ITEM_CHARS_MAX):
        sink.text(0, text[at : at + ITEM_CHARS_MAX], 0)
    sink.frame(Close(0))
    sink.frame(ChoiceEnd(0, "stop"))
    # Of a rerank some servers tell the total alone, and nothing but the prompt is in it
    return Usage(prompt=told.prompt_tokens or told.total_tokens or 0)


def upstream_error(raw: bytes | msgspec.Raw, status: int) -> ErrorInfo:
    """An error object of a server, whatever its shape. ``status``: of the response, or 502 within a stream."""
    if not 400 <= status < 600:  # no answer that we asked for, and none to give on
        status = 502
    message, code = bytes(raw).decode("utf-8", "replace")[:500], None
    try:
        parsed: Any = msgspec.json.decode(raw)
    except msgspec.MsgspecError:
        parsed = None
    if isinstance(parsed, dict):
        parsed = parsed.get("error") or parsed.get("detail") or parsed
    if isinstance(parsed, str):
        message = parsed[:2000]
    elif isinstance(parsed, dict):
        message = str(parsed.get("message") or message)[:2000]
        code = parsed.get("code")
    if message.startswith(_ENGINE_DEAD):
        return ErrorInfo.of(EngineLost(message))
    if isinstance(code, int) and status == 502 and 400 <= code < 600:  # within a stream it is all there is
        status = code
    refused = 400 <= status < 500
    if not isinstance(code, str) or code.isdecimal():  # vLLM repeats the status there
        code = "invalid_request" if refused else "engine_error"
    type_ = "invalid_request_error" if refused else "server_error"
    return ErrorInfo(code, message, type_, status, retriable=status >= 500 or status == 429)
