"""Bodies in Anthropic's format, and the engine's bodies that they become."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stream_fabric.errors import BadRequest, Unsupported
from stream_gw.dialects.anthropic.requests import parse_count_tokens, parse_messages
from stream_gw.dialects.requests import CreateRequest

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def parsed(**more: Any) -> CreateRequest:
    return parse_messages(msgspec.json.encode({"model": "m", "max_tokens": 9, "messages": HI} | more))


def engine(**more: Any) -> dict[str, Any]:
    return msgspec.json.decode(parsed(**more).body)  # type: ignore[no-any-return]


def said(*messages: Any) -> Any:
    return engine(messages=list(messages))["messages"]


def test_the_least_body() -> None:
    request = parsed()
    assert (request.kind, request.own_dialect, request.model, request.n) == ("chat", "anthropic.messages", "m", 1)
    assert (request.max_tokens, request.stream, request.user) == (9, False, None)
    assert engine() == {"model": "m", "messages": HI, "max_tokens": 9}


def test_settings() -> None:
    body = engine(
        stream=True,
        system="Be brief.",
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        tools=[TOOL | {"description": "d", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        cache_control={"type": "ephemeral"},
        context_management=None,
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, *HI],
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    }


def test_a_prompt_alone_makes_the_engine_generate_one_token() -> None:
    request = parsed(max_tokens=0)
    assert (request.max_tokens, engine(max_tokens=0)["max_tokens"]) == (0, 1)


def test_a_chats_name_of_the_limit_does_not_replace_max_tokens() -> None:
    request = parsed(max_completion_tokens=100_000)
    assert request.max_tokens == 9, "limits and budgets reserve this"
    assert engine(max_completion_tokens=100_000) == {"model": "m", "messages": HI, "max_tokens": 9}
    counted = parse_count_tokens(msgspec.json.encode({"model": "m", "messages": HI, "max_completion_tokens": 7}))
    assert b"max_completion_tokens" not in bytes(counted.body)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
    ],
)
def test_tool_choices(given: Any, made: Any) -> None:
    assert engine(tools=[TOOL], tool_choice=given)["tool_choice"] == made
    assert "tool_choice" not in engine(tool_choice=given), "engines refuse a choice without tools"


def test_thinking_and_effort() -> None:
    switch = engine(thinking={"type": "enabled", "budget_tokens": 2048})["chat_template_kwargs"]
    assert switch == {"enable_thinking": True, "thinking": True}
    assert engine(thinking={"type": "disabled"})["chat_template_kwargs"]["enable_thinking"] is False
    own = engine(thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": False, "a": 1})
    assert own["chat_template_kwargs"] == {"enable_thinking": False, "thinking": True, "a": 1}
    for effort in ("low", "xhigh", "max"):
        assert engine(output_config={"effort": effort})["reasoning_effort"] == effort, (
            "templates know levels of their own"
        )
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    schema = {"name": "output", "schema": {"type": "object"}, "strict": True}
    made = engine(output_config={"format": format_})["response_format"]
    assert made == {"type": "json_schema", "json_schema": schema}
    beta = engine(output_format=format_)
    assert beta["response_format"] == made, "as SDKs of 2025 send it"
    assert "output_format" not in beta
    with pytest.raises(BadRequest, match="not both"):
        engine(output_config={"format": format_}, output_format=format_)


def test_users_and_tiers() -> None:
    assert parsed(metadata={"user_id": "ann"}).user == "ann"
    long = parsed(metadata={"user_id": "u" * 200}).user
    assert long is not None and len(long) == 64
    assert [parsed(service_tier=tier).tier for tier in ("auto", "standard_only", "priority", "flex")] == [1, 1, 0, 2]
    assert parsed(session_id="s", background=True).session_id == "s"


def test_a_users_blocks() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "told"}}
    (message,) = said({"role": "user", "content": [image, linked, document, {"type": "text", "text": "see"}]})
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        {"type": "text", "text": "told"},
        {"type": "text", "text": "see"},
    ]


def test_results_of_tools_come_before_what_the_user_says() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    content = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}, image]},
        {"type": "tool_result", "tool_use_id": "2", "content": "two", "is_error": True},
        {"type": "tool_result", "tool_use_id": "3"},
        {"type": "text", "text": "so?"},
    ]
    assert said({"role": "user", "content": content}) == [
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "3", "content": ""},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
                {"type": "text", "text": "so?"},
            ],
        },
    ]


def test_an_assistants_blocks() -> None:
    content = [
        {"type": "redacted_thinking", "data": "ZW5j"},
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]
    message, _ = said({"role": "assistant", "content": content}, *HI)
    function = {"name": "f", "arguments": '{"a":1}'}
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    calls = [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in "12"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": each} for each in "12"]
    assert said(
        {"role": "user", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Let me see."},
        *({"role": "assistant", "content": [call]} for call in calls),
        *({"role": "user", "content": [result]} for result in results),
        {"role": "user", "content": "and?"},
    ) == [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in "12"
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "1"},
        {"role": "tool", "tool_call_id": "2", "content": "2"},
        {"role": "user", "content": "and?"},
    ]


def test_a_last_message_of_the_assistant_begins_the_answer() -> None:
    body = engine(messages=[*HI, {"role": "assistant", "content": "The answer is ("}])
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert "continue_final_message" not in engine()


def test_a_count_of_tokens() -> None:
    body = {"model": "m", "messages": HI, "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}, "top_k": 4}
    request = parse_count_tokens(msgspec.json.encode(body))
    assert (request.kind, request.own_dialect, request.prompt) == ("tokenize", "anthropic.count_tokens", ())
    assert set(msgspec.json.decode(request.body)) == {"model", "messages", "tools", "chat_template_kwargs"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": -1}, "max_tokens must be"),
        (
            {"max_tokens": 0, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "max_tokens 0 makes no answer",
        ),
        ({"messages": []}, "messages must be a list"),
        ({"messages": ["hi"]}, "messages.0 must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0 must be an object whose role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content must be a string or a list"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0 must be an object with"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text must be"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be a string"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1"}]}]}, "name must be a string"),
        ({"system": [{"type": "image"}]}, "system.0 is a block of type 'image'"),
        ({"tools": {}}, "tools must be a list"),
        ({"tools": [{"name": "f"}]}, "tools.0 must have a name and an input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type must be"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences must have at most 16"),
        ({"temperature": 3}, "temperature must be 0 to 2"),
        ({"presence_penalty": 3}, "presence_penalty must be -2 to 2"),
        ({"n": "x"}, "n is not valid"),
        ({"n": 0}, "n must be 1 to 16"),
        ({"stop": 5}, "stop is not valid"),
        ({"logit_bias": {"5": "x"}}, "logit_bias is not valid"),
        ({"thinking": {"type": "maybe"}}, "thinking is not valid"),
    ],
)
def test_what_is_refused_names_its_place(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parsed(**wrong)
    assert words in refused.value.message and refused.value.param == next(iter(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"container": "c_1"},
        {"mcp_servers": [{"type": "url"}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "https://x"}}]}
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "document",
                            "source": {"type": "text", "data": "x", "media_type": "text/plain"},
                            "citations": {"enabled": True},
                        }
                    ],
                }
            ]
        },
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"thread": {"id": "t"}},
        {"n": 2},
    ],
)
def test_what_cannot_be_expressed_is_said(wrong: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        parsed(**wrong)
    assert refused.value.param == next(iter(wrong))


def test_documents_are_texts_or_files() -> None:
    def content(source: dict[str, Any], **more: Any) -> Any:
        return said({"role": "user", "content": [{"type": "document", "source": source, **more}]})[0]["content"]

    plain = {"type": "text", "media_type": "text/plain", "data": "Rivers run."}
    assert content(plain, citations={"enabled": False}) == "Rivers run."
    assert content(plain, title="Rivers", context="A book.") == "Rivers\nA book.\nRivers run."
    assert (
        content({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
        == "a\nb"
    )
    assert content({"type": "content", "content": "a"}) == "a"
    data = "data:application/pdf;base64,AAAA"
    [pdf] = content({"type": "base64", "media_type": "application/pdf", "data": "AAAA"}, title="Rivers.pdf")
    assert pdf == {"type": "file", "file": {"filename": "Rivers.pdf", "file_data": data}}


def test_a_request_of_a_coding_agent() -> None:
    """Fields that Claude Code and its SDK send besides the messages: none of them reaches the engine."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = engine(
        system=[{"type": "text", "text": "You edit files.", **cached}, {"type": "text", "text": "Be brief."}],
        tools=[TOOL | cached | {"eager_input_streaming": True, "defer_loading": False, "input_examples": [{}]}],
        betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        metadata={"user_id": "user_" + "x" * 200},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        fallbacks=[{"model": "other"}],
        compaction={"type": "auto"},
        workspace_id="w",
        tool_choice={"type": "none"},
    )
    sent = {
        "model",
        "messages",
        "max_tokens",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "chat_template_kwargs",
        "user",
    }
    assert set(body) == sent
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert body["tool_choice"] == "none"
    assert [part["text"] for part in body["messages"][0]["content"]] == ["You edit files.", "Be brief."]


def test_system_messages_of_a_coding_agent() -> None:
    """Claude Code's beta ``mid-conversation-system`` and its billing text, whose value each conversation changes."""
    body = engine(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.3d9; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You edit files.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "system", "content": "Be brief."},
            *HI,
            {"role": "system", "content": "Agents: Explore."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Rain"}]},
            {"role": "system", "content": [{"type": "text", "text": "<system-reminder>Plan.</system-reminder>"}]},
            {"role": "user", "content": "Go on."},
        ],
    )

    def texts(*said: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in said]

    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert body["messages"] == [
        {"role": "system", "content": texts("You edit files.", "Be brief.")},
        {"role": "user", "content": texts("hi", "<system-reminder>\nAgents: Explore.\n</system-reminder>")},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
        {"role": "user", "content": texts("<system-reminder>Plan.</system-reminder>", "Go on.")},
    ]
