"""Source trees of earlier releases, from the repository's own history."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.missing import missing

ROOT = Path(__file__).resolve().parents[2]
PREVIOUS = "7570508"
"""Commit of the release before this one."""
_SIM = "inference/agent/engines/sim"
_SAME_TEXT = """

from inference.agent.engines.sim import text_now


def words(prompt, seed, choice):
    return text_now.words(text_now.Prompt(prompt.body), seed + choice)
"""


def previous_release(folder: Path) -> Path:
    """Unpack the previous release into the folder. Skips the test where the history lacks it; fails it in CI."""
    archive = subprocess.run(["git", "archive", "--format=tar", PREVIOUS], cwd=ROOT, capture_output=True)
    if archive.returncode:
        missing(f"the history lacks {PREVIOUS}; run: git fetch --unshallow")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    _give_same_text(folder / _SIM)
    return folder


def _give_same_text(sim: Path) -> None:
    """Make the simulated model of an earlier release say what this one's says: a model is no part of a release."""
    for name, copy in (("corpus.py", "corpus.py"), ("prose.py", "prose.py"), ("text.py", "text_now.py")):
        source = (ROOT / "inference/engines/sim" / name).read_text()
        (sim / copy).write_text(source.replace("inference.engines.", "inference.agent.engines."))
    with (sim / "text.py").open("a") as text:
        text.write(_SAME_TEXT)
