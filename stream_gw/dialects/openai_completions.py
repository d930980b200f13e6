"""``openai.completions``: the older text completion chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.frames import ChoiceEnd, Open
from stream_gw.dialects.base import Block, Encoder

_json = msgspec.json.Encoder().encode


class CompletionsEncoder(Encoder):
    object_name = "text_completion"
    id_prefix = "cmpl-"
    __slots__ = ()

    def open_block(self, frame: Open) -> tuple[Block, list[bytes]]:
        if frame.kind != "text":  # reasoning, tools and items have no words in this dialect
            return Block(frame.choice, frame.kind, b"", b""), []
        prefix = self._head + b'{"index":%d,"text":' % frame.choice
        return Block(frame.choice, "text", prefix, b',"logprobs":null,"finish_reason":null}' + self._tail), []

    def logprobs(self, raw: msgspec.Raw, text: str, kind: str) -> bytes:
        return _json(legacy_logprobs(msgspec.json.decode(raw)))

    def finish(self, frame: ChoiceEnd) -> bytes:
        stop = b"" if frame.detail is None else b',"stop_reason":' + bytes(frame.detail)
        return b'%b{"index":%d,"text":"","logprobs":null,"finish_reason":%b%b}%b' % (
            self._head,
            frame.choice,
            _json(frame.finish_reason),
            stop,
            self._tail,
        )


def legacy_logprobs(given: Any) -> dict[str, Any]:
    """OpenAI's older shape. An engine that speaks it gives it whole, offsets included.

    From the newer list of tokens, offsets count from the chunk's start: a chunk is spelled without those before it.
    """
    if isinstance(given, dict):
        return given
    offsets, position = [], 0
    for item in given:
        offsets.append(position)
        position += len(item["token"])
    return {
        "tokens": [item["token"] for item in given],
        "token_logprobs": [item["logprob"] for item in given],
        "top_logprobs": [{top["token"]: top["logprob"] for top in item.get("top_logprobs", ())} for item in given],
        "text_offset": offsets,
    }
