"""Child processes of ``stream-gw up``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stream_gw.cli.platform.child import Children

DIES = """#!/bin/sh
echo '{"ready":"agent"}'
echo 'stream-gw agent: no room for one more' >&2
exit 3
"""


async def test_a_child_that_ends_later_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, lines = tmp_path / "python", list[str]()
    program.write_text(DIES)
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    children = Children(lines.append)
    process, facts = await children.start(["agent"], dict(os.environ), name="replica0")
    assert facts == {"ready": "agent"} and await process.wait() == 3
    assert await children.last_words(process.pid) == "replica0: no room for one more"
    assert await children.last_words(os.getpid()) == "" and not lines
