"""What a stream's meta holds so that any gateway spells it the same way, now and at every replay."""

from __future__ import annotations

import msgspec

from stream_fabric.ids import StreamId
from stream_gw.dialects.requests import CreateRequest, Kind

ENCODER_VERSION = 1


class StreamFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Frozen with the stream. ``created``: unix seconds. ``encoder``: the version that spells it. ``logprobs``: they
    were asked for."""

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
        return cls(
            stream,
            created,
            request.model,
            request.kind,
            request.n,
            request.include_usage,
            logprobs=request.logprobs,
        )
