"""Two replicas of one model on the real vLLM, each with a LoRA adapter of its own: what goes where, and what becomes of
streams when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from stream_fabric.limits import QUEUE_WAIT_S_MAX
from tests.chaos.fleet import PARTITIONS, log_of
from tests.gateway.processes import Process, alive, need_redis
from tests.gateway.test_placement import placement, reasons
from tests.gateway.wire import Exchange, Gate
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.vllm.continued import (
    CHAT,
    Question,
    Told,
    all_ended,
    begun,
    chunks_of,
    must_be_continued,
    must_be_told,
    must_be_whole,
    questions,
)
from tests.vllm.real import FIGURES, MODEL, SMALL, Direct, Home, chat, children, folded, lora_slots, server_below

START_S = 400.0
"""A start of vLLM on a busy machine of two cores."""
BESIDE_MAX = 20
"""Streams of one question that may go to the other replica: each does so by chance."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

ADAPTERS = {"left": "one", "right": "two"}
FLAGS = (*SMALL, "--served-model-name", MODEL, "--kv-cache-memory-bytes", str(8 << 20), *lora_slots(1))


@dataclass(frozen=True)
class Pair:
    gate: Gate
    agents: dict[str, Process]
    redis_url: str

    def replica(self, name: str) -> str:
        found: str = self.agents[name].facts["replica"]
        return found

    def direct(self, name: str) -> Direct:
        return server_below(self.agents[name].pid)[1]

    async def serves(self, name: str) -> bool:
        """Whether the replica's vLLM answers; after a death there is none for a while."""
        with contextlib.suppress(AssertionError):
            return await self.direct(name).serves()
        return False

    async def placed(self, stream: str) -> str:
        """The name of the replica that took a stream first."""
        _, replica = (await reasons(self.gate, stream))[0]
        return next(name for name in self.agents if self.replica(name) == replica)

    async def models(self) -> set[str]:
        return {model["id"] for model in (await self.gate.ask("GET", "/v1/models")).json["data"]}


@pytest.fixture(scope="module")
def pair(home: Home) -> Iterator[Pair]:
    need_redis()
    with contextlib.ExitStack() as stack:
        redis_url = stack.enter_context(RedisServer()).url
        env = {"STREAM_GW_REDIS_URL": redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS)}
        stack.enter_context(Process("controller", **env))

        def start(name: str) -> Process:
            flags = [*FLAGS, "--lora-modules", f"{ADAPTERS[name]}={home.model(f'tiny-adapters/{ADAPTERS[name]}')}"]
            command = ["agent", "--replica", name, "--engine", "vllm", "--model", home.model()]
            return Process(*command, "--vllm-python", home.python, STREAM_GW_VLLM_FLAGS=shlex.join(flags), **env)

        began = time.monotonic()
        with ThreadPoolExecutor() as threads:
            started = [threads.submit(start, name) for name in ADAPTERS]
        agents = {name: stack.enter_context(one.result()) for name, one in zip(ADAPTERS, started, strict=True)}
        FIGURES.append(f"two vLLMs at once: ready after {time.monotonic() - began:.1f} s")
        gateway = stack.enter_context(Process("gateway", "--port", "0", STREAM_GW_DEV_KEY="sk-dev", **env))
        yield Pair(Gate(gateway.facts["url"], gateway.pid, "sk-dev"), agents, redis_url)


async def test_a_lease_tells_the_adapters_of_its_replica(pair: Pair) -> None:
    async with log_of(pair.redis_url) as log:
        told = {str(info.replica): info.models for info in await log.pools.replicas(MODEL)}
    assert told == {pair.replica(name): (MODEL, adapter) for name, adapter in ADAPTERS.items()}
    assert await pair.models() == {MODEL, "one", "two"}


async def test_an_adapter_s_requests_go_to_the_replica_that_holds_it(pair: Pair) -> None:
    """Many at once: also of those that find it busier than the other."""
    body = {"max_tokens": 20, "ignore_eos": True, "stream": True}
    holders: dict[str, set[str]] = {MODEL: set(ADAPTERS), "one": {"left"}, "two": {"right"}}
    asked = [(model, f"question {number}") for number in range(8) for model in holders]

    async def ask(model: str, text: str) -> str:
        question = chat(text, model=model, **body)
        async with pair.gate.open("POST", CHAT, question) as exchange:
            assert exchange.status == 200
            got, _ = folded(chunks_of(await exchange.rest(60)))
            stream = exchange.headers["x-stream-id"]
        name = await pair.placed(stream)
        (placed,) = (await placement(pair.gate, stream))["placements"]  # type: ignore[misc]
        assert {c["replica"] for c in placed["candidates"]} == set(map(pair.replica, holders[model]))
        expected, _ = folded(await pair.direct(name).chunks(CHAT, {**question, "stream": True}))
        assert got[0].text == expected[0].text
        return name

    went = await asyncio.gather(*(ask(*one) for one in asked))
    by_model = {model: {name for (asked_for, _), name in zip(asked, went, strict=True) if asked_for == model}
                for model in holders}  # fmt: skip
    assert by_model == holders


async def test_a_conversation_that_goes_on_in_another_dialect_finds_its_cache(pair: Pair) -> None:
    """Without a session: hints of the prefix come from the messages, whatever bytes a client sent them in."""

    async def first(number: int) -> tuple[str, str, str]:
        story = f"{number} {time.time()} of a river and a sea. " + "Go on with the story. " * 40
        question = chat(story, max_tokens=20, ignore_eos=True, stream=True)
        async with pair.gate.open("POST", CHAT, question) as exchange:
            got, _ = folded(chunks_of(await exchange.rest(60)))
            return story, got[0].text, await pair.placed(exchange.headers["x-stream-id"])

    begun_there = await asyncio.gather(*map(first, range(8)))
    assert {name for *_, name in begun_there} == set(ADAPTERS), "both replicas hold some"
    hits = 0
    for story, answer, name in begun_there:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": story}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            {"role": "user", "content": "And then?"},
        ]
        body = {"model": MODEL, "messages": messages, "max_tokens": 5}
        reply = await pair.gate.ask("POST", "/v1/messages", body)
        assert reply.status == 200, reply
        usage = reply.json["usage"]
        hits += usage["cache_read_input_tokens"] > usage["input_tokens"]
        assert await pair.placed(reply.headers["x-stream-id"]) == name
    FIGURES.append(f"conversations continued in another dialect: {hits} of {len(begun_there)} found their KV cache")
    assert hits == len(begun_there)


async def test_responses_that_follow_each_other_hit_the_cache_of_one_replica(pair: Pair) -> None:
    """Also where nothing but ``previous_response_id`` names the conversation, and others are placed meanwhile."""
    story = f"{time.time()} of two rivers. " + "Go on with the story. " * 40
    ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 20, "ignore_eos": True}
    turns = [(await pair.gate.ask("POST", "/v1/responses", ask | {"input": story})).json]
    home = await pair.placed(turns[0]["id"])
    before = await pair.direct(home).metrics()
    hits = 0
    for number in range(4):
        await pair.gate.ask("POST", "/v1/responses", ask | {"input": f"{number} beside it. " * 60})
        body = ask | {"input": "And then?", "previous_response_id": turns[-1]["id"]}
        turns.append((await pair.gate.ask("POST", "/v1/responses", body)).json)
        assert await pair.placed(turns[-1]["id"]) == home
        cached, length = turns[-1]["usage"]["input_tokens_details"]["cached_tokens"], turns[-2]["usage"]["input_tokens"]
        assert cached > length / 2
        hits += cached
    assert (await pair.direct(home).metrics()).prefix_hits - before.prefix_hits >= hits > 0
    FIGURES.append(f"four responses by previous_response_id: {hits} prompt tokens from one replica's cache")


async def running_on(
    pair: Pair, name: str, asked: dict[str, Question], stack: contextlib.AsyncExitStack
) -> tuple[dict[str, Told], dict[str, Exchange], dict[str, Question]]:
    """Streams of each question, one of them at least on this replica; those that went elsewhere are named ``beside …``.
    All have begun."""
    told: dict[str, Told] = {}
    exchanges: dict[str, Exchange] = {}
    of: dict[str, Question] = {}

    async def opened(key: str, question: Question) -> None:
        for attempt in range(BESIDE_MAX):
            exchange = await stack.enter_async_context(pair.gate.open("POST", question.path, question.streamed()))
            here = await pair.placed(exchange.headers["x-stream-id"]) == name
            label = key if here else f"beside {attempt} {key}"
            exchanges[label], of[label] = exchange, question
            if here:
                return
        raise AssertionError(f"{BESIDE_MAX} times beside {name}")

    # One after the other, the first would end before the last has begun
    await asyncio.gather(*(opened(*one) for one in asked.items()))
    for label, one in zip(exchanges, await asyncio.gather(*map(begun, exchanges.values())), strict=True):
        told[label] = one
    return told, exchanges, of


async def the_rest(pair: Pair, told: dict[str, Told], of: dict[str, Question], survivor: str) -> None:
    direct = pair.direct(survivor)
    async with log_of(pair.redis_url) as log:
        for label, one in told.items():
            if label.startswith("beside"):
                await must_be_whole(of[label], one, direct, log)
                assert one.epochs == [1]
            else:
                await must_be_continued(of[label], one, direct, log)


@pytest.mark.deep
async def test_streams_of_a_killed_vllm_go_on_at_the_other_at_once(pair: Pair) -> None:
    """And those of its adapter, which the other has not, at itself once it is back."""
    server, direct = server_below(pair.agents["left"].pid)
    asked = await questions(direct)
    own = {"adapter": (await questions(direct, "one"))["words"]}
    expected, _ = folded(await direct.chunks(CHAT, own["adapter"].body))
    plain, _ = folded(await direct.chunks(CHAT, asked["words"].body))
    assert expected[0].text != plain[0].text, "the adapter makes a difference"
    async with contextlib.AsyncExitStack() as stack:
        told, exchanges, of = await running_on(pair, "left", asked | own, stack)
        killed = time.monotonic()
        os.kill(server, signal.SIGKILL)
        await all_ended(told, exchanges)
    waited = told.pop("adapter")
    assert max(one.at for one in told.values()) < waited.at
    await the_rest(pair, told, of, "right")
    went_on = max(one.gap for label, one in told.items() if not label.startswith("beside"))
    FIGURES.append(f"vLLM of one of two replicas killed: its streams were silent for {went_on:.2f} s at most")
    assert went_on < 2
    if waited.error_code == "deadline_exceeded":
        assert waited.at - killed > QUEUE_WAIT_S_MAX
        pytest.skip("this machine is so busy that vLLM's start takes longer than a request waits")
    async with log_of(pair.redis_url) as log:
        await must_be_continued(own["adapter"], waited, pair.direct("left"), log)


async def test_streams_of_a_killed_replica_go_on_at_the_other(pair: Pair) -> None:
    """Comes last. Agent and vLLM die at once, and only the lease tells. Nobody else holds its adapter."""
    agent = pair.agents["right"]
    processes = children(agent.pid)
    await eventually(lambda: pair.serves("left"), "the vLLM that was killed to be back", START_S)
    asked = await questions(pair.direct("left"))
    own = {"adapter": (await questions(pair.direct("left"), "two"))["words"]}
    async with contextlib.AsyncExitStack() as stack:
        told, exchanges, of = await running_on(pair, "right", asked | own, stack)
        agent.kill()
        await all_ended(told, exchanges)
    async with log_of(pair.redis_url) as log:
        await must_be_told(told.pop("adapter"), "replica_lost", log)
    await the_rest(pair, told, of, "left")
    went_on = max(one.gap for label, one in told.items() if not label.startswith("beside"))
    FIGURES.append(f"one of two replicas killed: its streams were silent for {went_on:.2f} s at most")
    assert went_on < 6
    await eventually(lambda: not any(map(alive, processes)), "the end of its vLLM")

    async def forgotten() -> bool:
        return await pair.models() == {MODEL, "one"}

    await eventually(forgotten, "its adapter to be forgotten")
    refused: Any = await pair.gate.ask("POST", CHAT, chat(model="two"))
    assert (refused.status, refused.json["error"]["code"]) == (503, "no_replica")
