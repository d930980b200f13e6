"""Parsers of create bodies, by dialect and path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stream_gw.dialects.anthropic.requests import DIALECT, parse_count_tokens, parse_messages
from stream_gw.dialects.pooling.classify import parse_classify
from stream_gw.dialects.pooling.embeddings import parse_embeddings
from stream_gw.dialects.pooling.rerank import parse_rerank
from stream_gw.dialects.pooling.score import parse_score
from stream_gw.dialects.requests import CreateRequest, parse_create
from stream_gw.dialects.responses.requests import OPEN, OPENAI, parse_responses
from stream_gw.dialects.ui.requests import DIALECT as UI_DIALECT
from stream_gw.dialects.ui.requests import parse_ui

Parser = Callable[[bytes], CreateRequest]

PARSERS: dict[str, Parser] = {
    "openai.chat": partial(parse_create, kind="chat"),
    "openai.completions": partial(parse_create, kind="completions"),
    DIALECT: parse_messages,
    UI_DIALECT: parse_ui,
    OPENAI: parse_responses,
    OPEN: partial(parse_responses, dialect=OPEN),
}
"""Parsers of the dialects that are streamed."""
PATHS: dict[str, Parser] = {
    "/v1/chat/completions": PARSERS["openai.chat"],
    "/v1/completions": PARSERS["openai.completions"],
    "/v1/messages": PARSERS[DIALECT],
    "/v1/messages/count_tokens": parse_count_tokens,
    "/v1/embeddings": parse_embeddings,
    "/v1/rerank": parse_rerank,
    "/v1/classify": parse_classify,
    "/v1/score": parse_score,
}
"""Parsers of all paths that create a stream."""
