"""vLLM itself, on the CPU: in the folder that ``STREAM_GW_TEST_VLLM`` names, else where ``make test-vllm`` puts it."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from inference.engines.vllm import VllmEngine
from tests.agent.engines.recorder import Recorder
from tests.gateway import processes
from tests.support import waiting
from tests.support.missing import missing
from tests.support.waiting import eventually
from tests.vllm.real import FIGURES, Home, ask, chat, children, command_line, endless, request
from tests.vllm.whole_platform import Platform, platform_on

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "infra" / "vllm-cpu" / "requirements.txt"
MODELS_FROM = (ROOT / "infra" / "vllm-cpu" / "tiny_models.py", ROOT / "LICENSE")
"""Files that the models depend on; ``install.sh`` keeps their digest beside the models."""

CAUSE = re.compile(r"(\w+(?:Error|Exception): .*|.*(?:died|exit code -?\d+|SIG[A-Z]{3,}|Illegal instruction).*)")
CAUSES_MAX = 12


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("measured")
        for line in FIGURES:
            terminalreporter.line(line)
    causes = _causes_of_failures(terminalreporter)
    if causes:
        terminalreporter.section("errors that vLLM or an agent told")
        for line in causes:
            terminalreporter.line(line)


def _causes_of_failures(terminalreporter: pytest.TerminalReporter) -> list[str]:
    """First lines of the failed tests' output that name an exception or a signal: the last line seldom does."""
    causes: dict[str, None] = {}
    for report in (*terminalreporter.stats.get("error", ()), *terminalreporter.stats.get("failed", ())):
        for _, text in report.sections:
            for line in text.splitlines():
                found = CAUSE.search(line)
                if found:
                    causes[found[0][:300]] = None
    return list(causes)[:CAUSES_MAX]


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    """Where vLLM and the models are; else the tests are skipped, or fail where ``CI`` is set."""
    found = re.search(r"^vllm-cpu==(\S+)$", REQUIREMENTS.read_text(), re.MULTILINE)
    assert found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("STREAM_GW_TEST_VLLM") or cache / "stream-gw" / f"vllm-{found[1]}")
    made = folder / "models" / ".made"
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in MODELS_FROM)).hexdigest()
    if not (made.exists() and made.read_text().startswith(digest)):
        missing(f"needs vLLM in {folder}, with the models of this tree; run: make test-vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # lets a test clear the prefix cache
        # On a busy machine of two cores vLLM takes minutes to start, and seconds for a token
        patch.setattr(processes, "START_S", 400.0)
        patch.setattr(waiting, "PATIENCE_S", 60.0)
        yield Home(folder)


@pytest.fixture(scope="session")
def platform(home: Home) -> Iterator[Platform]:
    """One for the files about gateways. The last test of the last of them kills its agent."""
    processes.need_redis()
    with platform_on(home) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(home: Home) -> AsyncIterator[VllmEngine]:
    """One for all. Its close, at the end, is the engines' contract too: silence, and nothing is left."""
    engine = home.engine(kv_events=True)
    began = time.monotonic()
    assert list(await engine.start()) == ["tiny", "sim-small"]
    FIGURES.append(f"start to first token: {time.monotonic() - began:.1f} s")
    # vLLM compiles a part of its sampler at the first request for logprobs; on a busy machine no test waits that long
    began = time.monotonic()
    first = await ask(engine, request(0, chat(max_tokens=1, logprobs=True, top_logprobs=1)), within_s=180)
    assert first.status == "completed", first.error
    FIGURES.append(f"first request for logprobs: {time.monotonic() - began:.1f} s")
    yield engine
    sink = Recorder()
    engine.submit(request(1, endless()), sink)
    await eventually(lambda: sink.tokens() >= 5)
    port = str(urlsplit(engine.url).port)
    (guard,) = (
        pid for pid in children(os.getpid()) if "guard.py" in (line := " ".join(command_line(pid))) and port in line
    )
    left = [guard, *children(guard)]
    assert len(left) >= 4, "a guard, a server, an engine and a worker"
    began = time.monotonic()
    await engine.close()
    FIGURES.append(f"close with a request running: {time.monotonic() - began:.2f} s")
    calls = sink.calls
    await engine.close()
    assert (sink.calls, sink.status) == (calls, None)
    assert not [command_line(pid) for pid in left if processes.alive(pid)]
