"""Requests that certainly exceed a model's maximum context, and those that may fit."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_fabric.errors import ContextLengthExceeded
from stream_gw.dialects.context import check_context, prompt_tokens_least
from stream_gw.dialects.pooling.embeddings import parse_embeddings
from stream_gw.dialects.requests import CreateRequest, Generated, parse_create

CONTEXT = 100
_PIECES = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+")
"""As byte pair encodings split a text before they merge: each piece has one token at least."""


def request(kind: Generated = "chat", **body: Any) -> CreateRequest:
    return parse_create(msgspec.json.encode({"model": "m", **body}), kind)


def said(*contents: Any, role: str = "user", **more: Any) -> CreateRequest:
    return request(messages=[{"role": role, "content": content} for content in contents], **more)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD " * 3000}}
WORDS = "a " * CONTEXT
FITS = {
    "one word less": said("a " * (CONTEXT - 1)),
    "long words": said("internationalization " * (CONTEXT - 1)),
    "spaces": said(" " * 128 * (CONTEXT - 1)),
    "escapes": said("\n\n\n\n" * 1000),
    "an image": said([IMAGE, {"type": "text", "text": "What is it?"}]),
    "thoughts": said(f"<think>{WORDS}</think>Yes.", role="assistant"),
    "tools": said("Hi", tools=[{"type": "function", "function": {"name": "f", "description": WORDS}}]),
    "a truncated prompt": said(WORDS, truncate_prompt_tokens=-1),
    "a template of its own": said(WORDS, chat_template="{{ messages[0] }}"),
    "all output": said("Hi", max_tokens=CONTEXT),
    "prompt and output": said("a " * 90, max_tokens=90),
    "ids": request("completions", prompt=[7] * (CONTEXT - 1)),
}
EXCEEDS: dict[str, tuple[CreateRequest, str, str]] = {
    "a chat's limit": (
        request("completions", prompt="Hi", max_completion_tokens=101),
        "max_tokens",
        "max_tokens is 101;",
    ),
    "words": (said(WORDS), "messages", "messages takes at least 100;"),
    "messages together": (said(*["a b c"] * 40), "messages", "at least 120;"),
    "parts": (said([{"type": "text", "text": WORDS}, IMAGE]), "messages", "at least 100;"),
    "a past answer": (said(WORDS, role="assistant"), "messages", "at least 100;"),
    "no words": (said("x" * 128 * CONTEXT), "messages", "at least 100;"),
    "a prompt": (request("completions", prompt=[WORDS]), "prompt", "prompt takes at least 100;"),
    "one of several prompts": (
        request("completions", prompt=["x", WORDS, "y"]),
        "prompt",
        "prompt takes at least 100;",
    ),
    "one of several lists": (request("completions", prompt=[[1], [2] * 100]), "prompt", "prompt takes 100;"),
    "ids": (request("completions", prompt=[7] * 170), "prompt", "prompt takes 170;"),
    "a list of ids": (request("completions", prompt=[[7] * 100]), "prompt", "prompt takes 100;"),
    "output": (said("Hi", max_completion_tokens=101), "max_tokens", "max_tokens is 101;"),
}


@pytest.mark.parametrize("fitting", FITS.values(), ids=FITS.keys())
def test_what_may_fit_passes(fitting: CreateRequest) -> None:
    check_context(fitting, CONTEXT)


@pytest.mark.parametrize(("exceeding", "param", "told"), EXCEEDS.values(), ids=EXCEEDS.keys())
def test_what_cannot_fit_is_refused_with_the_numbers(exceeding: CreateRequest, param: str, told: str) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"^This model's maximum context length is 100 tokens") as refused:
        check_context(exceeding, CONTEXT)
    error = refused.value
    assert (error.code, error.http_status, error.type) == ("context_length_exceeded", 400, "invalid_request_error")
    assert error.param == param and told in error.message and not error.retriable


def test_embeddings_are_left_to_the_engine_which_may_cut_them() -> None:
    check_context(parse_embeddings(msgspec.json.encode({"model": "m", "input": WORDS * 9})), CONTEXT)


@example("\x85 \x85")
@given(st.text(st.sampled_from("aé流🙂 \t\n\r\x0b\x1c\x85\u3000.,-_'1")) | st.text())
def test_the_bound_is_never_above_the_pieces_of_a_tokenizer(text: str) -> None:
    try:
        tokens, is_exact = prompt_tokens_least(request("completions", prompt=text))
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON cannot carry
        return
    assert not is_exact and tokens <= max(len(_PIECES.findall(text)), len(text) // 128)
