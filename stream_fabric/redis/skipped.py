"""Records in Redis that this version cannot decode: they are skipped, counted, and logged once per version."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

_LOGGED_MAX = 1000


class SkippedRecords:
    """Reports skipped records. ``on_skip`` gets the kind of each, for a counter."""

    def __init__(self, on_skip: Callable[[str], None] | None = None) -> None:
        self._on_skip = on_skip
        self._logged: dict[tuple[str, str], str] = {}

    def add(self, kind: str, name: str, error: Exception) -> None:
        """Count a skipped record, and log it once per error. ``name`` identifies the record within its ``kind``."""
        if self._on_skip is not None:
            self._on_skip(kind)
        if self._logged.get((kind, name)) != str(error):
            if len(self._logged) >= _LOGGED_MAX:
                self._logged.clear()
            self._logged[(kind, name)] = str(error)
            log.warning("record skipped, another version wrote it: kind=%s name=%s error=%s", kind, name, error)
