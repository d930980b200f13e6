"""Chooses the items of a conversation that a request leaves out when the whole exceeds the model's context. Pure.

What remains is a conversation that chat templates take: it begins with a user's message where the whole did, and no
call is without its output. System messages, summaries, the last user message and what came last always remain.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from stream_gw.dialects.context import least_tokens

Json = dict[str, Any]
SUMMARY = "is_summary"
"""Field of a message that a compaction has become. Truncation never leaves it out."""
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_DATA_URL_BYTES = 4096
"""Weight of an image or a file in a data URL: its tokens do not follow from its bytes."""
_STEPS = 4
"""Places in one context, at least, at which a conversation may be cut. Later requests are cut at the same place, until
the next one is needed: they share the prefix of their prompts, and so the KV cache."""
_RESERVE_SHARE = 8
_RESERVE_TOKENS_MAX = 4096
_encode = msgspec.json.encode


def input_limit(context: int, max_tokens: int | None) -> int:
    """Return the tokens of a model's context that a prompt may take, so that an answer has room.

    ``max_tokens``: limit of the answer. It takes at most half of the context; without it the answer has an eighth, at
    most 4096 tokens.
    """
    reserve = min(context // _RESERVE_SHARE, _RESERVE_TOKENS_MAX) if max_tokens is None else max_tokens
    return context - min(reserve, context // 2)


class Cuttable:
    """A conversation, and the groups of its items that may be left out, the oldest first.

    ``other``: the rest of the prompt, such as instructions and tools. ``keeps_summaries``: False for a new summary,
    which stands for those before it too.
    """

    def __init__(self, items: list[Json], *other: Any, keeps_summaries: bool = True) -> None:
        self.items = items
        self.groups = _groups(items, keeps_summaries=keeps_summaries)
        self._weights = [_weight(item) for item in items]
        self._whole = sum(self._weights) + sum(_weight(each) for each in other)
        self._cut = [0, *accumulate(sum(self._weights[at] for at in group) for group in self.groups)]
        """Weight of the first 0, 1, 2, … groups."""

    def kept(self, count: int) -> list[Json]:
        """Return the items without those of the first ``count`` groups."""
        left_out = {at for group in self.groups[:count] for at in group}
        return [item for at, item in enumerate(self.items) if at not in left_out]

    def left_out(self, count: int) -> list[Json]:
        """Return the items of the first ``count`` groups."""
        return [self.items[at] for group in self.groups[:count] for at in group]

    def weight(self, count: int) -> int:
        """Return the weight of the prompt without the first ``count`` groups, in bytes."""
        return self._whole - self._cut[count]

    def certain(self, limit: int) -> int:
        """Return the number of groups that certainly must go: no tokenizer writes the rest in ``limit`` tokens."""
        tokens = [_least(item) for item in self.items]
        left, count = sum(tokens), 0
        while left > limit and count < len(self.groups):
            left -= sum(tokens[at] for at in self.groups[count])
            count += 1
        return count

    def next_cut(self, count: int, tokens: int, goal: float) -> int:
        """Return the number of groups, above ``count``, without which the prompt has about ``goal`` tokens.

        ``tokens``: of the prompt without the first ``count`` groups.
        """
        per_token = max(1.0, self.weight(count) / tokens)
        needed = self._cut[count] + (tokens - goal) * per_token
        step = 1 << max(0, int(goal * per_token / _STEPS).bit_length() - 1)
        rounded = -(-needed // step) * step
        return min(max(bisect_left(self._cut, rounded), count + 1), len(self.groups))


def _groups(items: list[Json], *, keeps_summaries: bool) -> list[tuple[int, ...]]:
    """Return the items that may be left out in groups, each of which goes as a whole: the turns before the last one,
    then what the assistant did in the last turn, but for its end."""
    open_after = _open_calls(items)
    starts = [at for at, item in enumerate(items) if _role(item) == "user" and not (at and open_after[at - 1])]
    last = starts[-1] if starts else 0
    bounds = [*starts, len(items)] if starts[:1] == [0] else [0, *starts, len(items)]
    turns = [range(*pair) for pair in pairwise(bounds) if pair[1] <= last]
    groups = turns
    ends = [at for at in range(last, len(items)) if not open_after[at] and items[at].get("type") != "reasoning"]
    begin, works = last, []
    for end in ends:
        works.append(range(begin, end + 1))
        begin = end + 1
    if begin == len(items) and works:
        works.pop()  # the last items remain; others that nothing has ended do so in any case
    groups += works
    if keeps_summaries:
        groups = [group for group in groups if not any(items[at].get(SUMMARY) for at in group)]
    made = (tuple(at for at in group if _may_go(items[at], at < last)) for group in groups)
    return [group for group in made if group]


def _open_calls(items: list[Json]) -> list[bool]:
    """Return for each item whether the output of a call up to it comes later."""
    results = {item.get("call_id"): at for at, item in enumerate(items) if item.get("type") in _RESULTS}
    until, made = -1, []
    for at, item in enumerate(items):
        if item.get("type") in _CALLS:
            until = max(until, results.get(item.get("call_id"), -1))
        made.append(at < until)
    return made


def _role(item: Json) -> str:
    """Return the role of a message; empty: the item is none."""
    return str(item.get("role", "")) if (item.get("type") or "message") == "message" else ""


def _may_go(item: Json, is_earlier: bool) -> bool:
    """Whether an item may be left out; ``is_earlier``: it stands before the last turn."""
    role = _role(item)
    return role not in ("system", "developer") and (role != "user" or is_earlier)


def _weight(value: Any) -> int:
    """Return the bytes of a value as JSON; a data URL counts as a fixed number."""
    size = len(_encode(value))
    return size if size <= _DATA_URL_BYTES else size - sum(map(_excess, _strings(value)))


def _excess(text: str) -> int:
    return max(0, len(text) - _DATA_URL_BYTES) if text.startswith("data:") else 0


def _strings(value: Any) -> list[str]:
    """Return the strings of a message's or an output's parts, where URLs may be."""
    parts = [
        part
        for name in ("content", "output")
        if isinstance(value, dict) and isinstance(value.get(name), list)
        for part in value[name]
        if isinstance(part, dict)
    ]
    return [text for part in parts for text in part.values() if isinstance(text, str)]


def _least(item: Json) -> int:
    """Return the least number of tokens that an item has in every template."""
    if _role(item) not in ("user", "system", "developer") and item.get("type") not in _RESULTS:
        return 0  # templates leave out thoughts, and write calls in their own form
    content = item.get("content", item.get("output"))
    if isinstance(content, str):
        return least_tokens(content)
    texts = [part.get("text") for part in content or () if isinstance(part, dict)] if isinstance(content, list) else []
    return sum(least_tokens(text) for text in texts if isinstance(text, str))
