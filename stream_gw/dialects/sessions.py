"""OpenAI's own names of a session. Values that are no names are left to the engine to judge."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from stream_fabric.limits import USER_CHARS_MAX


def conversation_of(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """Return the id of ``conversation``, a string or an object, which counts as the session; None: there is none."""
    raw = fields.get("conversation")
    if raw is not None and bytes(raw)[:1] == b"{":
        raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("id")
    return _name(raw)


def cache_key_of(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """Return ``prompt_cache_key``; None: there is none."""
    return _name(fields.get("prompt_cache_key"))


def _name(raw: msgspec.Raw | None) -> str | None:
    """Return a name. One that is longer than ours may be is replaced by its hash."""
    value = None if raw is None else msgspec.json.decode(raw)
    if not isinstance(value, str) or not value:
        return None
    if len(value) <= USER_CHARS_MAX:
        return value
    return hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()
