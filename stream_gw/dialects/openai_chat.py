"""Dialect ``openai.chat``: chat completion chunks."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from stream_fabric.stream.frames import Open
from stream_gw.dialects.base import NO_LOGPROBS, Encoder, tool_call_parts

_json = msgspec.json.Encoder().encode
_CHOICE_TAIL = b"}," + NO_LOGPROBS + b',"finish_reason":null}'


class ChatEncoder(Encoder):
    object_name = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    empty_delta = b'"delta":{}'
    __slots__ = ()

    def _choice_head(self, index: int) -> bytes:
        """Return the start of a chunk, up to the content of the delta."""
        return self._head + b'{"index":%d,"delta":{' % index

    def open_stream(self) -> list[bytes]:
        """One role chunk per choice, in order: SDK helpers index choices from 0, and join roles of the first choice."""
        return [
            self._choice_head(index) + b'"role":"assistant","content":""' + _CHOICE_TAIL + self._tail
            for index in range(self.facts.n)
        ]

    def open_block(self, frame: Open) -> tuple[tuple[bytes, ...], list[bytes]]:
        start, end = self._choice_head(frame.choice), _CHOICE_TAIL + self._tail
        match frame.kind:
            case "text":
                return (start + b'"content":"', end), []
            case "refusal":
                return (start + b'"refusal":"', end), []
            case "reasoning":
                # vLLM renamed the field; some clients read the old name, some the new one
                return (start + b'"reasoning_content":"', b',"reasoning":"', end), []
            case "tool":
                return self._open_tool_block(frame, start, end)
            case _:
                return (), []

    def _open_tool_block(self, frame: Open, start: bytes, end: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
        parts = tool_call_parts(frame, self.facts)
        if parts is None:
            return (), []
        kind, field, call = parts
        # From block numbers, not a counter: a block that opens again after a reset keeps its index
        self._tools = self._tools or {}
        blocks = self._tools.setdefault(frame.choice, [])
        index = bisect_left(blocks, frame.block)
        if frame.block not in blocks[index : index + 1]:
            blocks.insert(index, frame.block)
        first = start + b'"tool_calls":[' + _json({"index": index, **call}) + b"]" + end
        before = start + b'"tool_calls":[{"index":%d,"%b":{"%b":"' % (index, kind.encode(), field.encode())
        return (before, b"}}]" + end), [first]

    def logprobs(self, raw: msgspec.Raw, block: int) -> bytes:
        content, refused = (b"null", bytes(raw)) if block in self._refusals else (bytes(raw), b"null")
        return b'{"content":%b,"refusal":%b}' % (content, refused)
