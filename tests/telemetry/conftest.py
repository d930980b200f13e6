from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from telemetry.store.store import Store
from tests.support.clickhouse import ClickHouseFront
from tests.support.kafka import KafkaServer
from tests.support.stores import make_store


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaServer]:
    """A broker that tests share; they keep apart by their topics."""
    guard = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
    config = {"authorizer.class.name": guard, "allow.everyone.if.no.acl.found": "true"}
    with KafkaServer(**{"group.min.session.timeout.ms": 1000}, **config) as server:
        yield server


@pytest.fixture(scope="session")
def _front() -> Iterator[ClickHouseFront]:
    with ClickHouseFront() as front:
        yield front


@pytest.fixture
def front(_front: ClickHouseFront) -> Iterator[ClickHouseFront]:
    """The engine behind HTTP, in a process of its own, with a database of this test's own."""
    _front.database = f"t{uuid4().hex}"
    yield _front
    _front.fault("ok")


@pytest.fixture(params=["chdb", "http", "server"])
def clickhouse_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every way to reach ClickHouse, each with an empty database."""
    return _url(request, tmp_path_factory)


@pytest.fixture(params=["chdb", "server"])
def engine_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """ClickHouse without regard to how it is reached, which test_store.py looks at; with an empty database."""
    return _url(request, tmp_path_factory)


def _url(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> str:
    match request.param:
        case "chdb":
            return _embedded(factory)
        case "http":
            front: ClickHouseFront = request.getfixturevalue("front")
            return front.url
    url = os.environ.get("STREAM_GW_TEST_CLICKHOUSE")
    if not url:
        pytest.skip("no server: set STREAM_GW_TEST_CLICKHOUSE to http://user:password@host:8123")
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/t{uuid4().hex}"


_folder: list[Path] = []


def _embedded(factory: pytest.TempPathFactory) -> str:
    """One folder a process is all that the engine allows, so its tests have one each after another, in databases."""
    if not _folder:
        _folder.append(factory.mktemp("chdb"))
    return f"chdb://{_folder[0]}?database=t{uuid4().hex}"


@pytest.fixture
async def store(front: ClickHouseFront) -> AsyncIterator[Store]:
    opened = make_store(front.url)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def settings(kafka: KafkaServer, front: ClickHouseFront) -> dict[str, Any]:
    """Settings of a consumer: this test's own topics and group, short times, small blocks."""
    topic = f"events-{uuid4().hex}"
    return {
        "events": "kafka",
        "kafka_servers": kafka.servers,
        "events_topic": topic,
        "telemetry_dlq_topic": f"{topic}.dlq",
        "telemetry_group": topic,
        "clickhouse": front.url,
        "telemetry_session_s": 1.5,
        "telemetry_linger_s": 0.1,
        "telemetry_block_rows": 1000,
    }
