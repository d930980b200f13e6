"""The bytes of the dialect, written out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stream_fabric.errors import (
    BadRequest,
    BodyTooLarge,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    NotFound,
    PoolFull,
    StreamGwError,
    TooMany,
    Unauthenticated,
)
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, ErrorInfo, Frame, Note, Open, Usage, encode
from stream_gw.dialects import encoder_for
from stream_gw.dialects.anthropic.errors import error_body, http_status
from stream_gw.dialects.anthropic.whole import MessageCollector
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.strategies import STREAM, raw

HEX = STREAM[5:]
USAGE = Usage(prompt=12, cached=8, written=1, output=5, reasoning=2)


def facts(**more: Any) -> StreamFacts:
    return StreamFacts(STREAM, 1763712000, "sim-small", dialect="anthropic.messages", **more)


def spelled(*frames: Frame) -> str:
    return encoder_for("anthropic.messages", facts()).sse([encode(frame) for frame in frames], 1, 1).decode()


def event(body: str, cursor: str | None = None) -> str:
    name = body.split('"')[3]
    return f"event: {name}\ndata: {body}\n" + (f"id: {cursor}\n" if cursor else "") + "\n"


def start(prompt: int = 0, cached: int = 0) -> str:
    return (
        f'{{"type":"message_start","message":{{"id":"msg_{HEX}","type":"message","role":"assistant",'
        '"model":"sim-small","content":[],"stop_reason":null,"stop_sequence":null,"usage":{'
        f'"input_tokens":{prompt - cached},"cache_creation_input_tokens":0,"cache_read_input_tokens":{cached},'
        '"output_tokens":0}}}'
    )


def begin(index: int, content: str) -> str:
    return f'{{"type":"content_block_start","index":{index},"content_block":{{{content}}}}}'


def delta(index: int, words: str) -> str:
    return f'{{"type":"content_block_delta","index":{index},"delta":{{{words}}}}}'


def stop(index: int) -> str:
    return f'{{"type":"content_block_stop","index":{index}}}'


def end(reason: str, sequence: str = "null", usage: str = "", more: str = "") -> str:
    usage = usage or ('"input_tokens":0,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0')
    return (
        f'{{"type":"message_delta","delta":{{"stop_reason":"{reason}","stop_sequence":{sequence}{more}}},'
        f'"usage":{{{usage}}}}}'
    )


STOP = '{"type":"message_stop"}'
TEXT = '"type":"text","text":""'
THINKING = '"type":"thinking","thinking":"","signature":""'


def test_thoughts_and_a_text() -> None:
    frames = (
        Note("started"),
        Note("prompt", 12, 8),
        Open(0, 0, "reasoning", "raw"),
        Delta(0, "Hm.\n"),
        Close(0, "c2ln"),
        Open(1, 0, "text"),
        Delta(1, 'Say "hé"'),
        Delta(1, " twice", 2),
        Close(1),
        ChoiceEnd(0, "stop", raw("###")),
        End("completed", USAGE),
    )
    usage = (
        '"input_tokens":3,"cache_creation_input_tokens":1,"cache_read_input_tokens":8,"output_tokens":5,'
        '"output_tokens_details":{"thinking_tokens":2}'
    )
    assert spelled(*frames) == "".join(
        (
            event(start(12, 8), "1-2"),
            event(begin(0, THINKING), "1-3"),
            event(delta(0, r'"type":"thinking_delta","thinking":"Hm.\n"'), "1-4"),
            event(delta(0, '"type":"signature_delta","signature":"c2ln"')) + event(stop(0), "1-5"),
            event(begin(1, TEXT), "1-6"),
            event(delta(1, r'"type":"text_delta","text":"Say \"hé\""'), "1-7"),
            event(delta(1, '"type":"text_delta","text":" twice"'), "1-8"),
            event(stop(1), "1-9"),
            event(end("stop_sequence", '"###"', usage)) + event(STOP, "1-11"),
        )
    )


def test_calls_that_a_server_closes_only_at_the_end() -> None:
    frames = (
        Open(0, 0, "tool", "server", "srv_1", "web_search"),
        Delta(0, "{}"),
        Open(1, 0, "tool", "function", "call_a", "f"),
        Delta(1, '{"x":'),
        Delta(1, "1}"),
        Open(2, 0, "tool", None, None, "g"),
        Delta(2, "{}"),
        Close(1),
        Close(2),
        ChoiceEnd(0, "tool_calls"),
        End("completed"),
    )
    assert spelled(*frames) == "".join(
        (
            event(start(), "1-1"),
            event(begin(0, '"type":"tool_use","id":"call_a","name":"f","input":{}'), "1-3"),
            event(delta(0, r'"type":"input_json_delta","partial_json":"{\"x\":"'), "1-4"),
            event(delta(0, '"type":"input_json_delta","partial_json":"1}"'), "1-5"),
            # Its arguments are complete, so the next call need not wait
            event(stop(0)) + event(begin(1, f'"type":"tool_use","id":"call_{HEX}3","name":"g","input":{{}}'), "1-6"),
            event(delta(1, '"type":"input_json_delta","partial_json":"{}"'), "1-7"),
            event(stop(1), "1-9"),
            event(end("tool_use")) + event(STOP, "1-11"),
        )
    )


def test_a_block_that_opens_beside_another_waits() -> None:
    frames = (
        Open(0, 0, "text"),
        Open(1, 0, "reasoning", "summary"),
        Delta(1, "so"),
        Delta(0, "a"),
        Close(1),
        Close(0),
        End("completed"),
    )
    assert spelled(*frames) == "".join(
        (
            event(start()) + event(begin(0, TEXT), "1-1"),
            event(delta(0, '"type":"text_delta","text":"a"'), "1-4"),
            event(stop(0))
            + event(begin(1, THINKING))
            + event(delta(1, '"type":"thinking_delta","thinking":"so"'))
            + event(delta(1, '"type":"signature_delta","signature":"dW5zaWduZWQ="'))
            + event(stop(1), "1-6"),
            event(end("end_turn")) + event(STOP, "1-7"),
        )
    )


def test_hidden_thoughts_a_custom_tool_and_a_refusal() -> None:
    frames = (
        Open(0, 0, "reasoning", "redacted"),
        Delta(0, "hidden"),
        Close(0, "ZW5j"),
        Open(1, 0, "tool", "custom", "call_c", "h"),
        Delta(1, 'grep "x"'),
        Close(1),
        Open(2, 0, "refusal"),
        Delta(2, "No."),
        Close(2),
        ChoiceEnd(0, "content_filter"),
        End("completed"),
    )
    details = ',"stop_details":{"type":"refusal","category":null,"explanation":null}'
    assert spelled(*frames) == "".join(
        (
            event(start(), "1-1"),
            event(begin(0, '"type":"redacted_thinking","data":"ZW5j"')) + event(stop(0), "1-3"),
            event(begin(1, '"type":"tool_use","id":"call_c","name":"h","input":{}'))
            + event(delta(1, r'"type":"input_json_delta","partial_json":"{\"input\":\""'), "1-4"),
            event(delta(1, r'"type":"input_json_delta","partial_json":"grep \\\"x\\\""'), "1-5"),
            event(delta(1, r'"type":"input_json_delta","partial_json":"\"}"')) + event(stop(1), "1-6"),
            event(begin(2, TEXT), "1-7"),
            event(delta(2, '"type":"text_delta","text":"No."'), "1-8"),
            event(stop(2), "1-9"),
            event(end("refusal", more=details)) + event(STOP, "1-11"),
        )
    )
    collector = MessageCollector(facts())
    for frame in frames:
        collector.add(encode(frame))
    content = msgspec.json.decode(collector.result())["content"]
    assert content[1]["input"] == {"input": 'grep "x"'}


@pytest.mark.parametrize(
    ("finish", "detail", "reason"),
    [
        ("stop", None, "end_turn"),
        ("stop", 151645, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("budget", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
        ("function_call", None, "tool_use"),
        ("content_filter", None, "refusal"),
        ("abort", None, "end_turn"),
    ],
)
def test_stop_reasons(finish: str, detail: Any, reason: str) -> None:
    ended = ChoiceEnd(0, finish, None if detail is None else raw(detail))
    assert f'"stop_reason":"{reason}"' in spelled(ended, End("completed"))


def test_a_forced_call_that_a_server_ends_with_stop() -> None:
    frames = (Open(0, 0, "tool", "function", "c", "f"), Delta(0, "{}"), Close(0), ChoiceEnd(0, "stop"))
    assert '"stop_reason":"tool_use"' in spelled(*frames, End("completed"))


@pytest.mark.parametrize("text", ['{"x":', '{"x":' * 5000])
def test_arguments_that_were_cut(text: str) -> None:
    collector = MessageCollector(facts())
    for frame in (Open(0, 0, "tool", "function", "c", "f"), Delta(0, text), ChoiceEnd(0, "length")):
        collector.add(encode(frame))
    collector.add(encode(End("completed")))
    (block,) = msgspec.json.decode(collector.result())["content"]
    assert block == {"type": "tool_use", "id": "c", "name": "f", "input": {}, "partial_json": text}


def test_a_call_follows_arguments_that_are_nested_too_deep() -> None:
    text = '{"x":' * 5000 + "}" * 5000
    first, second = (Open(block, 0, "tool", "function", f"c{block}", "f") for block in (0, 1))
    frames = (first, Delta(0, text), second, Close(0), Close(1), ChoiceEnd(0, "tool_calls"))
    assert '"id":"c1"' in spelled(*frames, End("completed"))


def test_an_error_within_the_stream() -> None:
    error = ErrorInfo("engine_lost", "the engine broke", http_status=502, retriable=True)
    assert spelled(Open(0, 0, "text"), End("failed", None, error)).endswith(
        event(
            '{"type":"error","error":{"type":"api_error","message":"the engine broke","code":"engine_lost",'
            f'"param":null,"retriable":true,"stream_id":"{STREAM}","cursor":"1-2"}}}}',
            "1-2",
        )
    )


def test_a_cancel_within_the_stream_is_the_499_of_a_whole_answer() -> None:
    assert spelled(Open(0, 0, "text"), End("cancelled")).endswith(
        event(
            '{"type":"error","error":{"type":"invalid_request_error","message":"the stream was cancelled",'
            f'"code":"cancelled","param":null,"retriable":false,"stream_id":"{STREAM}","cursor":"1-2"}}}}',
            "1-2",
        )
    )


def test_pings_begin_with_the_message() -> None:
    encoder = encoder_for("anthropic.messages", facts())
    assert encoder.heartbeat() == b": hb\n"
    encoder.chunks([encode(Open(0, 0, "text"))])
    assert encoder.heartbeat() == b'event: ping\ndata: {"type":"ping"}\n\n'
    told = encoder.failure(Draining("bye"), "req_1", Cursor(1, 1))
    assert told == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"bye","code":"draining",'
        b'"param":null,"retriable":true,"stream_id":"%b","cursor":"1-1"},"request_id":"req_1"}\n\n' % STREAM.encode()
    )


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (Unauthenticated("x"), 401, "authentication_error"),
        (NotFound("x"), 404, "not_found_error"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (TooMany("x"), 429, "rate_limit_error"),
        (EngineFailed("x"), 502, "api_error"),
        (Draining("x"), 503, "api_error"),
        (DeadlineExceeded("x"), 504, "timeout_error"),
        (PoolFull("x"), 529, "overloaded_error"),
    ],
)
def test_errors_by_status(error: StreamGwError, status: int, type_: str) -> None:
    assert http_status(error) == status
    body = msgspec.json.decode(error_body(error, "req_1"))
    assert body["error"]["type"] == type_ and body["type"] == "error" and body["request_id"] == "req_1"
    assert body["error"]["code"] == error.code
