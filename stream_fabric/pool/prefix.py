"""What replicas hold of prompts: block hashes, an agent's ledger, a gateway's view of it. Sans I/O.

A prompt's bytes are cut into blocks, and each block's hash covers all before it: equal hashes mean equal prefixes. The
hash of a prompt is computed once, at the gateway. An agent keeps the hashes of what its engine has computed, as the
engine evicts: least recently used first, a chain's end before its beginning. So what it holds of a prompt is always a
beginning, and how long it is can be found by bisection.
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
    """Of each whole block of the parts' bytes, 32 bits over it and all before it. ``scope``: what must be equal besides
    the prompt, such as the model and its tools."""
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
    """What one replica is believed to hold, bounded. Only its agent changes it.

    The engine is asked for what it knows: its capacity bounds the ledger, its evictions shorten it, and a prompt of
    which less was cached than believed shows that the capacity in blocks was taken too large.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[int, None] = OrderedDict()
        self._limit = float(PREFIX_SUMMARY_BLOCKS_MAX)
        self._capacity = float(PREFIX_SUMMARY_BLOCKS_MAX)
        self.version = 0

    def __len__(self) -> int:
        return len(self._held)

    def bound(self, capacity_blocks: float) -> None:
        """What the engine's KV cache can hold, in our blocks; 0: it does not say."""
        self._capacity = min(capacity_blocks or PREFIX_SUMMARY_BLOCKS_MAX, PREFIX_SUMMARY_BLOCKS_MAX)
        self._trim(int(min(self._limit, self._capacity)))

    def match(self, hashes: Sequence[int]) -> int:
        """How many of the prompt's blocks are held."""
        return _held_blocks(self._held, hashes)

    def touch(self, hashes: Sequence[int]) -> None:
        """The engine has computed or used these blocks."""
        for value in reversed(hashes):  # the chain's beginning last: it is evicted last
            self._held[value] = None
            self._held.move_to_end(value)
        self.version += 1
        self._trim(int(min(self._limit, self._capacity)))

    def settle(self, believed_blocks: int, cached_blocks: float) -> None:
        """A prompt of which so many blocks were believed held had so many cached, as its engine says."""
        if believed_blocks < 2:
            return
        if cached_blocks < believed_blocks / 2:
            self._limit = max(_LEAST_BLOCKS, min(self._limit, len(self._held)) * _SHRINK)
            self._trim(int(self._limit))
        else:
            self._limit = min(self._limit * _GROW, PREFIX_SUMMARY_BLOCKS_MAX)

    def evict(self, blocks: int) -> None:
        """The engine has thrown out so many blocks' worth of tokens."""
        self._trim(max(0, len(self._held) - blocks))

    def clear(self) -> None:
        self._held.clear()
        self.version += 1

    def summary(self) -> bytes:
        """The hashes, 4 bytes each."""
        return array("I", self._held).tobytes()

    def _trim(self, size: int) -> None:
        if len(self._held) > size:
            self.version += 1
            while len(self._held) > size:
                self._held.popitem(last=False)


class PrefixView:
    """A gateway's copy of a replica's ledger, with what this gateway has sent there since."""

    def __init__(self, summary: bytes = b"", version: int = -1) -> None:
        self._sent: deque[Sequence[int]] = deque(maxlen=_SENT_MAX)
        self.renew(summary, version)

    def renew(self, summary: bytes, version: int) -> None:
        """A newer summary. It may be older than what was sent since the last one: that is kept until the next."""
        held = array("I")
        held.frombytes(summary)
        self._held = set(held).union(*self._sent)
        self._sent.clear()
        self.version = version

    def match(self, hashes: Sequence[int]) -> int:
        """How many of the prompt's blocks the replica is believed to hold."""
        return _held_blocks(self._held, hashes)

    def sent(self, hashes: Sequence[int]) -> None:
        """A request with these blocks went there: the next one with them need not wait for the summary."""
        self._held.update(hashes)
        self._sent.append(hashes)


def _held_blocks(held: Container[int], hashes: Sequence[int]) -> int:
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
