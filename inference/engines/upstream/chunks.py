"""Translates OpenAI's streaming chunks into frames. Sans I/O; tolerates the deviations of servers in the field."""

from __future__ import annotations

from typing import Protocol

import msgspec

from inference.engines.upstream.answers import upstream_error
from inference.engines.upstream.chunk_fields import (
    Chunk,
    ChunkChoice,
    ChunkFunction,
    ChunkMetrics,
    ChunkToolCall,
    ChunkUsage,
)
from inference.engines.upstream.chunk_template import ChunkTemplate
from inference.engines.upstream.logprobs import join_logprobs, read_logprobs, split_logprobs
from inference.engines.upstream.sse import EventParser
from stream_fabric.errors import StreamTooLarge
from stream_fabric.limits import STREAM_BYTES_MAX
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import BlockKind, ChoiceEnd, Close, Delta, ErrorInfo, Note, Open, Usage
from stream_fabric.stream.ids import StreamId, derived_id

_decoder = msgspec.json.Decoder(Chunk)
_metrics_decoder = msgspec.json.Decoder(ChunkMetrics)
_OWN_MS_MAX = 86_400_000
_NULL = b"null"
_ABORTED = ("abort", "error")
"""Finish reasons of a choice that the engine itself gave up: vLLM's and SGLang's, when they pause, sleep or stop."""
_TRIES_MAX = 8
"""Chunks of one block from which a template is made: a server whose chunks never equal each other costs no more."""


class _Call:
    """A tool call. Its block opens when the name is known; arguments before that are held."""

    __slots__ = ("block", "held", "id")

    def __init__(self, id: str | None) -> None:
        self.id = id
        self.block = -1
        self.held: list[str] = []


class _ChoiceState:
    """State of one choice: its open text block, and its tool calls by the server's index."""

    __slots__ = ("block", "by_index", "calls", "counted", "finished", "held", "ids", "kind", "last", "made")

    def __init__(self) -> None:
        self.kind: BlockKind | None = None
        self.block = -1
        self.by_index: dict[int, _Call] = {}
        self.calls: list[_Call] = []
        self.ids: set[str] = set()
        """Ids of the calls whose blocks are open or closed."""
        self.last = -1
        self.finished = False
        self.held: list[msgspec.Raw] = []
        """Logprobs of tokens without text (part of a character); they go out with the next token that has text."""
        self.made: int | None = None
        """Tokens so far, when the server sends the count with each chunk."""
        self.counted = 0
        """The part of ``made`` that has been counted with a text."""

    def take_tokens(self, otherwise: int) -> int:
        """Return the number of tokens since the last text. ``otherwise``: for a server that sends no counts."""
        if self.made is None:
            return otherwise
        tokens, self.counted = max(self.made - self.counted, 0), self.made
        return tokens


class ChunkReader:
    """Reads the chunks of one response: ``receive`` puts frames into the sink, ``end`` checks that nothing is missing.

    ``counts``: each chunk has the token counts of the prompt and of its choice (``continuous_usage_stats`` of vLLM).
    ``prompts``: each has the same number of choices, in the order of their indices.
    """

    def __init__(
        self, stream: StreamId, sink: FrameSink, choices: int, *, counts: bool = False, prompts: int = 1
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._choices = [_ChoiceState() for _ in range(choices)]
        self._next_block = 0
        self._usage: Usage | None = None
        self._counts = counts
        self._prompt_tokens: int | None = None
        self._choices_each = choices // prompts if prompts > 1 else 0
        """Choices of each prompt; 0: there is one prompt."""
        self._tokens_of: dict[int, int] = {}
        """Tokens of each prompt that is known, if there are several."""
        self._done = False
        self._template: ChunkTemplate | None = None
        """Form of the chunks of the open text block."""
        self._tries_left = _TRIES_MAX
        self._held_bytes = 0
        self._thought = 0
        """Tokens of reasoning, for a server that does not count them."""
        self.error: ErrorInfo | None = None

    def receive(self, data: bytes) -> None:
        """Take the data of one event, or a whole answer. Raises MsgspecError or UnicodeDecodeError for invalid data."""
        if self._template is not None and (found := self._template.read(data)) is not None:
            text, made = found
            (state,) = self._choices
            if made is not None:
                state.made = made
            self._send_text(state, text)
            return
        data = data.strip()
        if not data:  # a keep-alive of some servers
            return
        if data == b"[DONE]":
            self._done = True
            return
        if not data.isascii():  # the decoder leaves out the parts that are passed on as they are
            data.decode()
        chunk = _decoder.decode(data)
        error = _not_null(chunk.error)
        if error is not None:
            self.error = upstream_error(error, 502)
            return
        usage = chunk.usage
        if self._counts and chunk.choices:
            if usage is not None:
                self._take_counts(usage, chunk.choices)
            usage = None
        for choice in chunk.choices or ():
            # Output after the end of a choice is ignored
            if 0 <= choice.index < len(self._choices) and not self._choices[choice.index].finished:
                self._receive_choice(self._choices[choice.index], choice)
        if usage is not None:
            self._take_usage(usage)
        if chunk.metrics is not None:
            self._take_metrics(chunk.metrics)
        if self._tries_left and self._choices[0].kind is not None:
            self._learn_template(data, chunk)

    def _learn_template(self, data: bytes, chunk: Chunk) -> None:
        """Keep the form of a chunk that is a text and nothing else, of an answer with one choice."""
        usage, texts = chunk.usage, [_only_text(choice) for choice in chunk.choices or ()]
        if len(self._choices) != 1 or len(texts) != 1 or not texts[0]:
            return
        if chunk.metrics is not None or (usage is not None) != self._counts:
            return
        self._tries_left -= 1
        made = usage.completion_tokens if usage is not None else None
        if made is not None or not self._counts:
            self._template = ChunkTemplate.of(data, texts[0], made) or self._template

    def end(self) -> ErrorInfo | None:
        """Return the error of a response whose bytes have ended, or None when the response is complete."""
        if self.error is not None:
            return self.error
        return None if all(choice.finished for choice in self._choices) else _truncated()

    @property
    def done(self) -> bool:
        """True when no more output follows: the server has sent its end mark or an error."""
        return self._done or self.error is not None

    @property
    def usage(self) -> Usage | None:
        return self._usage

    def _take_counts(self, usage: ChunkUsage, choices: list[ChunkChoice]) -> None:
        """Take a chunk's counts of prompt tokens and of each choice's tokens."""
        if self._choices_each:
            self._add_prompts(usage, choices)
        elif self._prompt_tokens is None and usage.prompt_tokens:
            self._prompt_tokens = usage.prompt_tokens
            self._sink.usage(usage.prompt_tokens)
        for choice in choices:
            if 0 <= choice.index < len(self._choices):
                self._choices[choice.index].made = usage.completion_tokens

    def _add_prompts(self, usage: ChunkUsage, choices: list[ChunkChoice]) -> None:
        """Report the sum of the prompts known so far: a chunk counts the prompt of its own choice."""
        for choice in choices:
            prompt = choice.index // self._choices_each
            if usage.prompt_tokens and prompt not in self._tokens_of:
                self._tokens_of[prompt] = usage.prompt_tokens
                total = sum(self._tokens_of.values())
                self._sink.usage(total)
                if len(self._tokens_of) * self._choices_each == len(self._choices):
                    self._sink.frame(Note("prompt", prompt_tokens=total))  # for the next producer, if this one dies

    def _take_usage(self, usage: ChunkUsage) -> None:
        """Take the usage of the whole response."""
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        details, thought = usage.completion_tokens_details, min(self._thought, usage.completion_tokens or 0)
        reasoning = thought if details is None or details.reasoning_tokens is None else details.reasoning_tokens
        prompt = usage.prompt_tokens or 0
        if self._usage is None and (self._prompt_tokens is None or cached or reasoning):
            self._sink.usage(prompt, cached, 0, reasoning)
        self._usage = Usage(prompt, cached, 0, usage.completion_tokens or 0, reasoning)

    def _take_metrics(self, raw: msgspec.Raw) -> None:
        """Pass on vLLM's own queue and prefill times, if the response has one choice."""
        try:
            times = _metrics_decoder.decode(raw)
        except msgspec.MsgspecError:  # not vLLM's format
            return
        queue_ms, prefill_ms = times.queue_time_ms, times.time_to_first_token_ms
        if queue_ms is None or prefill_ms is None or len(self._choices) != 1:
            return
        if 0 <= queue_ms <= _OWN_MS_MAX and 0 <= prefill_ms <= _OWN_MS_MAX:
            self._sink.computed(queue_ms / 1000, prefill_ms / 1000)

    def _receive_choice(self, state: _ChoiceState, choice: ChunkChoice) -> None:
        delta = choice.delta or choice.message
        if choice.text is not None:
            self._receive_text(state, choice.index, "text", choice.text, choice.logprobs)
        elif delta is not None:
            thought = delta.reasoning_content or delta.reasoning
            if thought:
                self._receive_text(state, choice.index, "reasoning", thought, None)
            if delta.content or not (thought or delta.refusal or delta.tool_calls):
                self._receive_text(state, choice.index, "text", delta.content or "", choice.logprobs)
            if delta.refusal:
                self._receive_text(state, choice.index, "refusal", delta.refusal, choice.logprobs)
            for part in delta.tool_calls or ():
                self._receive_tool_call(state, choice.index, part)
        if choice.finish_reason in _ABORTED:
            self.error = _truncated()
        elif choice.finish_reason:
            state.finished = True
            if state.held and not state.calls:  # no text has come after them
                self._put_text(state, choice.index, state.kind or "text", "", *join_logprobs(state.held))
            self._close_text_block(state)
            for call in state.calls:
                if call.block < 0:
                    self._open_call(state, choice.index, call, "")
                self._sink.frame(Close(call.block))
            self._sink.frame(ChoiceEnd(choice.index, choice.finish_reason, _not_null(choice.stop_reason)))

    def _receive_text(
        self, state: _ChoiceState, index: int, kind: BlockKind, text: str, logprobs: msgspec.Raw | None
    ) -> None:
        """Put a text with its logprobs into the sink; keep logprobs of tokens without text for the next text.

        The log then never ends within a character, and what continues its text repeats no token.
        """
        given = _not_null(logprobs)
        raw, tokens = (None, 1) if given is None else read_logprobs(given, kind)
        if not text:  # part of a character or a special token: only its logprobs count
            if raw is None or not tokens or state.kind == "reasoning" or state.calls:
                return
            self._hold(len(bytes(raw)))
            state.held.append(raw)
            self._template = None  # the next text has these logprobs, so it is no ordinary chunk
            return
        if state.held:
            raw, tokens = join_logprobs(state.held if raw is None else [*state.held, raw])
        self._put_text(state, index, kind, text, raw, tokens)

    def _put_text(
        self, state: _ChoiceState, index: int, kind: BlockKind, text: str, logprobs: msgspec.Raw | None, tokens: int
    ) -> None:
        """Put a text into the sink, after opening a block of its kind if another kind is open."""
        state.held.clear()
        if state.kind != kind:
            self._close_text_block(state)
            state.kind, state.block = kind, self._new_block()
            self._tries_left = _TRIES_MAX
            self._sink.frame(Open(state.block, index, kind, "raw" if kind == "reasoning" else None))
        if logprobs is None:
            self._send_text(state, text)
            return
        left = state.take_tokens(max(1, tokens))
        *before, (text, logprobs, _) = split_logprobs(text, logprobs, tokens)
        for own, part, count in before:
            self._sink.frame(Delta(state.block, own, min(count, left), part))
            left -= min(count, left)
        self._sink.frame(Delta(state.block, text, left, logprobs))

    def _send_text(self, state: _ChoiceState, text: str) -> None:
        tokens = state.take_tokens(1)
        if state.kind == "reasoning":
            self._thought += tokens
        self._sink.text(state.block, text, tokens)

    def _receive_tool_call(self, state: _ChoiceState, index: int, part: ChunkToolCall) -> None:
        """Put a part of a tool call into the sink. Arguments are held until the call has a name."""
        function = part.function or ChunkFunction()
        number = part.index
        if number is None:  # some servers leave it out: an id begins a call, a part without id continues the last one
            number = state.last + 1 if part.id and function.name else max(state.last, 0)
        state.last = number
        call = state.by_index.get(number)
        if call is None or (part.id and call.id and part.id != call.id):  # some servers number every call 0
            call = state.by_index[number] = _Call(part.id)
            state.calls.append(call)
        call.id = call.id or part.id
        arguments = _arguments_text(function.arguments)
        if call.block < 0 and function.name:
            self._open_call(state, index, call, function.name)
        if call.block < 0:
            if arguments:
                self._hold(len(arguments))
                call.held.append(arguments)
        elif arguments:
            self._sink.text(call.block, arguments, state.take_tokens(1))

    def _hold(self, size: int) -> None:
        """Count what waits for a text or for the name of a call, which is in no frame yet: it counts as output."""
        self._held_bytes += size
        if self._held_bytes > STREAM_BYTES_MAX:
            message = f"the output exceeds {STREAM_BYTES_MAX >> 20} MiB, the maximum size of a stream"
            self.error = ErrorInfo.of(StreamTooLarge(message))

    def _open_call(self, state: _ChoiceState, index: int, call: _Call, name: str) -> None:
        self._close_text_block(state)
        call.block = self._new_block()
        if not call.id or call.id in state.ids:  # some servers repeat an id within an answer; clients tell calls by it
            call.id = derived_id("call_", self._stream, call.block + 1)
        state.ids.add(call.id)
        self._sink.frame(Open(call.block, index, "tool", "function", call.id, name))
        if call.held:
            self._sink.text(call.block, "".join(call.held), state.take_tokens(1))

    def _close_text_block(self, state: _ChoiceState) -> None:
        if state.kind is not None:
            self._sink.frame(Close(state.block))
            state.kind = self._template = None

    def _new_block(self) -> int:
        """Return the number of a new block. The first one is preceded by the prompt's note."""
        if not self._next_block and self._prompt_tokens is not None:
            # With the first block: on its own it would need an append before the first token
            self._sink.frame(Note("prompt", prompt_tokens=self._prompt_tokens))
        self._next_block += 1
        return self._next_block - 1


class Abortable(Protocol):
    """A request whose output nobody wants any more, once it is ``aborted``."""

    aborted: bool


class BodyReader:
    """Gives the events of a streamed body to a ``ChunkReader``, until the request is aborted."""

    def __init__(self, request: Abortable, reader: ChunkReader, parser: EventParser) -> None:
        self._request = request
        self._reader = reader
        self._parser = parser

    def receive(self, piece: bytes) -> bool:
        """Take a piece of any size. True: no more is needed; some servers keep the response open after the end.

        Raises msgspec.MsgspecError for invalid data, EventTooLarge.
        """
        for event in self._parser.receive(piece):
            if self._request.aborted:  # by what the sink has just heard
                break
            self._reader.receive(event)
        return self._reader.done

    def end(self) -> None:
        """Take the end of the body. Raises msgspec.MsgspecError: it was cut within an event."""
        for event in self._parser.end():
            self._reader.receive(event)


def _truncated() -> ErrorInfo:
    message = "the model server ended its answer before it was complete"
    return ErrorInfo("upstream_truncated", message, retriable=True, http_status=502)


def _only_text(choice: ChunkChoice) -> str | None:
    """Return the text of a choice that has no more than a text."""
    delta = choice.delta
    if choice.index or choice.finish_reason or choice.message is not None or _not_null(choice.logprobs) is not None:
        return None
    if delta is None:
        return choice.text
    if choice.text is not None or delta.refusal or delta.tool_calls:
        return None
    texts = [text for text in (delta.content, delta.reasoning, delta.reasoning_content) if text]
    return texts[0] if len(texts) == 1 else None


def _not_null(raw: msgspec.Raw | None) -> msgspec.Raw | None:
    return None if raw is None or bytes(raw) == _NULL else raw


def _arguments_text(raw: msgspec.Raw | None) -> str:
    given = _not_null(raw)
    if given is None:
        return ""
    text = bytes(given)
    return msgspec.json.decode(text, type=str) if text[:1] == b'"' else text.decode()
