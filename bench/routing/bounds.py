"""What no policy can beat, and what a single cache of the fleet's size would hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from inference.simulate.traces import ENGINE_BLOCK_TOKENS, TRACE_BLOCK_TOKENS, Request


def infinite(requests: Sequence[Request]) -> float:
    """Share of the prompts' tokens whose block ids came before in the trace."""
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
    """Of each prompt, the tokens that one LRU cache of that size, fed in order of arrival, would hold; a chain's end is
    evicted before its beginning, and the last token is always computed."""
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
