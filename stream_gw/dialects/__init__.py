"""Encoders turn a stream's frames into the chunks of a client's API. Pure: no clock, event loop or randomness."""

from __future__ import annotations

from stream_fabric.errors import BadRequest, Unsupported
from stream_gw.dialects.anthropic.encoder import MessagesEncoder
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.facts import ENCODER_SET, StreamFacts
from stream_gw.dialects.openai_chat import ChatEncoder
from stream_gw.dialects.openai_completions import CompletionsEncoder, MeasuringEncoder
from stream_gw.dialects.responses.encoder import OpenResponsesEncoder, ResponsesEncoder
from stream_gw.dialects.ui.encoder import UiEncoder
from stream_gw.dialects.whole import WHOLE, path_of

_FIRST: dict[str, type[Encoder]] = {"openai.chat": ChatEncoder, "openai.completions": CompletionsEncoder}
_SECOND: dict[str, type[Encoder]] = {**_FIRST, "anthropic.messages": MessagesEncoder}
_THIRD: dict[str, type[Encoder]] = {
    **_SECOND,
    "vercel.ui": UiEncoder,
    "openai.responses": ResponsesEncoder,
    "open.responses": OpenResponsesEncoder,
}
ENCODERS: dict[int, dict[str, type[Encoder]]] = {1: _FIRST, 2: _SECOND, 3: _THIRD, 4: _THIRD}
"""Encoders by set, then dialect. A stream is read with the set that it was begun with, as long as its log is kept.

Whoever changes the bytes of an encoder adds a set with the new class, marks the dialect in ``facts``, and removes the
old class a release later.
"""
DIALECTS = ENCODERS[ENCODER_SET]
"""Dialects that a stream can be read in, with their newest encoders."""


def encoder_for(dialect: str, facts: StreamFacts) -> Encoder:
    """Make an encoder of the dialect. Raises BadRequest for an unknown dialect, Unsupported for one that cannot encode
    the stream."""
    return encoder_class(dialect, facts)(facts)


def encoder_class(dialect: str, facts: StreamFacts) -> type[Encoder]:
    """Return the class of encoder that serves readers of the dialect. Raises like ``encoder_for``."""
    if facts.kind in WHOLE:
        raise Unsupported(
            f"this stream is the response to {path_of(facts.kind)}, which is not streamed; repeat the request with its "
            "Idempotency-Key to read it again"
        )
    if dialect not in DIALECTS:
        raise BadRequest(f"unknown dialect {dialect[:64]!r}; known: {', '.join(DIALECTS)}", param="dialect")
    if (reason := _inexpressible(dialect, facts)) is not None:
        raise Unsupported(
            f"this stream was created as {facts.own_dialect} and cannot be read as {dialect}: {reason}", param="dialect"
        )
    if facts.encoder not in ENCODERS:
        raise Unsupported(
            f"this stream needs encoder {facts.encoder}, this gateway has {', '.join(map(str, ENCODERS))}; retry on "
            "another one"
        )
    # A set that lacks the dialect is older than the dialect: nobody has read such a stream in it before
    encoder = next(
        found for number in range(facts.encoder, ENCODER_SET + 1) if (found := ENCODERS[number].get(dialect))
    )
    return MeasuringEncoder if encoder is CompletionsEncoder and facts.logprobs else encoder


def _inexpressible(dialect: str, facts: StreamFacts) -> str | None:
    """Return why the dialect cannot express the stream; None: it can."""
    if dialect == "openai.completions" and facts.kind != "completions":
        return "text completions have no reasoning, refusals or tool calls"
    if dialect == "openai.chat" and facts.kind != "chat" and facts.logprobs:
        return "its logprobs are in the shape of text completions"
    if dialect == "anthropic.messages" and facts.n != 1:
        return f"it has {facts.n} choices, and a message has one"
    if dialect == "anthropic.messages" and facts.logprobs:
        return "messages have no logprobs"
    if dialect == "vercel.ui" and facts.n != 1:
        return f"it has {facts.n} choices, and a UI message has one"
    if dialect == "vercel.ui" and facts.logprobs:
        return "UI messages have no logprobs"
    if dialect.endswith(".responses") and facts.n != 1:
        return f"it has {facts.n} choices, and a response has one"
    if dialect.endswith(".responses") and facts.kind != "chat" and facts.logprobs:
        return "its logprobs are in the shape of text completions"
    return None
