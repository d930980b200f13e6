"""Segments of the disk spool: the file format, and the files of one lane."""

from __future__ import annotations

import os
import re
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec

from telemetry.emit.transport import Record

MAGIC = b"sgspool1"
KEPT, OTHER = "kept", "rest"
"""The lanes, by the suffix of their files: billing events, and events that make room for them."""
_FRAME = struct.Struct("<II")
_NAME = re.compile(rf"(\d{{15}})-\d{{8}}\.({KEPT}|{OTHER})")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """Encode a record with its length and checksum, as segments store it."""
    payload = _encoder.encode(record)
    return _FRAME.pack(len(payload), crc32(payload)) + payload


class Damaged(Exception):
    """A segment is not readable to its end. ``records``: those before the damage."""

    def __init__(self, message: str, records: list[Record]) -> None:
        super().__init__(message)
        self.records = records


def decode_segment(data: bytes) -> list[Record]:
    """Decode a segment's records; a torn last one is left out. Raises Damaged."""
    records: list[Record] = []
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            return records
        raise Damaged("the header is not that of a segment", records)
    at, end = len(MAGIC), len(data)
    while at + _FRAME.size <= end:
        length, checksum = _FRAME.unpack_from(data, at)
        stop = at + _FRAME.size + length
        if stop > end:
            break
        payload = data[at + _FRAME.size : stop]
        try:
            if crc32(payload) != checksum:
                raise Damaged(f"the checksum is wrong at byte {at}", records)
            records.append(_decoder.decode(payload))
        except msgspec.MsgspecError as error:
            raise Damaged(f"no record at byte {at}: {error}", records) from error
        at = stop
    return records


@dataclass(eq=False)
class Segment:
    """A file of spooled records."""

    path: Path
    lane: str
    bytes: int
    born: float
    """Unix time in seconds."""
    count: int = 0


class Lane:
    """The sealed segments of one lane, and the open one."""

    def __init__(self) -> None:
        self.sealed: deque[Segment] = deque()
        self.open: Segment | None = None
        self.fd = -1

    def seal(self) -> None:
        """Close the open segment, so that it can be sent; later records begin a new one."""
        if self.open is not None:
            os.close(self.fd)
            self.sealed.append(self.open)
            self.open = None


def segment_at(path: Path) -> Segment | None:
    """Return the segment stored at ``path``, or None if the file is no segment."""
    named = _NAME.fullmatch(path.name)
    if named is None:
        return None
    return Segment(path, named[2], path.stat().st_size, int(named[1]) / 1000)


def write_all(fd: int, data: bytearray) -> None:
    """Write all of ``data``, also when the system writes only a part at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
