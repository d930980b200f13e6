"""A client's whole way: gateway, Redis, agent, and the real vLLM that the agent runs; beside it vLLM asked directly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from stream_fabric.limits import QUEUE_WAIT_S_MAX
from tests.chaos.fleet import PARTITIONS, log_of
from tests.gateway.processes import Process, alive, need_redis
from tests.gateway.wire import DONE, Gate
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.vllm.continued import (
    ASKED,
    CHAT,
    USAGE,
    Question,
    all_ended,
    begun,
    chunks_of,
    ended,
    must_be_continued,
    must_be_told,
    questions,
    until,
)
from tests.vllm.real import (
    FIGURES,
    GENERATION,
    KV_TOKENS,
    MODEL,
    NAMED,
    SCHEMA,
    TOOL,
    Direct,
    Home,
    chat,
    children,
    command_line,
    endless,
    folded,
    server_below,
    tokens_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG_LIST = {
    "type": "json_schema",
    "json_schema": {
        "name": "list",
        "strict": True,
        "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 5000},
    },
}


@dataclass(frozen=True)
class Platform:
    gate: Gate
    agent: Process
    redis_url: str

    @property
    def direct(self) -> Direct:
        return server_below(self.agent.pid)[1]

    @property
    def server(self) -> int:
        return server_below(self.agent.pid)[0]

    async def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        streamed = {**body, "stream": True, "stream_options": USAGE}
        reply = await self.gate.ask("POST", path, streamed)
        assert reply.status == 200, reply
        assert f"data: {DONE}\n".encode() in reply.body[-100:], reply.body[-500:]
        return chunks_of(reply.body)


@pytest.fixture(scope="module")
def platform(home: Home) -> Iterator[Platform]:
    need_redis()
    with contextlib.ExitStack() as stack:
        redis_url = stack.enter_context(RedisServer()).url
        env = {"STREAM_GW_REDIS_URL": redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS)}
        stack.enter_context(Process("controller", **env))
        flags = shlex.join(GENERATION)
        command = ["agent", "--engine", "vllm", "--model", home.model(), "--vllm-python", home.python, "--kv-events"]
        agent = stack.enter_context(Process(*command, STREAM_GW_VLLM_FLAGS=flags, **env))
        gateway = stack.enter_context(Process("gateway", "--port", "0", STREAM_GW_DEV_KEY="sk-dev", **env))
        yield Platform(Gate(gateway.facts["url"], gateway.pid, "sk-dev"), agent, redis_url)


# --- the same, token for token -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(max_tokens=60, ignore_eos=True, logprobs=True, top_logprobs=1), id="text"),
        pytest.param(CHAT, chat(n=2, seed=3, temperature=1, max_tokens=40, logprobs=True), id="two choices"),
        pytest.param(CHAT, chat(tools=[TOOL], tool_choice=NAMED, max_tokens=200), id="named tool"),
        pytest.param(CHAT, chat(tools=[TOOL], tool_choice="required", max_tokens=200), id="required tool"),
        pytest.param(CHAT, chat(response_format=SCHEMA, max_tokens=100, logprobs=True), id="schema"),
        pytest.param(
            "/v1/completions",
            {"model": MODEL, "prompt": "import os", "max_tokens": 40, "temperature": 0, "logprobs": 1},
            id="completion",
        ),
    ],
)
async def test_what_a_client_gets_is_what_vllm_says(platform: Platform, path: str, body: dict[str, Any]) -> None:
    direct = platform.direct
    await direct.chunks(path, body)  # what the prefix cache holds is then the same for both
    expected, expected_usage = folded(await direct.chunks(path, body))
    got, usage = folded(await platform.chunks(path, body))
    assert got == expected
    assert tokens_of(usage) == tokens_of(expected_usage)
    assert sum(bool(answer.text or answer.calls) for answer in got.values()) == body.get("n", 1)
    if "logprobs" in body:
        assert sum(len(answer.tokens) for answer in got.values()) == tokens_of(usage)[2] > 10
    if "tools" in body:
        arguments = json.loads(got[0].calls[0][1])
        assert got[0].calls[0][0] == "get_weather"
        assert set(arguments) == {"city", "days"}


async def test_reasoning_comes_apart_as_vllm_says_it(platform: Platform) -> None:
    direct = platform.direct
    _, answer = await direct.post("/tokenize", {"model": MODEL, "prompt": "</think>", "add_special_tokens": False})
    (end,) = json.loads(answer)["tokens"]
    for push in range(3, 12):  # until its thoughts end within the answer
        body = chat(max_tokens=60, ignore_eos=True, logit_bias={str(end): push})
        body["chat_template_kwargs"] = {"enable_thinking": True}
        expected, _ = folded(await direct.chunks(CHAT, body))
        if expected[0].reasoning and expected[0].text:
            break
    assert expected[0].reasoning and expected[0].text
    got, _ = folded(await platform.chunks(CHAT, body))
    assert got == expected


async def test_a_session_s_next_turn_hits_the_prefix_cache(platform: Platform) -> None:
    direct = platform.direct
    story = {"role": "user", "content": f"{time.time()} of a river and a sea. " + "Go on with the story. " * 40}
    body = chat(max_tokens=40, ignore_eos=True, session_id="story")
    body["messages"] = [story]
    first, usage = folded(await platform.chunks(CHAT, body))
    prompt, cached, _ = tokens_of(usage)
    assert cached == 0
    before = await direct.metrics()
    body["messages"] = [
        story,
        {"role": "assistant", "content": first[0].text},
        {"role": "user", "content": "And then?"},
    ]
    _, usage = folded(await platform.chunks(CHAT, body))
    _, cached, _ = tokens_of(usage)
    assert cached > prompt / 2
    assert (await direct.metrics()).prefix_hits - before.prefix_hits == cached


# --- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 8, 32])
async def test_a_cancel_reaches_vllm(platform: Platform, streams: int) -> None:
    """``streams``: that vLLM runs when one of them is cancelled; the others run on."""
    direct, took = platform.direct, []
    body = {**endless(tokens=min(7000, KV_TOKENS * 7 // 8 // streams)), "stream": True}
    async with contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(platform.gate.create(body)) for _ in range(streams - 1)]
        for _ in range(10):
            async with platform.gate.create(body) as exchange:
                await until(exchange, b'"content":"', 5)
                await direct.until_idle(20, running=streams)
                began = time.monotonic()
                cancelled = await platform.gate.cancel(exchange.headers["x-stream-id"])
                assert cancelled["result"] == "accepted"
                await direct.until_idle(20, running=streams - 1)
                took.append(time.monotonic() - began)
        for other in others:
            await platform.gate.cancel(other.headers["x-stream-id"])
    await direct.until_idle(5)
    took.sort()
    FIGURES.append(
        f"cancel at the gateway to its end in vLLM, {streams} running, 10 times: median {took[5] * 1000:.0f} ms, "
        f"worst {took[-1] * 1000:.0f} ms"
    )


async def test_a_cancelled_answer_is_settled_for_the_tokens_that_were_streamed(platform: Platform) -> None:
    """Several of which may have come in one chunk, or in none of their own."""
    direct, body = platform.direct, endless("Tell me about lakes")
    busy = [asyncio.create_task(platform.chunks(CHAT, endless(f"question {number}", 300))) for number in range(40)]
    async with platform.gate.create({**body, "stream": True}) as exchange:
        told = await begun(exchange)
        assert (await platform.gate.cancel(told.stream))["result"] == "accepted"
        await ended(told, exchange)
    await asyncio.gather(*busy)
    async with log_of(platform.redis_url) as log:
        end = await log.terminal(told.stream)
    assert end.status == "cancelled"
    assert end.usage is not None
    expected, usage = folded(await direct.chunks(CHAT, {**body, "max_tokens": end.usage.output}))
    assert told.text() == expected[0].text
    assert end.usage.prompt == tokens_of(usage)[0]


async def test_two_hundred_clients_at_once(platform: Platform) -> None:
    began = time.monotonic()
    async with asyncio.timeout(100):
        bodies = [endless(f"question {number}", 40) for number in range(200)]
        answers = await asyncio.gather(*(platform.chunks(CHAT, body) for body in bodies))
    took = time.monotonic() - began
    output = 0
    for chunks in answers:
        choices, usage = folded(chunks)
        assert choices[0].finish == "length"
        output += tokens_of(usage)[2]
    assert output == 200 * 40
    await platform.direct.until_idle(5)
    FIGURES.append(f"200 clients at once through the gateway: {took:.1f} s, {output / took:.0f} tokens/s")


async def test_a_killed_vllm_costs_no_plain_stream(platform: Platform) -> None:
    """A stream that can be continued waits for vLLM (at most one minute) and continues; one that cannot ends
    at once, with an error that may be tried again."""
    server = platform.server
    asked = await questions(platform.direct)
    lost = {
        "logprobs": {**endless("Tell me about seas", ASKED), "logprobs": True},
        "two": {**endless("Tell me about two seas", ASKED), "n": 2, "temperature": 1, "seed": 1},
        "guided": chat(response_format=LONG_LIST, max_tokens=ASKED),
    }
    asked |= {name: Question(CHAT, body, cut_alike=False) for name, body in lost.items()}
    async with contextlib.AsyncExitStack() as stack, log_of(platform.redis_url) as log:
        exchanges = {
            name: await stack.enter_async_context(platform.gate.open("POST", question.path, question.streamed()))
            for name, question in asked.items()
        }
        told = {name: await begun(exchange) for name, exchange in exchanges.items()}
        killed = time.monotonic()
        os.kill(server, signal.SIGKILL)
        await all_ended(told, exchanges)
        if "deadline_exceeded" in (told[name].error_code for name in asked):
            assert max(one.at for one in told.values()) - killed > QUEUE_WAIT_S_MAX
            pytest.skip("this machine is so busy that vLLM's start takes longer than a request waits")
        assert platform.server != server
        for name, question in asked.items():
            if name in lost:
                await must_be_told(told[name], "engine_lost", log)
                assert told[name].at - killed < 2
            else:
                await must_be_continued(question, told[name], platform.direct, log)
    FIGURES.append(
        f"vLLM killed: streams that cannot go on were told after {max(told[name].at for name in lost) - killed:.2f} s, "
        f"the others were whole after {max(one.at for one in told.values()) - killed:.1f} s"
    )


async def test_a_killed_agent_leaves_no_process_of_vllm(platform: Platform) -> None:
    """Comes last: nothing is left to test on."""
    processes = children(platform.agent.pid)
    assert len(processes) >= 4, "a guard, a server, an engine and a worker"
    async with platform.gate.create({**endless(), "stream": True}) as exchange:
        await until(exchange, b'"content":"', 5)
        began = time.monotonic()
        platform.agent.kill()
        await eventually(
            lambda: not any(map(alive, processes)),
            f"the end of {[command_line(pid)[:6] for pid in processes]}",
            20,
        )
    FIGURES.append(f"agent killed: nothing of vLLM is left after {time.monotonic() - began:.1f} s")
