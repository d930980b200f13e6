"""The bytes of the dialect, written out."""

from __future__ import annotations

import msgspec
import pytest

from stream_fabric.errors import Draining, KeyRevoked, StreamLost, StreamReset
from stream_fabric.stream.cursor import Cursor
from stream_fabric.stream.frames import ChoiceEnd, Close, Delta, End, ErrorInfo, Frame, Note, Open, Usage, encode
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.requests import CreateRequest
from stream_gw.dialects.ui.encoder import UiEncoder
from stream_gw.dialects.ui.replay import Before
from stream_gw.dialects.ui.requests import parse_ui
from tests.dialects.strategies import STREAM, raw

HEX = STREAM[5:]
START = (
    f'{{"type":"start","messageId":"msg_{HEX}","messageMetadata":{{"streamId":"{STREAM}","model":"sim-small",'
    '"createdAt":1763712000000}}'
)
STEP = '{"type":"start-step"}'
USAGE = (
    '{"inputTokens":12,"inputTokenDetails":{"noCacheTokens":3,"cacheReadTokens":8,"cacheWriteTokens":1},'
    '"outputTokens":5,"outputTokenDetails":{"textTokens":3,"reasoningTokens":2},"totalTokens":17}'
)


def facts(message_id: str = "") -> StreamFacts:
    return StreamFacts(STREAM, 1763712000, "sim-small", dialect="vercel.ui", encoder=3, message_id=message_id)


def made(message_id: str = "") -> UiEncoder:
    found = encoder_for("vercel.ui", facts(message_id))
    assert isinstance(found, UiEncoder)
    return found


def data(*frames: Frame) -> list[str]:
    body = made().sse([encode(frame) for frame in frames], 1, 1).decode()
    return [line[6:] for line in body.splitlines() if line.startswith("data: ")]


def test_an_answer() -> None:
    frames = [
        Note("started"), Note("prompt", 12, 8), Open(0, 0, "reasoning"), Delta(0, "So", 2), Close(0, "c2ln"),
        Open(1, 0, "text"), Delta(1, 'a "b"\n', 1, raw([])), Close(1), ChoiceEnd(0, "stop", raw("\n")),
        End("completed", Usage(prompt=12, cached=8, written=1, output=5, reasoning=2)),
    ]  # fmt: skip
    assert made().sse([encode(frame) for frame in frames], 1, 1).decode() == (
        f"data: {START}\n\ndata: {STEP}\nid: 1-2\n\n"
        'data: {"type":"reasoning-start","id":"0"}\nid: 1-3\n\n'
        'data: {"type":"reasoning-delta","id":"0","delta":"So"}\nid: 1-4\n\n'
        'data: {"type":"reasoning-end","id":"0","providerMetadata":{"streamGw":{"signature":"c2ln"}}}\nid: 1-5\n\n'
        'data: {"type":"text-start","id":"1"}\nid: 1-6\n\n'
        'data: {"type":"text-delta","id":"1","delta":"a \\"b\\"\\n"}\nid: 1-7\n\n'
        'data: {"type":"text-end","id":"1"}\nid: 1-8\n\n'
        'data: {"type":"finish-step"}\n\n'
        f'data: {{"type":"finish","finishReason":"stop","messageMetadata":{{"usage":{USAGE},"stopReason":"\\n"}}}}\n\n'
        "data: [DONE]\nid: 1-10\n\n"
    )


def test_calls() -> None:
    assert data(
        Open(0, 0, "tool", id="call_1", name="weather"), Delta(0, '{"city":\n'), Delta(0, '"Oslo"}'), Close(0),
        Open(1, 0, "tool", "server", "call_2", "search"), Delta(1, "{}"), Close(1),
        Open(2, 0, "tool", name="now"), Close(2), Open(3, 0, "item", item=raw({})), ChoiceEnd(0, "tool_calls"),
    ) == [
        START, STEP,
        '{"type":"tool-input-start","toolCallId":"call_1","toolName":"weather"}',
        '{"type":"tool-input-delta","toolCallId":"call_1","inputTextDelta":"{\\"city\\":\\n"}',
        '{"type":"tool-input-delta","toolCallId":"call_1","inputTextDelta":"\\"Oslo\\"}"}',
        '{"type":"tool-input-available","toolCallId":"call_1","toolName":"weather","input":{"city":"Oslo"}}',
        f'{{"type":"tool-input-start","toolCallId":"call_{HEX}3","toolName":"now"}}',
        f'{{"type":"tool-input-available","toolCallId":"call_{HEX}3","toolName":"now","input":{{}}}}',
    ]  # fmt: skip


def test_a_call_whose_input_is_nested_too_deep() -> None:
    told = data(Open(0, 0, "tool", id="c", name="t"), Delta(0, "[" * 5000), Close(0), ChoiceEnd(0, "tool_calls"))
    assert told[-1].startswith('{"type":"tool-input-error","toolCallId":"c"')


@pytest.mark.parametrize(
    ("end", "last"),
    [
        (End("cancelled"), '{"type":"abort","reason":"cancelled"}'),
        (End("failed", error=ErrorInfo("x", 'it "broke"')), '{"type":"error","errorText":"it \\"broke\\""}'),
        (End("incomplete"), '{"type":"error","errorText":"the stream ended before it was complete"}'),
    ],
)
def test_an_answer_without_its_end(end: End, last: str) -> None:
    told = data(Open(0, 0, "text"), Open(1, 0, "tool", id="c", name="t"), Delta(1, "{"), end)
    assert told[-3:] == ['{"type":"text-end","id":"0"}', last, "[DONE]"], "the call stays without input"


def test_what_the_gateway_cannot_deliver() -> None:
    told = made().failure(KeyRevoked("the key is revoked"), "req_1", Cursor(1, 5))
    assert told == b'data: {"type":"error","errorText":"the key is revoked"}\n\ndata: [DONE]\n\n'
    assert made().failure(Draining("shutting down"), "req_1", Cursor(1, 5)) == b"", "another gateway has the rest"
    assert made().failure(StreamReset("void"), "req_1", Cursor(1, 5)) == b"", "the log has another continuation"
    assert b"are lost" in made().failure(StreamLost("frames are lost"), "req_1", Cursor(1, 5)), "no gateway has them"


def test_the_start_of_a_message_that_goes_on() -> None:
    text = encode(Open(0, 0, "text"))
    assert b'"messageId":"a1"' in made("a1").chunks([text])[0]
    again = made("a1")
    again.replay(Before("a1", {"mine": 1, "model": "old"}, (b'{"type":"finish-step"}',)))
    start, before, step, _ = again.chunks([text])
    assert b'"messageId":"a1","messageMetadata":{"mine":1,"model":"sim-small"' in start
    assert (before, step) == (b'{"type":"finish-step"}', STEP.encode())
    alone = made("a1")
    alone.replay(None)
    assert f'"messageId":"msg_{HEX}"'.encode() in alone.chunks([text])[0]


def test_the_facts_of_a_stream_name_its_set_of_encoders() -> None:
    body = {"id": "c", "model": "m", "messages": [{"id": "u", "role": "user", "parts": []}]}
    request: CreateRequest = parse_ui(msgspec.json.encode(body))
    assert StreamFacts.of(STREAM, 1, request).encoder == 3
