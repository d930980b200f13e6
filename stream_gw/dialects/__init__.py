"""How frames are spelled for a client. Pure: no clock, loop or randomness."""

from __future__ import annotations

from stream_fabric.errors import BadRequest, Unsupported
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.facts import ENCODER_VERSION, StreamFacts
from stream_gw.dialects.openai_chat import ChatEncoder
from stream_gw.dialects.openai_completions import CompletionsEncoder, MeasuringEncoder
from stream_gw.dialects.whole import WHOLE

DIALECTS: dict[str, type[Encoder]] = {"openai.chat": ChatEncoder, "openai.completions": CompletionsEncoder}


def encoder_for(dialect: str, facts: StreamFacts) -> Encoder:
    """Raises BadRequest for an unknown dialect, Unsupported for one that cannot spell this stream."""
    if facts.kind in WHOLE:
        raise Unsupported(
            f"this stream is the answer to /v1/{facts.kind}, which comes whole and cannot be followed; repeat the "
            "request with its Idempotency-Key to read it again"
        )
    made = DIALECTS.get(dialect)
    if made is None:
        raise BadRequest(f"no dialect {dialect[:64]!r}; there are {', '.join(DIALECTS)}", param="dialect")
    if dialect != f"openai.{facts.kind}":
        raise Unsupported(
            f"this stream was made as openai.{facts.kind} and cannot be read as {dialect}", param="dialect"
        )
    if facts.encoder != ENCODER_VERSION:
        raise Unsupported(
            f"this stream is spelled by encoder {facts.encoder}; this gateway has {ENCODER_VERSION}, ask another"
        )
    return MeasuringEncoder(facts) if made is CompletionsEncoder and facts.logprobs else made(facts)
