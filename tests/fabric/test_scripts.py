"""Lua scripts take their constants from Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stream_fabric.pool import placement
from stream_fabric.redis.scripts import Script

FOLDER = Path(__file__).parents[2] / "stream_fabric" / "redis" / "lua"
ALLOWED = {"0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19",
           "20", "21", "22", "23", "24", "25", "26", "27"}  # fmt: skip
"""Indices, return codes and doublings."""
UNITS = {"60", "1000", "1024", "1000000", "64"}
"""Conversions of time and event ids, and the overhead of an event: no part of the law."""


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.lua")), ids=lambda path: path.stem)
def test_lua_has_no_numbers_of_the_law(path: Path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = re.sub(r"'[^']*'", "''", line.partition("--")[0])
        for literal in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", code):
            assert literal in ALLOWED | UNITS, f"{path.name}:{number}: {literal}; render it in redis/scripts.py"


def test_a_changed_constant_changes_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Script("place")
    assert f"local SCAN_MAX = {placement.SCAN_MAX}\n" in before.source
    monkeypatch.setattr(placement, "SCAN_MAX", placement.SCAN_MAX + 1)
    after = Script("place")
    assert f"local SCAN_MAX = {placement.SCAN_MAX}\n" in after.source
    assert after.sha != before.sha
