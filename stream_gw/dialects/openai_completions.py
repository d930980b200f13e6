"""``openai.completions``: the older text completion chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.frames import ChoiceEnd, Open, json_string
from stream_gw.dialects.base import NO_LOGPROBS, Encoder

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

    def logprobs(self, raw: msgspec.Raw, *, refusal: bool) -> bytes:
        data = bytes(raw)
        return data if data.startswith(b"{") else _json(legacy_logprobs(msgspec.json.decode(data)))

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


def legacy_logprobs(given: Any, base: int = 0) -> dict[str, Any]:
    """OpenAI's older shape. An engine that speaks it gives it whole, offsets included.

    From the newer list of tokens, offsets count from ``base``: 0, the chunk's start, where it is spelled without those
    before it.
    """
    if isinstance(given, dict):
        return given
    offsets = []
    for item in given:
        offsets.append(base)
        base += len(item["token"])
    return {
        "tokens": [item["token"] for item in given],
        "token_logprobs": [item["logprob"] for item in given],
        "top_logprobs": [{top["token"]: top["logprob"] for top in item.get("top_logprobs") or ()} for item in given],
        "text_offset": offsets,
    }
