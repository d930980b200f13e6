"""The accumulators of the official packages ``ai`` 6 and 7, in one Node process."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.missing import missing

_NODE_FOLDER = Path(__file__).parents[2] / "node"


class Official:
    """Asks the process of ``tests/node/ui_accumulate.mjs``."""

    def __init__(self) -> None:
        binary = shutil.which("node")
        if binary is None or not (_NODE_FOLDER / "node_modules" / "ai7").exists():
            missing("needs node on PATH and the packages of tests/node; run: make node")
        self._process = subprocess.Popen(
            [binary, "ui_accumulate.mjs"], cwd=_NODE_FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, version: int, body: bytes, **more: Any) -> Any:
        """The messages that the version's accumulator makes of an SSE body."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"version": version, "body": body.decode(), **more}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        assert told, "the program has ended"
        return json.loads(told)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
