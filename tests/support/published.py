"""Published messages, as gateways receive them."""

from __future__ import annotations

from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import RECORD, UNIT


def unpack_parts(payload: bytes) -> list[tuple[StreamId, Epoch, int, int, bytes]]:
    """The parts of a message: stream, epoch, first and last seq, and the frames."""
    out = []
    for part in payload.split(RECORD):
        stream, epoch, first, last, frames = part.split(UNIT, 4)
        out.append((StreamId(stream.decode()), Epoch.parse(epoch.decode()), int(first), int(last), frames))
    return out
