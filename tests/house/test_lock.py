"""``requirements.lock`` holds for every Python that the project supports, not only for the one that it was made on."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
LOCKED = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines() if re.match(r"\w", line)]


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_pip_takes_every_locked_package_on_a_supported_python(minor: int) -> None:
    environment = {**default_environment(), "python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
    refused = []
    checked = 0
    for locked in LOCKED:
        if locked.marker and not locked.marker.evaluate(environment):
            continue
        try:
            supported = metadata(locked.name)["Requires-Python"]
        except PackageNotFoundError:  # another Python's, which this one has not installed
            continue
        checked += 1
        if supported and f"3.{minor}.0" not in SpecifierSet(supported):
            refused.append(f"{locked}: {supported}")
    assert checked > 100
    assert not refused
