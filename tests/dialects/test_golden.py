"""The bytes of both dialects, written out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stream_fabric.errors import BadRequest, TooMany, Unsupported, from_info
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Frame,
    Note,
    Open,
    Usage,
    encode,
)
from stream_gw.dialects import DIALECTS, ENCODERS, encoder_for
from stream_gw.dialects.accumulate import Accumulator
from stream_gw.dialects.anthropic.encoder import MessagesEncoder
from stream_gw.dialects.errors import error_body
from stream_gw.dialects.facts import ENCODER_SET, StreamFacts
from stream_gw.dialects.openai_chat import ChatEncoder
from stream_gw.dialects.openai_completions import CompletionsEncoder
from stream_gw.dialects.requests import CreateRequest
from tests.dialects.strategies import STREAM, raw

HEX = STREAM[5:]
USAGE = Usage(prompt=12, cached=8, output=5, reasoning=2)
USAGE_JSON = (
    '{"prompt_tokens":12,"completion_tokens":5,"total_tokens":17,'
    '"prompt_tokens_details":{"cached_tokens":8},"completion_tokens_details":{"reasoning_tokens":2}}'
)


def facts(**more: Any) -> StreamFacts:
    return StreamFacts(STREAM, 1763712000, "sim-small", **more)


def chunk(choices: str, *, kind: str = "chat", tail: str = "") -> str:
    prefix, name = ("chatcmpl", "chat.completion.chunk") if kind == "chat" else ("cmpl", "text_completion")
    return (
        f'{{"id":"{prefix}-{HEX}","object":"{name}","created":1763712000,"model":"sim-small",'
        f'"choices":[{choices}]{tail}}}'
    )


def delta(words: str, index: int = 0, logprobs: str = "null") -> str:
    return chunk(f'{{"index":{index},"delta":{{{words}}},"logprobs":{logprobs},"finish_reason":null}}')


def finish(reason: str, index: int = 0, more: str = "") -> str:
    return chunk(f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}"{more}}}')


def text(words: str, index: int = 0, logprobs: str = "null", reason: str = "null") -> str:
    return chunk(
        f'{{"index":{index},"text":{words},"logprobs":{logprobs},"finish_reason":{reason}}}', kind="completions"
    )


def spelled(made: StreamFacts, *frames: Frame) -> str:
    encoder = encoder_for(f"openai.{made.kind}", made)
    return encoder.sse([encode(frame) for frame in frames], 1, 1).decode()


ROLE = '"role":"assistant","content":""'


def event(body: str, cursor: str | None = None) -> str:
    return f"data: {body}\n" + (f"id: {cursor}\n" if cursor else "") + "\n"


def test_chat() -> None:
    frames = (
        Note("started"),
        Note("prompt", 12, 8),
        Open(0, 0, "reasoning", "raw"),
        Delta(0, "Hm.\n"),
        Close(0, "c2ln"),
        Open(1, 0, "text"),
        Delta(1, 'Say "hé"'),
        Delta(1, " twice", 2),
        Delta(1, "!", 1, raw([{"token": "!", "logprob": -0.5, "bytes": [33], "top_logprobs": []}])),
        Close(1),
        ChoiceEnd(0, "stop", raw("###")),
        End("completed", USAGE),
    )
    assert spelled(facts(), *frames) == "".join(
        (
            event(delta(ROLE), "1-2"),
            event(delta(r'''"reasoning_content":"Hm.\n","reasoning":"Hm.\n"'''), "1-4"),
            event(delta(r'''"content":"Say \"hé\""'''), "1-7"),
            event(delta('"content":" twice"'), "1-8"),
            event(delta('"content":"!"', 0, CHAT_LOGPROBS), "1-9"),
            event(finish("stop", 0, ',"stop_reason":"###"'), "1-11"),
            "data: [DONE]\nid: 1-12\n\n",
        )
    )


CHAT_LOGPROBS = '{"content":[{"token":"!","logprob":-0.5,"bytes":[33],"top_logprobs":[]}],"refusal":null}'


def test_every_choice_starts_with_its_role() -> None:
    frames = (Open(0, 1, "text"), Delta(0, "b"), Open(1, 0, "refusal"), Delta(1, "no"))
    assert spelled(facts(n=2), *frames) == "".join(
        (
            event(delta(ROLE)) + event(delta(ROLE, 1), "1-1"),
            event(delta('"content":"b"', 1), "1-2"),
            event(delta('"refusal":"no"'), "1-4"),
        )
    )


def test_tool_calls() -> None:
    frames = (
        Open(0, 0, "tool", "server", "srv_1", "web_search"),
        Delta(0, "{}"),
        Open(1, 0, "tool", "function", "call_a", "f"),
        Open(2, 0, "tool", None, None, "g"),
        Delta(2, '{"x":1}'),
        Delta(1, "{}"),
        Open(3, 0, "tool", "custom", "call_c", "h"),
        Delta(3, "grep"),
        ChoiceEnd(0, "tool_calls"),
    )

    def call(words: str) -> str:
        return delta(f'"tool_calls":[{{{words}}}]')

    open_f = '"index":0,"id":"call_a","type":"function","function":{"name":"f","arguments":""}'
    open_g = f'"index":1,"id":"call_{HEX}3","type":"function","function":{{"name":"g","arguments":""}}'
    open_h = '"index":2,"id":"call_c","type":"custom","custom":{"name":"h","input":""}'
    assert spelled(facts(), *frames) == "".join(
        (
            event(delta(ROLE), "1-1"),
            event(call(open_f), "1-3"),
            event(call(open_g), "1-4"),
            event(call(r""""index":1,"function":{"arguments":"{\"x\":1}"}"""), "1-5"),
            event(call('"index":0,"function":{"arguments":"{}"}'), "1-6"),
            event(call(open_h), "1-7"),
            event(call('"index":2,"custom":{"input":"grep"}'), "1-8"),
            event(finish("tool_calls"), "1-9"),
        )
    )


def test_a_tool_block_that_opens_again_after_a_reset_keeps_its_index() -> None:
    encoder = encoder_for("openai.chat", facts())
    opens = [encode(Open(0, 0, "tool", id="a", name="f")), encode(Open(1, 0, "tool", id="b", name="g"))]
    first = encoder.chunks(opens)
    assert encoder.chunks(opens[1:]) == first[2:]


def test_usage_is_null_until_the_last_chunk() -> None:
    frames = (Open(0, 0, "text"), ChoiceEnd(0, "length"), End("completed", USAGE))
    null = ',"usage":null'
    role = chunk(f'{{"index":0,"delta":{{{ROLE}}},"logprobs":null,"finish_reason":null}}', tail=null)
    done = chunk('{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}', tail=null)
    assert spelled(facts(include_usage=True), *frames) == "".join(
        (
            event(role, "1-1"),
            event(done, "1-2"),
            event(chunk("", tail=',"usage":' + USAGE_JSON)),
            "data: [DONE]\nid: 1-3\n\n",
        )
    )


FAILED = ErrorInfo("replica_lost", 'the "replica" died', "server_error", 502, True)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (
            End("failed", USAGE, FAILED),
            r'"message":"the \"replica\" died","type":"server_error","code":"replica_lost",'
            r'"param":null,"retriable":true',
        ),
        (
            End("cancelled", USAGE),
            '"message":"the stream was cancelled","type":"cancelled","code":"cancelled","param":null,"retriable":false',
        ),
        (
            End("incomplete", USAGE, FAILED),
            r'"message":"the \"replica\" died","type":"server_error","code":"replica_lost",'
            r'"param":null,"retriable":true',
        ),
    ],
    ids=["failed", "cancelled", "incomplete"],
)
def test_an_end_other_than_completion(end: End, error: str) -> None:
    for kind in ("chat", "completions"):
        made = facts(kind=kind, include_usage=True)
        body = f'{{"error":{{{error},"stream_id":"{STREAM}","cursor":"7-58"}}}}'
        encoder = encoder_for(f"openai.{kind}", made)
        assert encoder.sse([encode(end)], 7, 58).decode() == f"data: {body}\nid: 7-58\n\n"
        assert encoder.chunks([encode(end)]) == [body.replace(',"cursor":"7-58"', "").encode()]


@pytest.mark.parametrize(
    "dialect", ["openai.chat", "openai.completions", "openai.responses", "open.responses", "anthropic.messages"]
)
def test_a_refusal_names_the_field_of_the_request(dialect: str) -> None:
    refused = ErrorInfo("invalid_request", "too large", "invalid_request_error", 400, param="max_tokens")
    made = facts(kind="completions" if dialect == "openai.completions" else "chat")
    told = encoder_for(dialect, made).sse([encode(End("failed", USAGE, refused))], 1, 1)
    assert b'"param":"max_tokens"' in told
    assert from_info(refused).param == "max_tokens", "of an answer that is not streamed"


def test_a_budgets_end_is_a_length_with_a_reason_and_no_error() -> None:
    for kind, delta in (("chat", '"delta":{}'), ("completions", '"text":""')):
        encoder = encoder_for(f"openai.{kind}", facts(kind=kind, include_usage=True))
        encoder.observe(encode(Open(0, 0, "text")))
        lines = [encode(ChoiceEnd(0, "budget")), encode(End("incomplete", USAGE))]
        first, *_, usage, done = [line for line in encoder.sse(lines, 1, 5).decode().split("\n") if line[:5] == "data:"]
        assert f'{{"index":0,{delta},"logprobs":null,"finish_reason":"length","stop_reason":"budget"}}' in first
        assert '"total_tokens":17' in usage
        assert done == "data: [DONE]"


def test_an_answer_that_moderation_cut_ends_with_its_reasons_and_done() -> None:
    """Only where every choice says why: a truncated stream is never a clean one."""
    ends = [encode(ChoiceEnd(choice, "content_filter")) for choice in range(2)]
    for kind in ("chat", "completions"):
        made = facts(kind=kind, n=2, include_usage=True)
        for before, clean in ((ends, True), (ends[:1], False), ([], False)):
            encoder = encoder_for(f"openai.{kind}", made)
            for line in before[:1]:  # a reader that resumes between the two
                encoder.observe(line)
            told = encoder.sse([*before[1:], encode(End("incomplete", USAGE))], 1, 3)
            assert (b"data: [DONE]" in told) is clean
            assert (b'"error"' in told) is not clean
            assert (b'"completion_tokens":5' in told) is clean


LOGPROBS = [
    {"token": "A", "logprob": -0.5, "top_logprobs": [{"token": "A", "logprob": -0.5}, {"token": "B", "logprob": -2}]},
    {"token": " river", "logprob": -1.5, "top_logprobs": []},
]
LEGACY = '{"tokens":["A"," river"],"token_logprobs":[-0.5,-1.5],"top_logprobs":[{"A":-0.5,"B":-2},{}],"text_offset":%s}'


def test_completions() -> None:
    own = raw({"tokens": ["."], "token_logprobs": [None], "top_logprobs": None, "text_offset": [70]})
    frames = (
        Note("prompt", 3, 0),
        Open(0, 0, "text"),
        Delta(0, "A river", 2, raw(LOGPROBS)),
        Delta(0, ".", 1, own),
        Open(1, 0, "reasoning", "raw"),
        Delta(1, "not here"),
        Open(2, 1, "text"),
        Delta(2, "\n"),
        ChoiceEnd(1, "stop"),
        ChoiceEnd(0, "length", raw(7)),
        End("completed", USAGE),
    )
    usage = chunk("", kind="completions", tail=f',"usage":{USAGE_JSON}')
    expected = "".join(
        (
            event(text('"A river"', 0, LEGACY % "[0,1]"), "1-3"),
            event(text('"."', 0, bytes(own).decode()), "1-4"),
            event(text(r'''"\n"''', 1), "1-8"),
            event(text('""', 1, "null", '"stop"'), "1-9"),
            event(text('""', 0, "null", '"length","stop_reason":7'), "1-10"),
            "data: [DONE]\nid: 1-11\n\n",
        )
    )
    made = facts(kind="completions", n=2, logprobs=True)
    assert spelled(made, *frames) == expected
    with_usage = spelled(facts(kind="completions", n=2, include_usage=True, logprobs=True), *frames)
    assert with_usage.endswith(f"data: {usage}\n\ndata: [DONE]\nid: 1-11\n\n")
    assert with_usage.replace(',"usage":null', "").replace(f"data: {usage}\n\n", "") == expected


PLACED = (
    Open(0, 0, "text"),
    Open(1, 1, "text"),
    Open(2, 0, "reasoning", "raw"),
    Delta(2, "not of the text"),
    Delta(0, "Où? ", 2),
    Delta(1, "Yes \U0001f680", 1, raw(LOGPROBS[:1])),
    Delta(0, "A river", 2, raw(LOGPROBS)),
    Delta(1, "A river", 2, raw(LOGPROBS)),
    Close(0),
    Open(3, 0, "text"),
    Delta(3, "A river", 2, raw(LOGPROBS)),
)
PLACES = {6: [0], 7: [4, 5], 8: [5, 6], 11: [11, 12]}


def places(body: bytes) -> dict[int, Any]:
    """Text offsets by the seq of each event with logprobs."""
    found = {}
    for block in body.decode().split("\n\n")[:-1]:
        data, cursor = block.split("\n")
        (choice,) = msgspec.json.decode(data[6:])["choices"]
        if choice["logprobs"]:
            found[int(cursor.partition("-")[2])] = choice["logprobs"]["text_offset"]
    return found


def test_text_offsets_count_from_the_start_of_their_choice() -> None:
    made = facts(kind="completions", n=2, logprobs=True)
    lines = [encode(frame) for frame in PLACED]
    assert places(encoder_for("openai.completions", made).sse(lines, 1, 1)) == PLACES
    one = encoder_for("openai.completions", made)
    assert places(b"".join(one.sse([line], 1, seq) for seq, line in enumerate(lines, 1))) == PLACES
    chunks = [msgspec.json.decode(chunk) for chunk in encoder_for("openai.completions", made).chunks(lines)]
    told = [choice["logprobs"]["text_offset"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert told == list(PLACES.values())


@pytest.mark.parametrize("after", range(1, len(PLACED)))
def test_a_reader_from_the_middle_gets_no_text_offsets(after: int) -> None:
    made = facts(kind="completions", n=2, logprobs=True)
    lines = [encode(frame) for frame in PLACED]
    encoder = encoder_for("openai.completions", made)
    for frame in PLACED[:after]:
        if isinstance(frame, Open):
            encoder.observe(encode(frame))
    assert places(encoder.sse(lines[after:], 1, after + 1)) == {seq: None for seq in PLACES if seq > after}


def test_text_is_not_measured_without_logprobs() -> None:
    lines = [encode(frame) for frame in PLACED]
    told = places(encoder_for("openai.completions", facts(kind="completions", n=2)).sse(lines, 1, 1))
    assert told == dict.fromkeys(PLACES)


def accumulated(made: StreamFacts, *frames: Frame) -> Any:
    accumulator = Accumulator(made)
    for frame in frames:
        accumulator.add(encode(frame))
    return msgspec.json.decode(accumulator.result())


def test_a_whole_chat_response() -> None:
    answer = accumulated(
        facts(n=2),
        Open(0, 0, "reasoning", "raw"),
        Open(1, 1, "tool", "function", "call_a", "f"),
        Delta(0, "Hm."),
        Delta(1, '{"x":'),
        Open(2, 0, "text"),
        Delta(2, "two\nlines", 3),
        Delta(1, "1}"),
        ChoiceEnd(0, "stop", raw("\n\n")),
        ChoiceEnd(1, "tool_calls"),
        End("completed", USAGE),
    )
    call = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
    assert answer == {
        "id": f"chatcmpl-{HEX}",
        "object": "chat.completion",
        "created": 1763712000,
        "model": "sim-small",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "two\nlines",
                    "reasoning_content": "Hm.",
                    "reasoning": "Hm.",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "\n\n",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]},
                "logprobs": None,
                "finish_reason": "tool_calls",
            },
        ],
        "usage": msgspec.json.decode(USAGE_JSON),
    }


def test_a_whole_completion_counts_its_offsets_over_the_whole_text() -> None:
    answer = accumulated(
        facts(kind="completions"),
        Open(0, 0, "text"),
        Delta(0, "Où? "),
        Delta(0, "A river", 2, raw(LOGPROBS)),
        Delta(0, "A river", 2, raw(LOGPROBS)),
        ChoiceEnd(0, "stop"),
        End("completed", USAGE),
    )
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "Où? A riverA river"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [4, 5, 11, 12]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["A", " river"] * 2


def test_the_registry() -> None:
    responses = {"openai.responses", "open.responses"}
    assert set(DIALECTS) == {"openai.chat", "openai.completions", "anthropic.messages", "vercel.ui", *responses}
    with pytest.raises(BadRequest, match=r"'openai.chatt'.*openai\.chat, openai\.completions") as unknown:
        encoder_for("openai.chatt", facts())
    assert unknown.value.param == "dialect"
    for dialect, more in (
        ("openai.completions", {"kind": "chat"}),
        ("openai.chat", {"kind": "completions", "logprobs": True}),
        ("anthropic.messages", {"n": 2}),
        ("anthropic.messages", {"logprobs": True}),
        ("vercel.ui", {"n": 2}),
        ("vercel.ui", {"logprobs": True}),
        ("openai.responses", {"n": 2}),
        ("open.responses", {"kind": "completions", "logprobs": True}),
    ):
        made = facts(**more)
        with pytest.raises(Unsupported, match=f"created as openai.{made.kind} and cannot be read as {dialect}: "):
            encoder_for(dialect, made)
    with pytest.raises(Unsupported, match=f"encoder {ENCODER_SET + 1}"):
        encoder_for("openai.chat", facts(encoder=ENCODER_SET + 1))


def test_a_stream_is_read_with_the_set_of_encoders_that_it_was_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, 2, {**ENCODERS[2], "openai.chat": CompletionsEncoder})
    assert type(encoder_for("openai.chat", facts())) is ChatEncoder
    assert type(encoder_for("openai.chat", facts(encoder=2))) is CompletionsEncoder
    assert type(encoder_for("anthropic.messages", facts())) is MessagesEncoder, "it came after set 1"


def test_a_stream_is_marked_with_the_set_that_its_dialect_last_changed_in() -> None:
    for dialect, encoder in ENCODERS[ENCODER_SET].items():
        same = [number for number, encoders in ENCODERS.items() if encoders.get(dialect) is encoder]
        request = CreateRequest("chat", "m", True, 1, False, False, None, None, False, None, raw({}), dialect=dialect)
        assert StreamFacts.of(STREAM, 1, request).encoder == min(same)
    old = msgspec.json.decode(b'{"stream":"%b","created":1,"model":"m"}' % STREAM.encode(), type=StreamFacts)
    assert (old.encoder, old.own_dialect) == (1, "openai.chat")


def test_facts_are_json_and_back() -> None:
    for made in (facts(), facts(kind="completions", n=3, include_usage=True, logprobs=True)):
        assert msgspec.json.decode(msgspec.json.encode(made), type=StreamFacts) == made


def test_error_bodies() -> None:
    error = TooMany("16 of 16 are in use", param="n", retry_after_s=1)
    assert error_body(error, "req_1") == (
        b'{"error":{"message":"16 of 16 are in use","type":"rate_limit_error","code":"too_many","param":"n",'
        b'"request_id":"req_1","retriable":true}}'
    )
    assert error_body(BadRequest("x"), "req_1", stream_id=STREAM, cursor=Cursor(2, 9)) == (
        b'{"error":{"message":"x","type":"invalid_request_error","code":"invalid_request","param":null,'
        b'"request_id":"req_1","retriable":false,"stream_id":"%b","cursor":"2-9"}}' % STREAM.encode()
    )
