"""An authenticated caller and its rights."""

from __future__ import annotations

from typing import Literal

import msgspec

from stream_fabric.errors import Forbidden
from stream_fabric.stream.ids import TenantId, UserId

Scope = Literal["create", "read", "cancel", "input", "admin"]
ALL_SCOPES: frozenset[Scope] = frozenset({"create", "read", "cancel", "input"})
"""Scopes of a tenant. ``admin`` is the operator's and covers the whole fleet; a key has it only if the keys file says
so."""


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller. ``user``, ``models``: None when the credential does not restrict them."""

    tenant: TenantId
    scopes: frozenset[Scope]
    user: UserId | None = None
    models: frozenset[str] | None = None
    expires_at: float | None = None
    """Unix seconds; None: an API key, which does not expire."""

    def require(self, scope: Scope) -> None:
        """Check that the caller has this scope. Raises Forbidden."""
        if scope not in self.scopes:
            raise Forbidden(
                f"this credential has no scope {scope!r}; its scopes are {', '.join(sorted(self.scopes)) or 'none'}"
            )

    def require_model(self, model: str) -> None:
        """Check that the caller may use this model. Raises Forbidden."""
        if self.models is not None and model not in self.models:
            raise Forbidden(f"this credential may not use model {model[:128]!r}", param="model")

    def may_see(self, user: str | None) -> bool:
        """True if the caller may read streams of this user of its own tenant."""
        return self.user is None or self.user == user
