"""Fixtures for the real services. A running Redis is named by ``STREAM_GW_TEST_REDIS``, a Kafka by
``STREAM_GW_TEST_KAFKA``; else one is started."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from playwright.async_api import Browser

from stream_fabric.redis.client import RedisClient
from tests.client.browser import chromium
from tests.support.figures import Tell
from tests.support.kafka import KafkaServer
from tests.support.redis import PATIENT_MS, RedisCluster, RedisServer, SentinelSetup

settings.register_profile(
    "default", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.register_profile("quick", settings.get_profile("default"), max_examples=20)
settings.register_profile("deep", settings.get_profile("default"), max_examples=5000)
settings.load_profile(os.environ.get("STREAM_GW_HYPOTHESIS", "default"))

_SUITES = ("platform", "sim", "chaos", "vllm", "kube")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without a test of the suite that ``-m`` names: to import all takes each worker 20 s.

    Only a suite's mark that comes first in the expression counts, as in ``-m 'platform and not chaos'``. It is written
    in the file, or beside a fixture's parameter in the folder's ``conftest.py``; ``tests/responses`` has its fixtures
    from ``tests/tenancy``.
    """
    suite = config.option.markexpr.partition(" ")[0]
    if suite not in _SUITES or not collection_path.match("test_*.py"):
        return None
    fixtures = collection_path.with_name("conftest.py")
    sources = [path.read_text() for path in (collection_path, fixtures) if path.exists()]
    return None if any(f"mark.{suite}" in text or "tests.tenancy.conftest" in text for text in sources) else True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Pause the garbage collector while pytest parses the source of a failed test.

    A finalizer that raises has its traceback formatted, which parses too. Python 3.11 cannot do one inside the other:
    "AST constructor recursion depth mismatch" ends the worker process.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told = [
        f"{report.nodeid.rpartition('::')[2]}: {text}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, text in report.user_properties
        if name == "figure" and report.when == "call"
    ]
    if told:
        terminalreporter.section("figures")
    for line in told:
        terminalreporter.write_line(line)


_LONG = tuple(
    f"tests/{name}.py"
    for name in (
        "telemetry/test_consume", "control/test_overload_platform", "gateway/reference/test_conformance",
        "control/test_scaling_platform", "metrics/test_rules",
    )
)  # fmt: skip
_BROWSER_ROOMS = ("tests/client/", "tests/e2e/", "tests/examples/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no worker is alone with one at the end.

    The tests of the rooms with pages run on one loop a process: the browser they share belongs to a loop.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(_LONG))
    for item in items:
        if item.nodeid.startswith(_BROWSER_ROOMS) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """A Chromium that tests share, each with a context of its own."""
    async with chromium() as launched:
        yield launched


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Tell:
    """Say a measured figure at the end of the run, also of a test that passes."""
    return lambda text: request.node.user_properties.append(("figure", text))


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Redis that tests share; they keep apart by their own ids and pool names."""
    url = os.environ.get("STREAM_GW_TEST_REDIS")
    if url:
        yield url
        return
    with RedisServer() as server:
        yield server.url


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of this test's own, to kill and restart."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster_url() -> Iterator[str]:
    """A cluster that tests share and leave as it is."""
    with RedisCluster(node_timeout_ms=PATIENT_MS) as cluster:
        yield cluster.url


@pytest.fixture
def redis_cluster() -> Iterator[RedisCluster]:
    """A cluster of this test's own."""
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def sentinel() -> Iterator[SentinelSetup]:
    with SentinelSetup() as setup:
        yield setup


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[RedisClient]:
    client = RedisClient(redis_url)
    await client.start()
    yield client
    await client.close()


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[KafkaServer]:
    """A Kafka that a test may stop, kill and pause, if it starts it again: one for all, as its start takes seconds."""
    with KafkaServer() as server:
        yield server


@pytest.fixture(scope="session")
def kafka_servers(request: pytest.FixtureRequest) -> str:
    """Where a Kafka is that tests share; they keep apart by their own topics."""
    named = os.environ.get("STREAM_GW_TEST_KAFKA")
    if named:
        return named
    server: KafkaServer = request.getfixturevalue("kafka_server")
    return server.servers
