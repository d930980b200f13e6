"""Two gateways and two simulated replicas that every official client is tried on."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext

from tests.client.browser import PATIENCE_MS
from tests.gateway.processes import Process, Running, running
from tests.gateway.wire import Gate
from tests.support.missing import missing
from tests.support.waiting import PATIENCE_S

SHORT, CONTEXT = "sim-tight", 1000
NODE_FOLDER = Path(__file__).parents[1] / "node"


@pytest.fixture(scope="session")
def platform() -> Iterator[Running]:
    with running(sim="itl_ms=15,ttft_ms=30") as started:
        yield started


@pytest.fixture(scope="session")
def short(platform: Running) -> Iterator[str]:
    """A model with a short context."""
    with agent_of(platform, SHORT, CONTEXT):
        yield SHORT


@contextlib.contextmanager
def agent_of(platform: Running, model: str, context: int, itl_ms: int = 0) -> Iterator[None]:
    """An agent of another model, which every gateway lists.

    Its name comes after the usual one's, because the chat page takes the first model.
    """
    sim = f"model={model},itl_ms={itl_ms},ttft_ms=0,context={context}"
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    with Process("agent", "--replica", model, "--sim", sim, **env):
        deadline = time.monotonic() + PATIENCE_S
        while not all(model in _models_of(gate) for gate in platform.gates):
            assert time.monotonic() < deadline, f"a gateway does not list {model}"
            time.sleep(0.05)
        yield


def _models_of(gate: Gate) -> list[str]:
    reply = httpx.get(f"{gate.url}/v1/models", headers={"authorization": f"Bearer {gate.key}"}, timeout=PATIENCE_S)
    reply.raise_for_status()
    return [model["id"] for model in reply.json()["data"]]


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
    if binary is None or not (NODE_FOLDER / "node_modules" / "@anthropic-ai").exists():
        missing("needs node on PATH and the packages of tests/node; run: make node")
    return binary


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser) -> AsyncIterator[BrowserContext]:
    made = await browser.new_context()
    made.set_default_timeout(PATIENCE_MS)
    yield made
    await made.close()
