"""Frames gathered into a whole answer, or into the one chunk that stands for everything so far."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.frames import BlockKind, ChoiceEnd, Delta, End, Open, Usage, decode
from stream_gw.dialects.base import usage_json
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.openai_completions import legacy_logprobs


class _Choice:
    def __init__(self) -> None:
        self.text: dict[str, list[str]] = {}
        self.tools: list[tuple[Open, list[str]]] = []
        self.logprobs: list[Any] = []
        self.refusal_logprobs: list[Any] = []
        self.legacy: dict[str, list[Any]] = {}
        self.finish_reason: str | None = None
        self.stop_reason: Any = None

    def joined(self, kind: str) -> str | None:
        return "".join(self.text[kind]) if kind in self.text else None


class Accumulator:
    """Memory is linear in the output, nothing else."""

    def __init__(self, facts: StreamFacts) -> None:
        self.facts = facts
        self._choices = [_Choice() for _ in range(facts.n)]
        self._blocks: dict[int, tuple[_Choice, BlockKind, list[str]]] = {}
        self._usage = Usage()

    def add(self, line: bytes) -> None:
        """Take the next frame."""
        frame = decode(line)
        match frame:
            case Open(number, choice_number, kind):
                choice = self._choices[choice_number]
                if kind == "tool":
                    parts: list[str] = []
                    choice.tools.append((frame, parts))
                else:
                    parts = choice.text.setdefault(kind, [])
                self._blocks[number] = (choice, kind, parts)
            case Delta(number, text, _, logprobs):
                choice, kind, parts = self._blocks[number]
                parts.append(text)
                if logprobs is not None:
                    self._add_logprobs(choice, kind, msgspec.json.decode(logprobs))
            case ChoiceEnd(choice_number, finish_reason, detail):
                choice = self._choices[choice_number]
                choice.finish_reason = finish_reason
                choice.stop_reason = None if detail is None else msgspec.json.decode(detail)
            case End(_, usage):
                self._usage = usage or self._usage

    def _add_logprobs(self, choice: _Choice, kind: str, given: Any) -> None:
        if self.facts.kind == "completions":
            for name, values in legacy_logprobs(given).items():
                if isinstance(values, list):
                    choice.legacy.setdefault(name, []).extend(values)
        else:
            (choice.refusal_logprobs if kind == "refusal" else choice.logprobs).extend(given)

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
        prefix = "chatcmpl-" if self.facts.kind == "chat" else "cmpl-"
        return msgspec.json.encode(
            {
                "id": prefix + self.facts.stream[5:],
                "object": object_name,
                "created": self.facts.created,
                "model": self.facts.model,
                "choices": choices,
                **extra,
            }
        )

    def _tool_calls(self, choice: _Choice) -> list[dict[str, Any]]:
        calls = []
        for frame, parts in choice.tools:
            kind, field = ("custom", "input") if frame.form == "custom" else ("function", "arguments")
            calls.append({"id": frame.id, "type": kind, kind: {"name": frame.name, field: "".join(parts)}})
        return calls

    def _words(self, choice: _Choice) -> dict[str, Any]:
        words: dict[str, Any] = {"role": "assistant", "content": choice.joined("text")}
        refusal, reasoning = choice.joined("refusal"), choice.joined("reasoning")
        if reasoning is not None:
            words["reasoning_content"] = words["reasoning"] = reasoning
        words["refusal"] = refusal
        return words

    def _logprobs(self, choice: _Choice) -> dict[str, Any] | None:
        if not choice.logprobs and not choice.refusal_logprobs:
            return None
        return {"content": choice.logprobs or None, "refusal": choice.refusal_logprobs or None}

    def _message(self, index: int, choice: _Choice) -> dict[str, Any]:
        message = self._words(choice)
        if choice.tools:
            message["tool_calls"] = self._tool_calls(choice)
        elif message["content"] is None and message["refusal"] is None:
            message["content"] = ""
        return self._ended({"index": index, "message": message, "logprobs": self._logprobs(choice)}, choice)

    def _delta(self, index: int, choice: _Choice) -> dict[str, Any]:
        delta = {name: value for name, value in self._words(choice).items() if value is not None}
        delta.setdefault("content", "")
        if choice.tools:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(self._tool_calls(choice))]
        return self._ended({"index": index, "delta": delta, "logprobs": self._logprobs(choice)}, choice)

    def _completion(self, index: int, choice: _Choice) -> dict[str, Any]:
        return self._ended(
            {"index": index, "text": choice.joined("text") or "", "logprobs": choice.legacy or None}, choice
        )

    def _ended(self, spelled: dict[str, Any], choice: _Choice) -> dict[str, Any]:
        spelled["finish_reason"] = choice.finish_reason
        if choice.stop_reason is not None:
            spelled["stop_reason"] = choice.stop_reason
        return spelled


def snapshot(facts: StreamFacts, lines: list[bytes]) -> list[bytes]:
    """The chunk that stands for the frames of ``lines``, none when they say nothing yet."""
    if not lines:
        return []
    accumulator = Accumulator(facts)
    for line in lines:
        accumulator.add(line)
    return [accumulator.snapshot()]
