"""Answers that are one JSON document of the engine's own, handed on as it is: embeddings and rerank."""

from __future__ import annotations

import msgspec

from stream_fabric.errors import EngineFailed, StreamTooLarge, Unsupported
from stream_fabric.frames import Open, decode, is_text, text_parts
from stream_fabric.limits import STREAM_BYTES_MAX
from stream_gw.dialects.requests import CreateRequest, Kind

WHOLE: tuple[Kind, ...] = ("embeddings", "rerank")


def whole(request: CreateRequest, input_bytes: int) -> CreateRequest:
    """The request for an answer that is computed, not generated. Raises Unsupported where it was to be streamed."""
    if request.stream:
        raise Unsupported(f"stream must be false: the answer to /v1/{request.kind} comes whole", param="stream")
    return msgspec.structs.replace(request, max_tokens=1, input_bytes=input_bytes)


class Document:
    """Gathers the document from a stream's frames: the text of the item that it is."""

    def __init__(self) -> None:
        self._item: int | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, line: bytes) -> None:
        """Take the next frame."""
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
        """The document, byte for byte. Raises EngineFailed when there was none, StreamTooLarge when it was too much."""
        if self._size > STREAM_BYTES_MAX:
            raise StreamTooLarge(f"the answer passed {STREAM_BYTES_MAX >> 20} MiB; send fewer inputs in one request")
        if self._item is None:
            raise EngineFailed("the engine ended without an answer")
        return b"".join(self._pieces)
