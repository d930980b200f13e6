"""Requests for responses: what the engine gets, what the response repeats, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.errors import BadRequest, Unsupported
from stream_gw.dialects.requests import CreateRequest, parse_create
from stream_gw.dialects.responses.requests import parse_responses, read_asked
from stream_gw.dialects.responses.tools import unwrapped, wrapped

FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
CHAT_FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Rain"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}


def parsed(**more: Any) -> CreateRequest:
    return parse_responses(msgspec.json.encode({"model": "m", "input": "hi", **more}))


def engine(**more: Any) -> dict[str, Any]:
    return msgspec.json.decode(parsed(**more).body)  # type: ignore[no-any-return]


def settings(**more: Any) -> dict[str, Any]:
    request = parsed(**more)
    assert request.settings is not None
    return msgspec.json.decode(request.settings)  # type: ignore[no-any-return]


def messages(*items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return engine(input=list(items), **more)["messages"]  # type: ignore[no-any-return]


def test_a_text_and_instructions() -> None:
    assert engine(instructions="Be brief.", max_output_tokens=9, temperature=0.5) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.5,
    }
    request = parsed(max_output_tokens=9)
    assert (request.max_tokens, request.kind, request.own_dialect) == (9, "chat", "openai.responses")


def test_items_become_the_messages_that_a_chat_client_sends() -> None:
    made = messages(
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}, IMAGE]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I ask.", "annotations": []}],
        },
        CALL,
        CALL | {"call_id": "c2"},
        RESULT,
        RESULT | {"call_id": "c2", "output": [{"type": "input_text", "text": "Sun"}, IMAGE]},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        {"role": "user", "content": "Thanks"},
    )  # fmt: skip
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    assert made == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}, image]},
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [call, call | {"id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "Sun"},
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": "Rain."},
        {"role": "assistant", "content": "No more."},
        {"role": "user", "content": "Thanks"},
    ]


def test_developer_messages_and_context_of_a_coding_agent() -> None:
    """Codex sends two developer messages, its environment and the prompt, and developer messages later on."""
    made = messages(
        {"role": "developer", "content": [{"type": "input_text", "text": "Skills: none."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "<cwd>/src</cwd>"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "Read only."}]},
        {"role": "user", "content": "More."},
        instructions="You are a coding agent.",
    )
    assert made == [
        {"role": "system", "content": "You are a coding agent.\n\nSkills: none."},
        {"role": "user", "content": "<cwd>/src</cwd>\n\nGo."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "<system-reminder>\nRead only.\n</system-reminder>\n\nMore."},
    ]


def test_reasoning_that_only_its_service_can_read_is_left_out() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "c2VhbGVk"}
    assert messages({"role": "user", "content": "a"}, sealed, {"role": "assistant", "content": "b"}) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_a_history_comes_before_the_input_and_after_the_instructions() -> None:
    asked = read_asked(b'{"model":"m","input":[%b],"instructions":"x"}' % msgspec.json.encode(RESULT))
    request = asked.request([{"role": "user", "content": "a"}, CALL])
    roles = [message["role"] for message in msgspec.json.decode(request.body)["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    with pytest.raises(BadRequest, match="not in the input"):
        asked.request([])


def test_the_prompt_is_that_of_the_same_chat() -> None:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    chat = parse_create(msgspec.json.encode({"model": "m", "messages": said, "tools": [CHAT_FUNCTION]}), "chat")
    assert parsed(instructions="s", tools=[FUNCTION]).prompt == chat.prompt


def test_tools_and_choices() -> None:
    assert engine(tools=[FUNCTION])["tools"] == [CHAT_FUNCTION]
    assert settings(tools=[FUNCTION])["tools"] == [FUNCTION | {"description": None}]
    named = engine(tools=[FUNCTION], tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False)
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert named["parallel_tool_calls"] is False
    other = {"type": "function", "name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    allowed = engine(tools=[FUNCTION, other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in allowed["tools"]] == ["other"]
    assert allowed["tool_choice"] == "required"
    assert settings(tools=[FUNCTION, other], tool_choice=choice)["tool_choice"] == choice
    choice["tools"] = [{"type": "function", "name": {}}]
    assert "tools" not in engine(tools=[FUNCTION], tool_choice=choice), "a name that is no text allows nothing"
    assert "tool_choice" not in engine(tool_choice="auto"), "engines refuse a choice without tools"


def test_a_custom_tool_is_a_function_with_one_string() -> None:
    tool = {"type": "custom", "name": "sql", "description": "Runs SQL."}
    made = engine(tools=[tool, FUNCTION], tool_choice={"type": "custom", "name": "sql"})
    assert made["tools"][1] == CHAT_FUNCTION and made["tool_choice"]["function"] == {"name": "sql"}
    function = made["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("sql", "Runs SQL.")
    assert function["parameters"]["required"] == ["input"]
    assert settings(tools=[tool])["tools"] == [tool | {"format": {"type": "text"}}]
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "sql", "input": 'SELECT "a"'}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]}
    [answer, told] = messages(call, result)
    assert msgspec.json.decode(answer["tool_calls"][0]["function"]["arguments"]) == {"input": 'SELECT "a"'}
    assert told == {"role": "tool", "tool_call_id": "c1", "content": "1"}


def test_the_tools_of_a_namespace_are_functions_with_its_name() -> None:
    """Codex sends its subagents' tools, and those of each MCP server, as a namespace."""
    space = {"type": "namespace", "name": "agents", "description": "Subagents.", "tools": [FUNCTION]}
    server = {"type": "namespace", "name": "mcp__sql__", "tools": [{"type": "custom", "name": "run"}]}
    asked = {"tools": [space, server, FUNCTION]}
    made = engine(**asked)
    names = [tool["function"]["name"] for tool in made["tools"]]
    assert names == ["agents__weather", "mcp__sql__run", "weather"]
    assert made["tools"][0]["function"] | {"name": "weather"} == CHAT_FUNCTION["function"]
    [told, *_] = settings(**asked)["tools"]
    assert told == space | {"tools": [FUNCTION | {"description": None}]}
    [answer, *_] = messages(CALL | {"namespace": "agents"}, RESULT)
    assert answer["tool_calls"][0]["function"]["name"] == "agents__weather"
    forced = engine(**asked, tool_choice={"type": "function", "name": "weather", "namespace": "agents"})
    assert forced["tool_choice"]["function"] == {"name": "agents__weather"}
    allowed: list[tuple[dict[str, str], list[str]]] = [
        ({"type": "namespace", "name": "mcp__sql__"}, ["mcp__sql__run"]),
        ({"type": "function", "name": "weather", "namespace": "agents"}, ["agents__weather"]),
        ({"type": "function", "name": "weather"}, ["weather"]),
    ]
    for each, left in allowed:
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [each]}
        assert [tool["function"]["name"] for tool in engine(**asked, tool_choice=choice)["tools"]] == left


def test_fields_of_codex_do_not_reach_the_engine() -> None:
    made = engine(client_metadata={"x-codex-turn-metadata": "{}"}, include=["reasoning.encrypted_content"], store=False)
    assert set(made) == {"model", "messages"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"input":"a\\n\\"b\\" \\u00e9"}', 'a\n"b" é'),
        ('{ "input" : "cut he', "cut he"),
        ('{"input":"cut\\', "cut"),
        ('{"input":' + "[" * 5000, '{"input":' + "[" * 5000),
        ('{"input":"deep","x":' + "[" * 5000 + "]" * 5000 + "}", "deep"),
        ('{"input":"a\\\\', "a\\"),
        ('{"input":"cut\\u00', "cut"),
        ('{"input":"cut\\ud83d', "cut"),
        ('{"input":"cut\\ud83d\\ude0', "cut"),
        ('{"input":"whole"', "whole"),
        ('{"inp', '{"inp'),
        ("SELECT 1", "SELECT 1"),
        ('{"query":"x"}', '{"query":"x"}'),
        ('{"input":5}', '{"input":5}'),
        ("", ""),
    ],
)
def test_the_input_of_a_custom_tool_as_far_as_it_came(arguments: str, told: str) -> None:
    assert unwrapped(arguments) == told


@given(st.text())
def test_any_input_of_a_custom_tool_survives_and_so_does_its_beginning(text: str) -> None:
    arguments = wrapped(text)
    assert unwrapped(arguments) == text
    for cut in range(len('{"input":"'), len(arguments)):
        assert text.startswith(unwrapped(arguments[:cut]))


def test_files_in_the_request() -> None:
    def content(**file: str) -> Any:
        [message] = messages({"role": "user", "content": [{"type": "input_file", **file}]})
        return message["content"]

    assert content(file_data="data:text/plain;base64,aGk=") == content(file_data="aGk=", filename="a.TXT") == "hi"
    pdf = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}}
    assert content(file_data="data:application/pdf;base64,AAAA", filename="a.pdf") == [pdf]
    assert content(file_data="AAAA", filename="a.pdf") == [pdf]
    image = "data:image/png;base64,AAAA"
    assert content(file_data=image) == [{"type": "image_url", "image_url": {"url": image}}]


def test_formats_of_the_answer() -> None:
    form = {"type": "json_schema", "name": "city", "schema": {"type": "object"}, "strict": True}
    assert engine(text={"format": form})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": {"type": "object"}, "strict": True},
    }
    assert settings(text={"format": form, "verbosity": "low"})["text"] == {
        "format": form | {"description": None}, "verbosity": "low",
    }  # fmt: skip
    assert engine(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}
    assert "response_format" not in engine(text={"format": {"type": "text"}})


@pytest.mark.parametrize(
    ("effort", "told"),
    [
        ("low", {"reasoning_effort": "low"}),
        ("minimal", {"reasoning_effort": "minimal"}),
        ("xhigh", {"reasoning_effort": "xhigh"}),
        ("none", {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        (None, {}),
    ],
)
def test_efforts(effort: str | None, told: dict[str, Any]) -> None:
    found = engine(reasoning={"effort": effort, "summary": "auto"})
    assert {name: value for name, value in found.items() if name not in ("model", "messages")} == told
    assert settings(reasoning={"effort": effort, "summary": "auto"})["reasoning"]["effort"] == effort


def test_logprobs() -> None:
    request = parsed(include=["message.output_text.logprobs", "file_search_call.results"], top_logprobs=2)
    assert request.logprobs and msgspec.json.decode(request.body)["top_logprobs"] == 2
    assert not parsed(top_logprobs=0).logprobs


def test_users_and_sessions() -> None:
    assert parsed(safety_identifier="ann", prompt_cache_key="k").user == "ann"
    assert parsed(safety_identifier="a" * 200).user == parsed(safety_identifier="a" * 200).user != "a" * 200
    assert parsed(user="bob", safety_identifier="ann").user == "bob"
    assert (parsed(prompt_cache_key="k").session_id, parsed(prompt_cache_key="k").cache_key) == (None, "k")
    assert parsed(prompt_cache_key="k", session_id="s").session_id == "s"
    asked = read_asked(b'{"model":"m","conversation":{"id":"conv_1"},"prompt_cache_key":"k"}')
    assert asked.conversation == "conv_1"
    assert asked.request([{"role": "user", "content": "a"}]).session_id == "conv_1"


def test_what_the_response_repeats() -> None:
    more = {
        "instructions": "x", "metadata": {"a": "b"}, "top_p": 0.5, "max_tool_calls": 3,
        "service_tier": "flex", "safety_identifier": "ann", "prompt_cache_key": "k", "store": True,
    }  # fmt: skip
    found = settings(**more)
    assert {name: found[name] for name in more} == more
    assert "truncation" not in found and "truncated_items" not in found
    told = [settings(service_tier=tier)["service_tier"] for tier in ("auto", "scale", "fast", "priority")]
    assert told == ["default", "default", "priority", "priority"]
    assert "background_options" not in engine(background_options={"completion_window": "2h"})
    body = engine(**more)
    assert set(body) == {"model", "messages", "top_p", "user", "prompt_cache_key"}


def test_truncation_is_repeated_with_what_was_left_out() -> None:
    asked = read_asked(b'{"model":"m","input":"x","truncation":"auto"}')
    for left_out in (0, 3):
        made = asked.request([], left_out=left_out)
        assert made.settings is not None
        found = msgspec.json.decode(made.settings)
        assert found["truncation"] == "auto" and found.get("truncated_items", 0) == left_out
        assert b"truncat" not in bytes(made.body)


def test_names_of_a_chat_and_unknown_fields() -> None:
    assert engine(max_tokens=7)["max_tokens"] == 7 and engine(max_completion_tokens=7)["max_tokens"] == 7
    assert engine(max_output_tokens=5, max_tokens=7)["max_tokens"] == 5
    assert engine(seed=4, something={"new": 1})["something"] == {"new": 1}
    assert "logprobs" not in engine(logprobs=True)


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"input": 5}, BadRequest),
        ({"input": []}, BadRequest),
        ({"input": ["hi"]}, BadRequest),
        ({"input": [{"content": "x"}]}, BadRequest),
        ({"input": [{"role": "tool", "content": "x"}]}, BadRequest),
        ({"input": [{"role": "user"}]}, BadRequest),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, BadRequest),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, Unsupported),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, Unsupported),
        ({"input": [RESULT]}, BadRequest),
        ({"input": [CALL | {"arguments": {}}]}, BadRequest),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, Unsupported),
        ({"input": [{"type": "web_search_call"}]}, Unsupported),
        ({"tools": [{"type": "web_search"}]}, Unsupported),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "https://x/y.pdf"}]}]},
            Unsupported,
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "data:x/y,z"}]}]}, Unsupported),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "filename": "a.txt", "file_data": "a"}]}]},
            BadRequest,
        ),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c9", "output": "x"}]}, BadRequest),
        ({"input": [{"type": "custom_tool_call", "call_id": "c9", "name": "x"}]}, BadRequest),
        ({"input": [{"type": "reasoning", "summary": 1}]}, BadRequest),
        ({"tools": [{"type": "custom"}]}, BadRequest),
        ({"tools": [{"type": "namespace", "name": "x"}]}, BadRequest),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "web_search"}]}]}, Unsupported),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "namespace"}]}]}, Unsupported),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "lark"}}]}, Unsupported),
        ({"tools": [{"type": "mcp", "server_label": "x", "server_url": "https://x"}]}, Unsupported),
        ({"image": {}}, Unsupported),
        ({"tools": [{"type": "function"}]}, BadRequest),
        ({"tool_choice": "any"}, BadRequest),
        ({"tool_choice": {"type": "web_search"}}, BadRequest),
        ({"text": {"format": {"type": "json_schema"}}}, BadRequest),
        ({"text": {"verbosity": "loud"}}, BadRequest),
        ({"truncation": "some"}, BadRequest),
        ({"metadata": {"a": 1}}, BadRequest),
        ({"metadata": {str(number): "" for number in range(17)}}, BadRequest),
        ({"max_output_tokens": 0}, BadRequest),
        ({"temperature": 3}, BadRequest),
        ({"stop": 5}, BadRequest),
        ({"logit_bias": {"5": "x"}}, BadRequest),
        ({"top_logprobs": 21}, BadRequest),
        ({"conversation": {"name": "x"}}, BadRequest),
        ({"n": 2}, Unsupported),
        ({"messages": []}, Unsupported),
        ({"prompt": {"id": "pmpt_1"}}, Unsupported),
        ({"previous_response_id": "resp_1"}, Unsupported),
        ({"truncation": "auto"}, Unsupported),
        ({"truncation": "some"}, BadRequest),
        ({"context_management": [{"type": "compaction"}]}, Unsupported),
        ({"context_management": [{"type": "clear"}]}, BadRequest),
        ({"context_management": {"type": "compaction"}}, BadRequest),
        ({"context_management": [{"type": "compaction", "compact_threshold": 0}]}, BadRequest),
        ({"context_management": [{"type": "compaction", "compact_threshold": True}]}, BadRequest),
    ],
)
def test_a_refusal_names_the_field(more: dict[str, Any], kind: type[BadRequest]) -> None:
    with pytest.raises(kind) as refused:
        parsed(**more)
    assert refused.value.param in more and isinstance(refused.value, Unsupported) == (kind is Unsupported)


def test_what_excludes_each_other() -> None:
    for body, param in (
        (b'{"model":"m","input":"x","background":true,"store":false}', "store"),
        (b'{"model":"m","input":"x","previous_response_id":"r","conversation":"c"}', "previous_response_id"),
        (b'{"model":"m"}', "input"),
    ):
        with pytest.raises(BadRequest) as refused:
            read_asked(body)
        assert refused.value.param == param
