"""The simulator as an engine, on a clock that jumps."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings
from stream_fabric.frames import Note
from stream_fabric.ids import StreamId
from tests.agent.engines.recorder import Recorder, chat, completion, stream_id
from tests.agent.engines.virtual import run_virtual
from tests.support.waiting import eventually

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


async def started(text: str, **more: Any) -> SimEngine:
    engine = SimEngine(SimSettings.parse(text), **more)
    await engine.start()
    return engine


async def answer(engine: SimEngine, request: Any) -> Recorder:
    sink = Recorder()
    engine.submit(request, sink)
    await asyncio.wait_for(sink.ended.wait(), 3600)
    return sink


def test_tokens_come_at_their_times_without_drift() -> None:
    async def main() -> None:
        engine = await started("itl_ms=20,ttft_ms=100")
        begun = asyncio.get_running_loop().time()
        sink = await answer(engine, chat(1, max_tokens=501))
        assert 0.1 <= sink.times[0] - begun <= 0.125
        # The step that ends the prefill takes its tokens' time as well
        assert sink.times[-1] - sink.times[0] == pytest.approx(500 * 0.02, abs=0.001)
        await engine.close()

    run_virtual(main())


def test_a_full_batch_decodes_in_step_and_the_rest_waits_in_line() -> None:
    async def main() -> None:
        engine = await started("itl_ms=10,ttft_ms=0,max_num_seqs=2")
        sinks = [Recorder() for _ in range(4)]
        for number, sink in enumerate(sinks):
            engine.submit(chat(number, max_tokens=10), sink)
        await sinks[0].ended.wait()
        assert sinks[1].status == "completed"
        assert sinks[2].status is None
        await sinks[3].ended.wait()
        assert sinks[0].times == sinks[1].times
        assert sinks[2].times[0] > sinks[1].times[-1]
        await engine.close()

    run_virtual(main())


def test_the_second_asking_of_a_long_prompt_is_cached() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        notes = []
        for number in (1, 2):
            sink = await answer(engine, chat(number, "once upon a time " * 100, max_tokens=2))
            note = sink.frames[0]
            assert isinstance(note, Note)
            notes.append((note.prompt_tokens, note.cached_tokens))
            assert sink.prompt == notes[-1]
        prompt, cached = notes[1]
        assert notes[0] == (prompt, 0)
        assert prompt and cached and cached > 0.9 * prompt
        await engine.close()

    run_virtual(main())


@pytest.mark.parametrize("batch", ["max_num_seqs=1", "max_num_seqs=16", "max_num_seqs=16,num_blocks=40"])
def test_the_text_does_not_depend_on_the_batch(batch: str) -> None:
    async def main(settings: str) -> list[str]:
        engine = await started(f"itl_ms=1,ttft_ms=0,{settings}")
        sinks = [Recorder() for _ in range(8)]
        for number, sink in enumerate(sinks):
            engine.submit(chat(number, f"question {number}", max_tokens=150), sink)
        await asyncio.gather(*(sink.ended.wait() for sink in sinks))
        if "num_blocks" in settings:
            assert engine.replica.preemptions > 0
        assert engine.replica.blocks.used == 0
        await engine.close()
        return [sink.body() for sink in sinks]

    assert run_virtual(main(batch)) == run_virtual(main("max_num_seqs=4"))


def test_some_of_the_text_is_markdown_and_beyond_ascii() -> None:
    async def main() -> str:
        engine = await started("itl_ms=0,ttft_ms=0")
        sink = await answer(engine, chat(1, max_tokens=3000))
        await engine.close()
        return sink.body()

    text = run_virtual(main())
    assert re.search(r"^#+ ", text, re.MULTILINE)
    assert re.search(r"^- ", text, re.MULTILINE)
    assert "```" in text
    assert any(ord(letter) > 0xFFFF for letter in text)


def test_abort_is_told_at_once() -> None:
    aborted: list[StreamId] = []

    async def main() -> None:
        engine = await started("itl_ms=10,ttft_ms=10", on_abort=aborted.append)
        sink = Recorder()
        engine.submit(chat(1, max_tokens=1000), sink)
        await asyncio.sleep(1)
        assert engine.replica.blocks.used
        engine.abort(stream_id(1))
        assert engine.replica.blocks.used == 0
        assert aborted == [stream_id(1)]
        calls = sink.calls
        engine.abort(stream_id(1))
        await asyncio.sleep(1)
        assert (aborted, sink.calls) == ([stream_id(1)], calls)
        await engine.close()

    run_virtual(main())


def test_failures_come_midway_and_may_be_tried_again() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0,fail_rate=1")
        sink = await answer(engine, chat(1, max_tokens=40))
        assert sink.status == "failed"
        assert sink.error is not None
        assert sink.error.retriable
        assert 0 < sink.tokens() < 40
        assert engine.replica.idle
        await engine.close()

    run_virtual(main())


def test_about_the_given_share_fails() -> None:
    async def main() -> None:
        engine = await started("itl_ms=0,ttft_ms=0,fail_rate=0.3")
        ends = [(await answer(engine, chat(k, f"question {k}", max_tokens=4))).status for k in range(200)]
        assert 30 < ends.count("failed") < 90
        await engine.close()

    run_virtual(main())


def test_a_stalled_request_falls_silent_until_it_is_aborted() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0,stall_after_tokens=5")
        sink = Recorder()
        engine.submit(chat(1, max_tokens=50), sink)
        await asyncio.sleep(60)
        assert (sink.tokens(), sink.status) == (5, None)
        engine.abort(stream_id(1))
        assert engine.replica.idle
        await engine.close()

    run_virtual(main())


def test_a_stalled_request_holds_its_slot_and_blocks() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0,stall_after_tokens=5")
        engine.submit(chat(1, max_tokens=50), Recorder())
        await asyncio.sleep(60)
        try:
            assert engine.load().running == 1
        finally:
            await engine.close()

    run_virtual(main())


def test_the_crash_comes_after_its_tokens() -> None:
    crashes: list[int] = []

    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0,crash_after_tokens=7", crash=lambda: crashes.append(1))
        sink = await answer(engine, chat(1, max_tokens=7))
        assert sink.tokens() == 7
        await engine.close()

    run_virtual(main())
    assert crashes == [1]


def test_what_cannot_be_read_ends_as_the_client_s_fault() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,num_blocks=16")
        endless = {"type": "array", "minItems": 1 << 40}
        for request in (
            chat(1, n="many"),
            chat(2, max_tokens=1_000_000),
            chat(3, messages=7),
            chat(4, response_format=_schema({"enum": []})),
            chat(5, response_format=_schema(endless)),
            chat(6, logprobs=True, top_logprobs=1 << 40),
        ):
            sink = await answer(engine, request)
            assert sink.status == "failed"
            assert sink.error is not None
            assert sink.error.http_status == 400
        await engine.close()

    run_virtual(main())


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def test_a_stop_string_is_looked_for_as_tokens_are_made() -> None:
    """Neither the whole answer is made beforehand, nor does a beginning of the stop string leave."""

    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        whole = (await answer(engine, chat(1, max_tokens=200))).body()
        begun = time.perf_counter()
        sink = Recorder()
        engine.submit(chat(2, max_tokens=400_000, stop=[whole[300:330], "never said"]), sink)
        assert time.perf_counter() - begun < 0.05
        await asyncio.wait_for(sink.ended.wait(), 3600)
        assert sink.body() == whole[: whole.index(whole[300:330])]
        assert sink.end_usage is not None
        assert sink.end_usage.output > sink.tokens() > 20
        assert engine.replica.idle
        assert engine.replica.blocks.used == 0
        # What looks like one and is none comes out whole
        near = whole[300:330] + "#"
        sink = await answer(engine, chat(3, max_tokens=200, stop=[near]))
        assert (sink.body(), sink.choice_ends()[0].finish_reason) == (whole, "length")
        assert sink.tokens() == 200
        await engine.close()

    run_virtual(main())


def test_the_least_ttft_holds_beside_a_stream_that_takes_no_time() -> None:
    async def main() -> float:
        engine = await started("itl_ms=0,ttft_ms=300,prefill_tokens_per_s=1e9")
        busy, sink = Recorder(), Recorder()
        engine.submit(chat(1, max_tokens=400_000), busy)
        await eventually(lambda: busy.tokens() > 5000)
        begun = asyncio.get_running_loop().time()
        engine.submit(chat(2, max_tokens=1), sink)
        await sink.wait()
        await engine.close()
        return sink.times[0] - begun

    assert asyncio.run(main()) >= 0.299


def test_a_tool_named_in_the_last_message_is_called() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1")
        named = await answer(engine, chat(1, "please get_weather", tools=[TOOL]))
        assert named.opens()[0].name == "get_weather"
        other = await answer(engine, chat(2, "hello", tools=[TOOL]))
        assert other.opens()[0].kind == "text"
        await engine.close()

    run_virtual(main())


def test_metrics_are_vllm_s_and_say_that_they_are_simulated() -> None:
    async def main() -> str:
        engine = await started("itl_ms=1,ttft_ms=0")
        await answer(engine, chat(1, "once upon a time " * 20, max_tokens=9))
        engine.submit(chat(2, max_tokens=500), Recorder())
        await asyncio.sleep(0.05)
        text = engine.metrics.render()
        await engine.close()
        return text

    families = {family.name: family for family in text_string_to_metric_families(run_virtual(main()))}
    for family in families.values():
        assert "simulated" in family.documentation
    value = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert value["vllm:num_requests_running"] == 1
    assert value["vllm:num_requests_waiting"] == 0
    assert 0 < value["vllm:kv_cache_usage_perc"] < 1
    assert value["vllm:prompt_tokens_total"] > 80
    assert value["vllm:generation_tokens_total"] >= 9
    assert value["vllm:time_to_first_token_seconds_count"] == 2


def test_metrics_hold_the_latency_between_tokens() -> None:
    async def main() -> str:
        engine = await started("itl_ms=1,ttft_ms=0")
        await answer(engine, chat(1, max_tokens=9))
        text = engine.metrics.render()
        await engine.close()
        return text

    assert "vllm:inter_token_latency_seconds_count" in run_virtual(main())


def test_an_abort_from_the_sink_at_the_last_token_leaves_the_engine_serving() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        sink = Recorder(on_token=lambda: engine.abort(stream_id(1)) if sink.tokens() == 5 else None)
        engine.submit(chat(1, max_tokens=5), sink)
        other = Recorder()
        engine.submit(chat(2, max_tokens=50), other)
        await asyncio.sleep(1)
        try:
            assert other.status == "completed"
        finally:
            assert engine._task is not None
            if engine._task.done():
                engine._task.exception()
                engine._task = None
            await engine.close()

    run_virtual(main())


def test_the_first_token_comes_when_steps_take_no_time() -> None:
    async def main() -> None:
        engine = await started("itl_ms=0,ttft_ms=20,prefill_tokens_per_s=1e9")
        sink = Recorder()
        engine.submit(chat(1, max_tokens=1), sink)
        try:
            async with asyncio.timeout(0.5):
                await sink.ended.wait()
        finally:
            await engine.close()

    asyncio.run(main())


def test_min_tokens_lengthens_an_answer() -> None:
    async def main() -> int:
        engine = await started("itl_ms=1,ttft_ms=0")
        sink = await answer(engine, chat(1, min_tokens=900, ignore_eos=True))
        await engine.close()
        return sink.tokens()

    assert run_virtual(main()) >= 900


def test_logprobs_of_completions_is_a_number() -> None:
    async def main() -> Recorder:
        engine = await started("itl_ms=1,ttft_ms=0")
        sink = await answer(engine, completion(1, max_tokens=2, logprobs=3))
        await engine.close()
        return sink

    raw = run_virtual(main()).deltas()[0].logprobs
    assert raw is not None
    assert len(msgspec.json.decode(raw)[0]["top_logprobs"]) == 3
