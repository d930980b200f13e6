"""Redaction of prompts and completions before traces store them. Needs the extra ``privacy``."""

from __future__ import annotations

from importlib.util import find_spec

MARGIN_BYTES = 4096
"""Bytes behind a cut that are looked at too, so that what lies across the cut is found."""


def can_redact() -> bool:
    """True if the packages of the extra ``privacy`` are installed."""
    return all(find_spec(name) is not None for name in ("re2", "phonenumbers"))
