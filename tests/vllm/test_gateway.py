"""A client's whole way: gateway, Redis, agent, and the real vLLM that the agent runs; beside it vLLM asked directly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from typing import Any

import pytest

from stream_fabric.limits import QUEUE_WAIT_S_MAX
from tests.chaos.fleet import log_of
from tests.gateway.processes import alive
from tests.support.waiting import eventually
from tests.vllm.continued import (
    ASKED,
    CHAT,
    COMPLETIONS,
    USAGE,
    Question,
    all_ended,
    begun,
    chunks_of,
    ended,
    must_be_continued,
    must_be_told,
    questions,
    repeated,
    several_tokens,
    until,
)
from tests.vllm.real import (
    FIGURES,
    MODEL,
    NAMED,
    SCHEMA,
    TOOL,
    chat,
    children,
    command_line,
    endless,
    folded,
    tokens_of,
)
from tests.vllm.whole_platform import PLATFORM_KV_TOKENS, Platform

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG_LIST = {
    "type": "json_schema",
    "json_schema": {
        "name": "list",
        "strict": True,
        "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 5000},
    },
}


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


async def test_a_prompt_alone_is_scored_as_vllm_scores_it(platform: Platform) -> None:
    body = {"model": MODEL, "prompt": ["import os", "import re"], "max_tokens": 0, "echo": True, "logprobs": 1}
    expected, expected_usage = folded(await platform.direct.chunks(COMPLETIONS, body))
    for streamed in (True, False):
        if streamed:
            got, usage = folded(await platform.chunks(COMPLETIONS, body))
        else:
            answer = json.loads((await platform.gate.ask("POST", COMPLETIONS, body)).body)
            got, usage = folded([answer])
        assert got == expected
        assert [answer.text for answer in got.values()] == body["prompt"]
        assert tokens_of(usage) == tokens_of(expected_usage)


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


async def test_an_input_cuts_the_answer_and_the_next_one_finds_its_prompt_cached(platform: Platform) -> None:
    direct, tokens = platform.direct, 120
    body = chat(max_tokens=tokens, ignore_eos=True, stream_options=USAGE)
    body["messages"] = [{"role": "user", "content": f"{time.time()} of a lake. " + "Tell me what you see. " * 40}]
    before = await direct.metrics()
    async with platform.gate.create({**body, "stream": True}) as exchange:
        stream = exchange.headers["x-stream-id"]
        read = await until(exchange, b'"content":"', 30)
        began = time.monotonic()
        item = {"id": "k1", "item": "Say it again in French."}
        reply = await platform.gate.ask("POST", f"/v1/streams/{stream}/input", item)
        assert reply.json == {"result": "accepted"}, reply.body
        while b'"result":"applied"' not in read:
            read += await exchange.piece()
        note = read.index(b'"result":"applied"')
        while b'"content":"' not in read[note:].partition(b"\n")[2]:
            read += await exchange.piece()
        took_ms = (time.monotonic() - began) * 1000
        read += await exchange.rest(120)
    after = await direct.metrics()
    chunks = chunks_of(read)
    at = next(place for place, chunk in enumerate(chunks) if "input" in chunk)
    first, _ = folded(chunks[:at])
    second, usage = folded(chunks[at:])
    alone, own = folded(await platform.chunks(CHAT, body))
    assert first[0].text and alone[0].text.startswith(first[0].text), "what was said stays as it was"
    assert second[0].text and second[0].finish == "length"
    (prompt, cached, output), (alone_prompt, _, _) = tokens_of(usage), tokens_of(own)
    said = output - tokens
    assert 0 < said < tokens, "each answer has the limit of the request"
    assert cached > alone_prompt / 2 and after.prefix_hits - before.prefix_hits == cached
    assert prompt - alone_prompt > alone_prompt + said / 2, "the second prompt has the first, and what was said"
    assert after.prefix_queries - before.prefix_queries == prompt, "vLLM has computed what the usage says"
    replayed = await platform.gate.ask("GET", f"/v1/streams/{stream}")
    assert chunks_of(replayed.body) == chunks
    FIGURES.append(
        f"input to the first token of the next answer: {took_ms:.0f} ms, {prompt - alone_prompt} prompt tokens of "
        f"which {cached} were cached"
    )


# --- ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 8, 32])
async def test_a_cancel_reaches_vllm(platform: Platform, streams: int) -> None:
    """``streams``: that vLLM runs when one of them is cancelled; the others run on."""
    direct, took = platform.direct, []
    body = {**endless(tokens=min(7000, PLATFORM_KV_TOKENS * 7 // 8 // streams)), "stream": True}
    async with contextlib.AsyncExitStack() as stack:
        others = [await stack.enter_async_context(platform.gate.create(body)) for _ in range(streams - 1)]
        for _ in range(10):
            async with platform.gate.create(body) as exchange:
                await until(exchange, b'"content":"', 5)
                await direct.until_idle(60, running=streams)
                began = time.monotonic()
                cancelled = await platform.gate.cancel(exchange.headers["x-stream-id"])
                assert cancelled["result"] == "accepted"
                await direct.until_idle(60, running=streams - 1)
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
    """A stream that can be continued or repeated waits for vLLM (at most one minute) and goes on; one that cannot ends
    at once, with an error that may be tried again."""
    server = platform.server
    asked = await questions(platform.direct)
    thinking = asked["words"].body | {"chat_template_kwargs": {"enable_thinking": True}}
    asked["thoughts"] = Question(CHAT, thinking, cut_alike=True)
    guided = chat(response_format=LONG_LIST, max_tokens=ASKED)
    asked["guided"] = Question(CHAT, guided, cut_alike=True)
    sampled = guided | {"logprobs": True, "n": 2, "temperature": 1, "seed": 1}
    asked["two guided with logprobs"] = Question(CHAT, sampled, cut_alike=True, choices=2)
    lost = {"guided by chance": guided | {"temperature": 1}}
    asked |= several_tokens(asked) | repeated(asked)
    held = asked["words"].body | {"stop": ["no such words here"]}
    undisturbed, _ = folded(await platform.direct.chunks(CHAT, held))
    asked |= {name: Question(CHAT, body, cut_alike=False) for name, body in lost.items()}
    async with contextlib.AsyncExitStack() as stack, log_of(platform.redis_url) as log:
        exchanges = {
            name: await stack.enter_async_context(platform.gate.open("POST", question.path, question.streamed()))
            for name, question in asked.items()
        }
        told = {name: await begun(exchange) for name, exchange in exchanges.items()}
        cut = await stack.enter_async_context(platform.gate.open("POST", CHAT, Question(CHAT, held, False).streamed()))
        stopped = await begun(cut)
        killed = time.monotonic()
        os.kill(server, signal.SIGKILL)
        await all_ended({**told, "stop": stopped}, {**exchanges, "stop": cut})
        if "deadline_exceeded" in (told[name].error_code for name in asked):
            assert max(one.at for one in told.values()) - killed > QUEUE_WAIT_S_MAX
            pytest.skip("this machine is so busy that vLLM's start takes longer than a request waits")
        assert platform.server != server
        assert len(stopped.epochs) == 2 and undisturbed[0].text.startswith(stopped.text()), "no word is cut"
        assert len(undisturbed[0].text) - len(stopped.text()) < 60, "a few tokens that were held back are missing"
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
