"""The npm package of the browser client, packed and installed as a user gets it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.house.tree import ROOT
from tests.support.missing import missing

PACKAGE = ROOT / "clients" / "js"
MANIFEST: dict[str, Any] = json.loads((PACKAGE / "package.json").read_text())
NODE_MODULES = ROOT / "tests" / "node" / "node_modules"
NPM_S = 120


def need(command: str) -> str:
    """The path of a program of Node. Skips where it is missing, or its packages are; fails under ``CI``."""
    found = shutil.which(command, path=f"{NODE_MODULES / '.bin'}:{os.environ['PATH']}")
    if found is None or not (NODE_MODULES / "typescript").exists():
        missing(f"needs {command} and the packages of tests/node; run: make node")
    return found


def run(*command: str, cwd: Path, **env: str) -> str:
    """Output of a command that succeeds."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=NPM_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(folder: Path) -> None:
    """Pack the package and unpack it where Node and tsc look for it in ``folder``; no registry is asked."""
    (packed,) = json.loads(run(need("npm"), "pack", "--json", "--pack-destination", str(folder), cwd=PACKAGE))
    modules = folder / "node_modules"
    modules.mkdir()
    run("tar", "-xzf", packed["filename"], "-C", "node_modules", cwd=folder)
    (modules / "package").rename(modules / MANIFEST["name"])
    (modules / "ws").symlink_to(NODE_MODULES / "ws")
