"""``openai.chat``: chat completion chunks."""

from __future__ import annotations

import msgspec

from stream_fabric.frames import ChoiceEnd, Open
from stream_gw.dialects.base import Block, Encoder

_json = msgspec.json.Encoder().encode
_CHOICE_TAIL = b'},"logprobs":null,"finish_reason":null}'


class ChatEncoder(Encoder):
    object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    __slots__ = ()

    def _choice(self, index: int) -> bytes:
        return self._head + b'{"index":%d,"delta":{' % index

    def open_stream(self) -> list[bytes]:
        """A role for every choice, in order: helpers index choices from 0 upward and add a second role to the first."""
        return [
            self._choice(index) + b'"role":"assistant","content":""' + _CHOICE_TAIL + self._tail
            for index in range(self.facts.n)
        ]

    def open_block(self, frame: Open) -> tuple[Block, list[bytes]]:
        start, end = self._choice(frame.choice), _CHOICE_TAIL + self._tail
        match frame.kind:
            case "text":
                return Block(frame.choice, "content", start + b'"content":', end), []
            case "refusal":
                return Block(frame.choice, "refusal", start + b'"refusal":', end), []
            case "reasoning":
                # vLLM renamed the field; clients in the wild read one or the other
                return Block(frame.choice, "content", start + b'"reasoning_content":', end, b',"reasoning":'), []
            case "tool":
                return self._tool(frame, start, end)
        return Block(frame.choice, "content", b"", b""), []  # an opaque item has no words in this dialect

    def _tool(self, frame: Open, start: bytes, end: bytes) -> tuple[Block, list[bytes]]:
        index = self._tools.get(frame.choice, 0)
        self._tools[frame.choice] = index + 1
        kind, field = ("custom", "input") if frame.form == "custom" else ("function", "arguments")
        call = {"index": index, "id": frame.id, "type": kind, kind: {"name": frame.name, field: ""}}
        first = start + b'"tool_calls":[' + _json(call) + b"]" + end
        prefix = start + b'"tool_calls":[{"index":%d,"%b":{"%b":' % (index, kind.encode(), field.encode())
        return Block(frame.choice, "content", prefix, b"}}]" + end), [first]

    def logprobs(self, raw: msgspec.Raw, text: str, kind: str) -> bytes:
        content, refusal = (b"null", bytes(raw)) if kind == "refusal" else (bytes(raw), b"null")
        return b'{"content":%b,"refusal":%b}' % (content, refusal)

    def finish(self, frame: ChoiceEnd) -> bytes:
        stop = b"" if frame.detail is None else b',"stop_reason":' + bytes(frame.detail)
        return b'%b{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b%b}%b' % (
            self._head,
            frame.choice,
            _json(frame.finish_reason),
            stop,
            self._tail,
        )
