"""``openai.chat``: chat completion chunks."""

from __future__ import annotations

import msgspec

from stream_fabric.frames import ChoiceEnd, Open, json_string
from stream_gw.dialects.base import NO_LOGPROBS, Encoder, tool_words

_json = msgspec.json.Encoder().encode
_CHOICE_TAIL = b"}," + NO_LOGPROBS + b',"finish_reason":null}'


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

    def open_block(self, frame: Open) -> tuple[tuple[bytes, ...], list[bytes]]:
        start, end = self._choice(frame.choice), _CHOICE_TAIL + self._tail
        match frame.kind:
            case "text":
                return (start + b'"content":"', end), []
            case "refusal":
                return (start + b'"refusal":"', end), []
            case "reasoning":
                # vLLM renamed the field; clients in the wild read one or the other
                return (start + b'"reasoning_content":"', b',"reasoning":"', end), []
            case "tool":
                return self._tool(frame, start, end)
            case _:
                return (), []

    def _tool(self, frame: Open, start: bytes, end: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
        words = tool_words(frame, self.facts)
        if words is None:
            return (), []
        kind, field, call = words
        # By number, not by a counter: a block that opens again after a reset keeps its place
        index = sum(choice == frame.choice and block < frame.block for choice, block in self._tools)
        self._tools |= {(frame.choice, frame.block)}
        first = start + b'"tool_calls":[' + _json({"index": index, **call}) + b"]" + end
        before = start + b'"tool_calls":[{"index":%d,"%b":{"%b":"' % (index, kind.encode(), field.encode())
        return (before, b"}}]" + end), [first]

    def logprobs(self, raw: msgspec.Raw, block: int) -> bytes:
        content, refused = (b"null", bytes(raw)) if block in self._refusals else (bytes(raw), b"null")
        return b'{"content":%b,"refusal":%b}' % (content, refused)

    def finish(self, frame: ChoiceEnd) -> bytes:
        stop = b"" if frame.detail is None else b',"stop_reason":' + bytes(frame.detail)
        return b'%b{"index":%d,"delta":{},%b,"finish_reason":%b%b}%b' % (
            self._head,
            frame.choice,
            NO_LOGPROBS,
            json_string(frame.finish_reason),
            stop,
            self._tail,
        )
