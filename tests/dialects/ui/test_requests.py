"""The bodies of ``useChat`` become the chats that engines read."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import CHAT_BEFORE_BYTES_MAX
from stream_gw.dialects.requests import parse_create, read_fields
from stream_gw.dialects.ui.bodies import UiChatBody
from stream_gw.dialects.ui.requests import Turn, parse_turn

USER = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}


def turn(*messages: Any, **more: Any) -> Turn:
    body = {"id": "chat", "model": "m", "messages": list(messages) or [USER], "trigger": "submit-message", **more}
    return parse_turn(read_fields(msgspec.json.encode(body)))


def sent(*messages: Any, **more: Any) -> dict[str, Any]:
    """The engine's body."""
    return msgspec.json.decode(turn(*messages, **more).request.body)  # type: ignore[no-any-return]


def user(*parts: Any) -> dict[str, Any]:
    return {"id": "u", "role": "user", "parts": list(parts)}


def assistant(*parts: Any, id: str = "a1") -> dict[str, Any]:
    return {"id": id, "role": "assistant", "parts": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "state": "done"}


def tool(state: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool-weather", "toolCallId": "c1", "state": state, "input": {"city": "Oslo"}, **more}


STEP = {"type": "step-start"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}


def test_a_turn() -> None:
    made = turn(maxOutputTokens=9, topP=0.5, stopSequences=["x"], system="Be brief.", ignored={"a": 1})
    assert msgspec.json.decode(made.request.body) == {
        "model": "m", "max_tokens": 9, "top_p": 0.5, "stop": ["x"], "ignored": {"a": 1},
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    }  # fmt: skip
    assert (made.chat, made.before) == ("chat", b"")
    request = made.request
    assert request.stream and request.max_tokens == 9 and request.session_id == "chat" and request.message_id == ""
    assert turn(session_id="mine").request.session_id == "mine"


def test_the_prompt_is_that_of_the_same_chat() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    assert turn().request.prompt == parse_create(msgspec.json.encode(body), "chat").prompt


def test_files() -> None:
    url = "https://example.com/a.png"
    pixels = "data:image/png;base64,aGk="
    parts = [{"type": "file", "mediaType": "image/png", "url": each} for each in (url, pixels)]
    [message] = sent(user(*parts, text("what?"), {"type": "data-x", "data": 1}))["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": pixels}},
        {"type": "text", "text": "what?"},
    ]


@pytest.mark.parametrize(
    ("media", "url", "part"),
    [
        ("text/plain", "data:text/plain;base64,aGk=", {"type": "text", "text": "hi"}),
        ("text/csv", "data:text/csv,a%2Cb", {"type": "text", "text": "a,b"}),
        ("audio/mpeg", "data:audio/mpeg;base64,aGk=",
         {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "mp3"}}),
        ("application/pdf", "data:application/pdf;base64,aGk=",
         {"type": "file", "file": {"filename": "f", "file_data": "data:application/pdf;base64,aGk="}}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_image(media: str, url: str, part: dict[str, Any]) -> None:
    file = {"type": "file", "mediaType": media, "url": url, "filename": "f"}
    [message] = sent(user(file, text("?")))["messages"]
    assert message["content"] == [part, {"type": "text", "text": "?"}]
    far = {**file, "url": "https://example.com/f"}
    with pytest.raises(Unsupported, match="must be a data URL"):
        turn(user(far))


def test_a_file_that_no_engine_reads() -> None:
    with pytest.raises(Unsupported, match="'video/mp4'"):
        turn(user({"type": "file", "mediaType": "video/mp4", "url": "data:,x"}))
    with pytest.raises(BadRequest, match="no comma"):
        turn(user({"type": "file", "mediaType": "application/pdf", "url": "data:application/pdf"}))
    with pytest.raises(BadRequest, match="not a valid data URL"):
        turn(user({"type": "file", "mediaType": "text/plain", "url": "data:text/plain;base64,?"}))


def test_steps_of_an_answer() -> None:
    thought = {"type": "reasoning", "text": "Hm."}
    answer = assistant(STEP, thought, text("Look."), tool("output-available", output={"c": 9}), STEP, text("9 C."))
    said = sent(USER, answer, user(text("And now?")))["messages"]
    assert said[1:] == [
        {"role": "assistant", "content": "Look.", "reasoning": "Hm.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"c":9}'},
        {"role": "assistant", "content": "9 C."},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize(
    ("part", "result"),
    [
        (tool("output-available", output="warm"), "warm"),
        (tool("output-error", errorText="no network"), "no network"),
        (tool("output-denied", approval={"id": "x", "approved": False, "reason": "not now"}), "not now"),
        (tool("output-denied"), "Tool call execution denied."),
        ({**tool("output-available", output=None), "type": "dynamic-tool", "toolName": "weather"}, "null"),
    ],
)
def test_results_of_tools(part: dict[str, Any], result: str) -> None:
    said = sent(USER, assistant(part))["messages"]
    assert said[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


@pytest.mark.parametrize("state", ["input-streaming", "input-available", "approval-requested"])
def test_a_call_without_a_result_is_left_out(state: str) -> None:
    (message,) = sent(USER, assistant(STEP, tool(state)), user(text("Go on.")))["messages"]
    assert message["role"] == "user"
    assert message["content"].endswith("\n\nGo on.")


@pytest.mark.parametrize("field", ["input", "rawInput"])
def test_arguments_are_always_an_object(field: str) -> None:
    cut = {**tool("output-error", errorText="cut"), "input": None, field: '{"city":"Os'}
    [call] = sent(USER, assistant(cut))["messages"][1]["tool_calls"]
    assert msgspec.json.decode(call["function"]["arguments"]) == {"input": '{"city":"Os'}


def test_a_message_that_goes_on_keeps_its_id() -> None:
    answer = assistant(tool("output-available", output="warm"))
    made = turn(USER, answer, messageId="a1")
    assert made.request.message_id == "a1" and msgspec.json.decode(made.before) == answer
    long = turn(USER, assistant(tool("output-available", output="x" * CHAT_BEFORE_BYTES_MAX)))
    assert long.request.message_id == "a1" and long.before == b""
    with pytest.raises(BadRequest, match="at most 128"):
        turn(USER, assistant(text("x"), id="a" * 129))


@pytest.mark.parametrize(("named", "count"), [("a1", 1), ("u1", 1), ("a2", 3), ("gone", 4), (None, 4)], ids=str)
def test_what_is_regenerated_is_left_out(named: str | None, count: int) -> None:
    messages = [USER, assistant(text("one")), {**USER, "id": "u2"}, assistant(text("two"), id="a2")]
    made = turn(*messages, trigger="regenerate-message", messageId=named)
    assert len(msgspec.json.decode(made.request.body)["messages"]) == count
    assert made.request.message_id == "", "a new message takes its place"


def test_tools() -> None:
    schema = {"type": "object", "properties": {}}
    function = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}}
    for tools in (
        {"weather": {"description": "d", "inputSchema": schema}},
        {"weather": {"description": "d", "inputSchema": {"jsonSchema": schema}}},
        [{"name": "weather", "description": "d", "parameters": schema}],
        [function],
    ):
        assert sent(tools=tools)["tools"] == [function]
    assert "tools" not in sent(tools={}, toolChoice="auto") and "tool_choice" not in sent(tools={}, toolChoice="auto")
    for choice, told in (
        ("required", "required"),
        ({"type": "tool", "toolName": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ):
        assert sent(tools=[function], toolChoice=choice)["tool_choice"] == told


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"n": 2}, "n", "one choice"),
        ({"logprobs": True}, "logprobs", "has none"),
        ({"stream": False}, "stream", "is a stream"),
        ({"id": ""}, "id", "1 to 128"),
        ({"trigger": "resume"}, "trigger", "submit-message, regenerate-message"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "messages", "messages of useChat"),
        ({"messages": [{"id": "s", "role": "system", "parts": []}]}, "messages", "message of the user"),
        ({"messages": [user({"type": "text"})]}, "messages", "messages.0.parts.0.text must be a string"),
        ({"tools": [{"name": "x"}]}, "tools", "inputSchema"),
        ({"toolChoice": "any"}, "toolChoice", "required"),
        (
            {
                "messages": [
                    user({"type": "file", "mediaType": "image", "url": "", "providerReference": {"x": "file_1"}})
                ]
            },
            "messages",
            "uploaded file",
        ),
        (
            {"messages": [{**user({"type": "steering-message"}), "role": "assistant"}]},
            "messages",
            "parts must be a list",
        ),
        ({"topP": 2}, "topP", "0 to 1"),
        ({"maxOutputTokens": 0}, "maxOutputTokens", "1 to"),
    ],
)
def test_what_is_refused_is_named(more: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as refused:
        turn(**more)
    assert refused.value.param == param


def test_what_version_7_adds_to_a_history() -> None:
    """The user's words within an answer, parts that no engine reads, and the first half of a media type."""
    text = {"type": "text", "text": "Go on."}
    image = {"type": "file", "mediaType": "image", "url": "data:image/png;base64,AAAA"}
    answer = {
        "id": "a1",
        "role": "assistant",
        "parts": [
            {"type": "step-start"},
            {"type": "custom", "kind": "acme.note"},
            {"type": "reasoning-file", "mediaType": "image/png", "url": "data:image/png;base64,AAAA"},
            {"type": "text", "text": "First."},
            {"type": "steering-message", "id": "s1", "parts": [{"type": "text", "text": "Shorter."}]},
            {"type": "step-start"},
            {"type": "text", "text": "Then."},
        ],
    }
    assert sent(user(text, image), answer, user(text))["messages"] == [
        {"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": image["url"]}}]},
        {"role": "assistant", "content": "First."},
        {"role": "user", "content": "Shorter."},
        {"role": "assistant", "content": "Then."},
        {"role": "user", "content": "Go on."},
    ]


def test_every_described_field_is_checked_by_the_parser() -> None:
    turn()
    for field in msgspec.structs.fields(UiChatBody):
        with pytest.raises(BadRequest) as refused:
            turn(**{field.encode_name: [{"no": "such value"}]})
        assert refused.value.param == field.encode_name


def test_every_required_field_is_described_as_required() -> None:
    required = {field.encode_name for field in msgspec.structs.fields(UiChatBody) if field.required}
    body = {"id": "c", "messages": [USER], "model": "m"}
    assert required == {"id", "messages"}, "a gateway may know the model"
    for name in body:
        with pytest.raises(BadRequest, match=f"{name} is missing"):
            parse_turn(read_fields(msgspec.json.encode({key: body[key] for key in body if key != name})))


def test_an_image_of_many_bytes_is_passed_on_unchanged() -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(300_000)).decode()
    [message] = sent(user({"type": "file", "mediaType": "image/png", "url": url}))["messages"]
    assert message["content"][0]["image_url"]["url"] == url
