"""The bytes of the dialects, written out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from stream_fabric.errors import Draining, EngineFailed, NotFound, PoolFull, StreamGwError, TooMany, Unauthenticated
from stream_fabric.events import Timing
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, ErrorInfo, Frame, Note, Open, Usage, encode
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.errors import is_open, open_error_body
from stream_gw.dialects.responses.requests import parse_responses
from stream_gw.dialects.responses.translate import chat_messages
from tests.dialects.strategies import STREAM, raw

HEX = STREAM[5:]
USAGE = Usage(prompt=12, cached=8, written=1, output=5, reasoning=2)
SETTINGS = (
    '"instructions":"Be brief.","previous_response_id":null,"tools":[],"tool_choice":"auto",'
    '"parallel_tool_calls":true,"text":{"format":{"type":"text"}},"reasoning":{"effort":null,"summary":null},'
    '"temperature":1.0,"top_p":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"top_logprobs":0,'
    '"truncation":"disabled","max_output_tokens":null,"max_tool_calls":null,"store":true,"background":false,'
    '"service_tier":"default","metadata":{"a":"b"},"safety_identifier":null,"prompt_cache_key":null'
)


def facts(**more: Any) -> StreamFacts:
    settings = raw({"instructions": "Be brief.", "metadata": {"a": "b"}, **more})
    return StreamFacts(STREAM, 1763712000, "sim-small", dialect="openai.responses", settings=settings)


def spelled(*frames: Frame, dialect: str = "openai.responses", **settings: Any) -> str:
    return encoder_for(dialect, facts(**settings)).sse([encode(frame) for frame in frames], 1, 1).decode()


class Told:
    """Events in order, each with the next number."""

    def __init__(self) -> None:
        self.text = ""
        self._number = 0

    def event(self, type_: str, fields: str, cursor: str = "") -> Told:
        self.text += (
            f'event: {type_}\ndata: {{"type":"{type_}",{fields},"sequence_number":{self._number}}}\n'
            + (f"id: {cursor}\n" if cursor else "")
            + "\n"
        )
        self._number += 1
        return self

    def response(self, type_: str, status: str, cursor: str = "", output: str = "", **more: str) -> Told:
        found = {"completed": "null", "error": "null", "why": "null", "usage": "null"} | more
        return self.event(
            type_,
            f'"response":{{"id":"{STREAM}","object":"response","created_at":1763712000,"status":"{status}",'
            f'"completed_at":{found["completed"]},"error":{found["error"]},"incomplete_details":{found["why"]},'
            f'"model":"sim-small","output":[{output}],"usage":{found["usage"]},{SETTINGS}}}',
            cursor,
        )

    def begin(self, cursor: str = "1-1") -> Told:
        return self.response("response.created", "in_progress").response("response.in_progress", "in_progress", cursor)


SPENT = (
    '{"input_tokens":12,"input_tokens_details":{"cached_tokens":8,"cache_write_tokens":1},"output_tokens":5,'
    '"output_tokens_details":{"reasoning_tokens":2},"total_tokens":17}'
)
NOTHING = (
    '{"input_tokens":0,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":0,'
    '"output_tokens_details":{"reasoning_tokens":0},"total_tokens":0}'
)


@pytest.mark.parametrize(("dialect", "name"), [("openai.responses", "reasoning_text"), ("open.responses", "reasoning")])
def test_thoughts_and_a_text(dialect: str, name: str) -> None:
    frames = (
        Note("started"),
        Open(0, 0, "reasoning", "raw"),
        Delta(0, "Hm.\n"),
        Close(0, "c2ln"),
        Open(1, 0, "text"),
        Delta(1, 'Say "hé"'),
        Delta(1, " twice", 2),
        Close(1),
        ChoiceEnd(0, "stop"),
        End("completed", USAGE, None, Timing(1, 2, 1_763_712_001_000_000, 500_000, 500_000, 2_900_000)),
    )
    thoughts = f'"item_id":"rs_{HEX}1","output_index":0,"content_index":0'
    words = f'"item_id":"msg_{HEX}2","output_index":1,"content_index":0'
    thought = (
        f'{{"type":"reasoning","id":"rs_{HEX}1","status":"completed","summary":[],'
        r'"content":[{"type":"reasoning_text","text":"Hm.\n"}],"encrypted_content":"c2ln"}'
    )
    part = r'{"type":"output_text","text":"Say \"hé\" twice","annotations":[],"logprobs":[]}'
    said = f'{{"type":"message","id":"msg_{HEX}2","status":"completed","role":"assistant","content":[{part}]}}'
    told = Told().begin()
    told.event(
        "response.output_item.added",
        f'"output_index":0,"item":{{"type":"reasoning","id":"rs_{HEX}1","status":"in_progress","summary":[],"content":[]}}',
    )
    told.event("response.content_part.added", thoughts + ',"part":{"type":"reasoning_text","text":""}', "1-2")
    told.event(f"response.{name}.delta", thoughts + r',"delta":"Hm.\n"', "1-3")
    # The end of an item waits for the next frame, which tells whether it was cut
    told.event(f"response.{name}.done", thoughts + r',"text":"Hm.\n"')
    told.event("response.content_part.done", thoughts + r',"part":{"type":"reasoning_text","text":"Hm.\n"}')
    told.event("response.output_item.done", f'"output_index":0,"item":{thought}')
    told.event(
        "response.output_item.added",
        f'"output_index":1,"item":{{"type":"message","id":"msg_{HEX}2","status":"in_progress","role":"assistant",'
        '"content":[]}',
    )
    empty = ',"part":{"type":"output_text","text":"","annotations":[],"logprobs":[]}'
    told.event("response.content_part.added", words + empty, "1-5")
    told.event("response.output_text.delta", words + r',"delta":"Say \"hé\"","logprobs":[]', "1-6")
    told.event("response.output_text.delta", words + ',"delta":" twice","logprobs":[]', "1-7")
    told.event("response.output_text.done", words + r',"text":"Say \"hé\" twice","logprobs":[]')
    told.event("response.content_part.done", words + f',"part":{part}')
    told.event("response.output_item.done", f'"output_index":1,"item":{said}', "1-9")
    told.response("response.completed", "completed", "1-10", f"{thought},{said}", completed="1763712004", usage=SPENT)
    if dialect == "openai.responses":
        assert spelled(*frames) == told.text
    else:
        bare = "\n".join(line for line in told.text.split("\n") if not line.startswith("id: "))
        assert spelled(*frames, dialect=dialect) == bare + "data: [DONE]\n\n"


def test_summaries_hidden_thoughts_and_a_custom_tool() -> None:
    frames = (
        Open(0, 0, "reasoning", "summary"),
        Delta(0, "so"),
        Close(0),
        Open(1, 0, "reasoning", "redacted"),
        Delta(1, "hidden"),
        Close(1, "ZW5j"),
        Open(2, 0, "tool", "custom", "call_c", "h"),
        Delta(2, 'grep "x"'),
        Close(2),
        Open(3, 0, "tool", "server", "srv_1", "web_search"),
        Delta(3, "{}"),
        Close(3),
        ChoiceEnd(0, "tool_calls"),
        End("completed"),
    )
    ours, theirs = spelled(*frames), spelled(*frames, dialect="open.responses")
    summary = f'"item_id":"rs_{HEX}1","output_index":0,"summary_index":0'
    assert f'"response.reasoning_summary_part.added",{summary},"part":{{"type":"summary_text","text":""}}' in ours
    assert f'"response.reasoning_summary_text.delta",{summary},"delta":"so"' in ours
    assert '"summary":[{"type":"summary_text","text":"so"}]}' in ours
    for told in (ours, theirs):
        assert "hidden" not in told and "srv_1" not in told
        assert f'"id":"rs_{HEX}2","status":"completed","summary":[],"content":[],"encrypted_content":"ZW5j"}}' in told
    custom = f'"item_id":"ctc_{HEX}3","output_index":2'
    assert rf'"response.custom_tool_call_input.delta",{custom},"delta":"grep \"x\""' in ours
    assert r'"call_id":"call_c","name":"h","input":"grep \"x\""}' in ours
    arguments = r'"{\"input\":\"grep \\\"x\\\"\"}"'
    assert (
        f'"response.function_call_arguments.delta","item_id":"fc_{HEX}3","output_index":2,"delta":{arguments}' in theirs
    )
    assert f'"call_id":"call_c","name":"h","arguments":{arguments}}}' in theirs
    assert '"name":"h","arguments":""}' in theirs, "an item begins empty"


def test_thoughts_in_a_form_that_clients_send_back() -> None:
    """With ``include: ["reasoning.encrypted_content"]``; hidden thoughts stay hidden."""
    frames = (
        Open(0, 0, "reasoning"),
        Delta(0, 'So "é".'),
        Close(0),
        Open(1, 0, "reasoning", "redacted"),
        Delta(1, "hidden"),
        Close(1),
        Open(2, 0, "reasoning"),
        Delta(2, "own"),
        Close(2, "ZW5j"),
        End("completed"),
    )
    asked = parse_responses(b'{"model":"m","input":"x","include":["reasoning.encrypted_content"]}')
    assert asked.settings is not None
    told = spelled(*frames, **msgspec.json.decode(asked.settings))
    done = [json.loads(line[6:]) for line in told.split("\n") if line.startswith('data: {"type":"response.output_item')]
    items = [event["item"] for event in done]
    assert [item.get("encrypted_content") for item in items] == [None, "sgw1.U28gIsOpIi4=", None, None, None, "ZW5j"]
    assert "carries_thoughts" not in told
    assert "sgw1." not in spelled(*frames)
    sent = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sgw1.U28gIsOpIi4="}
    assert chat_messages(None, [sent, {"role": "user", "content": "x"}])[0]["reasoning"] == 'So "é".'
    for other in ("gAAAAA", "sgw1.!", "sgw1./w==", 7):
        assert len(chat_messages(None, [sent | {"encrypted_content": other}, {"role": "user", "content": "x"}])) == 1


def test_calls_of_a_namespace() -> None:
    held = [{"type": kind, "name": kind} for kind in ("function", "custom")]
    tools = [{"type": "namespace", "name": "n", "tools": held}]
    frames = (
        Open(0, 0, "tool", None, "call_a", "n__function"),
        Delta(0, "{}"),
        Close(0),
        Open(1, 0, "tool", None, "call_b", "n__custom"),
        Delta(1, '{"input":"x"}'),
        Close(1),
        ChoiceEnd(0, "tool_calls"),
        End("completed"),
    )
    ours = spelled(*frames, tools=tools)
    assert '"call_id":"call_a","name":"function","namespace":"n","arguments":"{}"}' in ours
    assert '"call_id":"call_b","name":"custom","namespace":"n","input":"x"}' in ours
    assert '"arguments":"{}","name":"function"' in ours
    theirs = spelled(*frames, dialect="open.responses", tools=tools)
    assert '"call_id":"call_a","name":"n__function","arguments":"{}"}' in theirs
    assert '"namespace":"n"' not in theirs, "its schema of a call is closed"


def test_an_error_within_the_stream() -> None:
    error = ErrorInfo("engine_lost", "the engine broke", http_status=502, retriable=True)
    frames = (Note("started"), End("failed", None, error))
    told = Told().begin()
    told.event(
        "error",
        '"error":{"type":"server_error","code":"engine_lost","message":"the engine broke","param":null,'
        f'"retriable":true,"stream_id":"{STREAM}"}}',
    )
    code = '{"code":"engine_lost","message":"the engine broke"}'
    told.response("response.failed", "failed", "1-2", error=code, usage=NOTHING)
    assert spelled(*frames) == told.text
    theirs = spelled(*frames, dialect="open.responses")
    inner = '{"type":"model_error","code":"engine_lost","message":"the engine broke","param":null}'
    assert f'{{"type":"error","error":{inner},"sequence_number":2}}' in theirs


def test_a_background_response_waits_first() -> None:
    encoder = encoder_for("openai.responses", facts(background=True))
    opening = encoder.opening().decode()
    assert [line[7:] for line in opening.split("\n") if line.startswith("event")] == [
        "response.created",
        "response.queued",
    ]
    assert '"status":"queued"' in opening and "id: " not in opening
    assert '"response.in_progress"' in encoder.sse([encode(Note("started"))], 1, 1).decode()


def test_heartbeats_and_what_this_gateway_cannot_deliver() -> None:
    encoder = encoder_for("openai.responses", facts())
    encoder.sse([encode(Open(0, 0, "text"))], 1, 1)
    assert encoder.heartbeat() == b": hb\n"
    assert encoder.failure(Draining("bye"), "req_1", Cursor(1, 1)) == (
        b'event: error\ndata: {"type":"error","error":{"type":"server_error","code":"draining","message":"bye",'
        b'"param":null,"retriable":true,"request_id":"req_1","stream_id":"%b","cursor":"1-1"},"sequence_number":4}\n\n'
        % STREAM.encode()
    )


@pytest.mark.parametrize(
    ("error", "type_"),
    [
        (NotFound("x"), "not_found"),
        (TooMany("x"), "too_many_requests"),
        (Unauthenticated("x"), "invalid_request"),
        (EngineFailed("x"), "model_error"),
        (PoolFull("x"), "server_error"),
    ],
)
def test_errors_of_the_specification(error: StreamGwError, type_: str) -> None:
    body = msgspec.json.decode(open_error_body(error, "req_1"))
    assert body == {"error": {"type": type_, "code": error.code, "message": "x", "param": None}}


def test_which_requests_want_the_specification() -> None:
    header = {b"openresponses-version": b"latest"}
    assert is_open("/v1/open/responses", {}) and is_open("/v1/responses/resp_1", header)
    assert not is_open("/v1/responses", {}) and not is_open("/v1/chat/completions", header)
