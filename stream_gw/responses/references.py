"""Finds the items that a request refers to by their ids: those of stored responses, whose ids hold the response's."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import msgspec

from stream_fabric.errors import BadRequest
from stream_fabric.limits import REFERENCED_BYTES_MAX, RESPONSE_CHAIN_MAX, RESPONSE_HISTORY_BYTES_MAX
from stream_gw.responses.errors import HistoryTooLong, ReferenceNotFound
from stream_gw.responses.lineage import too_many_bytes
from stream_gw.responses.packing import Count, uncounted
from stream_gw.responses.records import Item, ResponseRecord

Read = Callable[[str], Awaitable[ResponseRecord | None]]
"""Reads a stored response that the caller may see; None: there is none."""
_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})")
"""Id of an item: what the model made, or an input item that came without an id."""


def refers(item: Item) -> bool:
    """Whether the item stands for another one. Clients may leave the type out."""
    return item.get("type") == "item_reference" or (len(item) == 1 and "id" in item)


class ReferencedBytes:
    """Bounds the bytes of all responses in which a request's references are looked up."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count a response. Raises HistoryTooLong; the first one may have any size."""
        if self._bytes and self._bytes + size > REFERENCED_BYTES_MAX:
            raise HistoryTooLong(
                f"the responses whose items the input refers to exceed {REFERENCED_BYTES_MAX} bytes; send the items "
                "themselves",
                param="input",
            )
        self._bytes += size


async def resolved(items: list[Item], history: list[Item], read: Read, count: Count = uncounted) -> list[Item]:
    """Return items with each reference replaced by the item that it names. One that the history has is left out.

    Raises ReferenceNotFound, HistoryTooLong, and what ``read`` and ``count`` raise.
    """
    if not any(map(refers, items)):
        return items
    there = {item["id"] for item in history if isinstance(item.get("id"), str)}
    names = {item["id"] for item in items if refers(item) and isinstance(item.get("id"), str)}
    found: dict[str, dict[str, Item]] = {}
    made, size, kept = [], 0, 0
    for number, item in enumerate(items):
        if not refers(item):
            made.append(item)
            continue
        name = item.get("id")
        if not isinstance(name, str):
            raise BadRequest(f"input.{number}.id must be the id of an item", param="input")
        if name in there:
            continue
        response = _response_of(name)
        if response not in found:
            if len(found) == RESPONSE_CHAIN_MAX:
                raise too_many_bytes("input")
            found[response] = await _named(response, names, read)
            added = sum(map(_size, found[response].values()))
            count(added)
            kept += added
        if name not in found[response]:
            raise ReferenceNotFound(name)
        made.append(found[response][name])
        size += _size(made[-1])
        if max(size, kept) > RESPONSE_HISTORY_BYTES_MAX:
            raise too_many_bytes("input")
    return made


def _response_of(name: str) -> str:
    """Return the id of the response that an item belongs to. Raises ReferenceNotFound."""
    match = _ID.match(name)
    if match is None:
        raise ReferenceNotFound(name)
    return f"resp_{match[1]}"


async def _named(response: str, names: set[str], read: Read) -> dict[str, Item]:
    """Read the items of a response that have one of the names. The others may be many, and are not kept."""
    record = await read(response)
    known = [] if record is None else [*record.input, *(record.output or [])]
    return {item["id"]: item for item in known if isinstance(item.get("id"), str) and item["id"] in names}


def _size(item: Item) -> int:
    return len(msgspec.json.encode(item))
