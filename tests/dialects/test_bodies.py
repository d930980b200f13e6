"""The described create bodies against the parsers: the same fields, the same names of tiers."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stream_fabric.errors import BadRequest
from stream_gw.dialects import bodies
from stream_gw.dialects.anthropic import bodies as anthropic
from stream_gw.dialects.anthropic.requests import parse_count_tokens, parse_messages
from stream_gw.dialects.pooling.classify import parse_classify
from stream_gw.dialects.pooling.embeddings import parse_embeddings
from stream_gw.dialects.pooling.rerank import parse_rerank
from stream_gw.dialects.pooling.score import parse_score
from stream_gw.dialects.requests import OWN_FIELDS, TIERS, CreateRequest, parse_create
from stream_gw.dialects.responses import bodies as responses
from stream_gw.dialects.responses.requests import parse_responses

Parser = Callable[[bytes], CreateRequest]
MODEL = {"model": "m"}
BODIES: list[tuple[type[msgspec.Struct], Parser, dict[str, Any]]] = [
    (bodies.ChatBody, lambda body: parse_create(body, "chat"), {"messages": [{"role": "user", "content": "hi"}]}),
    (bodies.CompletionsBody, lambda body: parse_create(body, "completions"), {"prompt": "hi"}),
    (anthropic.MessagesBody, parse_messages, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    (anthropic.CountTokensBody, parse_count_tokens, {"messages": [{"role": "user", "content": "hi"}]}),
    (responses.ResponsesBody, parse_responses, {"input": "hi"}),
    (bodies.EmbeddingsBody, parse_embeddings, {"input": "hi"}),
    (bodies.RerankBody, parse_rerank, {"query": "hi", "documents": ["a"]}),
    (bodies.ClassifyBody, parse_classify, {"input": "hi"}),
    (bodies.ScoreBody, parse_score, {"queries": "hi", "documents": ["a"]}),
]
ALTERNATIVES = (bodies.ClassifyBody, bodies.ScoreBody)
"""Bodies that a caller may write in several ways, so that their inputs are described as optional."""
each_body = pytest.mark.parametrize(
    ("struct", "parser", "least"), BODIES, ids=lambda part: getattr(part, "__name__", "")
)


@each_body
def test_every_described_field_is_checked_by_the_parser(
    struct: type[msgspec.Struct], parser: Parser, least: dict[str, Any]
) -> None:
    parser(msgspec.json.encode(MODEL | least))
    for field in msgspec.structs.fields(struct):
        with pytest.raises(BadRequest) as refused:
            parser(msgspec.json.encode(MODEL | least | {field.name: [{"no": "such value"}]}))
        assert refused.value.param == field.name


@pytest.mark.parametrize(
    ("struct", "parser", "least"),
    [body for body in BODIES if body[0] is not responses.ResponsesBody],  # its input is only needed where it is alone
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_every_required_field_is_described_as_required(
    struct: type[msgspec.Struct], parser: Parser, least: dict[str, Any]
) -> None:
    body = MODEL | least
    required = {field.name for field in msgspec.structs.fields(struct) if field.required}
    assert required == (set(MODEL) if struct in ALTERNATIVES else set(body))
    for name in body:
        with pytest.raises(BadRequest, match=f"{name} is missing"):
            parser(msgspec.json.encode({other: value for other, value in body.items() if other != name}))


@pytest.mark.parametrize(
    ("struct", "parser", "least"),
    [body for body in BODIES if body[0] is not anthropic.CountTokensBody],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_field_that_is_not_described_goes_to_the_engine(
    struct: type[msgspec.Struct], parser: Parser, least: dict[str, Any]
) -> None:
    request = parser(msgspec.json.encode(MODEL | least | {"vendor": {"any": "value"}}))
    assert msgspec.json.decode(request.body)["vendor"] == {"any": "value"}


def test_the_gateways_own_fields_are_described() -> None:
    assert set(OWN_FIELDS) <= {field.name for field in msgspec.structs.fields(bodies.ChatBody)}


def test_the_tiers_are_those_of_the_parser() -> None:
    described = typing.get_type_hints(bodies.ChatBody)["service_tier"]
    assert set(typing.get_args(typing.get_args(described)[0])) == set(TIERS)
