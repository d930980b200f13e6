"""Responses that are one JSON document of the engine, passed on unchanged: of pooling models, and counts of tokens."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from stream_fabric.errors import EngineFailed, StreamTooLarge, Unsupported
from stream_fabric.limits import STREAM_BYTES_MAX
from stream_fabric.stream.frames import Open, decode, is_text, text_parts
from stream_gw.dialects.requests import CreateRequest, Kind, read_common

WHOLE: tuple[Kind, ...] = ("embeddings", "rerank", "classify", "score", "tokenize")

_COUNTED = (
    "model", "messages", "tools", "user", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip
"""Fields of a chat's body that a count of tokens depends on, and the user for whom it is made."""
_PATHS = {"tokenize": "/v1/messages/count_tokens"}


def path_of(kind: Kind) -> str:
    """Return the path of requests of a kind whose answer is one document."""
    return _PATHS.get(kind, f"/v1/{kind}")


def whole_request(request: CreateRequest, input_bytes: int) -> CreateRequest:
    """Return the request with the size of its input and one output token. Raises Unsupported for a streamed request."""
    if request.stream:
        raise Unsupported(
            f"stream must be false: the response to {path_of(request.kind)} is not streamed", param="stream"
        )
    return msgspec.structs.replace(request, n=1, max_tokens=1, input_bytes=input_bytes)


def count_request(fields: dict[str, Raw]) -> CreateRequest:
    """Return the request that counts the tokens of a chat's prompt. ``fields``: of the chat's body."""
    kept = {name: raw for name, raw in fields.items() if name in _COUNTED}
    return whole_request(read_common(kept, "tokenize"), 0)


class Document:
    """Collects the document, which is the text of one item, from a stream's frames."""

    def __init__(self) -> None:
        self._item: int | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, line: bytes) -> None:
        """Add the next frame."""
        if not is_text(line):
            frame = decode(line)
            if isinstance(frame, Open) and frame.kind == "item":
                self._item = frame.block
            return
        block, _, quoted = text_parts(line)
        if block != self._item:
            return
        piece = msgspec.json.decode(quoted, type=str).encode()
        self._size += len(piece)
        if self._size > STREAM_BYTES_MAX:
            self._pieces.clear()
        else:
            self._pieces.append(piece)

    def result(self) -> bytes:
        """Return the document's bytes. Raises EngineFailed when there is none, StreamTooLarge above the limit."""
        if self._size > STREAM_BYTES_MAX:
            raise StreamTooLarge(f"the response exceeds {STREAM_BYTES_MAX >> 20} MiB; send fewer inputs in one request")
        if self._item is None:
            raise EngineFailed("the engine ended without a response")
        return b"".join(self._pieces)
