"""The simulator as an engine, on a clock that jumps."""

from __future__ import annotations

import asyncio
import base64
import math
import re
import struct
import time
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.frames import Note, Usage
from stream_fabric.stream.ids import StreamId
from tests.agent.engines.recorder import Recorder, chat, completion, stream_id
from tests.support.virtual import run_virtual

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


def test_a_step_s_token_is_not_for_a_request_that_came_during_the_step() -> None:
    """As when an input cuts an answer: the next one has the name of the request that was aborted."""

    async def main() -> None:
        engine = await started("itl_ms=40,ttft_ms=200")
        old, new = Recorder(), Recorder()
        engine.submit(chat(1, max_tokens=4), old)
        while not old.times:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # within the step of the last token
        engine.abort(stream_id(1))
        engine.submit(chat(1, max_tokens=4), new)
        begun = asyncio.get_running_loop().time()
        await asyncio.wait_for(new.ended.wait(), 3600)
        assert new.times[0] - begun >= 0.2, "the new request has a prefill of its own"
        assert new.end_usage is not None and new.end_usage.output == 4
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
            chat(2, max_tokens=1_000_000, ignore_eos=True),
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


def test_a_great_limit_only_bounds_an_answer() -> None:
    """Agents send the most that a model may answer with every request."""

    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        free = await answer(engine, chat(1))
        for tokens in (8192, 32_000):
            sink = await answer(engine, chat(2, max_tokens=tokens))
            assert (sink.body(), sink.choice_ends()[0].finish_reason) == (free.body(), "stop")
        for exact in ({"max_tokens": 8191}, {"max_tokens": 8192, "ignore_eos": True}):
            sink = await answer(engine, chat(4, **exact))
            assert (sink.end_usage.output, sink.choice_ends()[0].finish_reason) == (exact["max_tokens"], "length")
        await engine.close()

    run_virtual(main())


def test_a_stop_string_is_looked_for_as_tokens_are_made() -> None:
    """Neither the whole answer is made beforehand, nor does a beginning of the stop string leave."""

    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        whole = (await answer(engine, chat(1, max_tokens=200))).body()
        begun_s = time.process_time()
        sink = Recorder()
        engine.submit(chat(2, max_tokens=400_000, ignore_eos=True, stop=[whole[300:330], "never said"]), sink)
        assert time.process_time() - begun_s < 0.2
        await asyncio.wait_for(sink.ended.wait(), 3600)
        assert sink.body() == whole[: whole.index(whole[300:330])]
        assert sink.end_usage is not None
        assert sink.end_usage.output > sink.tokens() > 20
        assert engine.replica.idle
        assert engine.replica.blocks.used == 0
        # Text that resembles a stop string comes out whole
        near = whole[300:330] + "#"
        sink = await answer(engine, chat(3, max_tokens=200, stop=[near]))
        assert (sink.body(), sink.choice_ends()[0].finish_reason) == (whole, "length")
        assert sink.tokens() == 200
        await engine.close()

    run_virtual(main())


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
        text = engine.metrics.render().decode()
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
        text = engine.metrics.render().decode()
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
            async with asyncio.timeout(10):
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


# --- answers that come whole ---------------------------------------------------------------------------------


def embeddings(number: int, given: Any, **more: Any) -> EngineRequest:
    body = {"model": "sim-small", "input": given, **more}
    return EngineRequest(stream_id(number), "embeddings", "sim-small", msgspec.Raw(msgspec.json.encode(body)))


def rerank(number: int, query: Any, documents: Any, **more: Any) -> EngineRequest:
    body = {"model": "sim-small", "query": query, "documents": documents, **more}
    return EngineRequest(stream_id(number), "rerank", "sim-small", msgspec.Raw(msgspec.json.encode(body)))


async def document(engine: SimEngine, request: EngineRequest) -> Any:
    sink = await answer(engine, request)
    assert sink.status == "completed", sink.error
    assert [opened.kind for opened in sink.opens()] == ["item"]
    assert sink.choice_ends()[0].finish_reason == "stop"
    found = msgspec.json.decode(sink.body("item"))
    assert found["simulated"] is True
    tokens = found["usage"]["prompt_tokens"]
    assert found["usage"]["total_tokens"] == tokens
    assert sink.prompt == (tokens, 0)
    assert sink.end_usage == Usage(prompt=tokens)
    assert sink.tokens() == 0
    return found


def test_vectors_are_of_their_inputs_alone() -> None:
    async def main(settings: str, *inputs: Any, **more: Any) -> list[Any]:
        engine = await started(settings)
        found = await document(engine, embeddings(1, list(inputs), **more))
        assert [item["index"] for item in found["data"]] == list(range(len(inputs)))
        assert engine.replica.idle and engine.replica.blocks.used == 0
        await engine.close()
        return [item["embedding"] for item in found["data"]]

    one, other = "itl_ms=1,ttft_ms=5,max_num_seqs=2", "itl_ms=20,seed=7"
    vectors = run_virtual(main(one, "a", "b", "a", "流"))
    assert [vectors[k] for k in (3, 0, 1)] == run_virtual(main(other, "流", "a", "b"))
    assert vectors[0] == vectors[2] and len({tuple(vector) for vector in vectors}) == 3
    nothing = "382055"  # of which the first number drawn is 0
    for vector in (*vectors, *run_virtual(main(one, "a", nothing, dimensions=1))):
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)
    packed = run_virtual(main(one, "a", "b", encoding_format="base64", dimensions=300))
    listed = run_virtual(main(one, "a", "b", encoding_format="float", dimensions=300))
    assert [list(struct.unpack("<300f", base64.b64decode(vector))) for vector in packed] == listed
    assert run_virtual(main(one, [1, 2], [12])) != run_virtual(main(one, [12], [1, 2]))


def test_a_prompt_s_tokens_are_counted_and_nothing_is_billed() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        body = {"model": "sim-small", "messages": [{"role": "user", "content": "x" * 394}]}
        sink = Recorder()
        request = EngineRequest(stream_id(1), "tokenize", "sim-small", msgspec.Raw(msgspec.json.encode(body)))
        engine.submit(request, sink)
        await sink.wait()
        assert msgspec.json.decode(sink.body("item")) == {"count": 100, "simulated": True}
        assert sink.end_usage == Usage() and sink.prompt == (0, 0)
        await engine.close()

    run_virtual(main())


def test_an_input_s_tokens_are_counted() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        for number, (given, tokens) in enumerate((("x" * 400, 100), ([7] * 30, 30), ([[7] * 30, [8]], 31), ("", 1))):
            assert (await document(engine, embeddings(number, given)))["usage"]["prompt_tokens"] == tokens
        assert (await document(engine, rerank(9, "x" * 40, ["y" * 400, "z" * 4])))["usage"]["prompt_tokens"] == 121
        await engine.close()

    run_virtual(main())


def test_a_vector_costs_its_prefill_and_a_place_in_the_batch() -> None:
    async def main() -> list[float]:
        engine = await started("itl_ms=0,ttft_ms=100,prefill_tokens_per_s=1000,max_num_seqs=2")
        loop = asyncio.get_running_loop()
        took = []
        for number, request in enumerate((["x" * 20_000], ["x"], ["x"] * 2, ["x"] * 3, ["x" * 20_000] * 2)):
            begun = loop.time()
            await document(engine, embeddings(number, request))
            took.append(loop.time() - begun)
        assert engine.load().prefix_hits_tokens == 0
        await engine.close()
        return took

    long, one, two, three, twice = run_virtual(main())
    assert long == pytest.approx(5, abs=0.05)
    assert twice == pytest.approx(10, abs=0.05), "each by itself, though they were computed before"
    assert one == pytest.approx(0.1, abs=0.01) == two
    assert three == pytest.approx(0.2, abs=0.01), "the third waits for a slot"


def test_documents_are_ranked_by_the_words_they_share() -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0")
        documents = ["nothing", {"text": "Über den river"}, "river, river", "LONG RIVER über all", "the river."]
        found = await document(engine, rerank(1, "long river über", documents))
        assert [(item["index"], item["relevance_score"]) for item in found["results"]] == [
            (3, 1),
            (1, pytest.approx(2 / 3)),
            (2, pytest.approx(1 / 3)),
            (4, pytest.approx(1 / 3)),
            (0, 0),
        ]
        assert found["results"][1]["document"] == {"text": "Über den river"}
        top = await document(engine, rerank(1, "long river über", documents, top_n=2))
        assert top["results"] == found["results"][:2]
        assert len((await document(engine, rerank(2, "", documents, top_n=0)))["results"]) == 5
        await engine.close()

    run_virtual(main())


@pytest.mark.parametrize(
    "request_",
    [
        embeddings(1, []),
        embeddings(1, 7),
        embeddings(1, [None]),
        embeddings(1, "x", dimensions=0),
        embeddings(1, "x", dimensions=4097),
        embeddings(1, "x", dimensions="many"),
        embeddings(1, ["x"] * 2048, dimensions=4096),
        embeddings(1, "x", encoding_format="bytes"),
        embeddings(1, "x" * 4000),
        rerank(1, "q", []),
        rerank(1, 7, ["x"]),
        rerank(1, "q", [{"title": "x"}]),
        rerank(1, "q", ["x"], top_n=-1),
        rerank(1, "q", ["x", "y" * 4000]),
    ],
    ids=lambda request: bytes(request.body)[:60].decode(),
)
def test_what_cannot_be_computed_ends_as_the_clients_fault(request_: EngineRequest) -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,num_blocks=32")
        sink = await answer(engine, request_)
        assert sink.status == "failed" and sink.error is not None and sink.error.http_status == 400
        assert engine.replica.idle and not sink.frames
        await engine.close()

    run_virtual(main())


def test_an_abort_forgets_every_input() -> None:
    async def main() -> None:
        aborted: list[StreamId] = []
        engine = await started("itl_ms=10,ttft_ms=100,max_num_seqs=2", on_abort=aborted.append)
        sink = Recorder()
        engine.submit(embeddings(1, [str(k) for k in range(50)]), sink)
        await asyncio.sleep(0.35)
        assert engine.load().running == 2 and engine.load().waiting > 30
        engine.abort(stream_id(1))
        assert engine.replica.idle and engine.replica.blocks.used == 0 and aborted == [stream_id(1)]
        await asyncio.sleep(60)
        assert sink.status is None and not sink.opens()
        await engine.close()

    run_virtual(main())


@pytest.mark.parametrize("count", [1, 9])
def test_what_comes_whole_may_be_told_to_fail(count: int) -> None:
    async def main() -> None:
        engine = await started("itl_ms=1,ttft_ms=0,fail_rate=1")
        sink = await answer(engine, embeddings(1, ["x"] * count))
        assert sink.status == "failed" and sink.error is not None and sink.error.retriable
        assert engine.replica.idle and not sink.opens()
        await engine.close()

    run_virtual(main())


def test_what_comes_whole_generates_no_token() -> None:
    async def main() -> str:
        engine = await started("itl_ms=1,ttft_ms=0")
        await document(engine, embeddings(1, ["x" * 400, "y"]))
        text = engine.metrics.render().decode()
        await engine.close()
        return text

    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(run_virtual(main()))
        for sample in family.samples
    }
    assert samples["vllm:prompt_tokens_total"] == 101
    assert samples["vllm:generation_tokens_total"] == 0
    assert samples["vllm:request_success_total"] == 1


def test_a_request_gets_no_token_of_the_aborted_one_whose_name_it_has() -> None:
    async def main() -> None:
        engine = await started("itl_ms=20,ttft_ms=100")
        again = chat(1, "Again", max_tokens=5, seed=1)
        expected = await answer(engine, again)
        engine.submit(chat(1, max_tokens=50), Recorder())
        await asyncio.sleep(0.25)  # between two of its tokens
        engine.abort(stream_id(1))
        asked_at = asyncio.get_running_loop().time()
        sink = await answer(engine, again)
        assert sink.frames == expected.frames and sink.end_usage == expected.end_usage
        assert sink.times[0] - asked_at >= 0.02, "the prompt is computed first"
        await engine.close()

    run_virtual(main())
