"""An authenticated caller and its rights."""

from __future__ import annotations

import msgspec

from stream_fabric.accounts.records import Scope
from stream_fabric.errors import Forbidden, LinkEnded
from stream_fabric.stream.ids import StreamId, TenantId, UserId

ALL_SCOPES: frozenset[Scope] = frozenset({"create", "read", "cancel", "input"})
"""Scopes of a tenant. ``admin`` is the operator's and covers the whole fleet; a key has it only if the keys file says
so."""


class KeyUse(msgspec.Struct, frozen=True):
    """The API key that a caller used, or that minted its capability token."""

    id: str
    generation: int = 0


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller. ``user``, ``models``: None when the credential does not restrict them."""

    tenant: TenantId
    scopes: frozenset[Scope]
    user: UserId | None = None
    models: frozenset[str] | None = None
    expires_at: float | None = None
    """Unix seconds, for a capability token; None: an API key, whose expiry its record has."""
    key: KeyUse | None = None
    """None: a capability token of an earlier release, which did not name its key."""
    stream: StreamId | None = None
    """The only stream that the credential may read; None: no such limit."""
    link: int = 0
    """Generation of the stream's links in which the credential was made."""

    def require(self, scope: Scope) -> None:
        """Check that the caller has this scope. Raises Forbidden."""
        if scope not in self.scopes:
            raise Forbidden(
                f"this credential has no scope {scope!r}; its scopes are {', '.join(sorted(self.scopes)) or 'none'}"
            )

    def require_any_stream(self) -> None:
        """Check that the caller is not limited to one stream. Raises Forbidden."""
        if self.stream is not None:
            raise Forbidden(
                f"this capability token only reads stream {self.stream}: GET /v1/streams/{self.stream}, or a WebSocket"
            )

    def covers(self, other: Principal) -> bool:
        """True if the caller may follow every stream that the other one may."""
        return self.tenant == other.tenant and self.user in (None, other.user) and self.stream in (None, other.stream)

    def may_read(self, stream: str) -> bool:
        """True unless the caller is limited to another stream."""
        return self.stream is None or self.stream == stream

    def link_error(self, generation: int) -> LinkEnded | None:
        """Return the error of a link whose generation is over; None: it is valid. ``generation``: that of now."""
        if self.stream is None or self.link >= generation:
            return None
        return LinkEnded("the owner of this stream has ended the links to it; ask for a new one")

    def may_use(self, model: str) -> bool:
        """True if the caller may use this model. A model that it may not use must look as if it did not exist."""
        return self.models is None or model in self.models

    def may_see(self, user: str | None) -> bool:
        """True if the caller may read streams of this user of its own tenant."""
        return self.user is None or self.user == user
