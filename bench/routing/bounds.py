"""Upper bounds of any policy, and the hit rate of a single cache of the fleet's size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from inference.simulate.traces import ENGINE_BLOCK_TOKENS, TRACE_BLOCK_TOKENS, Request


def infinite(requests: Sequence[Request]) -> float:
    """Share of prompt tokens whose block ids came before in the trace."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        known = 0
        while known < len(request.ids) and request.ids[known] in seen:
            known += 1
        hits += min(known * TRACE_BLOCK_TOKENS, request.prompt_tokens)
        seen.update(request.ids)
    return hits / sum(r.prompt_tokens for r in requests)


def cached_tokens(requests: Sequence[Request], capacity_tokens: int) -> list[int]:
    """Cached tokens of each prompt in one LRU cache of that size, filled in order of arrival.

    The end of a chain of blocks is evicted before its beginning. The last token is always computed.
    """
    held: OrderedDict[int, None] = OrderedDict()
    capacity = capacity_tokens // ENGINE_BLOCK_TOKENS
    cached: list[int] = []
    for request in requests:
        hashes = request.engine_hashes
        usable = hashes[: (request.prompt_tokens - 1) // ENGINE_BLOCK_TOKENS]
        known = 0
        while known < len(usable) and usable[known] in held:
            known += 1
        cached.append(known * ENGINE_BLOCK_TOKENS)
        for value in reversed(hashes):
            held[value] = None
            held.move_to_end(value)
        while len(held) > capacity:
            held.popitem(last=False)
    return cached
