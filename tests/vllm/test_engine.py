"""The engine on the real vLLM, through its port."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import statistics
import time
from typing import Any

import msgspec
import pytest

from inference.engines.kv_events import KvEvents
from inference.engines.openai import OpenAIEngine
from inference.engines.vllm import VllmEngine
from stream_fabric.errors import EngineFailed
from tests.agent.engines.recorder import Recorder, stream_id
from tests.gateway.processes import alive
from tests.support.waiting import eventually
from tests.vllm.real import (
    BLOCK,
    FIGURES,
    KV_TOKENS,
    NAMED,
    SCHEMA,
    SLOTS,
    SMALL,
    TOOL,
    Direct,
    Home,
    after,
    ask,
    chat,
    children,
    command_line,
    cpu_s,
    endless,
    request,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


@pytest.fixture
def direct(engine: VllmEngine) -> Direct:
    assert engine.url is not None
    return Direct(engine.url)


# --- answers -----------------------------------------------------------------------------------------------------


async def test_a_chat_streams_and_usage_is_the_server_s(engine: VllmEngine) -> None:
    sink = await ask(engine, request(1, endless(tokens=50)))
    assert (sink.status, [block.kind for block in sink.opens()]) == ("completed", ["text"])
    assert len(sink.deltas()) > 10, "piece by piece"
    assert sink.choice_ends()[0].finish_reason == "length"
    assert sink.end_usage is not None
    assert sink.end_usage.output == 50
    assert sink.end_usage.prompt > 0


async def test_its_own_times_are_told_of_one_choice(engine: VllmEngine) -> None:
    """Requests within the slots do not queue; those beyond wait for them."""
    first = await ask(engine, request(1, endless(tokens=10)))
    assert first.own is not None
    queue_s, prefill_s = first.own
    assert 0 <= queue_s < 1
    assert 0 < prefill_s < 60
    crowd = [ask(engine, request(2 + n, endless(tokens=100))) for n in range(2 * SLOTS)]
    waits = sorted(sink.own[0] for sink in await asyncio.gather(*crowd) if sink.own is not None)
    assert len(waits) == 2 * SLOTS
    assert waits[-1] > max(0.05, 5 * waits[0]), "those that found no slot"
    several = await ask(engine, request(100, chat(n=2, max_tokens=5, ignore_eos=True)))
    assert several.own is None


async def test_a_completion_streams(engine: VllmEngine) -> None:
    body = {"model": "tiny", "prompt": "def main(", "max_tokens": 20, "ignore_eos": True}
    sink = await ask(engine, request(1, body, "completions"))
    assert sink.status == "completed"
    assert sink.body()
    assert sink.end_usage is not None
    assert sink.end_usage.output == 20


async def test_choices_side_by_side(engine: VllmEngine) -> None:
    sink = await ask(engine, request(1, chat(n=2, temperature=1, seed=5, max_tokens=30, ignore_eos=True)))
    assert sorted(sink.choice_ends()) == [0, 1]
    assert sink.body(choice=0) != sink.body(choice=1)
    assert sink.end_usage is not None
    assert sink.end_usage.output == 60


async def test_logprobs_are_one_for_each_token(engine: VllmEngine) -> None:
    sink = await ask(engine, request(1, chat(max_tokens=12, ignore_eos=True, logprobs=True, top_logprobs=2)))
    items = [item for delta in sink.deltas() if delta.logprobs for item in msgspec.json.decode(delta.logprobs)]
    assert len(items) == sink.tokens() == 12
    assert all(len(item["top_logprobs"]) == 2 for item in items)


async def test_a_stop_string_ends_the_answer_before_it(engine: VllmEngine) -> None:
    whole = (await ask(engine, request(1, chat(max_tokens=40)))).body()
    stop = whole[20:26]
    sink = await ask(engine, request(2, chat(max_tokens=40, stop=[stop])))
    assert sink.body() == whole[: whole.index(stop)]
    detail = sink.choice_ends()[0].detail
    assert detail is not None
    assert msgspec.json.decode(detail) == stop


async def test_a_named_tool_is_called(engine: VllmEngine) -> None:
    sink = await ask(engine, request(1, chat(tools=[TOOL], tool_choice=NAMED, max_tokens=300)))
    (block,) = sink.opens()
    assert (block.kind, block.name) == ("tool", "get_weather")
    arguments = json.loads(sink.body("tool"))
    assert arguments["city"] in ("Lima", "Oslo", "Quito")
    assert arguments["days"] in range(1, 10)


async def test_a_schema_gets_an_object_that_fits(engine: VllmEngine) -> None:
    sink = await ask(engine, request(1, chat(response_format=SCHEMA, max_tokens=100)))
    value = json.loads(sink.body())
    assert set(value) == {"n", "ok", "name"}
    assert type(value["ok"]) is bool


async def test_reasoning_is_a_block_before_the_text(engine: VllmEngine, direct: Direct) -> None:
    sink = await ask(engine, request(1, await thinking(direct)))
    assert [(block.kind, block.form) for block in sink.opens()] == [("reasoning", "raw"), ("text", None)]
    assert sink.body("reasoning")
    assert sink.body("text")


async def thinking(direct: Direct, **more: Any) -> dict[str, Any]:
    """A request whose answer ends its thoughts: the model knows no better than what it is pushed to."""
    _, answer = await direct.post("/tokenize", {"model": "tiny", "prompt": "</think>", "add_special_tokens": False})
    (end,) = json.loads(answer)["tokens"]
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    for push in range(3, 12):
        body = chat(max_tokens=60, ignore_eos=True, logit_bias={str(end): push}, **thinks, **more)
        status, answer = await direct.post("/v1/chat/completions", body)
        assert status == 200, answer
        message = json.loads(answer)["choices"][0]["message"]
        if message["reasoning"] and message["content"]:
            return body
    raise AssertionError("no push ends its thoughts within the answer")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (chat("river " * 9000), 400, "maximum context length"),
        (chat(max_tokens=1 << 20), 400, "cannot be greater than max_model_len"),
        (chat(model="other"), 404, "other"),
        (chat(temperature=-1), 400, "temperature"),
    ],
)
async def test_a_refusal_is_the_server_s_own(engine: VllmEngine, body: Any, status: int, said: str) -> None:
    sink = await ask(engine, request(1, body))
    assert sink.error is not None
    assert (sink.error.http_status, sink.error.retriable) == (status, False)
    assert said in sink.error.message
    assert not sink.error.code.isdecimal()
    assert (sink.error.code == "context_length_exceeded") == ("context" in said or "max_model_len" in said)


async def test_the_context_is_told_and_ends_the_output(engine: VllmEngine) -> None:
    """The sum of prompt and ``max_tokens`` may exceed it: the gateway must not refuse such a request."""
    context = engine.load().max_model_len
    assert context > 0
    prompt = [5] * (context - 10)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 50, "ignore_eos": True}
    sink = await ask(engine, request(1, body, "completions"))
    assert sink.status == "completed" and sink.end_usage is not None and sink.end_usage.output == 10
    sink = await ask(engine, request(2, body | {"prompt": [5] * context}, "completions"))
    assert sink.error is not None and (sink.error.code, sink.error.http_status) == ("context_length_exceeded", 400)


async def test_what_the_model_cannot_do_is_refused(engine: VllmEngine) -> None:
    sink = await ask(engine, request(1, {"model": "tiny", "input": "x"}, "embeddings"))
    assert sink.error is not None
    assert (sink.error.http_status, sink.error.code) == (400, "unsupported")
    assert "has no /v1/embeddings" in sink.error.message


# --- many, and none -----------------------------------------------------------------------------------------------


@pytest.mark.deep
async def test_two_hundred_at_once_all_complete(engine: VllmEngine, direct: Direct) -> None:
    sinks = [Recorder() for _ in range(200)]
    tokens = 200  # long enough that all have come before the first ends, and that the server tells of it
    began = time.monotonic()
    for number, sink in enumerate(sinks):
        engine.submit(request(number, endless(f"question {number}", tokens)), sink)
    seen = []
    async with asyncio.timeout(90):
        while not all(sink.ended.is_set() for sink in sinks):
            seen.append(await direct.metrics())
    took = time.monotonic() - began
    assert {sink.status for sink in sinks} == {"completed"}
    output = sum(sink.end_usage.output for sink in sinks if sink.end_usage)
    assert output == 200 * tokens
    assert max(metrics.running for metrics in seen) == SLOTS == engine.load().slots
    assert max(metrics.waiting for metrics in seen) > 0
    FIGURES.append(f"200 at once, {tokens} tokens each, {SLOTS} slots: {took:.1f} s, {output / took:.0f} tokens/s")


async def test_a_step_as_one_message_costs_less_than_http(engine: VllmEngine) -> None:
    """The same server by both ways, in turns. The agent's share is this process's, which has the sinks too."""
    assert engine.url is not None
    assert engine.pid is not None
    by_http = OpenAIEngine(engine.url)
    await by_http.start()
    ways: dict[str, OpenAIEngine | VllmEngine] = {"plug-in": engine, "HTTP": by_http}
    costs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(6):
        way = list(ways)[turn % 2]
        sinks = [Recorder() for _ in range(SLOTS)]
        own, servers = time.process_time(), cpu_s(engine.pid)
        for number, sink in enumerate(sinks):
            ways[way].submit(request(number, endless("the same for all", 100)), sink)
        async with asyncio.timeout(90):
            for sink in sinks:
                await sink.ended.wait()
        tokens = sum(sink.tokens() for sink in sinks)
        assert tokens == SLOTS * 100
        own, servers = time.process_time() - own, cpu_s(engine.pid) - servers
        costs[way].append((own / tokens * 1e6, servers / tokens * 1e6))
    await by_http.close()
    # Not the least: where other processes delay this one, it finds many tokens at once, which makes either way cheap
    usual = {way: [statistics.median(column) for column in zip(*each, strict=True)] for way, each in costs.items()}
    for way, (agent_us, server_us) in usual.items():
        FIGURES.append(
            f"{SLOTS} streams by {way}: CPU a token {agent_us:.0f} us in the agent's engine, {server_us:.0f} in vLLM's "
            "API server"
        )
    assert usual["plug-in"][0] < 0.9 * usual["HTTP"][0]


async def test_an_abort_frees_the_server_at_once(engine: VllmEngine, direct: Direct) -> None:
    took = []
    for number in range(10):
        sink = Recorder()
        engine.submit(request(number, endless()), sink)
        await eventually(lambda sink=sink: sink.tokens() >= 5 or sink.ended.is_set())
        assert sink.status is None, sink.error
        assert (await direct.metrics()).running == 1
        engine.abort(stream_id(number))
        calls = sink.calls
        took.append(await direct.until_idle(5))
        assert (sink.calls, sink.status) == (calls, None)
    took.sort()
    FIGURES.append(
        f"abort to nothing running, 10 times: median {took[5] * 1000:.0f} ms, worst {took[-1] * 1000:.0f} ms"
    )


async def test_load_is_the_server_s(engine: VllmEngine) -> None:
    sinks = [Recorder() for _ in range(3)]
    for number, sink in enumerate(sinks):
        engine.submit(request(number, endless()), sink)
    await eventually(lambda: engine.load().running == 3)
    load = engine.load()
    assert (load.ready, load.slots, load.kv_capacity_tokens) == (True, SLOTS, KV_TOKENS)
    assert 0 < load.kv_used_ratio < 1
    for number in range(3):
        engine.abort(stream_id(number))
    await eventually(lambda: engine.load().running == 0)


# --- the cache ---------------------------------------------------------------------------------------------------


async def test_a_prompt_seen_before_hits_the_prefix_cache(engine: VllmEngine, direct: Direct) -> None:
    body = chat("A long story about rivers. " * 60, max_tokens=4)
    before = await direct.metrics()
    first = await ask(engine, request(1, body))
    second = await ask(engine, request(2, body))
    assert first.end_usage is not None and second.end_usage is not None
    prompt = second.end_usage.prompt
    assert first.end_usage.cached == 0
    assert second.end_usage.cached >= prompt - BLOCK > 200
    since = await direct.metrics()
    assert since.prefix_hits - before.prefix_hits == second.end_usage.cached
    assert since.prefix_queries - before.prefix_queries == 2 * prompt
    await eventually(lambda: engine.load().prefix_hits_tokens == since.prefix_hits, "our reading to be theirs")
    assert engine.load().prefix_queries_tokens == since.prefix_queries


async def test_a_cleared_cache_is_counted(engine: VllmEngine, direct: Direct) -> None:
    clears = engine.load().kv_clears
    assert (await direct.post("/reset_prefix_cache"))[0] == 200
    await ask(engine, request(1, chat(max_tokens=1)))  # events leave with the next step
    await eventually(lambda: engine.load().kv_clears == clears + 1)


async def test_what_overflows_the_cache_is_counted(engine: VllmEngine, direct: Direct) -> None:
    """More distinct prompts than the cache holds: what was stored and is not held any more was thrown out."""
    assert (await direct.post("/reset_prefix_cache"))[0] == 200
    await ask(engine, request(1, chat(max_tokens=1)))
    before = engine.load().kv_evicted_tokens
    stored = 0
    for number in range(6):
        sink = await ask(engine, request(number, chat(f"story {number} " + "of a river " * 1000, max_tokens=1)))
        assert sink.end_usage is not None, sink.error
        assert sink.end_usage.cached < BLOCK
        stored += sink.end_usage.prompt // BLOCK * BLOCK
    assert stored > KV_TOKENS + 2 * BLOCK
    least = stored - KV_TOKENS
    await eventually(lambda: engine.load().kv_evicted_tokens - before >= least, f"{least} tokens to be evicted")
    assert engine.load().kv_evicted_tokens - before <= stored


async def test_events_that_were_missed_are_had_again(engine: VllmEngine) -> None:
    """A listener that comes late asks vLLM for all it missed, and counts what the one from the start counted."""
    assert engine.pid is not None
    about = json.loads(after("--kv-events-config", command_line(engine.pid)))
    late = KvEvents()
    late.follow(about["endpoint"], about["replay_endpoint"])
    try:

        async def caught_up() -> bool:
            # Each round makes an event, whose number tells the listener what it missed
            await ask(engine, request(1, chat(f"{time.monotonic()} " + "of a sea " * 20, max_tokens=1)))
            return late.evicted_tokens > 0

        await eventually(caught_up, "the replay")

        def counts() -> tuple[tuple[int, int], tuple[int, int]]:
            """The late listener's and the first one's, which may hear of the last round after it."""
            load = engine.load()
            return (late.evicted_tokens, late.clears), (load.kv_evicted_tokens, load.kv_clears)

        await eventually(lambda: counts()[0] == counts()[1], "both listeners to count the same")
    finally:
        late.close()


# --- deaths ------------------------------------------------------------------------------------------------------


async def test_a_killed_server_costs_its_streams_and_comes_back(engine: VllmEngine) -> None:
    before = engine.load()
    sink = Recorder()
    engine.submit(request(1, endless()), sink)
    await eventually(lambda: sink.tokens() >= 5)
    first = engine.pid
    assert first is not None
    processes = [first, *children(first)]
    assert len(processes) >= 3, "a server, an engine and a worker"
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    await eventually(sink.ended.is_set)
    told = time.monotonic() - killed
    assert sink.error is not None
    assert (sink.status, sink.error.code, sink.error.retriable) == ("failed", "engine_lost", True)
    await eventually(lambda: not engine.load().ready, timeout_s=3)
    unready = time.monotonic() - killed
    await eventually(lambda: engine.load().ready, "a new vLLM", 400)
    again = time.monotonic() - killed
    assert not [pid for pid in processes if alive(pid)]
    assert (await ask(engine, request(2, chat(max_tokens=5)))).status == "completed"
    since = engine.load()
    assert since.kv_clears == before.kv_clears + 1
    assert since.prefix_queries_tokens >= before.prefix_queries_tokens
    assert since.kv_evicted_tokens >= before.kv_evicted_tokens
    FIGURES.append(
        f"server killed: stream ended after {told * 1000:.0f} ms, not ready after {unready * 1000:.0f} ms, "
        f"serves again after {again:.1f} s"
    )


async def test_a_killed_engine_process_is_not_waited_for(engine: VllmEngine) -> None:
    """vLLM's server outlives its engine by seconds and answers each request with an error."""
    first = engine.pid
    assert first is not None
    (core,) = [pid for pid in children(first) if "EngineCore" in command_line(pid)[0]]
    sink = Recorder()
    engine.submit(request(1, endless()), sink)
    await eventually(lambda: sink.tokens() >= 5)
    killed = time.monotonic()
    os.kill(core, signal.SIGKILL)
    await eventually(sink.ended.is_set)
    told = time.monotonic() - killed
    assert sink.error is not None
    assert (sink.error.code, sink.error.retriable) == ("engine_lost", True)
    await eventually(lambda: not engine.load().ready, timeout_s=3)
    unready = time.monotonic() - killed
    await eventually(lambda: engine.load().ready, "a new vLLM", 400)
    assert engine.pid != first
    FIGURES.append(f"engine killed: stream ended after {told * 1000:.0f} ms, not ready after {unready * 1000:.0f} ms")


@pytest.mark.deep
async def test_steps_keep_the_objective_while_long_prompts_are_computed(home: Home) -> None:
    """The gaps of four answers beside three prompts of some 4,000 tokens each, with and without a step budget."""
    flags = (*SMALL, "--served-model-name", "tiny", "--kv-cache-memory-bytes", str(4 * KV_TOKENS * 512))
    found: list[tuple[list[float], float]] = []
    for _ in range(2):
        # Half of what the machine takes without an objective
        objective_s = found[0][0][len(found[0][0]) // 2] / 2 if found else 0.0
        engine = home.engine(flags, itl_objective_s=objective_s)
        try:
            await engine.start()
            assert engine.load().itl_objective_ms == objective_s * 1000
            runs = [await _gaps_beside_prompts(engine, number) for number in range(4)]
        finally:
            await engine.close()
        found.append((sorted(gap for gaps, _ in runs[1:] for gap in gaps), sum(took for _, took in runs[1:])))
    (without, whole_s), (within, pieces_s) = found
    FIGURES.append(
        f"gaps beside long prompts, objective {objective_s * 1000:.0f} ms, median and p90: "
        + ", ".join(
            f"{gaps[len(gaps) // 2] * 1000:.0f} and {gaps[len(gaps) * 9 // 10] * 1000:.0f} ms" for gaps, _ in found
        )
        + f"; the prompts took {whole_s:.2f} and {pieces_s:.2f} s (without, with)"
    )
    assert within[len(within) // 2] < without[len(without) // 2] / 1.4
    assert len(within) > len(without), "the answers go on beside the prompts"


async def _gaps_beside_prompts(engine: VllmEngine, number: int) -> tuple[list[float], float]:
    """Gaps of running answers while prompts are computed, and how long these took."""
    loop, first = asyncio.get_running_loop(), 100 * number
    answers = [Recorder() for _ in range(4)]
    for at, sink in enumerate(answers):
        engine.submit(request(first + at, endless(f"answer {number} {at}", 2000)), sink)
    await eventually(lambda: all(sink.tokens() > 20 for sink in answers))
    began = loop.time()
    words = [" ".join(f"river{number}{at}{word}" for word in range(650)) for at in range(3)]
    ended = await asyncio.gather(
        *(ask(engine, request(first + 10 + at, chat(text, max_tokens=2))) for at, text in enumerate(words))
    )
    assert [sink.status for sink in ended] == ["completed"] * 3, [sink.error for sink in ended]
    ended_at = loop.time()
    for at in range(len(answers)):
        engine.abort(stream_id(first + at))
    times = [[time for time in sink.times if began <= time <= ended_at] for sink in answers]
    return [after - before for one in times for before, after in itertools.pairwise(one)], ended_at - began


@pytest.mark.deep
async def test_a_template_of_vllm_s_own_that_ends_a_continued_answer_is_known(engine: VllmEngine, home: Home) -> None:
    assert engine.loaded().continues_chats
    deepseek = home.engine((*SMALL, "--tokenizer-mode", "deepseek_v32", "--kv-cache-memory-bytes", str(8 << 20)))
    try:
        await deepseek.start()
        assert not deepseek.loaded().continues_chats
    finally:
        await deepseek.close()


async def test_a_flag_that_vllm_refuses_is_told_in_its_words(home: Home) -> None:
    engine = home.engine((*SMALL, "--no-such-flag"))
    with pytest.raises(EngineFailed, match="no-such-flag"):
        await engine.start()
    await engine.close()
