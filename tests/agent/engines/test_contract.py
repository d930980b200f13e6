"""The Engine port's contract, on the simulator itself and on the HTTP engine in front of a server it drives: any
OpenAI-compatible one, one that tells as much as vLLM, and one with the plug-in for vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference.engines.openai import OpenAIEngine
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.pool.records import EngineRequest
from stream_fabric.ports import Engine
from stream_fabric.stream.frames import Delta, Note
from tests.agent.engines.recorder import Recorder, chat, completion, stream_id
from tests.agent.engines.upstream import server, sim_handlers, sim_metrics, sim_plugin
from tests.support.waiting import eventually

SETTINGS = "itl_ms=1,ttft_ms=0,max_num_seqs=8,num_blocks=4096,max_num_batched_tokens=512"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
EXACT = {"seed": 1, "temperature": 0, "ignore_eos": True}
"""The answer is the same each time, and as long as may be."""


class Setup:
    def __init__(self, engine: Engine, sim: SimEngine) -> None:
        self.engine = engine
        self.sim = sim
        """The simulated replica that computes, whether used directly or behind a server."""


@pytest.fixture(params=["sim", "openai", "as vLLM", "by steps"])
async def setup(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Setup]:
    sim = SimEngine(SimSettings.parse(SETTINGS))
    assert await sim.start() == ["sim-small"]
    if request.param == "sim":
        yield Setup(sim, sim)
    elif request.param == "by steps":
        path = str(tmp_path / "steps")
        async with server({}, {"/metrics": sim_metrics(sim)}) as url, sim_plugin(sim, path):
            engine = OpenAIEngine(url, steps=path)
            assert "sim-small" in await engine.start()
            yield Setup(engine, sim)
            await engine.close()
    else:
        gets = {"/metrics": sim_metrics(sim)} if request.param == "as vLLM" else None
        async with server(sim_handlers(sim), gets) as url:
            engine = OpenAIEngine(url)
            assert "sim-small" in await engine.start()
            yield Setup(engine, sim)
            await engine.close()
    await sim.close()


def output(sink: Recorder) -> int:
    """Settled output tokens. The running count equals them, except for tokens of half a character at the end."""
    assert sink.end_usage is not None
    assert 0 <= sink.end_usage.output - sink.tokens() <= 3
    return sink.end_usage.output


async def ask(setup: Setup, request: EngineRequest) -> Recorder:
    sink = Recorder(choices=request.choices)
    setup.engine.submit(request, sink)
    return await sink.wait()


async def test_an_answer_has_one_text_block_one_choice_end_and_one_terminal(setup: Setup) -> None:
    sink = await ask(setup, chat(1, max_tokens=30, **EXACT))
    assert sink.status == "completed"
    assert [block.kind for block in sink.opens()] == ["text"]
    assert output(sink) == 30
    assert sink.choice_ends()[0].finish_reason == "length"
    assert sink.prompt is not None
    assert sink.prompt[0] > 0


async def test_completions_stream_text_too(setup: Setup) -> None:
    sink = await ask(setup, completion(1, max_tokens=12, **EXACT))
    assert sink.status == "completed"
    assert output(sink) == 12
    assert sink.body()


async def test_without_max_tokens_the_answer_ends_by_itself(setup: Setup) -> None:
    sink = await ask(setup, chat(1))
    assert sink.choice_ends()[0].finish_reason == "stop"
    assert 50 <= sink.tokens() <= 400


async def test_the_same_request_gets_the_same_text_and_another_seed_another(setup: Setup) -> None:
    first, second, third = [
        (await ask(setup, chat(number, seed=seed, max_tokens=40))).body() for number, seed in ((1, 7), (2, 7), (3, 8))
    ]
    assert first == second != third


async def test_choices_open_in_order_and_end_each(setup: Setup) -> None:
    sink = await ask(setup, chat(1, n=3, max_tokens=20, seed=1, ignore_eos=True))
    assert [block.choice for block in sink.opens()] == [0, 1, 2]
    assert sorted(sink.choice_ends()) == [0, 1, 2]
    assert len({sink.body(choice=choice) for choice in range(3)}) == 3
    order = [delta.block for delta in sink.deltas()]
    assert order != sorted(order), "choices are made side by side"


@pytest.mark.parametrize("prompts", [["Once", "Tell me of long rivers and the sea"], [[10, 11, 12], [9, 8]]], ids=str)
async def test_several_prompts_have_their_choices_side_by_side(setup: Setup, prompts: list[Any]) -> None:
    """Choice ``i`` of prompt ``p`` has index ``p * n + i``, and is what the prompt alone would get."""
    alone = [await ask(setup, completion(1, [one], n=2, max_tokens=12, **EXACT)) for one in prompts]
    sink = await ask(setup, completion(2, prompts, n=2, max_tokens=12, **EXACT))
    assert sink.status == "completed"
    assert [block.choice for block in sink.opens()] == [0, 1, 2, 3]
    assert sorted(sink.choice_ends()) == [0, 1, 2, 3]
    assert [sink.body(choice=k) for k in range(4)] == [each.body(choice=k) for each in alone for k in range(2)]
    assert output(sink) == 48
    counted = [each.end_usage.prompt for each in (sink, *alone) if each.end_usage is not None]
    assert len(counted) == 3 and counted[0] == counted[1] + counted[2]
    order = [delta.block for delta in sink.deltas()]
    assert order != sorted(order), "choices are made side by side"


async def test_a_stop_string_ends_the_answer_before_it_and_is_told(
    setup: Setup, request: pytest.FixtureRequest
) -> None:
    whole = (await ask(setup, chat(1, max_tokens=60, **EXACT))).body()
    stop = whole[40:47]
    sink = await ask(setup, chat(2, max_tokens=60, stop=[stop], **EXACT))
    assert (sink.status, sink.body()) == ("completed", whole[: whole.index(stop)])
    end = sink.choice_ends()[0]
    assert end.finish_reason == "stop"
    assert end.detail is not None
    assert msgspec.json.decode(end.detail) == stop


async def test_a_tool_call_streams_its_arguments(setup: Setup) -> None:
    # A model of noise may want several calls
    wishes = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1, "temperature": 0}
    sink = await ask(setup, chat(1, **wishes))
    (block,) = sink.opens()
    assert (block.kind, block.form, block.name) == ("tool", "function", "get_weather")
    assert block.id
    arguments = msgspec.json.decode(sink.body("tool"))
    assert isinstance(arguments["city"], str)
    assert isinstance(arguments["days"], int)
    assert set(arguments) == {"city", "days"}
    assert sink.choice_ends()[0].finish_reason == "tool_calls"


async def test_reasoning_is_a_block_of_its_own_before_the_text(setup: Setup) -> None:
    sink = await ask(setup, chat(1, reasoning_effort="low", max_tokens=30))
    assert [(block.kind, block.form) for block in sink.opens()] == [("reasoning", "raw"), ("text", None)]
    assert sink.body("reasoning")
    assert sink.body("text")
    (thoughts, _) = sink.opens()
    thought = sum(delta.tokens for delta in sink.deltas() if delta.block == thoughts.block)
    assert sink.end_usage is not None and sink.end_usage.reasoning == thought > 0


async def test_logprobs_are_aligned_to_the_tokens(setup: Setup, request: pytest.FixtureRequest) -> None:
    sink = await ask(setup, chat(1, max_tokens=5, logprobs=True, top_logprobs=2, **EXACT))
    assert (sink.status, sink.tokens(), output(sink)) == ("completed", 5, 5)
    said = b""
    for delta in sink.deltas():
        assert delta.logprobs is not None
        items = msgspec.json.decode(delta.logprobs)
        assert len(items) == delta.tokens
        assert all(len(item["top_logprobs"]) == 2 for item in items)
        said += b"".join(bytes(item["bytes"]) for item in items)
    # vLLM tells no bytes for a token that is no character alone
    assert said.decode(errors="replace").replace("\ufffd", "").startswith(sink.body().replace("\ufffd", ""))


async def test_a_schema_gets_an_object_that_fits(setup: Setup) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    sink = await ask(setup, chat(1, response_format=wanted, seed=1, temperature=0))
    value = msgspec.json.decode(sink.body())
    assert type(value["n"]) is int
    assert type(value["ok"]) is bool


async def test_streams_side_by_side_do_not_mix(setup: Setup) -> None:
    alone = [(await ask(setup, chat(k, f"question {k}", max_tokens=25, **EXACT))).body() for k in range(6)]
    assert len(set(alone)) == 6
    sinks = [Recorder() for _ in range(6)]
    for k, sink in enumerate(sinks):
        setup.engine.submit(chat(100 + k, f"question {k}", max_tokens=25, **EXACT), sink)
    assert [(await sink.wait()).body() for sink in sinks] == alone


async def test_after_abort_the_sink_hears_nothing_and_the_blocks_are_free(setup: Setup) -> None:
    sink = Recorder()
    setup.engine.submit(chat(1, max_tokens=5000, **EXACT), sink)
    await eventually(lambda: sink.tokens() >= 3)
    setup.engine.abort(stream_id(1))
    calls = sink.calls
    await eventually(lambda: setup.sim.replica.blocks.used == 0)
    await asyncio.sleep(0.01)
    assert sink.calls == calls
    assert sink.status is None
    assert setup.sim.replica.idle


async def test_abort_of_the_unknown_and_the_ended_is_ignored(setup: Setup) -> None:
    setup.engine.abort(stream_id(99))
    await ask(setup, chat(1, max_tokens=3))
    setup.engine.abort(stream_id(1))
    setup.engine.abort(stream_id(1))
    assert (await ask(setup, chat(2, max_tokens=3))).status == "completed"


async def test_abort_from_within_the_sink_leaves_the_engine_serving(setup: Setup) -> None:
    sink = Recorder(on_token=lambda: setup.engine.abort(stream_id(1)) if sink.tokens() == 2 else None)
    setup.engine.submit(chat(1, max_tokens=5000, **EXACT), sink)
    await eventually(lambda: sink.tokens() >= 2)
    assert (await ask(setup, chat(2, max_tokens=3))).status == "completed"
    await eventually(lambda: setup.sim.replica.idle)


async def test_load_tells_what_runs(setup: Setup) -> None:
    sinks = [Recorder() for _ in range(3)]
    for number, sink in enumerate(sinks):
        setup.engine.submit(chat(number, max_tokens=5000, **EXACT), sink)
    await eventually(lambda: all(sink.tokens() for sink in sinks))

    def busy() -> int:
        load = setup.engine.load()
        return load.running + load.waiting

    await eventually(lambda: busy() == 3, "a server's own figures come once a second")
    assert setup.engine.load().slots > 0
    for number in range(3):
        setup.engine.abort(stream_id(number))
    await eventually(lambda: setup.engine.load().running == 0)


async def test_close_aborts_everything_and_may_come_twice(setup: Setup) -> None:
    sink = Recorder()
    setup.engine.submit(chat(1, max_tokens=5000, **EXACT), sink)
    await eventually(lambda: sink.tokens() > 0)
    await setup.engine.close()
    calls = sink.calls
    await setup.engine.close()
    assert sink.calls == calls
    assert sink.status is None


async def test_a_prompt_note_comes_before_the_output(setup: Setup) -> None:
    sink = await ask(setup, chat(1, max_tokens=3))
    notes = [frame for frame in sink.frames if isinstance(frame, Note)]
    assert sink.prompt is not None
    if (
        isinstance(setup.engine, OpenAIEngine) and not setup.engine.server_load.metrics.shown
    ):  # most servers tell it at the end
        assert notes == []
    else:
        assert [(note.kind, note.prompt_tokens) for note in notes] == [("prompt", sink.prompt[0])]
        assert sink.frames[0] == notes[0]
    assert any(isinstance(frame, Delta) for frame in sink.frames)
