"""The simulator's text looks like what was asked for, and depends on the request and the seed alone."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engines.sim.corpus import SENTENCES
from inference.engines.sim.text import Prompt, skip, words


def prompt(text: str, **more: Any) -> Prompt:
    return Prompt({"messages": [{"role": "user", "content": text}], **more})


def said(text: str, count: int = 120, seed: int = 1) -> str:
    return "".join(islice(words(prompt(text), seed), count))


@pytest.mark.parametrize(
    ("asked", "holds"),
    [
        ("Compare SSE and WebSocket in a table", ["| Transport | Good for | Resume |", "| SSE |"]),
        ("Write a Python function that merges sorted iterators", ["```python\ndef merge(", "\n    return", "```\n"]),
        ("Explain backpressure with an everyday example", ["Backpressure has an everyday example: a bakery"]),
        ("List the steps of a deploy", ["\n- ", "\n1. "]),
    ],
)
def test_an_answer_looks_like_what_was_asked_for(asked: str, holds: list[str]) -> None:
    for seed in range(20):
        text = said(asked, seed=seed)
        assert any(each in text for each in holds), text


def test_the_tables_and_functions_end_before_a_short_answer_does() -> None:
    for seed in range(50):
        assert "|\n\n" in said("a table, please", 50, seed)
        assert said("a function, please", 80, seed).count("```") >= 2


def test_texts_differ_with_the_seed_and_the_prompt() -> None:
    starts = {said("Hello", 12, seed) for seed in range(100)}
    assert len(starts) > 70
    assert len({said("Hello", 200, seed) for seed in range(100)}) == 100
    assert said("Hello", 200) != said("Hello!", 200)


def test_a_text_is_equal_in_every_process() -> None:
    code = (
        "from itertools import islice\nfrom inference.engines.sim.text import Prompt, words\n"
        "prompt = Prompt({'messages': [{'role': 'user', 'content': 'Explain how a gateway reads the log'}]})\n"
        "print(''.join(islice(words(prompt, 3), 500)), end='')"
    )
    texts = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True).stdout
        for seed in ("1", "2")
    }
    assert texts == {said("Explain how a gateway reads the log", 500, 3).encode()}


def test_a_cycle_meets_every_sentence_and_none_follows_itself() -> None:
    count = len(SENTENCES)
    assert all(count % divisor for divisor in range(2, count)), "the number of sentences is prime"
    text = said("Hello", 6000)
    assert all(sentence in text for sentence in SENTENCES)
    assert not any(f"{sentence} {sentence}" in text for sentence in SENTENCES)


@given(st.text(max_size=60), st.integers(-(1 << 61), 1 << 61), st.integers(0, 200), st.integers(0, 400))
def test_a_text_goes_on_where_it_was_cut(asked: str, seed: int, tokens: int, chars: int) -> None:
    """Within a token too: a stop string may have held its end back."""
    whole = "".join(islice(words(prompt(asked), seed), 260))
    cut = min(chars, len("".join(islice(words(prompt(asked), seed), tokens))))
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": whole[:cut]}]
    continued = Prompt({"messages": messages, "continue_final_message": True}, own_chars=cut)
    _, rest = skip(words(continued, seed), continued.continued)
    assert whole.startswith(whole[:cut] + "".join(islice(rest, 10)))


@given(st.text(max_size=60))
def test_every_token_has_text(asked: str) -> None:
    assert all(islice(words(prompt(asked), 1), 300))
