"""Memory that a process frees is there for its next request."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COPIES = """
import resource, sys
from stream_fabric.process.memory import prepare_memory

if sys.argv[1] == "prepared":
    prepare_memory()
prompt = b"x" * 400_000


def copy() -> None:
    held = [prompt + b"0", prompt + b"1", prompt + b"2"]


copy()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    copy()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", _COPIES, how], check=True, capture_output=True, text=True, timeout=60)
    return int(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_the_copies_of_a_long_prompt_cost_no_page_faults() -> None:
    assert page_faults("prepared") < 100 < page_faults("as it is") / 10
