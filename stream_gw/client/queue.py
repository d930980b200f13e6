"""Items that a stream has got and its reader has not taken."""

from __future__ import annotations

from collections import deque

from stream_gw.client.items import Item
from stream_gw.client.position import Position


class ItemQueue:
    """Items that the reader has not taken, counted in items and bytes."""

    def __init__(self) -> None:
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: Item, size: int) -> None:
        self._items.append((item, size))
        self._bytes += size

    def pop(self) -> Item:
        item, size = self._items.popleft()
        self._bytes -= size
        return item

    def drop_after(self, seq: int) -> Position | None:
        """Drop the items beyond ``seq``. Returns the position of the last remaining item; None: the queue is empty."""
        while self._items and (last := Position.parse(self._items[-1][0].cursor)).seq > seq:
            self._bytes -= self._items.pop()[1]
        return last if self._items else None

    def clear(self) -> None:
        self._items.clear()
        self._bytes = 0

    def is_full(self, items: int, size: int) -> bool:
        return len(self._items) >= items or self._bytes >= size

    def is_within(self, items: int, size: int) -> bool:
        return len(self._items) <= items and self._bytes <= size
