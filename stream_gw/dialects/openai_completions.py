"""Dialect ``openai.completions``: the legacy text completion chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.stream.frames import Delta, Frame, Open, decode, is_text, text_parts
from stream_gw.dialects.base import NO_LOGPROBS, Encoder
from stream_gw.dialects.facts import StreamFacts

_json = msgspec.json.Encoder().encode
LEGACY_LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_CHOICE_TAIL = b"," + NO_LOGPROBS + b',"finish_reason":null}'


class CompletionsEncoder(Encoder):
    object_name = "text_completion"
    id_prefix = "cmpl-"
    empty_delta = b'"text":""'
    __slots__ = ()

    def open_block(self, frame: Open) -> tuple[tuple[bytes, ...], list[bytes]]:
        if frame.kind != "text":  # the dialect has no reasoning, refusals, tools or items
            return (), []
        return (self._head + b'{"index":%d,"text":"' % frame.choice, _CHOICE_TAIL + self._tail), []

    def logprobs(self, raw: msgspec.Raw, block: int) -> bytes:
        data = bytes(raw)
        return data if data.startswith(b"{") else _json(legacy_logprobs(msgspec.json.decode(data), self.chars(block)))

    def chars(self, block: int) -> int | None:
        """Characters so far in the text of the block's choice; None: unknown."""
        return None


class MeasuringEncoder(CompletionsEncoder):
    """Encoder of streams with logprobs: it counts characters for ``text_offset``.

    A reader that starts in the middle gets no offsets, because the length of the preceding text is unknown.
    """

    __slots__ = ("_chars", "_choices", "_measured", "_saw_text")

    def __init__(self, facts: StreamFacts) -> None:
        super().__init__(facts)
        self._choices: dict[int, int] = {}
        """Choice of each text block."""
        self._chars: dict[int, int] = {}
        """Characters so far, by choice."""
        self._measured = True
        self._saw_text = False

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
            self._count_text_frame(line)
        return event

    def encode(self, line: bytes) -> list[bytes]:
        chunks = super().encode(line)
        if is_text(line):
            self._count_text_frame(line)
        return chunks

    def _encode_frame(self, frame: Frame) -> list[bytes]:
        chunks = super()._encode_frame(frame)
        if isinstance(frame, Delta):
            self._count_chars(frame.block, frame.text)
        return chunks

    def observe(self, line: bytes) -> None:
        """Take a frame before the reader's cursor: callers pass all of them, or structural ones only. Without the text
        frames, offsets stay unknown."""
        frame = decode(line)
        if isinstance(frame, Delta):
            self._saw_text = True
            self._count_chars(frame.block, frame.text)
        else:
            super().observe(line)
        self._measured = self._saw_text

    def _count_text_frame(self, line: bytes) -> None:
        block, _, text = text_parts(line)
        if block in self._choices:
            self._count_chars(block, msgspec.json.decode(text, type=str))

    def _count_chars(self, block: int, text: str) -> None:
        choice = self._choices.get(block)
        if choice is not None:
            self._chars[choice] = self._chars.get(choice, 0) + len(text)


def legacy_logprobs(logprobs: Any, base: int | None) -> dict[str, Any]:
    """Convert logprobs to OpenAI's legacy object.

    ``logprobs``: that object, returned unchanged, or the newer list of tokens. ``base``: characters of text before
    these tokens, from which offsets count; None: unknown, and offsets are left out.
    """
    if isinstance(logprobs, dict):
        return logprobs
    offsets = []
    for item in logprobs:
        if base is not None:
            offsets.append(base)
            base += len(item["token"])
    return {
        "tokens": [item["token"] for item in logprobs],
        "token_logprobs": [item["logprob"] for item in logprobs],
        "top_logprobs": [{top["token"]: top["logprob"] for top in item.get("top_logprobs") or ()} for item in logprobs],
        "text_offset": None if base is None else offsets,
    }
