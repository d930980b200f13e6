"""``openai.completions``: the older text completion chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.frames import ChoiceEnd, Delta, Frame, Open, decode, is_text, json_string, text_parts
from stream_gw.dialects.base import NO_LOGPROBS, Encoder
from stream_gw.dialects.facts import StreamFacts

_json = msgspec.json.Encoder().encode
LEGACY_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_CHOICE_TAIL = b"," + NO_LOGPROBS + b',"finish_reason":null}'


class CompletionsEncoder(Encoder):
    object_name = "text_completion"
    id_prefix = "cmpl-"
    __slots__ = ()

    def open_block(self, frame: Open) -> tuple[tuple[bytes, ...], list[bytes]]:
        if frame.kind != "text":  # reasoning, refusals, tools and items have no words in this dialect
            return (), []
        return (self._head + b'{"index":%d,"text":"' % frame.choice, _CHOICE_TAIL + self._tail), []

    def logprobs(self, raw: msgspec.Raw, block: int) -> bytes:
        data = bytes(raw)
        return data if data.startswith(b"{") else _json(legacy_logprobs(msgspec.json.decode(data), self.chars(block)))

    def chars(self, block: int) -> int | None:
        """How long the text is so far of which the block is a part; None: nobody has measured it."""
        return None

    def finish(self, frame: ChoiceEnd) -> bytes:
        stop = b"" if frame.detail is None else b',"stop_reason":' + bytes(frame.detail)
        return b'%b{"index":%d,"text":"",%b,"finish_reason":%b%b}%b' % (
            self._head,
            frame.choice,
            NO_LOGPROBS,
            json_string(frame.finish_reason),
            stop,
            self._tail,
        )


class MeasuringEncoder(CompletionsEncoder):
    """Of a stream with logprobs, whose tokens are told their place in the text: each frame is measured. A reader that
    starts in the middle has not seen what came before, so its encoder knows no places."""

    __slots__ = ("_chars", "_choices", "_measured", "_shown")

    def __init__(self, facts: StreamFacts) -> None:
        super().__init__(facts)
        self._choices: dict[int, int] = {}
        """Of each block whose text counts, its choice."""
        self._chars: dict[int, int] = {}
        """By choice."""
        self._measured = True
        self._shown = False

    def chars(self, block: int) -> int | None:
        return self._chars.get(self._choices[block], 0) if self._measured else None

    def open_block(self, frame: Open) -> tuple[tuple[bytes, ...], list[bytes]]:
        if frame.kind == "text":
            self._choices[frame.block] = frame.choice
        return super().open_block(frame)

    def sse(self, lines: list[bytes], epoch: int, first: int) -> bytes:
        return b"".join([self._event(line, epoch, seq) for seq, line in enumerate(lines, first)])

    def _event(self, line: bytes, epoch: int, seq: int) -> bytes:
        event = super()._event(line, epoch, seq)
        if is_text(line):
            self._measure_text(line)
        return event

    def encode(self, line: bytes) -> list[bytes]:
        chunks = super().encode(line)
        if is_text(line):
            self._measure_text(line)
        return chunks

    def _spell(self, frame: Frame) -> list[bytes]:
        chunks = super()._spell(frame)
        if isinstance(frame, Delta):
            self._measure(frame.block, frame.text)
        return chunks

    def observe(self, line: bytes) -> None:
        """Of the frames before a reader's cursor either all are shown, and the text is measured, or the structural ones
        alone: then it is not."""
        frame = decode(line)
        if isinstance(frame, Delta):
            self._shown = True
            self._measure(frame.block, frame.text)
        else:
            super().observe(line)
        self._measured = self._shown

    def _measure_text(self, line: bytes) -> None:
        block, _, text = text_parts(line)
        if block in self._choices:
            self._measure(block, msgspec.json.decode(text, type=str))

    def _measure(self, block: int, text: str) -> None:
        choice = self._choices.get(block)
        if choice is not None:
            self._chars[choice] = self._chars.get(choice, 0) + len(text)


def legacy_logprobs(given: Any, base: int | None) -> dict[str, Any]:
    """OpenAI's older shape. An engine that speaks it gives it whole, offsets included.

    From the newer list of tokens, offsets count from ``base``, the text's length before them; where that is not known
    there are none.
    """
    if isinstance(given, dict):
        return given
    offsets = []
    for item in given:
        if base is not None:
            offsets.append(base)
            base += len(item["token"])
    return {
        "tokens": [item["token"] for item in given],
        "token_logprobs": [item["logprob"] for item in given],
        "top_logprobs": [{top["token"]: top["logprob"] for top in item.get("top_logprobs") or ()} for item in given],
        "text_offset": None if base is None else offsets,
    }
