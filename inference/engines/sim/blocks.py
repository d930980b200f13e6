"""Paged KV blocks with a prefix cache: reference counts, a hash chain over full blocks, LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Pool of ``total`` KV blocks.

    A block is free and empty, free and cached (evictable), or held by one or more sequences.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._empty = list(range(total))
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Free blocks with reusable content, block → hash, least recently used first."""
        self._by_hash: dict[int, int] = {}
        self._hash: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self.evictions = 0

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def used(self) -> int:
        return len(self._references)

    def match(self, hashes: Sequence[int]) -> list[int]:
        """Take the blocks of the longest cached prefix of the chain."""
        found: list[int] = []
        for value in hashes:
            block = self._by_hash.get(value)
            if block is None:
                break
            if block in self._cached:
                del self._cached[block]
            self._references[block] = self._references.get(block, 0) + 1
            found.append(block)
        return found

    def take(self, count: int) -> list[int] | None:
        """Take ``count`` blocks, evicting cached ones; None when there are too few."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block, value = self._cached.popitem(last=False)
                del self._by_hash[value]
                del self._hash[block]
                self.evictions += 1
            self._references[block] = 1
            taken.append(block)
        return taken

    def publish(self, block: int, value: int) -> None:
        """Let other sequences share a full block. Of several blocks with equal content the first is shared."""
        if value not in self._by_hash and block not in self._hash:
            self._by_hash[value] = block
            self._hash[block] = value

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks. The end of a chain is evicted before its beginning."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            del self._references[block]
            if block in self._hash:
                self._cached[block] = self._hash[block]
            else:
                self._empty.append(block)

    def clear(self) -> None:
        """Forget the content of every free block."""
        for block in self._cached:
            del self._by_hash[self._hash.pop(block)]
        self._empty += self._cached
        self._cached.clear()
