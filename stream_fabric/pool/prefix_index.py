"""Finds the replicas of a large pool that hold a prompt's beginning, without asking each one's view. Pure.

The index knows one block of eight, chosen by its hash, and for each the replicas that hold it: an integer with a bit a
replica. It finds where a prompt is likely cached; how far, the views of these replicas tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stream_fabric.stream.ids import ReplicaId

_SAMPLE = 8
_PARTS = 64
"""The index is divided, because a dictionary that grows is copied at once while all streams of the gateway wait."""
_SENT_TURNS = 3
"""Turns (``end_turn``) for which a sent prompt counts as cached without the replica's word: its agent publishes each
second, and gateways read each second."""
_SENT_BLOCKS_MAX = 20_000
"""Indexed blocks of the prompts sent in one turn."""


def sampled(blocks: Iterable[int]) -> list[int]:
    """Return the blocks that the index knows."""
    return [block for block in blocks if not block % _SAMPLE]


class PrefixIndex:
    """Replicas of one pool by the blocks that they hold."""

    def __init__(self) -> None:
        self._parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self._bits: dict[ReplicaId, int] = {}
        self._by_bit: list[ReplicaId | None] = []
        self._sent: list[dict[int, int]] = [{} for _ in range(_SENT_TURNS)]
        """By turn, the newest last: the replicas that got prompts with a block."""

    def add(self, replica: ReplicaId, blocks: Iterable[int]) -> None:
        """Record that the replica holds these blocks."""
        bit = self._bits.get(replica) or self._new_bit(replica)
        for block in sampled(blocks):
            part = self._parts[block // _SAMPLE % _PARTS]
            holders = part.setdefault(block, bit)
            if not holders & bit:
                part[block] = holders | bit

    def remove(self, replica: ReplicaId, blocks: Iterable[int]) -> None:
        """Record that the replica does not hold these blocks any more."""
        bit = self._bits.get(replica, 0)
        for block in sampled(blocks):
            part = self._parts[block // _SAMPLE % _PARTS]
            holders = part.get(block, 0)
            if holders == bit:
                del part[block]
            elif holders & bit:
                part[block] = holders ^ bit

    def drop(self, replica: ReplicaId, blocks: Iterable[int]) -> None:
        """Forget a replica, which held ``blocks``."""
        if replica not in self._bits:
            return
        self.remove(replica, blocks)
        bit = self._bits.pop(replica)
        self._by_bit[bit.bit_length() - 1] = None
        self._sent = [{block: holders & ~bit for block, holders in turn.items()} for turn in self._sent]

    def _new_bit(self, replica: ReplicaId) -> int:
        if None in self._by_bit:
            number = self._by_bit.index(None)
            self._by_bit[number] = replica
        else:
            number = len(self._by_bit)
            self._by_bit.append(replica)
        self._bits[replica] = 1 << number
        return 1 << number

    def sent(self, replica: ReplicaId, hashes: Sequence[int]) -> None:
        """Record that a request with this prompt went to the replica, which will have cached its blocks."""
        bit, turn = self._bits.get(replica), self._sent[-1]
        if bit is not None and len(turn) < _SENT_BLOCKS_MAX:
            for block in sampled(hashes):
                turn[block] = turn.get(block, 0) | bit

    def end_turn(self) -> None:
        """Begin the next turn: all changes that the agents published until now have been applied."""
        self._sent = [*self._sent[1:], {}]

    def depth(self, hashes: Sequence[int]) -> int:
        """Return how many of the prompt's indexed blocks a replica holds: the most that any does."""
        known = sampled(hashes)
        low, high = 0, len(known)
        while low < high:
            middle = (low + high + 1) // 2
            if self._holders(known[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def find(self, hashes: Sequence[int], replicas_max: int, turn: int = 0) -> list[ReplicaId]:
        """Return replicas that hold a beginning of the prompt, the longest first.

        Among equals ``turn`` decides which come first.
        """
        found: list[ReplicaId] = []
        known = sampled(hashes)
        if not known:
            return found
        for mask in self._groups(known, 0, len(known), self._holders(known[0])):
            start = turn % len(self._by_bit)
            late = mask >> start << start
            for part in (late, mask ^ late):
                for number in _numbers(part):
                    replica = self._by_bit[number]
                    assert replica is not None
                    found.append(replica)
                    if len(found) == replicas_max:
                        return found
        return found

    def _holders(self, block: int) -> int:
        mask = self._parts[block // _SAMPLE % _PARTS].get(block, 0)
        for turn in self._sent:
            if turn:
                mask |= turn.get(block, 0)
        return mask

    def _groups(self, blocks: Sequence[int], low: int, high: int, mask: int) -> Iterator[int]:
        """Divide the replicas of ``mask``, which hold block ``low`` and not block ``high``, by how far they hold.

        A cache evicts the end of a prompt before its beginning, so bisection finds how far.
        """
        if not mask:
            return
        if high - low == 1:
            yield mask
            return
        middle = (low + high) // 2
        further = mask & self._holders(blocks[middle])
        yield from self._groups(blocks, middle, high, further)
        yield from self._groups(blocks, low, middle, mask ^ further)


def _numbers(mask: int) -> Iterator[int]:
    """Return the numbers of the bits that are set."""
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
