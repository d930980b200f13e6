"""The simulator's answers: sentences, tables, functions and lists of the corpus, in an order that a key decides."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count, repeat
from typing import Literal, NamedTuple

from inference.engines.sim.corpus import (
    COMMON,
    FUNCTIONS,
    HEADINGS,
    INTRODUCTIONS,
    LISTS,
    OPENERS,
    QUOTES,
    SENTENCES,
    TABLES,
)

Task = Literal["explanation", "table", "function", "list"]
"""Kind of text that a prompt asks for."""

_LOOKED_AT = 400
"""Characters at the end of a prompt that tell its topic."""
_TASK_WORDS: dict[str, Task] = {
    **dict.fromkeys(("list", "steps", "checklist", "bullets"), "list"),
    **dict.fromkeys(("function", "code", "python", "program", "script", "implement", "snippet"), "function"),
    **dict.fromkeys(("table", "tabular", "compare", "comparison", "versus"), "table"),
}
"""Task by word; of several words the last in this order decides."""
_SHARED_MIN: dict[Task, int] = {"explanation": 2, "function": 1, "table": 1, "list": 1}
"""Words that a prompt and a text must share to be about the same."""
_WORD = re.compile(r"\w{3,}")
_TOKEN = re.compile(r"\s*\S+")


def _split(text: str) -> tuple[str, ...]:
    """Split into tokens: words with the space before them."""
    return tuple(_TOKEN.findall(text))


def _sentence(text: str) -> tuple[str, ...]:
    return _split(" " + text)


_SENTENCES = tuple(map(_sentence, SENTENCES))
_OPENERS = tuple(map(_split, OPENERS))
_BLOCKS: dict[Task, tuple[tuple[str, ...], ...]] = {
    "table": tuple(_split("\n" + text.rstrip()) for text in TABLES),
    "function": tuple(_split("\n" + text.rstrip()) for text in FUNCTIONS),
    "list": tuple(_split("\n" + text.rstrip()) for text in LISTS),
    "explanation": tuple(_split("\n\n" + text) for text in (*HEADINGS, *QUOTES)),
}
_COMMON = frozenset(COMMON.split())
_INTRODUCTIONS = {task: tuple(map(_split, texts)) for task, texts in INTRODUCTIONS.items()}
_LATER: tuple[Task, ...] = ("explanation", "explanation", "list", "explanation", "function", "explanation", "table")
"""Blocks between later paragraphs, of which the key takes one."""


_TEXTS: dict[Task, Sequence[str]] = {
    "explanation": SENTENCES, "table": TABLES, "function": FUNCTIONS, "list": LISTS
}  # fmt: skip


class Topic(NamedTuple):
    """Kind of text that a prompt asks for, and the text nearest to it."""

    task: Task
    nearest: int | None
    """The block, or for an explanation the sentence, that shares most words with the prompt; None: none does."""


def topic_of(prompt: str) -> Topic:
    """Return what a prompt asks for; an explanation where it does not say."""
    words = set(_WORD.findall(prompt[-_LOOKED_AT:].casefold()))
    asked = [task for word, task in _TASK_WORDS.items() if word in words]
    task: Task = asked[-1] if asked else "explanation"
    shared = Counter(chain.from_iterable(map(_PLACES[task].get, words, repeat(()))))
    found = max(shared.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
    return Topic(task, found[0] if found[1] >= _SHARED_MIN[task] else None)


def tokens_of(topic: Topic, key: bytes) -> Iterator[str]:
    """Yield the tokens of an answer, without end."""
    task, nearest = topic
    number = _number(key, 0)
    first = (number >> 8) % len(_SENTENCES)
    if task == "explanation":
        first = first if nearest is None else nearest
        yield from _take(_OPENERS, number)
        yield from _SENTENCES[first]
    else:
        yield from _take(_INTRODUCTIONS[task], number)
        yield from _take(_BLOCKS[task], number >> 16 if nearest is None else nearest)
        yield from _paragraph([first])
    for paragraph in _paragraphs(key, number, first):
        yield from paragraph


def _paragraphs(key: bytes, number: int, last: int) -> Iterator[Iterator[str]]:
    """Yield paragraphs of two to four sentences, each with a block after it. A cycle meets each sentence once.

    ``last``: the sentence before the first paragraph, which begins in its line.
    """
    for cycle in count(1):
        stride = 1 + (number >> 24) % (len(_SENTENCES) - 1)
        left = len(_SENTENCES) - 1
        while left > 0:
            size = min(left, 2 + (number >> left % 40) % 3)
            numbers = [(last + stride * step) % len(_SENTENCES) for step in range(1, size + 1)]
            in_line = cycle == 1 and left == len(_SENTENCES) - 1
            yield chain.from_iterable(_SENTENCES[each] for each in numbers) if in_line else _paragraph(numbers)
            last, left = numbers[-1], left - size
            yield iter(_take(_BLOCKS[_LATER[(number >> left % 48) % len(_LATER)]], number >> left % 32))
        number = _number(key, cycle)


def _paragraph(numbers: Sequence[int]) -> Iterator[str]:
    """Yield the tokens of the sentences, after an empty line."""
    first, *rest = _SENTENCES[numbers[0]]
    yield "\n\n" + first.lstrip()
    yield from rest
    for number in numbers[1:]:
        yield from _SENTENCES[number]


def _places(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the places of the texts that have a word, by word."""
    found: dict[str, tuple[int, ...]] = {}
    for place, text in enumerate(texts):
        for word in set(_WORD.findall(text.casefold())) - _COMMON:
            found[word] = (*found.get(word, ()), place)
    return found


def _take(choices: Sequence[tuple[str, ...]], number: int) -> tuple[str, ...]:
    return choices[number % len(choices)]


def _number(key: bytes, cycle: int) -> int:
    return int.from_bytes(hashlib.blake2b(key + cycle.to_bytes(4, "big"), digest_size=16).digest(), "big")


_PLACES = {task: _places(texts) for task, texts in _TEXTS.items()}
