"""A stream's meta: facts, so that every gateway encodes it in the same way at every replay, and what its bill needs."""

from __future__ import annotations

import msgspec

from stream_fabric.pool.records import Work
from stream_fabric.recovery.bill_terms import BillTerms
from stream_fabric.stream.frames import MaybeRaw
from stream_fabric.stream.ids import StreamId
from stream_gw.dialects.requests import CreateRequest, Kind

ENCODER_SET = 4
"""Newest set of encoders (``stream_gw.dialects.ENCODERS``)."""
_CHANGED_IN = {"anthropic.messages": 2, "vercel.ui": 3, "openai.responses": 3, "open.responses": 3}
"""The set in which a dialect's encoder came or last changed its bytes; 1 for all others. A stream is marked with its
dialect's, so that gateways of the release before go on reading what they can."""
_WITH_COMPACTION = 4
"""The set from which on encoders know answers that begin with a compaction."""


class StreamFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fixed when the stream is created. ``created``: unix seconds. ``logprobs``: the request wants them."""

    stream: StreamId
    created: int
    model: str
    kind: Kind = "chat"
    """Task of the engine."""
    n: int = 1
    include_usage: bool = False
    encoder: int = 1
    """Set of encoders that the stream was begun with. A stream without the field was begun with set 1."""
    logprobs: bool = False
    dialect: str = ""
    """Dialect of the request; empty: OpenAI's of the kind."""
    message_id: str = ""
    """Id of the client's message that the answer continues; empty: derived from the stream's."""
    settings: MaybeRaw = None
    """Settings that the dialect repeats in its answers, as a JSON object."""
    compaction: str = ""
    """Sealed content of the compaction that the answer begins with; empty: it begins with none."""
    prompt_only: bool = False
    """The request wants its prompt in the KV cache and no answer. Engines make one token, which its readers do not
    get."""

    @property
    def own_dialect(self) -> str:
        """Dialect in which a reader gets the stream that names none."""
        return self.dialect or f"openai.{self.kind}"

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
            _WITH_COMPACTION if request.compaction else _CHANGED_IN.get(request.dialect, 1),
            logprobs=request.logprobs,
            dialect=request.dialect,
            message_id=request.message_id,
            settings=request.settings,
            compaction=request.compaction,
            prompt_only=request.max_tokens == 0 and request.kind == "chat",
        )


class StreamMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a stream's record in the fabric that only gateways read."""

    facts: StreamFacts
    user: str | None = None
    bill: BillTerms = BillTerms()


_encoder = msgspec.json.Encoder()
meta_decoder = msgspec.json.Decoder(StreamMeta)


def encoded_meta(facts: StreamFacts, user: str | None, work: Work, pool: str) -> bytes:
    """Encode the meta of a stream that is sent to ``pool``."""
    return _encoder.encode(StreamMeta(facts, user, BillTerms.of(work, pool)))
