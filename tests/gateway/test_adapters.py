"""A model's LoRA adapters, each on some of its replicas: who is told to hold what, and where requests go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools
from tests.gateway.processes import Process, Running
from tests.gateway.test_placement import placement, reasons
from tests.gateway.test_request_traces import Told, told
from tests.gateway.wire import DONE, Exchange, Gate, events, refusal
from tests.support.waiting import eventually
from tests.vllm import fake

pytestmark = pytest.mark.platform

__all__ = ["told"]  # a fixture

COMPLETIONS = "/v1/completions"
HELD = {"left": ("fake", "french", "german"), "right": ("fake", "french", "greek")}


@dataclass(frozen=True)
class Adapters:
    gate: Gate
    agents: dict[str, Process]
    redis_url: str

    def replica(self, name: str) -> str:
        found: str = self.agents[name].facts["replica"]
        return found

    async def told(self) -> dict[str, tuple[str, ...]]:
        """Models in the lease of each replica of the pool."""
        client = RedisClient(self.redis_url)
        await client.start()
        try:
            return {str(info.replica): info.models for info in await RedisPools(client).replicas("fake")}
        finally:
            await client.close()

    async def answered(self, model: str) -> str:
        """The replica that answered a request."""
        async with self.gate.open("POST", COMPLETIONS, completion(model, 2)) as exchange:
            assert events(await exchange.rest())[-1].data == DONE
            found = await placement(self.gate, exchange.headers["x-stream-id"])
        (producer,) = found["producers"]  # type: ignore[misc]
        replica: str = producer["replica"]
        return replica

    @asynccontextmanager
    async def running(self, model: str) -> AsyncIterator[Exchange]:
        """A stream that goes on for long."""
        async with self.gate.open("POST", COMPLETIONS, completion(model, 10_000)) as exchange:
            yield exchange


def completion(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "Say", "max_tokens": tokens, "stream": True}


@pytest.fixture(scope="module")
def adapters(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapters]:
    """Two replicas that run one request each, with a stand-in for vLLM."""
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    agents = {}
    try:
        for name, (_, *held) in HELD.items():
            python = fake.command(tmp_path_factory.mktemp(name))
            model = tmp_path_factory.mktemp(f"model-{name}")
            (model / "config.json").write_text("{}")
            (model / "model.safetensors").write_bytes(b"weights")
            engine = ["--engine", "vllm", "--model", str(model), "--vllm-python", python, "--room-ratio", "1"]
            flags = ["--max-num-seqs", "1", "--enable-lora", "--lora-modules", *(f"{word}=/{word}" for word in held)]
            agents[name] = Process("agent", "--replica", name, *engine, "--", *flags, **env)
        with platform.gateway("--queue-wait-s", "20") as process:
            gate = Gate(process.facts["url"], process.pid, platform.key)
            yield Adapters(gate, agents, platform.redis_url)
    finally:
        for agent in agents.values():
            agent.close()


async def test_a_lease_tells_the_adapters_and_each_is_listed_as_a_model(adapters: Adapters) -> None:
    told = await adapters.told()
    assert told == {adapters.replica(name): models for name, models in HELD.items()}
    names = {model["id"]: model["owned_by"] for model in (await adapters.gate.ask("GET", "/v1/models")).json["data"]}
    assert {name for name, pool in names.items() if pool == "fake"} == {"fake", "french", "german", "greek"}


async def test_a_trace_says_that_its_model_is_an_adapter_and_what_the_base_was_loaded_from(
    adapters: Adapters, told: Told
) -> None:
    found = {}
    for model in ("fake", "german", "french"):
        async with adapters.gate.open("POST", COMPLETIONS, completion(model, 2)) as exchange:
            await exchange.rest()
        (trace,) = await told.requests(exchange.headers["x-stream-id"])
        found[model] = trace
    assert {model: (trace.model, trace.adapter) for model, trace in found.items()} == {
        "fake": ("fake", ""), "german": ("german", "german"), "french": ("french", "french"),
    }  # fmt: skip
    (artifact,) = {trace.artifact for trace in found.values()}
    assert len(artifact) == 16, "both replicas have loaded the same"


@pytest.mark.parametrize(("model", "holders"), [("german", ["left"]), ("greek", ["right"]), ("french", [*HELD])])
async def test_only_who_holds_an_adapter_is_a_candidate(adapters: Adapters, model: str, holders: list[str]) -> None:
    async with adapters.running(model) as exchange:
        stream = exchange.headers["x-stream-id"]
        await reasons(adapters.gate, stream)
        (placed,) = (await placement(adapters.gate, stream))["placements"]  # type: ignore[misc]
        assert {c["replica"] for c in placed["candidates"]} == set(map(adapters.replica, holders))
        await adapters.gate.cancel(stream)


async def test_a_request_waits_for_its_adapter_and_others_pass_it(adapters: Adapters) -> None:
    """One replica is busy: what only it can serve waits, also when the other has room for what comes later."""
    left, right = adapters.replica("left"), adapters.replica("right")
    async with AsyncExitStack() as stack:
        busy = await stack.enter_async_context(adapters.running("german"))
        await eventually(lambda: busy.piece(), "its first piece")
        waiting = asyncio.create_task(adapters.answered("german"))
        assert [await adapters.answered(model) for model in ("greek", "fake", "french")] == [right] * 3
        assert not waiting.done()
        await adapters.gate.cancel(busy.headers["x-stream-id"])
        assert await waiting == left


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS, "/v1/embeddings", "/v1/rerank"])
async def test_an_adapter_that_nobody_holds_is_not_found(adapters: Adapters, path: str) -> None:
    question = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "query": "Hi"}
    wanted = {"chat/completions": "messages", "completions": "prompt", "embeddings": "input", "rerank": "query"}
    name = wanted[path.removeprefix("/v1/")]
    body = {"model": "latin", name: question[name]} | ({"documents": ["Hi"]} if name == "query" else {})
    error = refusal(await adapters.gate.ask("POST", path, body), 404, "model_not_found")
    assert (error["param"], error["retriable"]) == ("model", False)
    assert "latin" in error["message"] and "greek" in error["message"], "what there is, is said"


async def test_an_adapter_that_nobody_holds_is_not_found_on_a_socket(adapters: Adapters) -> None:
    async with adapters.gate.socket() as socket:
        await socket.create(1, {"model": "latin", "messages": [{"role": "user", "content": "Hi"}]})
        told = await socket.until_t("error", ch=1)
        assert told["code"] == "model_not_found"


async def test_an_adapter_whose_replicas_are_gone_may_be_asked_for_again(adapters: Adapters) -> None:
    """Comes last: one replica leaves."""
    gate = adapters.gate
    adapters.agents["right"].terminate()
    await asyncio.to_thread(adapters.agents["right"].wait)

    async def forgotten() -> bool:
        return "greek" not in {model["id"] for model in (await gate.ask("GET", "/v1/models")).json["data"]}

    await eventually(forgotten, "the gateway to look again")
    error = refusal(await gate.ask("POST", COMPLETIONS, completion("greek", 2)), 503, "no_replica")
    assert error["retriable"]
    page = (await gate.ask("GET", "/metrics")).body.decode()
    counted = 'reads_total{ended="refused",fault="platform",pool="fake",role="refused"} 1.0'
    assert counted in page, "it counts against the pool that served the model"
    left = adapters.replica("left")
    assert {await adapters.answered(model) for model in ("fake", "french", "german")} == {left}
