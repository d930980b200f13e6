"""Source trees of earlier releases, from the repository's own history."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.missing import missing

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = "a53a3cd7"
"""Commit of the release before this one."""


def previous_release(folder: Path) -> Path:
    """Unpack the previous release into the folder. Skips the test where the history lacks it; fails it in CI."""
    archive = subprocess.run(["git", "archive", "--format=tar", PREVIOUS], cwd=ROOT, capture_output=True)
    if archive.returncode:
        missing(f"the history lacks {PREVIOUS}; run: git fetch --unshallow")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder
