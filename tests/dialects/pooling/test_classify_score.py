"""Bodies of ``/v1/classify`` and ``/v1/score``: accepted ones, and errors that name the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import BATCH_MAX
from stream_gw.dialects.pooling.classify import parse_classify
from stream_gw.dialects.pooling.score import PAIRS, parse_score
from stream_gw.dialects.prompt import IMAGE_TOKENS
from stream_gw.dialects.requests import CreateRequest


def classify(**body: Any) -> CreateRequest:
    return parse_classify(msgspec.json.encode({"model": "m", **body}))


def score(**body: Any) -> CreateRequest:
    return parse_score(msgspec.json.encode({"model": "m", **body}))


@pytest.mark.parametrize("given", ["x", ["x", "y"], [1, 2], [[1], [2, 3]]])
def test_the_inputs_of_a_classification(given: Any) -> None:
    request = classify(input=given, use_activation=False, session_id="s")
    assert (request.kind, request.max_tokens, request.session_id) == ("classify", 1, "s")
    assert msgspec.json.decode(request.body) == {"model": "m", "input": given, "use_activation": False}
    assert request.prompt_bytes == len(msgspec.json.encode(given))


def test_a_chat_is_classified() -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = classify(messages=messages)
    assert msgspec.json.decode(request.body)["messages"] == messages
    assert request.input_bytes == len(msgspec.json.encode(messages))


def test_an_image_is_not_taken_for_its_bytes() -> None:
    def parts(size: int) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}]

    large = classify(messages=[{"role": "user", "content": parts(1 << 20)}])
    assert large.input_bytes < 4 * IMAGE_TOKENS + 100
    pair = score(queries="a cat", documents=[{"content": parts(1 << 20)}, {"content": parts(100)}])
    assert pair.input_bytes < 4 * IMAGE_TOKENS + 500


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", 1]}, "input"),
        ({"input": ["x"] * (BATCH_MAX + 1)}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}], "input": "x"}, "messages"),
        ({"messages": "x"}, "messages"),
    ],
)
def test_a_wrong_classification_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        classify(**body)
    assert refused.value.param == param


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("left", "right"), [("q", "d"), ("q", ["d", "e"]), (["q", "r"], ["d", "e"]), (["q"], ["d", "e"])]
)
def test_the_pairs_of_a_score(pair: tuple[str, str], left: Any, right: Any) -> None:
    request = score(**dict(zip(pair, (left, right), strict=True)))
    assert request.kind == "score"
    repeats = len(right) if isinstance(right, list) and not (isinstance(left, list) and len(left) > 1) else 1
    assert request.input_bytes == len(msgspec.json.encode(left)) * repeats + len(msgspec.json.encode(right))


def test_a_text_may_have_parts() -> None:
    part = {"content": [{"type": "text", "text": "x"}]}
    assert score(queries=part, documents=[part, "y"]).kind == "score"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "queries"),
        ({"queries": "q"}, "documents"),
        ({"text_2": "q"}, "queries"),
        ({"queries": [], "documents": "d"}, "queries"),
        ({"queries": "q", "documents": []}, "documents"),
        ({"queries": ["q", "r"], "documents": ["d"]}, "queries"),
        ({"queries": "q", "documents": ["d"] * (BATCH_MAX + 1)}, "documents"),
        ({"queries": 7, "documents": "d"}, "queries"),
        ({"queries": {"content": []}, "documents": "d"}, "queries"),
        ({"text_1": "q", "text_2": [1]}, "text_2"),
        ({"queries": "q", "documents": "d", "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
    ],
)
def test_a_wrong_score_names_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        score(**body)
    assert refused.value.param == param


def test_neither_is_streamed() -> None:
    for parse in (lambda: classify(input="x", stream=True), lambda: score(queries="q", documents="d", stream=True)):
        with pytest.raises(Unsupported, match="is not streamed"):
            parse()
