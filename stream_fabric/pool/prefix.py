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
from collections.abc import Container, Iterable, Sequence, Set

from stream_fabric.limits import PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MAX, PREFIX_SUMMARY_BLOCKS_MAX
from stream_fabric.pool.lease_changes import BlockChange

_SHRINK = 0.9
_GROW = 1.01
_LEAST_BLOCKS = 16
_SENT_MAX = 1000
_CHANGES_MAX = PREFIX_SUMMARY_BLOCKS_MAX // 2
"""Changed blocks above which a summary is no larger than its changes."""


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
        self._added: set[int] = set()
        self._removed: set[int] = set()
        self._changes_known = True
        self.version = 0

    def __len__(self) -> int:
        return len(self._held)

    def set_capacity(self, capacity_blocks: float) -> None:
        """Bound the ledger by the capacity of the engine's KV cache in blocks; 0: unknown."""
        self._capacity = min(capacity_blocks or PREFIX_SUMMARY_BLOCKS_MAX, PREFIX_SUMMARY_BLOCKS_MAX)
        self._trim(int(min(self._limit, self._capacity)))

    def match(self, hashes: Sequence[int]) -> int:
        """Number of the prompt's first blocks that are cached."""
        return _match_length(self._held, (), hashes)

    def touch(self, hashes: Sequence[int]) -> None:
        """Record that the engine computed or used these blocks."""
        held = self._held
        for value in reversed(hashes):  # the beginning of the prompt last, so that it is evicted last
            if value in held:
                held.move_to_end(value)
            else:
                held[value] = None
                self._note_change(value, self._added, self._removed)
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
        self._changes_known = False
        self.version += 1

    def summary(self) -> bytes:
        """Encode all hashes for the gateways, 4 bytes each."""
        return array("I", self._held).tobytes()

    def take_changes(self) -> tuple[bytes, bytes] | None:
        """Return the blocks that were added and removed since the last call, 4 bytes each.

        None: there are too many, or all were cleared; only the summary tells.
        """
        known, added, removed = self._changes_known, self._added, self._removed
        self._added, self._removed, self._changes_known = set(), set(), True
        return (array("I", added).tobytes(), array("I", removed).tobytes()) if known else None

    def _note_change(self, value: int, here: set[int], there: set[int]) -> None:
        """Note a block in ``here``, unless the opposite change in ``there`` cancels it."""
        if value in there:
            there.remove(value)
        elif self._changes_known:
            here.add(value)
            if len(self._added) + len(self._removed) > _CHANGES_MAX:
                self._changes_known = False
                self._added.clear()
                self._removed.clear()

    def _trim(self, size: int) -> None:
        if len(self._held) > size:
            self.version += 1
            while len(self._held) > size:
                value, _ = self._held.popitem(last=False)
                self._note_change(value, self._removed, self._added)


class PrefixView:
    """A gateway's copy of a replica's ledger, plus the blocks of requests that it sent there lately."""

    def __init__(self, summary: bytes = b"", version: int = -1) -> None:
        self._sent: deque[Sequence[int]] = deque(maxlen=_SENT_MAX)
        self._sent_blocks: set[int] = set()
        """Blocks of the requests that went there since the last summary or change, and between the two before."""
        self.renew(summary, version)

    def renew(self, summary: bytes, version: int) -> None:
        """Replace the view by a summary, and keep blocks sent since the last renewal until the next one."""
        self._held = set(unpack_blocks(summary))
        self.version = version
        self.complete = version >= 0
        """False: changes are missing that came before the last one; the next summary has them."""
        self._forget_sent()

    def apply(self, change: BlockChange) -> None:
        """Apply a change that is newer than the view."""
        self.complete = self.complete and change.since == self.version
        self._held.difference_update(unpack_blocks(change.removed))
        self._held.update(unpack_blocks(change.added))
        self.version = change.version
        self._forget_sent()

    @property
    def held(self) -> Set[int]:
        """Blocks of which the replica's agent has said that they are cached."""
        return self._held

    def _forget_sent(self) -> None:
        self._sent_blocks = set[int]().union(*self._sent)
        self._sent.clear()

    def match(self, hashes: Sequence[int]) -> int:
        """Number of the prompt's first blocks that the replica is believed to have cached."""
        return _match_length(self._held, self._sent_blocks, hashes)

    def sent(self, hashes: Sequence[int]) -> None:
        """Record that a request with these blocks went to the replica."""
        self._sent_blocks.update(hashes)
        self._sent.append(hashes)


def unpack_blocks(data: bytes) -> array[int]:
    """Decode block hashes of 4 bytes each."""
    blocks = array("I")
    blocks.frombytes(data)
    return blocks


def _match_length(held: Container[int], more: Container[int], hashes: Sequence[int]) -> int:
    """Number of a prompt's first blocks that are in ``held`` or in ``more``, found by bisection."""
    low, high = 0, len(hashes)
    if high and hashes[0] not in held and hashes[0] not in more:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        value = hashes[middle - 1]
        if value in held or value in more:
            low = middle
        else:
            high = middle - 1
    return low
