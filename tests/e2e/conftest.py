"""Two gateways and two simulated replicas that every official client is tried on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.processes import Running, running
from tests.gateway.wire import Gate

NODE_FOLDER = Path(__file__).parents[1] / "node"


@pytest.fixture(scope="session")
def platform() -> Iterator[Running]:
    with running(sim="itl_ms=15,ttft_ms=30") as started:
        yield started


@pytest.fixture
def one(platform: Running) -> Gate:
    return platform.gates[0]


@pytest.fixture
def two(platform: Running) -> Gate:
    return platform.gates[1]


@pytest.fixture(scope="session")
def node() -> str:
    """The path of Node, with the official clients installed."""
    binary = shutil.which("node")
    if binary is not None and (NODE_FOLDER / "node_modules" / "@anthropic-ai").exists():
        return binary
    reason = "needs node on PATH and the packages of tests/node; run: make node"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
