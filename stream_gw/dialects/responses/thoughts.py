"""Thoughts of open models as ``encrypted_content``, which clients send back when nothing is stored.

Clients made for OpenAI's models drop the plain thoughts in ``content``. They are no secret, so they are only encoded.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

_PREFIX = "sgw1."
"""Tells our thoughts from those that another service encrypted."""


def carried(thoughts: str) -> str:
    """Return thoughts as ``encrypted_content``."""
    return _PREFIX + base64.b64encode(thoughts.encode()).decode()


def thoughts_of(content: Any) -> str:
    """Return the thoughts in an ``encrypted_content``; empty: there are none that can be read here."""
    if not isinstance(content, str) or not content.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(content[len(_PREFIX) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
