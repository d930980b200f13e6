"""An authenticated caller and its rights."""

from __future__ import annotations

import msgspec

from stream_fabric.accounts.records import Scope
from stream_fabric.errors import Forbidden
from stream_fabric.stream.ids import TenantId, UserId

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

    def require(self, scope: Scope) -> None:
        """Check that the caller has this scope. Raises Forbidden."""
        if scope not in self.scopes:
            raise Forbidden(
                f"this credential has no scope {scope!r}; its scopes are {', '.join(sorted(self.scopes)) or 'none'}"
            )

    def may_use(self, model: str) -> bool:
        """True if the caller may use this model. A model that it may not use must look as if it did not exist."""
        return self.models is None or model in self.models

    def may_see(self, user: str | None) -> bool:
        """True if the caller may read streams of this user of its own tenant."""
        return self.user is None or self.user == user
