"""Collects frames into one whole response, or into one chunk equal to all chunks so far."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from stream_fabric.stream.frames import (
    ChoiceEnd,
    Delta,
    End,
    Note,
    Open,
    Usage,
    coalesce,
    coalesce_from,
    decode,
    is_text,
    json_string,
)
from stream_fabric.stream.ids import derived_id
from stream_gw.dialects import openai_chat, openai_completions
from stream_gw.dialects.anthropic.encoder import MessagesEncoder
from stream_gw.dialects.base import check_json, finish_of, tool_call_parts, usage_json
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.whole import DIALECTS as RESPONSES
from stream_gw.dialects.responses.whole import encoder_of
from stream_gw.dialects.ui.encoder import UiEncoder

_ENCODERS = {"chat": openai_chat.ChatEncoder, "completions": openai_completions.CompletionsEncoder}


class _Choice:
    """One choice. Texts stay JSON-escaped without their quotes, so a token costs no parsing."""

    __slots__ = ("finish", "logprobs", "measured", "measured_chars", "texts", "tools")

    def __init__(self) -> None:
        self.texts: dict[str, bytearray] = {}
        self.tools: list[tuple[str, str, dict[str, Any], bytearray]] = []
        self.logprobs: dict[str, list[bytes]] = {}
        self.finish: ChoiceEnd | None = None
        self.measured = self.measured_chars = 0

    def joined(self, kind: str) -> Raw | None:
        """Text of all blocks of this kind, as a JSON string; None: there is no text."""
        text = self.texts.get(kind)
        return _raw_string(text) if text else None  # an opened but empty block counts as absent

    def add_logprobs(self, name: str, values: bytes) -> None:
        """Append the elements of a JSON array to the list ``name``."""
        inner = values.strip()[1:-1]
        pieces = self.logprobs.setdefault(name, [])
        if inner.strip():
            pieces.append(inner)

    def chars(self, text: bytearray) -> int:
        """Number of characters in ``text``, which only grows."""
        self.measured_chars += len(msgspec.json.decode(_raw_string(text[self.measured :]), type=str))
        self.measured = len(text)
        return self.measured_chars


class Accumulator:
    """Collects a response of OpenAI's API; ``chat`` None: as the engine was asked. Memory is linear in the output.

    Raises KeyError for text of a block that was never opened.
    """

    def __init__(self, facts: StreamFacts, *, chat: bool | None = None) -> None:
        self.facts = facts
        self._chat = facts.kind == "chat" if chat is None else chat
        self._choices = [_Choice() for _ in range(facts.n)]
        self._buffers: dict[bytes, bytearray | None] = {}
        """Text buffer by the block's number in digits; None: the dialect cannot express the block."""
        self._blocks: dict[int, tuple[_Choice, str]] = {}
        self._usage = Usage()
        self._inputs: list[dict[str, Any]] = []
        """Results of inputs, each with the characters of text before it."""
        self.begun = False
        """True once a frame has produced a chunk."""

    def add(self, line: bytes) -> None:
        """Add the next frame."""
        if is_text(line):
            number, _, text = line.partition(b'"')
            buffer = self._buffers[number.partition(b":")[0]]
            if buffer is not None:
                buffer += text[:-1]
            return
        frame = decode(line)
        match frame:
            case Open():
                self.begun = True
                self._open_block(frame)
            case Delta():
                self._add_delta(frame)
            case ChoiceEnd():
                self.begun = True
                self._choice(frame.choice).finish = frame
            case Note("prompt"):
                self.begun = True
            case Note("input", body=body) if body is not None and self.facts.n == 1 and self._choice(0).finish is None:
                self.begun = True
                choice = self._choice(0)
                at = choice.chars(choice.texts.get("text", bytearray()))
                self._inputs.append(msgspec.json.decode(body, type=dict[str, Any]) | {"at": at})
            case End(_, usage):
                self._usage = usage or self._usage

    @property
    def has_all_reasons(self) -> bool:
        """True if every choice has its finish reason."""
        return all(choice.finish is not None for choice in self._choices)

    def _add_delta(self, frame: Delta) -> None:
        buffer = self._buffers[b"%d" % frame.block]
        if buffer is not None:
            choice, kind = self._blocks[frame.block]
            if frame.logprobs is not None:
                self._add_logprobs(choice, kind, buffer, bytes(frame.logprobs))
            buffer += json_string(frame.text)[1:-1]

    def _choice(self, number: int) -> _Choice:
        while len(self._choices) <= number:
            self._choices.append(_Choice())
        return self._choices[number]

    def _open_block(self, frame: Open) -> None:
        choice = self._choice(frame.choice)
        buffer: bytearray | None = None
        if frame.kind == "text" or (self._chat and frame.kind in ("reasoning", "refusal")):
            buffer = choice.texts.setdefault(frame.kind, bytearray())
        elif self._chat and frame.kind == "tool":
            parts = tool_call_parts(frame, self.facts)
            if parts is not None:
                buffer = bytearray()
                choice.tools.append((*parts, buffer))
        self._buffers[b"%d" % frame.block] = buffer
        self._blocks[frame.block] = choice, frame.kind

    def _add_logprobs(self, choice: _Choice, kind: str, text: bytearray, logprobs: bytes) -> None:
        if self._chat:
            choice.add_logprobs("refusal" if kind == "refusal" else "content", logprobs)
            return
        legacy = openai_completions.legacy_logprobs(msgspec.json.decode(logprobs), choice.chars(text))
        for name, values in legacy.items():
            if isinstance(values, list):
                choice.add_logprobs(name, msgspec.json.encode(values))

    # --- out -----------------------------------------------------------------------------------------------

    def result(self) -> bytes:
        """Return the body of a response that is not streamed, as JSON."""
        chat = self._chat
        return self._response_body(
            "chat.completion" if chat else "text_completion",
            [(self._message_choice if chat else self._completion_choice)(i, c) for i, c in enumerate(self._choices)],
            {"usage": usage_json(self._usage)},
        )

    def snapshot(self) -> bytes:
        """Return one streaming chunk equal to all chunks so far."""
        chat = self._chat
        return self._response_body(
            "chat.completion.chunk" if chat else "text_completion",
            [(self._delta_choice if chat else self._completion_choice)(i, c) for i, c in enumerate(self._choices)],
            {"usage": None} if self.facts.include_usage else {},
        )

    def _response_body(self, object_name: str, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        return msgspec.json.encode(
            {
                "id": derived_id(_ENCODERS["chat" if self._chat else "completions"].id_prefix, self.facts.stream),
                "object": object_name,
                "created": self.facts.created,
                "model": self.facts.model,
                "choices": choices,
                **({"inputs": self._inputs} if self._inputs else {}),
                **extra,
            }
        )

    def _message_fields(self, choice: _Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": "assistant", "content": choice.joined("text")}
        reasoning = choice.joined("reasoning")
        if reasoning is not None:
            fields["reasoning_content"] = fields["reasoning"] = reasoning
        fields["refusal"] = choice.joined("refusal")
        return fields

    def _tool_calls(self, choice: _Choice) -> list[dict[str, Any]]:
        return [
            {**call, kind: {**call[kind], field: _raw_string(arguments)}}
            for kind, field, call, arguments in choice.tools
        ]

    def _message_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Choice of a chat response that is not streamed."""
        message = self._message_fields(choice)
        if choice.tools:
            message["tool_calls"] = self._tool_calls(choice)
        elif message["content"] is None and message["refusal"] is None:
            message["content"] = ""
        return _add_finish_reason({"index": index, "message": message, "logprobs": _chat_logprobs(choice)}, choice)

    def _delta_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Choice of a chat chunk."""
        delta = {name: value for name, value in self._message_fields(choice).items() if value is not None}
        delta.setdefault("content", "")
        if choice.tools:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(self._tool_calls(choice))]
        return _add_finish_reason({"index": index, "delta": delta, "logprobs": _chat_logprobs(choice)}, choice)

    def _completion_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Choice of a text completion."""
        legacy: dict[str, Raw | None] | None = None
        if choice.logprobs:
            legacy = dict.fromkeys(openai_completions.LEGACY_LOGPROBS)
            legacy.update({name: _raw_array(pieces) for name, pieces in choice.logprobs.items()})
        return _add_finish_reason({"index": index, "text": choice.joined("text") or "", "logprobs": legacy}, choice)


def _raw_string(inner: bytearray) -> Raw:
    """Put quotes around text that is already JSON-escaped."""
    return Raw(b'"' + inner + b'"')


def _raw_array(pieces: list[bytes]) -> Raw:
    return Raw(b"[%b]" % b",".join(pieces))


def _chat_logprobs(choice: _Choice) -> dict[str, Raw | None] | None:
    found = {name: _raw_array(pieces) for name, pieces in choice.logprobs.items()}
    return {"content": found.get("content"), "refusal": found.get("refusal")} if found else None


def _add_finish_reason(document: dict[str, Any], choice: _Choice) -> dict[str, Any]:
    finish = choice.finish
    reason, detail = (None, None) if finish is None else finish_of(finish)
    document["finish_reason"] = reason
    if detail is not None:
        document["stop_reason"] = detail
    if finish is not None and finish.check is not None:
        document["structured_output"] = check_json(finish.check)
    return document


def snapshot(facts: StreamFacts, lines: list[bytes], dialect: str | None = None) -> list[bytes]:
    """Return as few chunks as are equal to all chunks of ``lines``; empty when these produce none.

    One in OpenAI's older dialects. In the others, one event for each that begins or ends something, and one a text.
    """
    chosen = dialect or facts.own_dialect
    if chosen in ("anthropic.messages", "vercel.ui"):
        simple = MessagesEncoder(facts) if chosen == "anthropic.messages" else UiEncoder(facts)
        return simple.chunks(coalesce(lines))
    if chosen in RESPONSES:
        encoder = encoder_of(facts, chosen)
        return [chunk for seq, line in coalesce_from(1, lines) for chunk in encoder.chunks([line], seq)]
    accumulator = Accumulator(facts, chat=None if dialect is None else dialect == "openai.chat")
    for line in lines:
        accumulator.add(line)
    return [accumulator.snapshot()] if accumulator.begun else []
