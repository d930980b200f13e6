"""Published messages, as gateways receive them."""

from __future__ import annotations

from stream_fabric.native import split_message
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import StreamId


def unpack_parts(payload: bytes) -> list[tuple[StreamId, Epoch, int, int, bytes]]:
    """The parts of a message: stream, epoch, first and last seq, and the frames."""
    return [
        (StreamId(stream.decode()), Epoch.parse(epoch.decode()), first, last, frames)
        for stream, epoch, first, last, frames in split_message(payload)
    ]
