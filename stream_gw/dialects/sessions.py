"""A session's names in OpenAI's requests, and how long a stream waits for its readers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

from stream_fabric.errors import BadRequest
from stream_fabric.limits import USER_CHARS_MAX

GRACE_S_MAX = 3600.0


def conversation_of(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """Return the id of ``conversation``, a string or an object, which counts as the session; None: there is none.

    A value that is no name is left to the engine to judge.
    """
    raw = fields.get("conversation")
    if raw is not None and bytes(raw)[:1] == b"{":
        raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("id")
    return _name(raw)


def cache_key_of(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """Return ``prompt_cache_key``; None: there is none."""
    return _name(fields.get("prompt_cache_key"))


def grace_of(text: str | None) -> float | UnsetType | None:
    """Return the grace period in seconds; None: never cancel; UNSET: the field is absent. Raises BadRequest."""
    if text is None:
        return UNSET
    if text == "continue":
        return None
    name, _, seconds = text.partition("=")
    try:
        grace_s = float(seconds)
    except ValueError:
        grace_s = -1.0
    if name != "cancel_after" or not 0 <= grace_s <= GRACE_S_MAX:
        raise BadRequest(
            f'on_disconnect must be "continue" or "cancel_after=<0 to {GRACE_S_MAX:g} seconds>", got {text[:60]!r}',
            param="on_disconnect",
        )
    return grace_s


def _name(raw: msgspec.Raw | None) -> str | None:
    """Return a name. One that is longer than ours may be is replaced by its hash."""
    value = None if raw is None else msgspec.json.decode(raw)
    if not isinstance(value, str) or not value:
        return None
    if len(value) <= USER_CHARS_MAX:
        return value
    return hashlib.sha256(value.encode("utf-8", "replace")).hexdigest()
