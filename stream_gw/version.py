"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    """Return the version; for a source tree that is not installed, say so."""
    try:
        return installed("stream-gw")
    except PackageNotFoundError:
        return "from a source tree that is not installed"
