"""Prompts that are made to fit a context, against tokenizers of every kind: few counts, and an end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import ContextLengthExceeded
from stream_gw.dialects.requests import CreateRequest
from stream_gw.dialects.responses.requests import OPENAI, read_asked
from stream_gw.dialects.responses.truncation import Cuttable, input_limit
from stream_gw.streams.context.fit import Fitting, Prompt
from tests.dialects.responses.test_truncation import conversations, is_alternating, user

COUNTS_MAX = 4


class Tokenizer:
    """Counts the tokens of each message as its length decides: from one for each word to two for a byte."""

    def __init__(self, seed: int, *, can_count: bool = True) -> None:
        self.seed = seed
        self.can_count = can_count
        self.calls = 0

    def tokens(self, request: CreateRequest) -> int:
        messages = msgspec.json.decode(request.body)["messages"]
        return sum(self._of(msgspec.json.encode(message)) for message in messages) + 3

    def _of(self, message: bytes) -> int:
        share = (16, 8, 4, 2, 1)[(len(message) * 31 + self.seed) % 5]
        return max(1, message.count(b" "), 2 * len(message) // share)  # no tokenizer joins words

    async def count(self, request: CreateRequest) -> int | None:
        self.calls += 1
        return self.tokens(request) if self.can_count else None


def fit(items: list[dict[str, Any]], context: int, tokenizer: Tokenizer) -> CreateRequest:
    body = {"model": "m", "input": items, "truncation": "auto", "instructions": "Be kind.", "max_output_tokens": 10}
    asked = read_asked(msgspec.json.encode(body))
    request = asked.request([])
    prompt = Prompt(request, asked, asked.items, len(request.body))
    return asyncio.run(Fitting(prompt, OPENAI, tokenizer, context, input_limit(context, 10)).cut())


@given(conversations(), st.integers(30, 2000), st.integers(0, 4))
def test_what_remains_fits_or_nothing_more_may_go(items: list[dict[str, Any]], context: int, seed: int) -> None:
    tokenizer = Tokenizer(seed)
    least = fit(items, 1 << 30, tokenizer)
    assert tokenizer.calls == 1 and msgspec.json.decode(least.settings or b"{}").get("truncated_items") is None
    tokenizer.calls = 0
    try:
        made = fit(items, context, tokenizer)
    except ContextLengthExceeded:
        assert tokenizer.calls <= COUNTS_MAX
        return
    assert tokenizer.calls <= COUNTS_MAX
    messages = msgspec.json.decode(made.body)["messages"]
    assert is_alternating(messages) and messages[0]["content"].startswith("Be kind.")
    left_out = msgspec.json.decode(made.settings or b"{}").get("truncated_items", 0)
    if tokenizer.tokens(made) > input_limit(context, 10):
        whole = Cuttable(items)
        assert left_out == len(items) - len(whole.kept(len(whole.groups))), "no more may go"
    if tokenizer.tokens(least) <= input_limit(context, 10):
        assert left_out == 0, "what fits stays whole"


def test_an_engine_that_cannot_count_is_guessed_for() -> None:
    items = [user("word " * 50) for _ in range(40)]
    tokenizer = Tokenizer(0, can_count=False)
    made = fit(items, 1000, tokenizer)
    left_out = msgspec.json.decode(made.settings or b"{}")["truncated_items"]
    assert 20 < left_out < 39 and tokenizer.calls <= COUNTS_MAX


def test_what_must_stay_and_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(ContextLengthExceeded, match=r"is 100 tokens, and what truncation keeps of the input takes \d+"):
        fit([user("a"), user("b"), user("word " * 200)], 100, Tokenizer(3))
