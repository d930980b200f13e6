"""Prefix caches: block hashes of prompts, an agent's ledger of cached blocks, and a gateway's view of it. Sans I/O.

A prompt is cut into blocks of bytes. Each block's hash covers everything before it: equal hashes mean equal prefixes.
Gateways compute the hashes. An agent keeps the hashes of the blocks that its engine has cached. It evicts as the engine
does: least recently used first, the end of a prompt before its beginning. So the cached part of a prompt is always a
prefix, and bisection finds its length.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence

from stream_fabric.limits import PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MAX, PREFIX_SUMMARY_BLOCKS_MAX

_SHRINK = 0.9
_GROW = 1.01
_LEAST_BLOCKS = 16
_SENT_MAX = 1000


def block_hashes(scope: bytes, parts: Iterable[bytes]) -> list[int]:
    """Hash the whole blocks of a prompt, in order: 32 bits each, over the block and everything before it.

    ``scope`` is hashed first: values that must be equal besides the prompt, such as the model and its tools.
    """
    chain = hashlib.blake2b(scope, digest_size=4)
    out: list[int] = []
    rest = b""
    for part in parts:
        data = rest + part if rest else part
        whole = len(data) - len(data) % PREFIX_BLOCK_BYTES
        for start in range(0, whole, PREFIX_BLOCK_BYTES):
            chain.update(data[start : start + PREFIX_BLOCK_BYTES])
            out.append(int.from_bytes(chain.digest(), "big"))
            if len(out) == PREFIX_BLOCKS_MAX:
                return out
        rest = data[whole:]
    return out


class PrefixLedger:
    """Blocks that one replica is believed to have cached, bounded. Only its agent changes it.

    The engine's capacity bounds the ledger and its evictions shorten it. If less of a prompt was cached than believed,
    the capacity in blocks was estimated too large and is reduced.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._limit = float(PREFIX_SUMMARY_BLOCKS_MAX)
        self._capacity = float(PREFIX_SUMMARY_BLOCKS_MAX)
        self.version = 0

    def __len__(self) -> int:
        return len(self._held)

    def set_capacity(self, capacity_blocks: float) -> None:
        """Bound the ledger by the capacity of the engine's KV cache in blocks; 0: unknown."""
        self._capacity = min(capacity_blocks or PREFIX_SUMMARY_BLOCKS_MAX, PREFIX_SUMMARY_BLOCKS_MAX)
        self._trim(int(min(self._limit, self._capacity)))

    def match(self, hashes: Sequence[int]) -> int:
        """Number of the prompt's first blocks that are cached."""
        return _match_length(self._held, hashes)

    def touch(self, hashes: Sequence[int]) -> None:
        """Record that the engine computed or used these blocks."""
        for value in reversed(hashes):  # the beginning of the prompt last, so that it is evicted last
            self._held[value] = None
            self._held.move_to_end(value)
        self.version += 1
        self._trim(int(min(self._limit, self._capacity)))

    def adjust_limit(self, believed_blocks: int, cached_blocks: float) -> None:
        """Lower the ledger's limit if less than half of the believed blocks were cached; else raise it a little."""
        if believed_blocks < 2:
            return
        if cached_blocks < believed_blocks / 2:
            self._limit = max(_LEAST_BLOCKS, min(self._limit, len(self._held)) * _SHRINK)
            self._trim(int(self._limit))
        else:
            self._limit = min(self._limit * _GROW, PREFIX_SUMMARY_BLOCKS_MAX)

    def evict(self, blocks: int) -> None:
        """Remove the ``blocks`` least recently used blocks, because the engine evicted as many."""
        self._trim(max(0, len(self._held) - blocks))

    def clear(self) -> None:
        self._held.clear()
        self.version += 1

    def summary(self) -> bytes:
        """Encode all hashes for the gateways, 4 bytes each."""
        return array("I", self._held).tobytes()

    def _trim(self, size: int) -> None:
        if len(self._held) > size:
            self.version += 1
            while len(self._held) > size:
                self._held.popitem(last=False)


class PrefixView:
    """A gateway's copy of a replica's ledger, plus the blocks of requests that it sent there since."""

    def __init__(self, summary: bytes = b"", version: int = -1) -> None:
        self._sent: deque[Sequence[int]] = deque(maxlen=_SENT_MAX)
        self.renew(summary, version)

    def renew(self, summary: bytes, version: int) -> None:
        """Replace the view by a newer summary, and keep blocks sent since the last one until the next summary."""
        held = array("I")
        held.frombytes(summary)
        self._held = set(held).union(*self._sent)
        self._sent.clear()
        self.version = version

    def match(self, hashes: Sequence[int]) -> int:
        """Number of the prompt's first blocks that the replica is believed to have cached."""
        return _match_length(self._held, hashes)

    def sent(self, hashes: Sequence[int]) -> None:
        """Record that a request with these blocks went to the replica."""
        self._held.update(hashes)
        self._sent.append(hashes)


def _match_length(held: Container[int], hashes: Sequence[int]) -> int:
    """Number of a prompt's first blocks that are in ``held``, found by bisection."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
