"""``bench.gpu`` on the CPU: its parts come to an end, and each answer is whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.processes import clean_env
from tests.vllm.real import SMALL, Home

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.deep]


def test_a_gpu_s_benchmark_runs_on_a_cpu(home: Home, tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench.gpu", "--vllm", str(home.folder), "--model", home.model()]
    command += ["--parts", "path", "cancel", "objective", "death", "--at-once", "1", "8", "--json", str(report)]
    command += ["--", *SMALL, "--kv-cache-memory-bytes", str(64 << 20)]
    done = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(report.read_text())
    assert found["failed"] == {}
    assert {name: len(runs) for name, runs in found["path"].items()} == dict.fromkeys(
        ("1 direct", "1 gateway", "8 direct", "8 gateway"), 1
    )
    assert [one["median_ms"] > 0 for one in found["cancel"].values()] == [True] * 2
    assert found["death"]["streams_on_the_killed"] + found["death"]["streams_on_the_other"] == 32
    assert 0 < found["death"]["silence_of_the_killed_s"]["worst"] < 60
