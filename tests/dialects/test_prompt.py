"""The form of a prompt from which prefix hints are hashed: one for all dialects and ways of writing."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.limits import JSON_SLOW_NUMBERS_MAX
from stream_fabric.pool.prefix import block_hashes
from stream_gw.dialects.anthropic.requests import parse_messages
from stream_gw.dialects.prompt import IMAGE_TOKENS, estimated_tokens, in_turns
from stream_gw.dialects.requests import parse_create

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief. " * 80},
    {"role": "user", "content": "What is in the picture, and the weather? " * 30},
    {"role": "assistant", "content": "I look. " * 40, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain. " * 90},
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
            {"type": "text", "text": "And here? " * 60},
        ],
    },
]
TEXT_PART = {"type": "text", "text": "c"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
MESSAGES: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief. " * 80, "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "What is in the picture, and the weather? " * 30},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look. " * 40},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Rain. " * 90}]},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                {"type": "text", "text": "And here? " * 60},
            ],
        },
    ],
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_a_conversation_has_the_same_hashes_in_both_dialects() -> None:
    tool = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
    chat = parse_create(
        msgspec.json.encode({"model": "m", "messages": CHAT, "tools": [{"type": "function", "function": tool}]}), "chat"
    )
    other = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
    messages = parse_messages(msgspec.json.encode({"model": "m", "max_tokens": 9, **MESSAGES, "tools": [other]}))
    assert messages.prompt == chat.prompt
    hashes = block_hashes(b"m", messages.prompt)
    assert hashes == block_hashes(b"m", chat.prompt) and len(hashes) > 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "hi"}, {"content": [{"type": "text", "text": "hi"}], "role": "user"}),
        (
            {"role": "assistant", "content": "a", "reasoning": "b"},
            {"role": "assistant", "content": "a", "refusal": None},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [CALL | {"function": {"arguments": '{"city":"Paris"}', "name": "weather"}}],
            },
        ),
    ],
)
def test_ways_of_writing_one_message(one: Any, other: Any) -> None:
    def prompt(message: Any, **spaces: Any) -> tuple[bytes, ...]:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}, message]}
        return parse_create(json.dumps(body, **spaces).encode(), "chat").prompt

    assert prompt(one) == prompt(other, indent=2)


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "ho"},
        {"role": "system", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": ""}]},
        {"role": "user", "content": "hi", "name": "ann"},
    ],
)
def test_different_messages_stay_different(other: Any) -> None:
    one = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    different = {"model": "m", "messages": [other]}
    prompts = [parse_create(msgspec.json.encode(body), "chat").prompt for body in (one, different)]
    assert prompts[0] != prompts[1]


@pytest.mark.parametrize(
    "arguments",
    ["", "{'a': 1}", '{"a": 1', "[" * 100_000, '{"a": ' * 100_000 + "1" + "}" * 100_000],
)
def test_arguments_that_are_no_json_or_too_deep_stay_a_text(arguments: str) -> None:
    """They stand in a string, where the check of the body does not look."""
    call = CALL | {"function": {"name": "weather", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    (part,) = parse_create(msgspec.json.encode({"model": "m", "messages": [message]}), "chat").prompt
    (told,) = msgspec.json.decode(part)["tool_calls"]
    assert told["function"]["arguments"] == arguments


def test_arguments_are_compared_without_their_spaces() -> None:
    """Templates write arguments anew, but in the order of their keys, and numbers as they are."""

    def prompt(arguments: str) -> tuple[bytes, ...]:
        call = CALL | {"function": {"name": "weather", "arguments": arguments}}
        message = {"role": "assistant", "tool_calls": [call]}
        return parse_create(msgspec.json.encode({"model": "m", "messages": [message]}), "chat").prompt

    assert prompt('{"a": [1, {"b": "x  y"}], "c": 1e300}') == prompt(' {"a":[1,{"b":"x  y"}] ,\n"c":1e300}')
    assert prompt('{"a": 1, "b": 2}') != prompt('{"b": 2, "a": 1}')
    assert prompt('{"a": "x  y"}') != prompt('{"a": "x y"}')


def test_slow_numbers_in_many_arguments_take_no_multiple() -> None:
    """msgspec takes 20 us to read one such number, so a body of many arguments within the limit took a minute."""

    def process_time_s(number: str) -> float:
        arguments = "[" + ",".join([number] * JSON_SLOW_NUMBERS_MAX) + "]"
        call = CALL | {"function": {"name": "weather", "arguments": arguments}}
        body = msgspec.json.encode({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call] * 10}]})
        times = []
        for _ in range(3):
            begun = time.process_time()
            parse_create(body, "chat")
            times.append(time.process_time() - begun)
        return min(times)

    assert process_time_s("1e300") < 20 * process_time_s('"1e3"')


@given(st.text(max_size=40))
def test_the_role_and_the_text_are_in_the_prompt(text: str) -> None:
    (part,) = parse_create(
        msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}]}), "chat"
    ).prompt
    assert part == b'{"role":"user","content":%b}' % msgspec.json.encode(text)


def test_the_bytes_of_an_image_are_no_tokens() -> None:
    """A photo of a megabyte is some hundred or thousand tokens, and not 250,000."""

    def tokens(*parts: Any) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}
        return estimated_tokens(parse_create(msgspec.json.encode(body), "chat").prompt, 0, 4.0)

    def image(size: int) -> Any:
        return {"type": "image_url", "image_url": {"detail": "auto", "url": "data:image/png;base64," + "A" * size}}

    text = {"type": "text", "text": 'what is it? "url":"data:image/png' + "x" * 4000}
    alone = tokens(text)
    assert alone > 1000
    assert alone + 2 * IMAGE_TOKENS <= tokens(image(1_000_000), text, image(2_000_000)) < alone + 2 * IMAGE_TOKENS + 60
    assert alone + 100 <= tokens(text, image(400)) < alone + 200, "a small one is taken for its bytes"


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
CONTENTS = st.one_of(st.sampled_from(["", "a", "b"]), st.lists(st.sampled_from([IMAGE_PART, TEXT_PART]), max_size=2))


@given(st.lists(st.builds(lambda role, content: {"role": role, "content": content}, ROLES, CONTENTS), max_size=8))
def test_turns_are_as_strict_templates_demand(said: list[dict[str, Any]]) -> None:
    made = in_turns(said)
    roles = [message["role"] for message in made]
    assert "system" not in roles[1:]
    assert ("user", "user") not in list(itertools.pairwise(roles))
    assert [each for each in made if each["role"] in ("assistant", "tool")] == [
        each for each in said if each["role"] in ("assistant", "tool")
    ]
    assert in_turns(made) == made


def test_a_later_system_message_is_a_reminder_of_the_users_turn() -> None:
    said = [("system", "s"), ("system", "t"), ("user", "hi"), ("system", "Be brief."), ("assistant", "a")]
    assert in_turns([{"role": role, "content": text} for role, text in said]) == [
        {"role": "system", "content": "s\n\nt"},
        {"role": "user", "content": "hi\n\n<system-reminder>\nBe brief.\n</system-reminder>"},
        {"role": "assistant", "content": "a"},
    ]


def test_many_messages_of_one_turn_are_joined_in_linear_time() -> None:
    """8 MiB of the user's messages took 2.4 s of a thread, which copied the first ones for each further one."""

    def process_time_s(content: Any) -> float:
        said = [{"role": "user", "content": content}] * 8000
        begun = time.process_time()
        (made,) = in_turns(said)
        assert len(made["content"]) >= 8000
        return time.process_time() - begun

    assert process_time_s("x" * 950) < 0.5
    assert process_time_s([TEXT_PART] * 8) < 0.5


def test_texts_before_a_list_are_one_part() -> None:
    said = [{"role": "user", "content": content} for content in ("a", "", "b", [IMAGE_PART], "c", "", "d")]
    text = {"type": "text", "text": "a\n\nb"}
    assert in_turns(said) == [{"role": "user", "content": [text, IMAGE_PART, TEXT_PART, {"type": "text", "text": "d"}]}]
