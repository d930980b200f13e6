"""A whole platform with its telemetry under a little load, and all that it shows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import pytest

from tests.gateway.processes import Process, Running, running
from tests.gateway.wire import MODEL, Gate, chat
from tests.support.clickhouse import ClickHouseFront
from tests.support.kube import HOME
from tests.support.server import find_binary

KV_BYTES = 131_072
VERSIONS = ("installed", "3")
"""Prometheus versions: Debian's 2 on the PATH, and 3 as ``make kube`` builds it."""


def of_version(name: str, version: str) -> str:
    """Skips the test where there is none, or fails it where ``CI`` is set and it should have been installed."""
    if version == "installed":
        return find_binary(name)
    built = HOME / "bin" / name
    if not built.exists():
        pytest.skip(f"needs {built}; run: make kube")
    return str(built)


@dataclass(frozen=True)
class Observed:
    platform: Running
    telemetry: Process
    store: ClickHouseFront

    def targets(self) -> dict[str, list[str]]:
        """Where each role's metrics are."""
        facts = self.platform.process.facts
        return {
            "gateway": [gateway["url"] for gateway in facts["gateways"]],
            "agent": [agent["metrics"] for agent in facts["agents"]],
            "controller": [facts["controller"]["metrics"]],
            "telemetry": [self.telemetry.facts["url"]],
        }


async def some_load(gates: list[Gate]) -> None:
    """Requests that end in each way that a reader can bring about."""
    stream = ""
    for number in range(12):
        stream, _ = await gates[number % len(gates)].finished(20, seed=number)
    elsewhere = {"name": "s", "schema": {"$ref": "https://schemas.example/s"}}  # is not fetched
    await gates[0].finished(5, response_format={"type": "json_schema", "json_schema": elsewhere})
    reply = await gates[0].ask("GET", f"/v1/streams/{stream}?after=1-5")
    assert reply.status == 200
    reply = await gates[0].ask("POST", "/v1/chat/completions", chat(5) | {"model": "nobody-serves-it"})
    assert reply.status == 404
    running = await gates[1].background(2000)
    reply = await gates[0].ask("POST", f"/v1/streams/{running}/input", {"id": "i", "item": "Shorter."})
    assert reply.status == 202
    await gates[0].cancel(running)


async def fetch(url: str, accept: str = "") -> str:
    headers = {"accept": accept} if accept else {}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", headers=headers) as response:
        assert response.status == 200
        return await response.text()


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with contextlib.ExitStack() as stack:
        store = ClickHouseFront().start()
        stack.callback(store.close)
        pools = tmp_path_factory.mktemp("pools") / "pools.toml"
        pools.write_text(f'[pool."{MODEL}"]\nreplicas_min = 2\nreplicas_max = 2\nwarm_share = 0\n')
        given = {"STREAM_GW_KV_BYTES_PER_TOKEN": str(KV_BYTES), "STREAM_GW_POOLS_FILE": str(pools)}
        platform = stack.enter_context(running(sim="itl_ms=4,ttft_ms=10", **given))
        env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
        flags = ("telemetry", "--clickhouse", store.url, "--telemetry-linger-s", "0.2")
        telemetry = stack.enter_context(Process(*flags, **env))
        asyncio.run(some_load(platform.gates))
        yield Observed(platform, telemetry, store)
