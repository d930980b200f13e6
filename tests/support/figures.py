"""Figures that tests measure, said at the end of the run."""

from __future__ import annotations

from collections.abc import Callable

Tell = Callable[[str], None]
