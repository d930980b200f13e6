"""Facts kept in a stream's meta, so that every gateway encodes it in the same way at every replay."""

from __future__ import annotations

import msgspec

from stream_fabric.stream.ids import StreamId
from stream_gw.dialects.requests import CreateRequest, Kind

ENCODER_VERSION = 1


class StreamFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fixed when the stream is created. ``created``: unix seconds. ``encoder``: version of the encoder.
    ``logprobs``: the request wants them."""

    stream: StreamId
    created: int
    model: str
    kind: Kind = "chat"
    n: int = 1
    include_usage: bool = False
    encoder: int = ENCODER_VERSION
    logprobs: bool = False

    @classmethod
    def of(cls, stream: StreamId, created: int, request: CreateRequest) -> StreamFacts:
        """Make the facts of a new stream; ``created``: unix seconds."""
        return cls(
            stream,
            created,
            request.model,
            request.kind,
            request.n,
            request.include_usage,
            logprobs=request.logprobs,
        )
