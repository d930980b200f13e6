"""Encoding and compression of what is stored; large values leave the event loop."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from stream_gw.responses.records import Item, ResponseRecord, stored_items

if TYPE_CHECKING:
    from stream_gw.tenancy.sql.conversations import StoredItem

_T = TypeVar("_T")
Count = Callable[[int], None]
"""Counts bytes of stored items that were read or are read next. Raises where they exceed a limit."""
_LEVEL = 1
_OFF_LOOP_BYTES: Final = 64 << 10
_ITEM_BYTES: Final = 1024
"""An input item takes as long to be stored as so many bytes take to be encoded."""


def uncounted(size: int) -> None:
    """Count nothing."""


async def pack(value: object) -> tuple[bytes, int]:
    """Encode and compress a value; return also its size before."""
    return await _compress(msgspec.json.encode(value))


async def pack_begun(record: ResponseRecord) -> tuple[bytes, int]:
    """Encode and compress the record of a new response, its input as it is stored; return also its size before.

    Raises BadRequest.
    """

    def encode() -> bytes:
        return msgspec.json.encode(msgspec.structs.replace(record, input=stored_items(record.input, record.id[5:])))

    return await _compress(await off_loop(_ITEM_BYTES * len(record.input), encode))


async def _compress(encoded: bytes) -> tuple[bytes, int]:
    return await off_loop(len(encoded), lambda: zlib.compress(encoded, _LEVEL)), len(encoded)


async def pack_items(items: Sequence[Item]) -> list[StoredItem]:
    """Encode and compress items one by one, in a thread: there may be thousands, or a large one."""
    from stream_gw.tenancy.sql.conversations import StoredItem

    def packed() -> list[StoredItem]:
        return [StoredItem(item["id"], zlib.compress(msgspec.json.encode(item), _LEVEL)) for item in items]

    return await asyncio.to_thread(packed)


async def unpack_record(request: bytes, response: bytes, count: Count = uncounted) -> ResponseRecord:
    """Decode a record of its two packed parts; ``response`` empty: its stream runs."""

    def decode() -> tuple[ResponseRecord, int]:
        parts = [zlib.decompress(each) for each in (request, response) if each]
        record = msgspec.json.decode(parts[0], type=ResponseRecord)
        if response:
            record = msgspec.structs.replace(record, response=msgspec.json.decode(parts[1]))
        return record, sum(map(len, parts))

    record, size = await off_loop(_unpacked_bytes([request, response]), decode)
    count(size)
    return record


async def unpack_items(
    packed: Sequence[bytes], bytes_max: int, is_last: Callable[[Item], bool] = lambda item: False
) -> tuple[list[Item], int]:
    """Decode items that were packed one by one; return them with their bytes.

    Stops after the item with which they exceed ``bytes_max``, or that ``is_last``: a few KiB may stand for many MiB.
    """

    def decode() -> tuple[list[Item], int]:
        items: list[Item] = []
        size = 0
        for each in packed:
            encoded = zlib.decompress(each)
            items.append(msgspec.json.decode(encoded))
            size += len(encoded)
            if size > bytes_max or is_last(items[-1]):
                break
        return items, size

    return await off_loop(_unpacked_bytes(packed), decode)


async def unpack_lists(packed: Sequence[bytes]) -> list[Item]:
    """Decode lists of items that were packed one by one, and join them."""
    lists = await off_loop(
        _unpacked_bytes(packed), lambda: [msgspec.json.decode(zlib.decompress(each)) for each in packed]
    )
    return [item for each in lists for item in each]


def _unpacked_bytes(packed: Sequence[bytes]) -> int:
    """Return how many bytes were packed, or at least as many as leave the loop: 16 KiB may stand for 16 MiB."""
    size = 0
    for each in packed:
        size += len(zlib.decompressobj().decompress(each, _OFF_LOOP_BYTES))
        if size >= _OFF_LOOP_BYTES:
            break
    return size


async def off_loop(size: int, work: Callable[[], _T]) -> _T:
    """Run work on ``size`` bytes, in a thread if they are many."""
    return await asyncio.to_thread(work) if size >= _OFF_LOOP_BYTES else work()
