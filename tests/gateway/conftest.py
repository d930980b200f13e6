"""One platform a test process: Redis, two simulated replicas, two gateways, and a third with a keys file.

With ``STREAM_GW_TEST_FABRIC=cluster`` its Redis is a cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stream_fabric.process.host import HostRandom
from stream_gw.auth import key_digest, new_key
from tests.gateway.processes import Process, Running, on_cluster, running
from tests.gateway.wire import MODEL, Gate

HERE = Path(__file__).parent
OF_THE_EDGE = [
    "test_adapters", "test_asyncapi", "test_bad_input", "test_bench", "test_cli", "test_connections", "test_cycles",
    "test_doctor", "test_nginx", "test_ws_bytes", "test_ws_messages",
]  # fmt: skip
"""Files about bytes, processes and words, which do not depend on what Redis is."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of a run on a cluster the tests that are the same on one Redis: as those without a platform."""
    if on_cluster():
        same = [item for item in items if item.path.is_relative_to(HERE) and not _depends_on_redis(item)]
        config.hook.pytest_deselected(items=same)
        items[:] = [item for item in items if item not in set(same)]


def _depends_on_redis(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    if item.path.stem in OF_THE_EDGE:
        return False
    return "platform" in item.fixturenames or any(hasattr(item.module, name) for name in ("running", "api_fleet"))


@pytest.fixture(scope="session")
def platform() -> Iterator[Running]:
    with running(sim="itl_ms=5,ttft_ms=10") as started:
        assert started.redis_url.startswith("redis+cluster://") is on_cluster()
        yield started


@pytest.fixture
def one(platform: Running) -> Gate:
    return platform.gates[0]


@pytest.fixture
def two(platform: Running) -> Gate:
    return platform.gates[1]


@pytest.fixture(scope="session")
def fast(platform: Running) -> Iterator[str]:
    """A model whose replica is faster than any reader."""
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    with Process("agent", "--replica", "fast", "--sim", "model=sim-swift,itl_ms=0,ttft_ms=0", **env):
        yield "sim-swift"  # after the usual model, because the chat page takes the first one


@dataclass(frozen=True)
class Tenants:
    """A gateway as each of its keys sees it."""

    acme: Gate
    acme_reader: Gate
    """Scope read alone."""
    acme_other_model: Gate
    """Every scope, for a model that nobody serves."""
    globex: Gate


@pytest.fixture(scope="session")
def tenants(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    keys = [new_key(HostRandom()) for _ in range(4)]
    digests = [key_digest(key) for key in keys]
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f"""
        [[tenant]]
        id = "acme"
        [[tenant.key]]
        sha256 = "{digests[0]}"
        [[tenant.key]]
        sha256 = "{digests[1]}"
        scopes = ["read"]
        models = ["{MODEL}"]
        [[tenant.key]]
        sha256 = "{digests[2]}"
        models = ["another-model"]

        [[tenant]]
        id = "globex"
        [[tenant.key]]
        sha256 = "{digests[3].upper()}"
        """
    )
    env = {"STREAM_GW_KEYS_FILE": str(path), "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16)}
    with platform.gateway("--gateway", "tenants", **env) as process:
        yield Tenants(*(Gate(process.facts["url"], process.pid, key) for key in keys))
