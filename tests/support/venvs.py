"""Python clients of others, each in a virtual environment of its own, so that they pin none of our packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.missing import missing

INSTALL_S = 400
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stream-gw" / "clients"


def venv_with(*requirements: str) -> Path:
    """The Python of an environment with these packages, each named with its version; made once and kept.

    Skips with the reason where the packages cannot be had; fails under ``CI``.
    """
    assert all("==" in requirement for requirement in requirements)
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    folder = CACHE / "-".join([version, *(each.replace("==", "-") for each in requirements)])
    python = folder / "bin" / "python"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at once
        if (folder / ".installed").exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, timeout=60)
            # Without byte code: a test imports a small part of what is installed
            flags = ("-q", "--no-compile", "--disable-pip-version-check")
            pip = [str(python), "-m", "pip", "install", *flags, *requirements]
            subprocess.run(pip, check=True, capture_output=True, text=True, timeout=INSTALL_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            shutil.rmtree(folder, ignore_errors=True)
            missing(f"cannot install {' '.join(requirements)}: {str(error.stderr or error)[-300:]}")
        (folder / ".installed").touch()
    return python
