"""The HTTP engine against servers that do what servers in the field do, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from aiohttp import web

from inference.engines.openai import OpenAIEngine
from inference.engines.served_models import list_models
from inference.engines.upstream.answers import upstream_error
from inference.engines.upstream.chunks import ChunkReader
from stream_fabric.errors import EngineFailed, EngineLost, StreamTooLarge
from stream_fabric.limits import FRAME_BYTES_MAX, ITEM_CHARS_MAX, STREAM_BYTES_MAX
from stream_fabric.pool.records import EngineRequest
from stream_fabric.process.http_client import open_session
from stream_fabric.stream.frames import ErrorInfo, Note, Open, Usage, encode
from stream_fabric.stream.ids import derived_id
from tests.agent.engines.recorder import Recorder, chat, completion, stream_id
from tests.agent.engines.upstream import Handler, play, server
from tests.support.tls import Authority
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


def event(**chunk: Any) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": index, "delta": fields, "finish_reason": finish}])


def call(**item: Any) -> bytes:
    return delta(tool_calls=[item])


@contextlib.asynccontextmanager
async def engine_on(
    handler: Handler, path: str = CHAT, gets: dict[str, Handler] | None = None, key: str = ""
) -> AsyncIterator[OpenAIEngine]:
    async with server({path: handler}, gets) as url:
        engine = OpenAIEngine(url, key)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


async def ask(handler: Handler, request: EngineRequest | None = None) -> Recorder:
    request = request or chat(1)
    path = CHAT if request.kind == "chat" else "/v1/completions"
    async with engine_on(handler, path) as engine:
        sink = Recorder()
        engine.submit(request, sink)
        return await sink.wait()


def read(*chunks: bytes, choices: int = 1, counts: bool = False, prompts: int = 1) -> Recorder:
    """Chunks given straight to the reader; the sink checks the frames' law."""

    async def main() -> Recorder:
        sink = Recorder(choices=choices)
        reader = ChunkReader(stream_id(1), sink, choices, counts=counts, prompts=prompts)
        for chunk in chunks:
            reader.receive(chunk.removeprefix(b"data: ").rstrip())
        error = reader.end()
        sink.end("failed" if error else "completed", error, reader.usage)
        return sink

    return asyncio.run(main())


# --- the request ---------------------------------------------------------------------------------------------


async def test_the_body_goes_up_as_it_came_with_streaming_and_usage_asked_for() -> None:
    seen: list[Any] = []
    request = chat(1, temperature=0.5, unknown={"kept": [1, None]})
    async with engine_on(play(delta(content="x"), delta(finish="stop"), DONE, seen=seen), key="secret") as engine:
        sink = Recorder()
        engine.submit(request, sink)
        await sink.wait()
    headers, body = seen[0]
    sent = msgspec.json.decode(request.body)
    assert body == {**sent, "stream": True, "stream_options": {"include_usage": True}}
    assert headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(("key", "sent"), [("", "Basic dXNlcjpwQHNz"), ("secret", "Bearer secret")])
async def test_a_login_in_the_url_goes_with_every_request_unless_there_is_a_key(key: str, sent: str) -> None:
    """As a proxy in front of the server asks for it."""
    seen: list[tuple[str, str | None]] = []

    async def models(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, request.headers.get("authorization")))
        return web.json_response({"data": [{"id": "sim-small"}]})

    async def serve(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, request.headers.get("authorization")))
        return await play(delta(content="x"), delta(finish="stop"), DONE)(request)

    async with server({CHAT: serve}, {"/v1/models": models}) as url:
        engine, sink = OpenAIEngine(url.replace("//", "//user:p%40ss@"), key), Recorder()
        await engine.start()
        engine.submit(chat(1), sink)
        await sink.wait()
        await engine.close()
    assert sink.status == "completed"
    assert seen == [("/v1/models", sent), (CHAT, sent)]


async def test_only_vllm_is_asked_to_count_as_it_goes() -> None:
    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(text="vllm:num_requests_running 0.0\n")

    seen: list[Any] = []
    answer = play(delta(content="x"), delta(finish="stop"), DONE, seen=seen)
    for gets in ({"/metrics": metrics}, None):
        async with engine_on(answer, gets=gets) as engine:
            sink = Recorder()
            engine.submit(chat(1), sink)
            await sink.wait()
            assert (sink.status, sink.tokens()) == ("completed", 1), "one that leaves the counts out is taken as it is"
    options = [body["stream_options"] for _, body in seen]
    assert options == [{"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True}]


# --- frames --------------------------------------------------------------------------------------------------


async def test_content_becomes_a_text_block_with_the_upstream_s_usage() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    parts = (
        delta(role="assistant", content=""),
        delta(content="zwölf "),
        b": beat\r\n\r\n",
        delta(content="🚀"),
        delta(finish="stop"),
        event(choices=[], usage=usage),
        DONE,
    )
    whole = b"".join(parts)
    for pieces in (parts, tuple(whole[i : i + 3] for i in range(0, len(whole), 3)), (whole,)):
        sink = await ask(play(*pieces))
        assert (sink.status, sink.body()) == ("completed", "zwölf 🚀")
        assert sink.end_usage == Usage(9, 4, 0, 5, 2)
        assert sink.prompt == (9, 4)


def test_reasoning_under_either_name_is_taken_once() -> None:
    spellings: tuple[dict[str, Any], ...] = (
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
    )
    for fields in spellings:
        sink = read(delta(**fields), delta(content="so"), delta(finish="stop"), DONE)
        assert [block.kind for block in sink.opens()] == ["reasoning", "text"]
        assert (sink.body("reasoning"), sink.body("text")) == ("hm", "so")


@pytest.mark.parametrize("details", [None, {"reasoning_tokens": None}])
@pytest.mark.parametrize("counts", [True, False])
def test_reasoning_is_counted_where_the_server_does_not(details: dict[str, Any] | None, counts: bool) -> None:
    """Many servers report no ``reasoning_tokens``."""
    thoughts = [counted(n, reasoning=f"hm {n} ") for n in range(1, 7)]
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "completion_tokens_details": details}
    said = [counted(8, content="so"), counted(9, finish="stop"), event(choices=[], usage=usage), DONE]
    assert read(*thoughts, *said, counts=counts).end_usage == Usage(7, 0, 0, 9, 6)


def test_a_server_that_counts_reasoning_is_believed() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}}
    sink = read(delta(reasoning="hm"), delta(finish="stop"), event(choices=[], usage=usage), DONE)
    assert sink.end_usage == Usage(7, 0, 0, 9, 4)


def test_a_refusal_is_a_block_of_its_own() -> None:
    sink = read(delta(refusal="I can"), delta(refusal="not"), delta(finish="stop"), DONE)
    assert sink.body("refusal") == "I cannot"


def test_choices_interleave() -> None:
    sink = read(
        *(delta(k, content=text) for k, text in ((0, "a"), (1, "x"), (0, "b"), (1, "y"))),
        delta(1, "stop"),
        delta(0, "length"),
        choices=2,
    )
    assert (sink.body(choice=0), sink.body(choice=1)) == ("ab", "xy")
    assert {k: end.finish_reason for k, end in sink.choice_ends().items()} == {0: "length", 1: "stop"}


ONE = {"index": 0, "id": "c1", "type": "function"}
TWO = {"index": 1, "id": "c2", "type": "function"}


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(
            [
                call(**ONE, function={"name": "f", "arguments": ""}),
                call(index=0, function={"arguments": '{"a"'}),
                call(**TWO, function={"name": "g", "arguments": ""}),
                call(index=1, function={"arguments": "{}"}),
                call(index=0, function={"arguments": ":1}"}),
            ],
            id="in pieces, interleaved",
        ),
        pytest.param(
            [
                delta(
                    tool_calls=[
                        {**ONE, "function": {"name": "f", "arguments": '{"a":1}'}},
                        {**TWO, "function": {"name": "g", "arguments": "{}"}},
                    ]
                )
            ],
            id="whole in one chunk",
        ),
        pytest.param(
            [
                call(**ONE, function={"name": "f", "arguments": '{"a"'}),
                call(**ONE, function={"name": "f", "arguments": ":1}"}),
                call(**TWO, function={"name": "g", "arguments": "{}"}),
            ],
            id="id and name repeated",
        ),
        pytest.param(
            [
                call(id="c1", function={"name": "f", "arguments": '{"a"'}),
                call(function={"arguments": ":1}"}),
                call(id="c2", function={"name": "g", "arguments": "{}"}),
            ],
            id="no index",
        ),
        pytest.param(
            [
                call(**ONE, function={"name": "f", "arguments": '{"a":1}'}),
                call(index=0, id="c2", function={"name": "g", "arguments": "{}"}),
            ],
            id="one index for both",
        ),
        pytest.param(
            [
                call(**ONE),
                call(index=0, function={"name": "f", "arguments": '{"a":1}'}),
                call(**TWO, function={"name": "g", "arguments": "{}"}),
            ],
            id="name after the id",
        ),
        pytest.param(
            [
                call(**ONE, function={"name": "f", "arguments": {"a": 1}}),
                call(**TWO, function={"name": "g", "arguments": {}}),
            ],
            id="arguments as an object",
        ),
    ],
)
def test_tool_calls_of_every_make(parts: list[bytes]) -> None:
    sink = read(*parts, delta(finish="tool_calls"), DONE)
    assert [(block.id, block.name) for block in sink.opens()] == [("c1", "f"), ("c2", "g")]
    texts = {block.name: "".join(d.text for d in sink.deltas() if d.block == block.block) for block in sink.opens()}
    assert {name: msgspec.json.decode(text) for name, text in texts.items()} == {"f": {"a": 1}, "g": {}}
    assert sink.choice_ends()[0].finish_reason == "tool_calls"


def test_a_call_without_an_id_gets_one() -> None:
    sink = read(call(index=0, function={"name": "f", "arguments": "{}"}), delta(finish="tool_calls"))
    assert sink.opens()[0].id


@pytest.mark.parametrize("reason", ["END", 128_009])
def test_the_stop_that_matched_is_kept(reason: str | int) -> None:
    sink = read(
        delta(content="x"), event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": reason}])
    )
    detail = sink.choice_ends()[0].detail
    assert detail is not None
    assert msgspec.json.decode(detail) == reason


def test_logprobs_stay_aligned_when_a_chunk_holds_several_tokens() -> None:
    items = [{"token": "so", "logprob": -0.1}, {"token": " it", "logprob": -0.2}]
    sink = read(
        event(choices=[{"index": 0, "delta": {"content": "so it"}, "logprobs": {"content": items}}]),
        delta(finish="stop"),
    )
    (only,) = sink.deltas()
    assert only.tokens == 2
    assert only.logprobs is not None
    assert msgspec.json.decode(only.logprobs) == items


def spelled(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5}


def said(text: str, *tokens: str, finish: str | None = None) -> bytes:
    logprobs = {"content": [spelled(token) for token in tokens]}
    return event(choices=[{"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": finish}])


@pytest.mark.parametrize(
    ("chunks", "texts", "tokens"),
    [
        pytest.param([said("a", "a"), said("", "<end>", finish="stop")], ["a", ""], ["a", "<end>"], id="the end"),
        pytest.param([said("", "\\xf0"), said("🙂", "\\x9f")], ["🙂"], ["\\xf0", "\\x9f"], id="half a character first"),
        pytest.param([said("a", "a"), said("", "c"), said("ü", "b")], ["a", "ü"], ["a", "c", "b"], id="later"),
        pytest.param([said("", "<end>", finish="stop")], [""], ["<end>"], id="nothing but the end"),
        pytest.param([said(""), said("a", "a"), said("")], ["a"], ["a"], id="no tokens"),
    ],
)  # fmt: skip
def test_logprobs_of_tokens_without_a_text_are_not_lost(
    chunks: list[bytes], texts: list[str], tokens: list[str]
) -> None:
    sink = read(*chunks, delta(finish="stop"))
    assert [delta.text for delta in sink.deltas()] == texts
    assert [block.kind for block in sink.opens()] == ["text"]
    items = [item for delta in sink.deltas() if delta.logprobs for item in msgspec.json.decode(delta.logprobs)]
    assert items == [spelled(token) for token in tokens]
    assert sink.tokens() == len(tokens)


@pytest.mark.parametrize("whole", [True, False], ids=["characters", "halves"])
@pytest.mark.parametrize("older", [False, True], ids=["list", "object"])
def test_the_logprobs_of_many_tokens_are_divided_into_frames(older: bool, whole: bool) -> None:
    """As vLLM sends them in one chunk after its server, or the agent, stood still."""
    tokens = [f" w{number}" if whole or number % 2 else "\xf0" for number in range(400)]
    text = "".join(token for token in tokens if whole or token != "\xf0")
    tops = [{f"{token}{rank}": -rank - 0.5 for rank in range(50)} for token in tokens]
    offsets = list(range(len(tokens)))
    lists = {"tokens": tokens, "token_logprobs": None, "top_logprobs": tops, "text_offset": offsets}
    items = [{"token": token, "logprob": -0.5, "top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]
    choice = (
        {"text": text, "logprobs": lists} if older else {"delta": {"content": text}, "logprobs": {"content": items}}
    )
    usage = {"prompt_tokens": 7, "completion_tokens": 410}
    sink = read(event(choices=[{"index": 0, **choice}], usage=usage), delta(finish="stop"), counts=True)
    deltas = sink.deltas()
    assert len(deltas) > 1 and max(len(encode(each)) for each in deltas) <= FRAME_BYTES_MAX
    assert "".join(each.text for each in deltas) == text
    assert sink.tokens() == 410, "some had no logprobs"
    found = [msgspec.json.decode(each.logprobs or b"") for each in deltas]
    if older:
        assert {name: [*chain(*(part[name] for part in found))] for name in lists if lists[name]} == {
            name: each for name, each in lists.items() if each
        }
        assert all(part["token_logprobs"] is None for part in found)
    else:
        assert [*chain(*found)] == items
    if whole:
        named = [part["tokens"] if older else [item["token"] for item in part] for part in found]
        assert ["".join(each) for each in named] == [each.text for each in deltas]


def counted(made: int | None, index: int = 0, finish: str | None = None, **fields: Any) -> bytes:
    """A chunk with what its choice has made so far."""
    usage = {"prompt_tokens": 7, "completion_tokens": made}
    return event(choices=[{"index": index, "delta": fields, "finish_reason": finish}], usage=usage)


TOTAL = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 9})


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        pytest.param([counted(1, content="a"), counted(4, content="bcd")], [("a", 1), ("bcd", 3)], id="several in one"),
        pytest.param(
            [counted(2, content=""), counted(3, content="ü"), counted(5, content="")], [("ü", 3)], id="half characters"
        ),
        pytest.param(
            [counted(1, reasoning="hm"), counted(4, reasoning="so", content="yes"), counted(5, content="!")],
            [("hm", 1), ("so", 3), ("yes", 0), ("!", 1)],
            id="the end of thoughts",
        ),
        pytest.param(
            [
                counted(3, tool_calls=[{**ONE, "function": {"name": "f", "arguments": ""}}]),
                counted(5, tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]),
            ],
            [("{}", 5)],
            id="a tool call",
        ),
        pytest.param([counted(None, content="a"), counted(None, content="bcd")], [("a", 1), ("bcd", 1)], id="not told"),
    ],
)
def test_a_server_that_counts_is_believed(chunks: list[bytes], told: list[tuple[str, int]]) -> None:
    sink = read(counted(0, role="assistant", content=""), *chunks, counted(9, finish="stop"), TOTAL, DONE, counts=True)
    assert [(delta.text, delta.tokens) for delta in sink.deltas()] == told
    assert sink.frames[0] == Note("prompt", prompt_tokens=7)
    thought = sum(tokens for text, tokens in told if text in ("hm", "so"))
    assert (sink.prompt, sink.end_usage) == ((7, 0), Usage(7, output=9, reasoning=thought))


def test_each_choice_counts_its_own() -> None:
    sink = read(
        *(counted(made, index, content="x") for index, made in ((0, 1), (1, 5), (0, 4), (1, 6))),
        *(counted(9, index, "stop") for index in (0, 1)),
        choices=2,
        counts=True,
    )
    assert [delta.tokens for delta in sink.deltas()] == [1, 5, 3, 1]


def test_what_was_cached_is_told_at_the_end() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    sink = read(counted(1, content="a"), counted(1, finish="stop"), event(choices=[], usage=usage), DONE, counts=True)
    assert (sink.prompt, sink.end_usage) == ((7, 4), Usage(7, 4, output=1))


def test_logprobs_around_a_tool_call_open_no_text() -> None:
    sink = read(
        said("", "<call>"),
        call(**ONE, function={"name": "f", "arguments": "{}"}),
        said("", "<end>"),
        said("", finish="tool_calls"),
    )
    assert [block.kind for block in sink.opens()] == ["tool"]


def test_nothing_of_a_choice_follows_its_end() -> None:
    read(delta(content="x"), delta(finish="stop"), delta(content="late"), DONE)


# --- ends that are none --------------------------------------------------------------------------------------


def test_many_calls_take_no_quadratic_time() -> None:
    """10,000 calls took longer than an agent's lease lasts."""
    calls = [{"index": n, "id": f"c{n}", "function": {"name": "f", "arguments": "{}"}} for n in range(20_000)]
    began = time.process_time()
    sink = read(delta(tool_calls=calls), delta(finish="tool_calls"), DONE)
    assert time.process_time() - began < 3
    assert len({frame.id for frame in sink.opens()}) == 20_000


@pytest.mark.parametrize(
    "chunk",
    [
        delta(tool_calls=[{"index": 0, "function": {"arguments": "x" * 1000}}]),
        event(choices=[{"index": 0, "delta": {"content": ""}, "logprobs": {"content": [{"token": "x" * 1000}]}}]),
    ],
    ids=["arguments without a name", "logprobs without a text"],
)
def test_what_is_held_back_counts_as_output(chunk: bytes) -> None:
    sink = read(*[chunk] * (STREAM_BYTES_MAX // 1000 + 1))
    assert sink.error is not None and sink.error.code == StreamTooLarge.code


async def test_a_cut_before_the_finish_is_never_a_clean_end() -> None:
    for parts in ((), (delta(content="half"),), (delta(content="half"), DONE)):
        sink = await ask(play(*parts))
        assert sink.status == "failed"
        assert sink.error is not None
        assert (sink.error.code, sink.error.retriable) == ("upstream_truncated", True)


async def test_a_cut_in_one_of_two_choices_is_no_clean_end() -> None:
    sink = await ask(play(delta(0, content="a"), delta(0, "stop"), delta(1, content="b")), chat(1, n=2))
    assert sink.error is not None
    assert sink.error.code == "upstream_truncated"


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_answer_that_the_engine_gave_up_is_no_clean_end(reason: str) -> None:
    sink = await ask(play(delta(content="x"), delta(finish=reason, content="y"), event(choices=[], usage={}), DONE))
    assert (sink.status, sink.body(), sink.choice_ends()) == ("failed", "xy", {})
    assert sink.error is not None and (sink.error.code, sink.error.retriable) == ("upstream_truncated", True)


async def test_a_finish_without_done_is_whole() -> None:
    assert (await ask(play(delta(content="x"), delta(finish="stop")))).status == "completed"


async def test_a_dropped_connection_may_be_tried_again() -> None:
    sink = await ask(play(delta(content="half"), cut=True))
    assert sink.status == "failed"
    assert sink.error is not None
    assert sink.error.retriable


async def test_a_cut_within_an_event_may_be_tried_again() -> None:
    sink = await ask(play(delta(content="half"), delta(content="and more")[:-20]))
    assert sink.error is not None
    assert (sink.error.code, sink.error.retriable) == ("upstream_truncated", True)


async def test_done_ends_the_answer_though_the_connection_stays() -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(delta(content="x") + delta(finish="stop") + DONE)
        await asyncio.sleep(60)
        return response

    async with engine_on(serve) as engine:
        sink = Recorder()
        engine.submit(chat(1), sink)
        async with asyncio.timeout(10):
            await sink.ended.wait()


async def test_a_connection_that_drops_behind_the_finish_loses_nothing() -> None:
    sink = await ask(play(delta(content="x"), delta(finish="stop"), cut=True))
    assert (sink.status, sink.body()) == ("completed", "x")


def answering(*parts: bytes, status: int = 200, **headers: str) -> Handler:
    async def serve(request: web.Request) -> web.StreamResponse:
        told = {"content-type": "application/json", **headers}
        return web.Response(status=status, body=b"".join(parts), headers=told)

    return serve


async def test_a_server_that_does_not_stream_is_heard_all_the_same() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "zwölf", "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    body = msgspec.json.encode({"object": "chat.completion", "choices": [choice], "usage": usage})
    sink = await ask(answering(msgspec.json.format(body, indent=2)))
    assert (sink.status, sink.body(), sink.end_usage) == ("completed", "zwölf", Usage(9, 0, 0, 5, 0))
    assert [block.name for block in sink.opens() if block.kind == "tool"] == ["f"]
    text = {"object": "text_completion", "choices": [{"index": 0, "text": "zwölf", "finish_reason": "stop"}]}
    sink = await ask(answering(msgspec.json.encode(text)), completion(1))
    assert (sink.status, sink.body()) == ("completed", "zwölf")


async def test_an_error_with_status_200_keeps_its_words() -> None:
    sink = await ask(answering(b'{"error":{"message":"too long by 7","type":"BadRequestError","code":400}}'))
    assert sink.error == ErrorInfo("invalid_request", "too long by 7", "invalid_request_error", 400)


async def test_a_document_beyond_bounds_in_place_of_a_stream_fails() -> None:
    sink = await ask(answering(b'{"choices":"', b"x" * STREAM_BYTES_MAX, b'"}'))
    assert (sink.status, sink.frames) == ("failed", [])


async def test_events_without_data_are_passed_over() -> None:
    sink = await ask(play(b"data:\n\n", delta(content="x"), b"data: \n\n", delta(finish="stop"), DONE))
    assert (sink.status, sink.body()) == ("completed", "x")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_the_operators_to_follow(status: int) -> None:
    """A client that follows one would ask with GET, or send the request somewhere else than was set."""
    seen: list[Any] = []
    async with server({CHAT: play(delta(content="x"), delta(finish="stop"), DONE, seen=seen)}) as elsewhere:
        sink = await ask(answering(status=status, location=elsewhere + CHAT))
        assert sink.error is not None
        assert (sink.error.http_status, sink.error.type) == (502, "server_error")
        assert "redirect" in sink.error.message
        models = answering(status=status, location=f"{elsewhere}/v1/models")
        async with server({}, {"/v1/models": models}) as url:
            engine = OpenAIEngine(url)
            with pytest.raises(EngineFailed, match=f"{elsewhere}/v1/models.*--upstream"):
                await engine.start()
            await engine.close()
    assert not seen


@pytest.mark.parametrize("status", [202, 204, 304, 600])
async def test_a_status_that_is_no_error_is_never_the_answers(status: int) -> None:
    sink = await ask(answering(status=status))
    assert sink.error is not None
    assert (sink.error.http_status, sink.error.code) == (502, "engine_error")


@pytest.mark.parametrize("error", [{"message": "CUDA out of memory", "code": 500}, "CUDA out of memory"])
async def test_an_error_within_the_stream_ends_it_with_the_upstream_s_words(error: Any) -> None:
    sink = await ask(play(delta(content="x"), event(error=error), DONE))
    assert sink.status == "failed"
    assert sink.error is not None
    assert "CUDA out of memory" in sink.error.message
    assert "chunk" not in sink.error.message
    assert sink.error.retriable


@pytest.mark.parametrize("junk", [b"data: {not json\n\n", b'data: {"choices":7}\n\n', b"data: \xff\n\n"])
async def test_what_is_no_chunk_fails_the_stream(junk: bytes) -> None:
    sink = await ask(play(delta(content="x"), junk, delta(finish="stop"), DONE))
    assert sink.status == "failed"


@pytest.mark.parametrize("count", [-1, 1 << 31, 1 << 64, 10**30])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
async def test_a_count_that_no_answer_has_fails_the_stream(name: str, count: int) -> None:
    """Counters of the agent and of Redis take no such number, and end all streams of the replica with an error."""
    sink = await ask(play(delta(content="x"), delta(finish="stop"), event(choices=[], usage={name: count}), DONE))
    assert (sink.status, sink.end_usage) == ("failed", None)
    assert sink.error is not None and name in sink.error.message


@pytest.mark.parametrize("field", ["logprobs", "stop_reason"])
async def test_bytes_that_are_no_text_fail_the_stream(field: str) -> None:
    """These fields are passed on undecoded: a browser ends a socket, with all its streams, that sends such bytes."""
    choice = {"index": 0, "delta": {"content": "x"}, field: {"content": [{"token": "?"}]}}
    junk = event(choices=[choice]).replace(b"?", b"\xff")
    sink = await ask(play(junk, delta(finish="stop"), DONE))
    assert sink.status == "failed"
    assert sink.error is not None and "utf-8" in sink.error.message


async def test_a_long_error_is_not_decoded() -> None:
    """A million such numbers took four seconds, in which the agent lost its lease."""
    error = b"[" + b"1e300," * 1_000_000 + b"1]"
    sink = await ask(play(delta(content="x"), b'data: {"error":%b}\n\n' % error, DONE))
    assert sink.status == "failed"
    assert sink.error is not None and sink.error.message == error[:500].decode()


async def test_a_deep_error_is_told_with_its_status() -> None:
    sink = await ask(play(b"[" * 3000 + b"]" * 3000, status=400))
    assert sink.error is not None and (sink.error.http_status, sink.error.message) == (400, "[" * 500)


@pytest.mark.parametrize(("status", "retriable"), [(400, False), (404, False), (429, True), (500, True), (503, True)])
async def test_a_refused_request_keeps_the_status_and_the_message(status: int, retriable: bool) -> None:
    body = msgspec.json.encode({"error": {"message": "too long by 7", "type": "BadRequestError", "code": status}})
    sink = await ask(play(body, status=status))
    assert sink.error is not None
    assert "too long by 7" in sink.error.message
    assert (sink.error.http_status, sink.error.retriable) == (status, retriable)


async def test_a_server_that_is_gone_is_told_and_may_be_tried_again() -> None:
    async with server({}) as url:
        engine = OpenAIEngine(url)
        await engine.start()
    sink = Recorder()
    assert engine.load().ready
    engine.submit(chat(1), sink)
    await sink.wait()
    ready = engine.load().ready
    await engine.close()
    assert sink.error is not None
    assert sink.error.retriable
    assert sink.error.message == "the model server failed: the connection failed", "clients get no address"
    assert not ready, "before its load is read again: the pool would give the request back at once"


@pytest.mark.parametrize("closes", [1, 2])
async def test_a_connection_that_closes_when_it_is_used_again_costs_no_request(closes: int) -> None:
    """As a server does at the end of its keep-alive time; one that never answers is given up."""
    answer, asked = play(delta(content="x"), delta(finish="stop"), DONE), []

    async def serve(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers["x-request-id"])
        if 1 < len(asked) <= 1 + closes:
            assert request.transport is not None
            request.transport.abort()
        return await answer(request)

    async with engine_on(serve) as engine:
        for number in range(2):
            sink = Recorder()
            engine.submit(chat(number), sink)
            await sink.wait()
            if number and closes == 2:
                assert sink.error is not None and (sink.error.code, sink.error.retriable) == ("engine_lost", True)
            else:
                assert (sink.status, sink.tokens()) == ("completed", 1)
    assert asked == [stream_id(0), stream_id(1), stream_id(1)]


async def test_a_body_that_cannot_be_read_ends_the_stream() -> None:
    async with engine_on(play()) as engine:
        sink = Recorder()
        engine.submit(chat(1, n="many"), sink)
        async with asyncio.timeout(10):
            await sink.ended.wait()


# --- abort, start, load --------------------------------------------------------------------------------------


async def test_nothing_that_has_come_is_heard_after_an_abort() -> None:
    """A token that waits in the socket while the agent aborts is not told, whichever of the two the loop runs first."""
    sent, closed = threading.Event(), threading.Event()
    more = threading.Event()

    def serve(listener: socket.socket) -> None:
        for answer in ({"data": [{"id": "m"}]}, {}, None):  # the models, no metrics, the stream
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if answer is not None:
                    body = msgspec.json.encode(answer)
                    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                    connection.sendall(head.encode() + body)
                    continue
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + delta(content="a"))
                more.wait(20)
                connection.sendall(delta(content="b"))
                sent.set()
                with contextlib.suppress(ConnectionError):
                    connection.recv(1)
                closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        engine = OpenAIEngine(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await engine.start()
        sink = Recorder()
        engine.submit(chat(1), sink)
        await eventually(lambda: sink.tokens() == 1)
        more.set()
        sent.wait(20)  # the loop stands still: it finds the token when it runs again
        await asyncio.sleep(0)
        calls = sink.calls
        engine.abort(stream_id(1))
        await asyncio.to_thread(closed.wait, 20)
        await engine.close()
        assert (sink.calls, sink.status) == (calls, None)
        assert calls == 2, "the block and its first token came, and the second had not been read"


@pytest.mark.parametrize("pieces", [[delta(content="a") + delta(content="b") + delta(finish="stop") + DONE], None])
async def test_an_abort_by_what_the_sink_hears_ends_its_calls(pieces: list[bytes] | None) -> None:
    whole = [delta(content="a"), delta(content="b"), delta(finish="stop"), DONE]
    async with engine_on(play(*(pieces or whole))) as engine:
        sink = Recorder(on_token=lambda: engine.abort(stream_id(1)))
        engine.submit(chat(1), sink)
        await eventually(lambda: sink.tokens() == 1)
        await ask_again(engine)
        assert (sink.calls, sink.status) == (2, None)


@pytest.mark.parametrize("aborted", [False, True])
async def test_an_ended_request_is_freed_without_the_cycle_collector(aborted: bool) -> None:
    """With its sink: the agent's holds the frames of the whole stream."""
    async with engine_on(play(delta(content="a"), delta(finish="stop"), DONE)) as engine:
        await ask_again(engine)  # connections, caches
        gc.collect()
        gc.disable()
        try:
            sink = Recorder(on_token=(lambda: engine.abort(stream_id(1))) if aborted else None)
            gone = weakref.ref(sink)
            engine.submit(chat(1), sink)
            await eventually(sink.tokens)
            del sink
            await eventually(lambda: gone() is None, "the sink to be freed")
        finally:
            gc.enable()


async def ask_again(engine: OpenAIEngine) -> None:
    """Serve another request to its end: what was under way for the one before has come by then."""
    sink = Recorder()
    engine.submit(chat(2), sink)
    await sink.wait()


async def test_abort_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(delta(content="x"))
        try:
            await asyncio.sleep(60)
        finally:
            closed.set()
        return response

    async with engine_on(serve) as engine:
        sink = Recorder()
        engine.submit(chat(1), sink)
        await eventually(sink.tokens)
        engine.abort(stream_id(1))
        async with asyncio.timeout(10):
            await closed.wait()
        assert sink.status is None
        assert engine.load().running == 0


async def test_start_names_the_models_or_the_url_and_what_to_do() -> None:
    async with server({}) as url:
        engine = OpenAIEngine(url)
        assert list(await engine.start()) == ["sim-small", "other"]
        await engine.close()

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=401)

    async def empty(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": []})

    async def prose(request: web.Request) -> web.StreamResponse:
        return web.Response(text="hello")

    async def loading(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    answers = (
        (refuse, "401.*--upstream-api-key"),
        (loading, "loads its model"),
        (empty, "no model"),
        (prose, "OpenAI-compatible"),
    )
    for models, told in answers:
        async with server({}, {"/v1/models": models}) as url:
            engine = OpenAIEngine(url)
            with pytest.raises(EngineFailed, match=told) as raised:
                await engine.start()
            assert url in raised.value.message
            await engine.close()
    engine = OpenAIEngine("http://127.0.0.1:9")
    with pytest.raises(EngineFailed, match=r"http://127\.0\.0\.1:9/v1/models"):
        await engine.start()
    await engine.close()


async def test_start_says_what_keeps_tls_from_working(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    expired = authority.issue("expired", "subjectAltName=IP:127.0.0.1", days=-1)

    async def refused(url: str, tls: ssl.SSLContext | None = None) -> str:
        async with open_session(total_s=5, tls=tls) as session:
            with pytest.raises(EngineFailed) as raised:
                await list_models(session, url, 5)
        return raised.value.message

    async with server({}, tls=authority.server_context()) as url:
        assert "issuer certificate; set SSL_CERT_FILE" in await refused(url)
        async with open_session(total_s=5, tls=authority.context()) as session:
            assert (await list_models(session, url, 5)).names == ["sim-small", "other"]
        assert "--upstream as the certi" in await refused(url.replace("127.0.0.1", "localhost"), authority.context())
    async with server({}, tls=authority.server_context(expired)) as url:
        assert "expired; renew it, or correct this host's clock" in await refused(url, authority.context())
    async with server({}) as url:
        assert "(WRONG_VERSION_NUMBER); if the server speaks no TLS" in await refused(url.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ([{"id": "m", "owned_by": "vllm", "max_model_len": 8192}, {"id": "lora", "owned_by": "vllm"}], 8192),
        ([{"id": "m", "owned_by": "vllm", "max_model_len": None}], 0),
        ([{"id": "m", "owned_by": "sglang", "max_model_len": 8192}], 0),
        ([{"id": "m"}], 0),
    ],
    ids=["vllm", "vllm-unknown", "another-server", "bare"],
)
async def test_the_maximum_context_is_vllm_s_own(models: Any, told: int) -> None:
    """Another server may truncate a prompt that exceeds what it lists."""

    async def listed(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": models})

    async with server({}, {"/v1/models": listed}) as url:
        engine = OpenAIEngine(url)
        await engine.start()
        assert engine.load().max_model_len == told
        await engine.close()


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("<user>Tell me a story.<assistant>Once upon a time", True),
        ("<user>Tell me a story.<assistant>Once upon a time<end>", False),
        (None, True),
    ],
    ids=["open", "ended", "not-shown"],
)
async def test_a_template_that_ends_a_continued_answer_is_known(prompt: str | None, told: bool) -> None:
    """Recorded of vLLM 0.32; the last is a server without a chat template, which refuses."""
    asked: list[Any] = []

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(text='vllm:num_requests_running{engine="0"} 0.0\n')

    async def tokenize(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        if prompt is None:
            return web.json_response({"error": {"message": "no chat template", "code": 400}}, status=400)
        return web.json_response({"count": 3, "max_model_len": 4096, "tokens": [1, 2, 3], "token_strs": None})

    async def detokenize(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["tokens"] == [1, 2, 3]
        return web.json_response({"prompt": prompt})

    posts = {"/tokenize": tokenize, "/detokenize": detokenize}
    async with server(posts, {"/metrics": metrics}) as url:
        engine = OpenAIEngine(url)
        await engine.start()
        assert engine.loaded().continues_chats is told
        await engine.close()
    (body,) = asked
    assert body["messages"][-1] == {"role": "assistant", "content": "Once upon a time"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


async def test_load_is_the_server_s_own_where_it_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    async def metrics(request: web.Request) -> web.StreamResponse:
        labels = '{engine="0",model_name="m"}'
        lines = (
            f"vllm:num_requests_running{labels} 3.0",
            f"vllm:num_requests_waiting{labels} 2.0",
            f"vllm:kv_cache_usage_perc{labels} 0.25",
        )
        return web.Response(text="# TYPE vllm:num_requests_running gauge\n" + "\n".join(lines) + "\n")

    async with engine_on(play(), gets={"/metrics": metrics}) as engine:
        await eventually(lambda: engine.load().running == 3)
        assert (engine.load().waiting, engine.load().kv_used_ratio) == (2, 0.25)
        assert engine.load().waits_beside_slots
        engine._slots = 3
        assert not engine.load().waits_beside_slots, "they wait for a slot"
        await eventually(lambda: engine.load().metrics_missing == 3)
    said = [record.message for record in caplog.records if "metrics lack" in record.message]
    assert len(said) == 1, "once, not at each look"
    assert "vllm:prefix_cache_hits_total" in said[0] and "num_requests_running" not in said[0]


async def test_load_tells_what_the_server_s_cache_does_over_its_restarts() -> None:
    hits = 40
    filler = "# HELP something Something long enough that the text comes in many pieces.\n" * 20_000

    async def metrics(request: web.Request) -> web.StreamResponse:
        lines = (
            'vllm:prefix_cache_queries_total{engine="0"} 100.0',
            f'vllm:prefix_cache_hits_total{{engine="0"}} {hits}',
            'vllm:cache_config_info{block_size="32",num_gpu_blocks="10"} 1.0',
        )
        return web.Response(text=filler + "\n".join(lines) + "\n")

    async with engine_on(play(), gets={"/metrics": metrics}) as engine:
        await eventually(lambda: engine.load().prefix_hits_tokens == 40)
        load = engine.load()
        assert (load.prefix_queries_tokens, load.kv_capacity_tokens, load.kv_clears) == (100, 320, 0)
        hits = 10
        await eventually(lambda: engine.load().prefix_hits_tokens == 50)
        assert engine.load().kv_clears == 1


async def test_one_failed_answer_about_the_load_is_no_restart_of_the_server() -> None:
    failed = 0

    async def metrics(request: web.Request) -> web.StreamResponse:
        nonlocal failed
        if failed == 1:
            failed = 2
            return web.Response(status=503, text="no upstream")
        lines = (
            "vllm:num_requests_running 3.0",
            f"vllm:prefix_cache_queries_total {100 + failed}",
            f"vllm:prefix_cache_hits_total {40 + failed}",
            'vllm:cache_config_info{block_size="32",num_gpu_blocks="10"} 1.0',
        )
        return web.Response(text="\n".join(lines) + "\n")

    async with engine_on(play(), gets={"/metrics": metrics}) as engine:
        assert engine.load().prefix_queries_tokens == 100
        failed = 1
        await eventually(lambda: failed == 2)
        await eventually(lambda: engine.load().prefix_queries_tokens > 100)
        load = engine.load()
        assert (load.prefix_queries_tokens, load.prefix_hits_tokens, load.kv_clears) == (102, 42, 0)


async def test_load_says_when_the_server_takes_no_connection() -> None:
    async with server({}) as url:
        engine = OpenAIEngine(url)
        await engine.start()
        assert engine.load().ready
    await eventually(lambda: not engine.load().ready)
    await engine.close()


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_server_that_serves_nothing_is_not_ready(status: int) -> None:
    """As llama.cpp while it loads its model, and as a proxy before a server that restarts."""
    down = True

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status if down else 404)

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="Loading model") if down else await play(delta(finish="stop"))(request)

    async with server({"/v1/chat/completions": answer}, {"/metrics": metrics}) as url:
        down = False
        engine = OpenAIEngine(url)
        await engine.start()
        down = True
        sink = Recorder()
        engine.submit(chat(1), sink)
        await sink.wait()
        assert sink.error == ErrorInfo.of(EngineLost("the model server is not ready: Loading model"))
        assert not engine.load().ready
        down = False
        await eventually(lambda: engine.load().ready)
        await engine.close()


async def test_a_server_whose_engine_process_is_dead_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's API server answers for its metrics until it ends, and would be given the same requests again."""
    polls = 0

    async def metrics(request: web.Request) -> web.StreamResponse:
        nonlocal polls
        polls += 1
        return web.Response(text='vllm:num_requests_running{engine="0"} 0.0\n')

    died = play(b'{"error":{"message":"EngineCore encountered an issue. See stack trace","code":500}}', status=500)
    monkeypatch.setattr("inference.engines.server_load._POLL_EVERY_S", 0.05)
    monkeypatch.setattr("inference.engines.server_load._ENDS_S", 1.0)
    async with engine_on(died, gets={"/metrics": metrics}) as engine:
        sink = Recorder()
        engine.submit(chat(1), sink)
        await sink.wait()
        assert sink.error is not None and sink.error.code == "engine_lost"
        told = polls
        await eventually(lambda: polls > told + 1)
        assert not engine.load().ready
        await eventually(lambda: engine.load().ready, "the server to be asked again")


async def test_answers_of_a_server_that_stops_and_says_no_more_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM waits for them without end, after its engine has gone."""
    monkeypatch.setattr("inference.engines.server_load._POLL_EVERY_S", 0.05)
    monkeypatch.setattr("inference.engines.openai._STOPPING_SILENCE_S", 1.0)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n\r\n%b"
    models = msgspec.json.encode({"data": [{"id": "m"}]})
    held: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if asked.startswith(b"POST"):
            writer.write(head % (b"text/event-stream", delta(content="Once")))
            held.append(writer)
            return
        writer.write(head % (b"application/json", models if b"/v1/models" in asked else b"{}"))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = OpenAIEngine(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    await engine.start()
    sink = Recorder()
    engine.submit(chat(1), sink)
    await eventually(sink.tokens)
    await asyncio.sleep(1.5)
    assert sink.status is None, "a silent server that takes connections may compute a long prompt"
    listening.close()
    await sink.wait()
    assert sink.error is not None and (sink.error.code, sink.error.retriable) == ("engine_lost", True)
    assert "it stops" in sink.error.message and not engine.load().ready
    await engine.close()
    held[0].close()


async def test_adapters_that_vllm_loads_and_unloads_while_it_runs_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["french"]

    async def models(request: web.Request) -> web.StreamResponse:
        adapters = [{"id": name, "parent": "base", "owned_by": "vllm"} for name in names]
        return web.json_response({"data": [{"id": "base", "owned_by": "vllm"}, *adapters]})

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(text='vllm:num_requests_running{engine="0"} 0.0\n')

    unknown = play(b'{"error":{"message":"The model does not exist","param":"model","code":404}}', status=404)
    gets = {"/metrics": metrics, "/v1/models": models}
    monkeypatch.setattr("inference.engines.served_models._READ_EVERY_S", 0.05)
    async with engine_on(unknown, gets=gets) as engine:
        assert engine.loaded().adapters == ("french",)
        names.append("greek")
        await eventually(lambda: engine.loaded().adapters == ("french", "greek"))
    monkeypatch.setattr("inference.engines.served_models._READ_EVERY_S", 60)
    async with engine_on(unknown, gets=gets) as engine:
        assert engine.loaded().adapters == ("french", "greek")
        names.clear()
        sink = Recorder()
        engine.submit(chat(1), sink)
        await sink.wait()
        assert sink.error is not None and (sink.error.code, sink.error.http_status) == ("model_not_found", 404)
        assert engine.loaded().adapters == (), "a request for what is not there reads them at once"


async def test_a_path_of_metrics_that_never_answers_says_nothing_of_the_server() -> None:
    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    async def full(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="full")

    async with engine_on(full, gets={"/metrics": metrics}) as engine:
        sink = Recorder()
        engine.submit(chat(1), sink)
        await sink.wait()
        assert sink.error is not None and sink.error.http_status == 503 and sink.error.code == "engine_error"
        assert engine.load().ready


async def test_what_a_lost_server_was_asked_ends_at_once_and_the_rest_is_as_it_was() -> None:
    async with engine_on(play(delta(content="x"), delta(finish="stop"), DONE)) as engine:
        done, lost = Recorder(), Recorder()
        engine.submit(chat(1), done)
        await done.wait()
        engine.submit(chat(2), lost)
        engine.fail_all(EngineLost("it is gone"))
        assert (lost.status, lost.error) == ("failed", ErrorInfo.of(EngineLost("it is gone")))
        assert done.status == "completed"
        again = Recorder()
        engine.submit(chat(3), again)
        assert (await again.wait()).status == "completed"


async def test_load_without_metrics_is_what_was_sent() -> None:
    async with engine_on(play()) as engine:
        assert (engine.load().running, engine.load().waiting) == (0, 0)


async def test_completions_are_text() -> None:
    parts = [event(choices=[{"index": 0, "text": text, "finish_reason": None}]) for text in ("a", "b")]
    last = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
    sink = await ask(play(*parts, last, DONE), completion(1))
    assert (sink.body(), sink.choice_ends()[0].finish_reason) == ("ab", "length")


async def test_the_platforms_own_refused_key_is_no_fault_of_the_client() -> None:
    for status in (401, 403):
        sink = await ask(play(b'{"error":{"message":"Incorrect API key provided: sk-own","code":"x"}}', status=status))
        assert sink.error is not None
        assert (sink.error.http_status, sink.error.type) == (502, "server_error")
        assert "sk-own" not in sink.error.message


async def test_an_answer_that_the_adapter_chokes_on_ends_its_stream() -> None:
    def choke() -> None:
        raise RuntimeError("unforeseen")

    async with engine_on(play(delta(content="a"), delta(content="b"))) as engine:
        sink = Recorder(on_token=choke)
        engine.submit(chat(1), sink)
        await sink.wait()
        assert sink.status == "failed"
        assert sink.error is not None
        assert "unforeseen" in sink.error.message
        assert engine.load().running == 0


# --- several prompts -----------------------------------------------------------------------------------------


def of_vllm(index: int, text: str, prompt: int, made: int, finish: str | None = None) -> bytes:
    """A chunk of vLLM's, for one choice of one of several prompts, with ``continuous_usage_stats``."""
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
    head = {"id": "cmpl-resp_1", "object": "text_completion", "created": 1, "model": "m"}
    return msgspec.json.encode({**head, "choices": [choice], "usage": usage})


def test_calls_of_one_answer_have_ids_of_their_own() -> None:
    """Some servers repeat an id within an answer. The ids that replace it are the same whenever the stream is read."""
    chunks = [
        delta(tool_calls=[{"index": n, "id": id_, "function": {"name": "f", "arguments": "{}"}}])
        for n, id_ in enumerate(["call_0", "call_0", "", "call_1", "call_0"])
    ]
    sink = read(*chunks, delta(finish="tool_calls"), DONE)
    ids = [frame.id for frame in sink.opens()]
    assert ids == ["call_0", *(derived_id("call_", stream_id(1), n) for n in (2, 3)), "call_1", ids[4]]
    assert len(set(ids)) == 5 and sink.body("tool") == "{}" * 5
    assert [frame.id for frame in read(*chunks, delta(finish="tool_calls"), DONE).opens()] == ids


def test_vllms_chunks_of_several_prompts() -> None:
    """Each chunk counts the prompt of its own choice; the last one has the sums."""
    sums = {"prompt_tokens": 12, "total_tokens": 18, "completion_tokens": 6}
    last = msgspec.json.encode({"id": "cmpl-resp_1", "choices": [], "usage": sums})
    chunks = (
        of_vllm(2, "x", 9, 1), of_vllm(0, "a", 3, 1), of_vllm(1, "b", 3, 1), of_vllm(3, "y", 9, 1),
        of_vllm(0, "a", 3, 2, "length"), of_vllm(3, "", 9, 1, "stop"), of_vllm(2, "x", 9, 2, "stop"),
    )  # fmt: skip
    cut = read(*chunks, choices=4, counts=True, prompts=2)
    assert cut.status == "failed" and cut.prompt == (12, 0), "the prompts are billed also when the answer is cut off"
    sink = read(*chunks, of_vllm(1, "", 3, 1, "stop"), last, b"[DONE]", choices=4, counts=True, prompts=2)
    assert [sink.body(choice=k) for k in range(4)] == ["aa", "b", "xx", "y"]
    reasons = {k: end.finish_reason for k, end in sink.choice_ends().items()}
    assert reasons == {0: "length", 1: "stop", 2: "stop", 3: "stop"}
    assert (sink.status, sink.prompt, sink.end_usage) == ("completed", (12, 0), Usage(prompt=12, output=6))
    notes = [frame for frame in sink.frames if isinstance(frame, Note)]
    assert notes == [Note("prompt", prompt_tokens=12)], "no count is told that is a part only"


# --- answers that are one document ---------------------------------------------------------------------------


def question(kind: Literal["embeddings", "rerank"], **body: Any) -> EngineRequest:
    return EngineRequest(stream_id(1), kind, "m", msgspec.Raw(msgspec.json.encode(body)))


async def whole(handler: Handler, kind: Literal["embeddings", "rerank"] = "embeddings", **body: Any) -> Recorder:
    async with engine_on(handler, f"/v1/{kind}") as engine:
        sink = Recorder()
        engine.submit(question(kind, **body), sink)
        return await sink.wait()


@pytest.mark.parametrize(
    ("kind", "usage"),
    [("embeddings", {"prompt_tokens": 7, "total_tokens": 7}), ("rerank", {"total_tokens": 7})],
)
async def test_the_document_is_an_item_of_bounded_deltas(kind: Literal["embeddings", "rerank"], usage: Any) -> None:
    document = msgspec.json.encode({"data": ["ü" * 40_000], "usage": usage})
    seen: list[Any] = []
    sink = await whole(play(document[:99], document[99:], seen=seen), kind, input=["a"], model="m")
    assert seen[0][1] == {"input": ["a"], "model": "m"}, "nothing of streams is asked"
    assert sink.opens() == [Open(0, 0, "item")]
    assert sink.body("item").encode() == document
    assert max(len(delta.text) for delta in sink.deltas()) == ITEM_CHARS_MAX
    assert sink.tokens() == 0
    assert sink.choice_ends()[0].finish_reason == "stop"
    assert (sink.status, sink.end_usage) == ("completed", Usage(prompt=7))


@pytest.mark.parametrize(
    "junk", [b"", b"{", b"[1]", b'{"usage": 7}', b'{"data": "\xff"}', b'{"usage": {"total_tokens": -1}}']
)
async def test_what_is_no_document_fails_and_nothing_of_it_is_told(junk: bytes) -> None:
    sink = await whole(play(junk))
    assert sink.error is not None
    assert (sink.status, sink.error.http_status, sink.frames) == ("failed", 502, [])


async def test_a_document_beyond_bounds_fails() -> None:
    sink = await whole(play(b'{"data":"', b"x" * STREAM_BYTES_MAX, b'"}'))
    assert sink.error is not None
    assert sink.error.code == "stream_too_large"


@pytest.mark.parametrize("kind", ["classify", "score"])
@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_document_is_asked_where_vllm_and_where_other_servers_have_it(
    kind: Literal["classify", "score"], prefix: str
) -> None:
    document = msgspec.json.encode({"data": [], "usage": {"prompt_tokens": 3, "total_tokens": 3}})
    seen: list[Any] = []
    async with engine_on(play(document, seen=seen), f"{prefix}/{kind}") as engine:
        sink = Recorder()
        body = msgspec.Raw(msgspec.json.encode({"model": "m", "input": "x"}))
        engine.submit(EngineRequest(stream_id(1), kind, "m", body), sink)
        await sink.wait()
    assert sink.body("item").encode() == document
    assert (sink.status, sink.end_usage, len(seen)) == ("completed", Usage(prompt=3), 1)


async def test_a_refused_question_keeps_the_status_and_the_message() -> None:
    sink = await whole(play(b'{"detail":"no such document"}', status=404), "rerank")
    assert sink.error == ErrorInfo("invalid_request", "no such document", "invalid_request_error", 404)


@pytest.mark.parametrize("body", [b'{"detail":"Not Found"}', b"404 page not found", b'{"error":"File Not Found"}'])
async def test_what_the_model_cannot_do_is_said(body: bytes) -> None:
    sink = await whole(play(body, status=404), "rerank")
    assert sink.error is not None and (sink.error.code, sink.error.http_status) == ("unsupported", 400)
    assert "model 'm' has no /v1/rerank; use a model" in sink.error.message


async def count(handler: Handler) -> Recorder:
    async with engine_on(handler, "/tokenize") as engine:
        sink = Recorder()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        engine.submit(EngineRequest(stream_id(1), "tokenize", "m", msgspec.Raw(msgspec.json.encode(body))), sink)
        return await sink.wait()


async def test_a_count_of_tokens_comes_without_the_tokens() -> None:
    answer = {"count": 3, "max_model_len": 4096, "tokens": [1, 2, 3], "token_strs": None}
    sink = await count(play(msgspec.json.encode(answer)))
    assert sink.body("item") == '{"count":3}'
    assert (sink.status, sink.end_usage) == ("completed", Usage())


async def test_a_server_that_cannot_count_tokens_says_so() -> None:
    sink = await count(play(b'{"detail":"Not Found"}', status=404))
    assert sink.error is not None
    assert (sink.error.code, sink.error.http_status) == ("unsupported", 400)
    for junk in (b"{}", b"[]", b'{"count":"many"}'):
        failed = (await count(play(junk))).error
        assert failed is not None and failed.http_status == 502


# --- the codes of errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        ({"message": "m", "code": 400}, 400, ("invalid_request", 400, False)),
        ({"message": "m", "code": "context_length_exceeded"}, 400, ("context_length_exceeded", 400, False)),
        ({"message": "m", "code": 500}, 500, ("engine_error", 500, True)),
        ({"message": "m", "code": None}, 429, ("too_many", 429, True)),
        ({"message": "m", "code": 429}, 502, ("too_many", 429, True)),
        ({"message": "m", "code": "rate_limit_exceeded"}, 429, ("rate_limit_exceeded", 429, True)),
        ({"message": "m", "code": 400}, 502, ("invalid_request", 400, False)),
        ({"message": "m", "code": 500}, 502, ("engine_error", 500, True)),
        (
            {"message": "This model's maximum context length is 8192 tokens. However, you …", "code": 400},
            400,
            ("context_length_exceeded", 400, False),
        ),
        (
            {"message": "The decoder prompt (length 9) is longer than the maximum model length of 8.", "code": 400},
            502,
            ("context_length_exceeded", 400, False),
        ),
        (
            {"message": "max_completion_tokens=9 cannot be greater than max_model_len=8. Please …", "code": 400},
            400,
            ("context_length_exceeded", 400, False),
        ),
        (
            {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"},
            400,
            ("context_length_exceeded", 400, False),
        ),
        (
            {"message": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "code": 400},
            400,
            ("context_length_exceeded", 400, False),
        ),
        ({"message": "maximum context length", "code": 500}, 500, ("engine_error", 500, True)),
        ({"message": "EngineCore encountered an issue. See …", "code": 500}, 502, ("engine_lost", 502, True)),
    ],
)
def test_an_error_has_a_code_and_not_a_status_twice(error: Any, status: int, told: tuple[str, int, bool]) -> None:
    info = upstream_error(msgspec.json.encode({"error": error}), status)
    assert (info.code, info.http_status, info.retriable) == told
    assert info.type == {400: "invalid_request_error", 429: "rate_limit_error"}.get(info.http_status, "server_error")


@pytest.mark.parametrize("error", [b'""', b'" "'])
async def test_an_error_without_a_message_gets_one(error: bytes) -> None:
    sink = await ask(play(delta(content="x"), b'data: {"error":%b}\n\n' % error, DONE))
    assert sink.error is not None
    assert sink.error.message == "the model server sent an error without a message"
    assert upstream_error(b"", 500).message == sink.error.message


def last(**metrics: Any) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1}, metrics=metrics)


def test_the_engines_own_times_are_taken_where_it_tells_them() -> None:
    """As vLLM 0.32 says them with the last usage; what it does not know is null, or left out."""
    answer = (delta(content="x"), delta(finish="stop"))
    whole = {"time_to_first_token_ms": 41.5, "generation_time_ms": 3.0, "queue_time_ms": 1250.0, "mean_itl_ms": None}
    assert read(*answer, last(**whole), DONE).own == (1.25, 0.0415)
    for lacking in ({}, {"queue_time_ms": None, "time_to_first_token_ms": 1.0}, {"queue_time_ms": 3.0}):
        assert read(*answer, last(**lacking), DONE).own is None


@pytest.mark.parametrize(
    "metrics", ["many", [1, 2], 7, {"queue_time_ms": "soon"}, {"queue_time_ms": -1.0, "time_to_first_token_ms": 1.0},
                {"queue_time_ms": 1e12, "time_to_first_token_ms": 1.0}],
)  # fmt: skip
def test_another_servers_metrics_are_its_own(metrics: Any) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    sink = read(delta(content="x"), delta(finish="stop"), event(choices=[], usage=usage, metrics=metrics), DONE)
    assert (sink.status, sink.own, sink.end_usage) == ("completed", None, Usage(9, 0, 0, 1))


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        ({"message": "m", "code": 400, "param": "max_tokens"}, 400, "max_tokens"),
        ({"message": "m", "code": 400, "param": "max_tokens"}, 502, "max_tokens"),
        ({"message": "m", "code": 400, "param": None}, 400, None),
        ({"message": "m", "code": 400, "param": ["a"]}, 400, None),
        ({"message": "m", "code": 400, "param": "x" * 1000}, 400, "x" * 200),
        ({"message": "m", "code": 500, "param": "max_tokens"}, 500, None),
    ],
)
def test_a_refusal_names_the_field_that_the_server_names(error: Any, status: int, param: str | None) -> None:
    assert upstream_error(msgspec.json.encode({"error": error}), status).param == param
