"""A caller's request for a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stream_fabric.errors import IdempotencyMismatch
from stream_fabric.stream.cursor import Cursor
from stream_gw.auth import Principal
from stream_gw.dialects import encoder_class
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.requests import CreateRequest
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.chats.turn import ChatTurn


class OnNamed(Protocol):
    """Learns of a new stream before it is created."""

    async def named(self, facts: StreamFacts, user: str | None) -> None:
        """Take the stream's facts and user. Raises StreamGwError: the stream is not created."""

    async def withdrawn(self, facts: StreamFacts) -> None:
        """Take that the stream was not created after all."""


@dataclass(frozen=True)
class CreateCall:
    """One caller's request for a stream."""

    who: Principal
    request: CreateRequest
    trace: ReaderTrace
    key: str | None = None
    """Idempotency key."""
    kept: bool = False
    """Keep the stream for the longer grace after its last reader left."""
    after: Cursor | None = None
    """Where a caller that attaches continues; None: at the beginning."""
    dialect: str | None = None
    """The dialect that the caller reads; None: the caller reads the whole answer."""
    chat: ChatTurn | None = None
    """The chat whose newest stream this becomes."""
    retried: bool = False
    """The client says that it has sent the request before."""
    on_named: OnNamed | None = None
    """Learns of the stream before it is created; not called for a stream that the key is bound to."""

    def check_facts(self, facts: StreamFacts) -> None:
        """Check that the caller can read such a stream. Raises BadRequest, Unsupported or IdempotencyMismatch."""
        if facts.own_dialect != self.request.own_dialect:
            raise IdempotencyMismatch(f"this Idempotency-Key was used for {facts.own_dialect}; use a new key")
        if self.dialect is not None:
            encoder_class(self.dialect, facts)

    @property
    def scoped_key(self) -> str:
        """The stored form of the key."""
        return scoped_key(self.who, self.key or "")


def scoped_key(who: Principal, key: str) -> str:
    """Return the stored form of an idempotency key. A caller limited to one user shares no key with other users."""
    return key if who.user is None else f"{who.user}\0{key}"
