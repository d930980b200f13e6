"""Attribute names of OpenTelemetry's conventions for generative AI, by version: the only place that knows them.

The conventions are still in development, and moved to a repository of their own after 1.41. An attribute that they do
not have gets our own prefix. A version is added here, and chosen by ``STREAM_GW_OTLP_NAMES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Version = Literal["1.41", "next"]


class Names(NamedTuple):
    """Attribute names of one version."""

    schema_url: str
    """Empty: the version has none yet."""
    words: Mapping[str, str]
    """Ours → theirs. What is not here is told under our prefix."""

    def attribute(self, word: str) -> str:
        """Return the span attribute for one of our words."""
        return self.words.get(word, f"stream_gw.{word}")


_SINCE_1_41 = {
    "operation": "gen_ai.operation.name",
    "provider": "gen_ai.provider.name",
    "model": "gen_ai.request.model",
    "response_model": "gen_ai.response.model",
    "response": "gen_ai.response.id",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "session": "gen_ai.conversation.id",
    "error": "error.type",
    "status": "http.response.status_code",
}
VERSIONS: Mapping[Version, Names] = {
    "1.41": Names("https://opentelemetry.io/schemas/1.41.0", _SINCE_1_41),
    "next": Names(
        "",
        _SINCE_1_41 | {"streamed": "gen_ai.request.stream", "ttft_s": "gen_ai.response.time_to_first_chunk"},
    ),
}
