"""Parsers of create bodies, by dialect and path."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stream_gw.dialects.anthropic.requests import DIALECT, parse_count_tokens, parse_messages
from stream_gw.dialects.embeddings import parse_embeddings
from stream_gw.dialects.requests import CreateRequest, parse_create
from stream_gw.dialects.rerank import parse_rerank

Parser = Callable[[bytes], CreateRequest]

PARSERS: dict[str, Parser] = {
    "openai.chat": partial(parse_create, kind="chat"),
    "openai.completions": partial(parse_create, kind="completions"),
    DIALECT: parse_messages,
}
"""Parsers of the dialects that are streamed."""
PATHS: dict[str, Parser] = {
    "/v1/chat/completions": PARSERS["openai.chat"],
    "/v1/completions": PARSERS["openai.completions"],
    "/v1/messages": PARSERS[DIALECT],
    "/v1/messages/count_tokens": parse_count_tokens,
    "/v1/embeddings": parse_embeddings,
    "/v1/rerank": parse_rerank,
}
"""Parsers of all paths that create a stream."""
