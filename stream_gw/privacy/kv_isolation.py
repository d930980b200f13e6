"""Cache salts: requests of different salts share no KV cache in the engine, and no prefix hints in the gateways. Pure.

The engine's salt is always a hash. A client's own ``cache_salt`` is only its input, so that no client can name the salt
of another tenant.
"""

from __future__ import annotations

import hashlib

import msgspec

from stream_fabric.stream.ids import TenantId

_SALT_BYTES = 16


def cache_salt(tenant: TenantId | None, own: str | None) -> str:
    """Return the engine's salt; empty: the cache is shared.

    ``tenant``: the caller, if its cache is apart from that of other tenants; else None. ``own``: the client's salt.
    """
    if tenant is None and own is None:
        return ""
    return hashlib.blake2b(msgspec.json.encode((tenant, own)), digest_size=_SALT_BYTES).hexdigest()


def salted_body(body: msgspec.Raw, salt: str) -> msgspec.Raw:
    """Return the engine's body with the salt, which the body must not have yet."""
    return msgspec.Raw(b'{"cache_salt":"%b",' % salt.encode() + bytes(body)[1:]) if salt else body


def prefix_scope(model: str, salt: str) -> bytes:
    """Return what must be equal besides the prompt for a prefix to be shared."""
    return model.encode() + (b"\0" + salt.encode() if salt else b"")
