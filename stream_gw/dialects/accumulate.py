"""Frames gathered into a whole answer, or into the one chunk that stands for everything so far."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from stream_fabric.frames import ChoiceEnd, Delta, End, Note, Open, Usage, decode, is_text, json_string
from stream_fabric.ids import derived_id
from stream_gw.dialects import openai_chat, openai_completions
from stream_gw.dialects.base import tool_words, usage_json
from stream_gw.dialects.facts import StreamFacts

_ENCODERS = {"chat": openai_chat.ChatEncoder, "completions": openai_completions.CompletionsEncoder}


class _Choice:
    """Texts are kept as they came, JSON without its quotes, so nothing is parsed or built a token."""

    __slots__ = ("finish", "logprobs", "measured", "measured_chars", "texts", "tools")

    def __init__(self) -> None:
        self.texts: dict[str, bytearray] = {}
        self.tools: list[tuple[str, str, dict[str, Any], bytearray]] = []
        self.logprobs: dict[str, list[bytes]] = {}
        self.finish: ChoiceEnd | None = None
        self.measured = self.measured_chars = 0

    def joined(self, kind: str) -> Raw | None:
        text = self.texts.get(kind)
        return _quoted(text) if text else None  # a block that was opened and left empty has said nothing

    def add_logprobs(self, name: str, values: bytes) -> None:
        inner = values.strip()[1:-1]
        pieces = self.logprobs.setdefault(name, [])
        if inner.strip():
            pieces.append(inner)

    def chars(self, text: bytearray) -> int:
        """How many characters ``text``, which only grows, has."""
        self.measured_chars += len(msgspec.json.decode(_quoted(text[self.measured :]), type=str))
        self.measured = len(text)
        return self.measured_chars


class Accumulator:
    """Memory is linear in the output. Raises KeyError for text of a block that was never opened."""

    def __init__(self, facts: StreamFacts) -> None:
        self.facts = facts
        self._choices = [_Choice() for _ in range(facts.n)]
        self._buffers: dict[bytes, bytearray | None] = {}
        """By a block's number in digits, where its text goes; None: the dialect has no words for it."""
        self._blocks: dict[int, tuple[_Choice, str]] = {}
        self._usage = Usage()
        self.begun = False
        """Whether something has been said: what comes before the first chunk does not count."""

    def add(self, line: bytes) -> None:
        """Take the next frame."""
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
                self._open(frame)
            case Delta():
                self._add_delta(frame)
            case ChoiceEnd():
                self.begun = True
                self._choice(frame.choice).finish = frame
            case Note("prompt"):
                self.begun = True
            case End(_, usage):
                self._usage = usage or self._usage

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

    def _open(self, frame: Open) -> None:
        choice = self._choice(frame.choice)
        buffer: bytearray | None = None
        if frame.kind == "text" or (self.facts.kind == "chat" and frame.kind in ("reasoning", "refusal")):
            buffer = choice.texts.setdefault(frame.kind, bytearray())
        elif self.facts.kind == "chat" and frame.kind == "tool":
            words = tool_words(frame, self.facts)
            if words is not None:
                buffer = bytearray()
                choice.tools.append((*words, buffer))
        self._buffers[b"%d" % frame.block] = buffer
        self._blocks[frame.block] = choice, frame.kind

    def _add_logprobs(self, choice: _Choice, kind: str, text: bytearray, given: bytes) -> None:
        if self.facts.kind == "chat":
            choice.add_logprobs("refusal" if kind == "refusal" else "content", given)
            return
        legacy = openai_completions.legacy_logprobs(msgspec.json.decode(given), choice.chars(text))
        for name, values in legacy.items():
            if isinstance(values, list):
                choice.add_logprobs(name, msgspec.json.encode(values))

    # --- out -----------------------------------------------------------------------------------------------

    def result(self) -> bytes:
        """The answer that is not streamed, as JSON."""
        chat = self.facts.kind == "chat"
        return self._spell(
            "chat.completion" if chat else "text_completion",
            [(self._message if chat else self._completion)(i, c) for i, c in enumerate(self._choices)],
            {"usage": usage_json(self._usage)},
        )

    def snapshot(self) -> bytes:
        """One streaming chunk equal to all that was streamed so far."""
        chat = self.facts.kind == "chat"
        return self._spell(
            "chat.completion.chunk" if chat else "text_completion",
            [(self._delta if chat else self._completion)(i, c) for i, c in enumerate(self._choices)],
            {"usage": None} if self.facts.include_usage else {},
        )

    def _spell(self, object_name: str, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        return msgspec.json.encode(
            {
                "id": derived_id(_ENCODERS[self.facts.kind].id_prefix, self.facts.stream),
                "object": object_name,
                "created": self.facts.created,
                "model": self.facts.model,
                "choices": choices,
                **extra,
            }
        )

    def _words(self, choice: _Choice) -> dict[str, Any]:
        words: dict[str, Any] = {"role": "assistant", "content": choice.joined("text")}
        reasoning = choice.joined("reasoning")
        if reasoning is not None:
            words["reasoning_content"] = words["reasoning"] = reasoning
        words["refusal"] = choice.joined("refusal")
        return words

    def _tool_calls(self, choice: _Choice) -> list[dict[str, Any]]:
        return [
            {**call, kind: {**call[kind], field: _quoted(arguments)}} for kind, field, call, arguments in choice.tools
        ]

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = self._words(choice)
        if choice.tools:
            message["tool_calls"] = self._tool_calls(choice)
        elif message["content"] is None and message["refusal"] is None:
            message["content"] = ""
        return _ended({"index": index, "message": message, "logprobs": _chat_logprobs(choice)}, choice)

    def _delta(self, index: int, choice: _Choice) -> dict[str, Any]:
        delta = {name: value for name, value in self._words(choice).items() if value is not None}
        delta.setdefault("content", "")
        if choice.tools:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(self._tool_calls(choice))]
        return _ended({"index": index, "delta": delta, "logprobs": _chat_logprobs(choice)}, choice)

    def _completion(self, index: int, choice: _Choice) -> dict[str, Any]:
        legacy: dict[str, Raw | None] | None = None
        if choice.logprobs:
            legacy = dict.fromkeys(openai_completions.LEGACY_LOGPROBS)
            legacy.update({name: _listed(pieces) for name, pieces in choice.logprobs.items()})
        return _ended({"index": index, "text": choice.joined("text") or "", "logprobs": legacy}, choice)


def _quoted(inner: bytearray) -> Raw:
    return Raw(b'"' + inner + b'"')


def _listed(pieces: list[bytes]) -> Raw:
    return Raw(b"[%b]" % b",".join(pieces))


def _chat_logprobs(choice: _Choice) -> dict[str, Raw | None] | None:
    found = {name: _listed(pieces) for name, pieces in choice.logprobs.items()}
    return {"content": found.get("content"), "refusal": found.get("refusal")} if found else None


def _ended(spelled: dict[str, Any], choice: _Choice) -> dict[str, Any]:
    finish = choice.finish
    spelled["finish_reason"] = None if finish is None else finish.finish_reason
    if finish is not None and finish.detail is not None:
        spelled["stop_reason"] = finish.detail
    return spelled


def snapshot(facts: StreamFacts, lines: list[bytes]) -> list[bytes]:
    """The chunk that stands for the frames of ``lines``, none when they say nothing yet."""
    accumulator = Accumulator(facts)
    for line in lines:
        accumulator.add(line)
    return [accumulator.snapshot()] if accumulator.begun else []
