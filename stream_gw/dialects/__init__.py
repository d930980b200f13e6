"""Encoders turn a stream's frames into the chunks of a client's API. Pure: no clock, event loop or randomness."""

from __future__ import annotations

from stream_fabric.errors import BadRequest, Unsupported
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.facts import ENCODER_VERSION, StreamFacts
from stream_gw.dialects.openai_chat import ChatEncoder
from stream_gw.dialects.openai_completions import CompletionsEncoder, MeasuringEncoder
from stream_gw.dialects.whole import WHOLE

DIALECTS: dict[str, type[Encoder]] = {"openai.chat": ChatEncoder, "openai.completions": CompletionsEncoder}


def encoder_for(dialect: str, facts: StreamFacts) -> Encoder:
    """Make an encoder of the dialect. Raises BadRequest for an unknown dialect, Unsupported for one that cannot encode
    the stream."""
    if facts.kind in WHOLE:
        raise Unsupported(
            f"this stream is the response to /v1/{facts.kind}, which is not streamed; repeat the request with its "
            "Idempotency-Key to read it again"
        )
    encoder = DIALECTS.get(dialect)
    if encoder is None:
        raise BadRequest(f"unknown dialect {dialect[:64]!r}; known: {', '.join(DIALECTS)}", param="dialect")
    if dialect != f"openai.{facts.kind}":
        raise Unsupported(
            f"this stream was created as openai.{facts.kind} and cannot be read as {dialect}", param="dialect"
        )
    if facts.encoder != ENCODER_VERSION:
        raise Unsupported(
            f"this stream needs encoder {facts.encoder}, this gateway has {ENCODER_VERSION}; retry on another one"
        )
    return MeasuringEncoder(facts) if encoder is CompletionsEncoder and facts.logprobs else encoder(facts)
