"""Redaction of prompts and completions before traces store them. Needs the extra ``privacy``."""

from __future__ import annotations

from importlib.util import find_spec


def can_redact() -> bool:
    """True if the packages of the extra ``privacy`` are installed."""
    return all(find_spec(name) is not None for name in ("re2", "phonenumbers"))
