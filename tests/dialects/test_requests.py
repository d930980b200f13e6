"""Create bodies: accepted ones, the body for the engine, and errors that name the field."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import UNSET

from stream_fabric.errors import BadRequest, TooDeep, Unsupported
from stream_fabric.json_bounds import check_depth
from stream_fabric.limits import (
    BATCH_MAX,
    CHOICES_MAX,
    JSON_CONTAINERS_MAX,
    JSON_DEPTH_MAX,
    JSON_MEMBERS_MAX,
    JSON_SLOW_NUMBERS_MAX,
    JSON_STRINGS_MAX,
    JSON_VALUES_MAX,
    MESSAGES_MAX,
    PROMPT_CHOICES_MAX,
    USER_CHARS_MAX,
)
from stream_fabric.pool.prefix import block_hashes
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.ids import StreamId
from stream_gw.dialects import encoder_for
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.pooling.embeddings import parse_embeddings
from stream_gw.dialects.pooling.rerank import parse_rerank
from stream_gw.dialects.requests import CreateRequest, Generated, Kind, parse_create
from stream_gw.streams.idempotency import fingerprint

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> CreateRequest:
    return parse_create(msgspec.json.encode({"model": "m", "messages": MESSAGES, **more}), "chat")


def completions(prompt: Any, **more: Any) -> CreateRequest:
    return parse_create(msgspec.json.encode({"model": "m", "prompt": prompt, **more}), "completions")


def test_the_minimal_body() -> None:
    assert chat() == CreateRequest(
        kind="chat",
        model="m",
        stream=False,
        n=1,
        include_usage=False,
        logprobs=False,
        user=None,
        session_id=None,
        background=False,
        on_disconnect_s=UNSET,
        body=msgspec.Raw(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'),
        prompt=(b'{"role":"user","content":"hi"}',),
    )


@pytest.mark.parametrize(
    ("more", "session", "affinity"),
    [
        ({"prompt_cache_key": "k"}, None, "k"),
        ({"conversation": "conv_1"}, "conv_1", "conv_1"),
        ({"conversation": {"id": "conv_2"}, "prompt_cache_key": "k"}, "conv_2", "conv_2"),
        ({"session_id": "s", "conversation": "c", "prompt_cache_key": "k"}, "s", "s"),
        ({"conversation": "c" * 200}, "3d1b2dd6", "3d1b2dd6"),
        ({"conversation": "", "prompt_cache_key": ""}, None, None),
        ({"conversation": 5, "prompt_cache_key": ["x"]}, None, None),
        ({"conversation": {"id": 5}}, None, None),
        ({"conversation": None, "prompt_cache_key": None}, None, None),
    ],
    ids=str,
)
def test_openais_own_names_of_a_session(more: dict[str, Any], session: str | None, affinity: str | None) -> None:
    request = chat(**more)
    if len(str(more.get("conversation"))) > USER_CHARS_MAX:
        session = affinity = request.session_id
        assert session is not None and len(session) == 64 and chat(**more).session_id == session
    assert (request.session_id, request.affinity) == (session, affinity)
    kept = {name: value for name, value in more.items() if name != "session_id"}
    assert {name: msgspec.json.decode(request.body).get(name) for name in kept} == kept, "the engine gets them too"


def test_the_fields_that_placement_uses() -> None:
    request = chat(service_tier="flex", deadline_s=2.5, max_tokens=7, tools=[{"type": "function"}])
    assert (request.tier, request.deadline_s, request.max_tokens) == (2, 2.5, 7)
    assert request.prompt == (b'[{"type":"function"}]', b'{"role":"user","content":"hi"}')
    assert set(msgspec.json.decode(request.body)) == {"model", "messages", "max_tokens", "tools"}
    for limits in ({"max_completion_tokens": 9}, {"max_completion_tokens": 9.0, "max_tokens": 500}):
        made = completions("p", **limits)
        assert (made.max_tokens, msgspec.json.decode(made.body)) == (9, {"model": "m", "prompt": "p", "max_tokens": 9})
    assert completions("p", max_completion_tokens=None, max_tokens=5).max_tokens == 5
    whole = completions("p", max_tokens=18.0, n=2.0)
    assert (whole.max_tokens, whole.n, type(whole.max_tokens)) == (18, 2, int), "as OpenAI and vLLM take it"
    assert whole.body == completions("p", max_tokens=18, n=2).body, "agents and engines read integers"
    with pytest.raises(BadRequest, match=r"max_tokens is not valid: .* got 18\.5"):
        completions("p", max_tokens=18.5)
    for name in ("max_tokens", "max_completion_tokens"):
        scored = completions("p", echo=True, **{name: 0})
        made = msgspec.json.decode(scored.body)
        assert (scored.max_tokens, made["max_tokens"]) == (0, 0), "the prompt's own logprobs"
        for make in (chat, functools.partial(completions, "p"), functools.partial(chat, echo=True)):
            with pytest.raises(BadRequest, match=f"{name} must be 1 to"):
                make(**{name: 0})
    tiers = ("fast", "priority", "auto", "default", "scale", "flex")
    assert [chat(service_tier=tier).tier for tier in tiers] == [0, 0, 1, 1, 1, 2], "all that OpenAI's SDKs know"
    for wrong in ({"service_tier": "gold"}, {"deadline_s": 0}, {"deadline_s": "soon"}):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            chat(**wrong)


def test_a_conversations_next_turn_begins_with_the_blocks_of_the_one_before() -> None:
    turn = [{"role": "user", "content": "a" * 3000}]
    longer = [*turn, {"role": "assistant", "content": "b" * 3000}, {"role": "user", "content": "more"}]
    first, second = (
        block_hashes(b"m", parse_create(msgspec.json.encode({"model": "m", "messages": m}), "chat").prompt)
        for m in (turn, longer)
    )
    assert len(first) == 5
    assert second[:5] == first
    assert (
        block_hashes(b"other", parse_create(msgspec.json.encode({"model": "m", "messages": turn}), "chat").prompt)
        != first
    )


def test_logprobs_are_requested() -> None:
    assert chat(logprobs=True).logprobs and completions("p", logprobs=0).logprobs
    assert not (chat(logprobs=False).logprobs or completions("p", logprobs=None).logprobs)


def test_our_own_fields_are_read_and_removed() -> None:
    request = chat(
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        session_id="s1",
        background=True,
        on_disconnect="cancel_after=2.5",
        user="u1",
        n=3,
    )
    assert (request.stream, request.include_usage, request.session_id) == (True, True, "s1")
    assert (request.background, request.on_disconnect_s, request.user, request.n) == (True, 2.5, "u1", 3)
    assert msgspec.json.decode(request.body) == {"model": "m", "messages": MESSAGES, "user": "u1", "n": 3}
    assert chat(on_disconnect="continue").on_disconnect_s is None


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": ""}]},
        {"messages": [{"role": "user", "content": "hi", "name": "x", "vendor": {"a": 1}}]},
        {"max_tokens": 5, "max_completion_tokens": 6},
        {"stop": None},
        {"stop": "x"},
        {"stop": ["x"] * 16},
        {"temperature": 0},
        {"temperature": 2.0, "top_p": 1, "n": None, "stream": None, "user": None, "stream_options": None},
        {"user": ""},
        {"store": True, "metadata": {"a": "b"}, "parallel_tool_calls": False, "vendor": [[1, {"x": None}]]},
        {"seed": 2**63 - 1, "logit_bias": {"50256": -100}},
        {"min_tokens": 5.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "stop_token_ids": [], "priority": None},
    ],
    ids=lambda more: str(more)[:50],
)
def test_real_client_bodies_are_accepted(more: dict[str, Any]) -> None:
    sent = {"model": "m", "messages": MESSAGES, **more}
    kept = msgspec.json.decode(chat(**more).body)
    assert kept == {name: value for name, value in sent.items() if name not in ("stream", "stream_options")}


@pytest.mark.parametrize("prompt", ["", "x", ["x"], [1, 2, 3], [[1, 2]], ["é\n"]])
def test_accepted_prompts(prompt: Any) -> None:
    assert msgspec.json.decode(completions(prompt).body)["prompt"] == prompt


def test_the_engine_gets_the_clients_own_bytes() -> None:
    body = (
        b'{ "seed" : 123456789012345678901234567890,\n "temperature":1.0000000000000000000001, "stream": true,'
        b' "model":"m", "x":{"b" : 1e-7,"a":"\\u00e9"}, "messages":[ {"role":"user"} ] }'
    )
    assert bytes(parse_create(body, "chat").body) == (
        b'{"seed":123456789012345678901234567890,"temperature":1.0000000000000000000001,'
        b'"model":"m","x":{"b" : 1e-7,"a":"\\u00e9"},"messages":[ {"role":"user"} ]}'
    )


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": None}, "model", "null"),
    ({"model": ""}, "model", "1 to 256"),
    ({"model": "x" * 257}, "model", "1 to 256"),
    ({"model": 7}, "model", "7"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "hi"}, "messages", '"hi"'),
    ({"messages": None}, "messages", "null"),
    ({"messages": ["hi"]}, "messages", "object"),
    ({"messages": [{"content": "hi"}]}, "messages", "role"),
    ({"messages": [{"role": 1}]}, "messages", "role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "content"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages", "content"),
    ({"n": 0}, "n", f"1 to {CHOICES_MAX}"),
    ({"n": CHOICES_MAX + 1}, "n", f"got {CHOICES_MAX + 1}"),
    ({"n": True}, "n", "true"),
    ({"n": 1.5}, "n", "1.5"),
    ({"n": "1"}, "n", '"1"'),
    ({"max_tokens": -1}, "max_tokens", "got -1"),
    ({"max_tokens": 2.5}, "max_tokens", "2.5"),
    ({"max_tokens": "5"}, "max_tokens", '"5"'),
    ({"max_completion_tokens": -5}, "max_completion_tokens", "got -5"),
    ({"temperature": -0.1}, "temperature", "0 to 2, got -0.1"),
    ({"temperature": 2.1}, "temperature", "0 to 2, got 2.1"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"temperature": False}, "temperature", "false"),
    ({"top_p": 1.5}, "top_p", "0 to 1"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 to 2"),
    ({"stop": 5}, "stop", "5"),
    ({"stop": [5]}, "stop", "5"),
    ({"stop": ["x"] * 17}, "stop", "at most 16 strings, got 17"),
    ({"stream": "yes"}, "stream", "yes"),
    ({"stream": 1}, "stream", "1"),
    ({"stream_options": []}, "stream_options", "object"),
    ({"stream_options": {"include_usage": 1}}, "stream_options", "bool"),
    ({"user": "x" * (USER_CHARS_MAX + 1)}, "user", f"got {USER_CHARS_MAX + 1}"),
    ({"user": 5}, "user", "5"),
    ({"session_id": ""}, "session_id", "got 0"),
    ({"session_id": ["s"]}, "session_id", "array"),
    ({"background": "true"}, "background", "true"),
    ({"on_disconnect": "cancel"}, "on_disconnect", "'cancel'"),
    ({"on_disconnect": "cancel_after=nan"}, "on_disconnect", "nan"),
    ({"on_disconnect": "cancel_after=1e9"}, "on_disconnect", "3600"),
    ({"on_disconnect": 5}, "on_disconnect", "5"),
    ({"min_tokens": "5"}, "min_tokens", '"5"'),
    ({"top_k": 1.5}, "top_k", "1.5"),
    ({"seed": "x"}, "seed", "x"),
    ({"top_logprobs": [2]}, "top_logprobs", "array"),
    ({"logprobs": "yes"}, "logprobs", "yes"),
    ({"priority": "high"}, "priority", "high"),
    ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens", "true"),
    ({"min_p": "0.1"}, "min_p", '"0.1"'),
    ({"repetition_penalty": {}}, "repetition_penalty", "object"),
    ({"ignore_eos": "yes"}, "ignore_eos", "yes"),
    ({"skip_special_tokens": 1}, "skip_special_tokens", "1"),
    ({"stop_token_ids": 5}, "stop_token_ids", "5"),
    ({"stop_token_ids": ["5"]}, "stop_token_ids", "str"),
    ({"bad_words": [1]}, "bad_words", "int"),
    ({"logit_bias": [5]}, "logit_bias", "array"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "str"),
    ({"chat_template_kwargs": 7}, "chat_template_kwargs", "7"),
    ({"response_format": "json"}, "response_format", "json"),
    ({"tools": [5]}, "tools", "int"),
    ({"tool_choice": 7}, "tool_choice", "7"),
    ({"reasoning_effort": 7}, "reasoning_effort", "7"),
]


@pytest.mark.parametrize(("more", "field", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_an_error_names_the_field_and_its_value(more: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(BadRequest) as raised:
        chat(**more)
    assert raised.value.param == field
    assert raised.value.message.startswith(field)
    assert words in raised.value.message
    assert len(raised.value.message) < 500


@pytest.mark.parametrize("prompt", [[], [""] * 2 + [1], [[]], [[], []], None, 5, {"a": 1}, [1.5], [[1, "x"]]])
def test_refused_prompts(prompt: Any) -> None:
    with pytest.raises(BadRequest) as raised:
        completions(prompt)
    assert raised.value.param == "prompt"
    assert raised.value.message.startswith("prompt")


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2, 3]], ["a"] * PROMPT_CHOICES_MAX])
def test_several_prompts_have_n_choices_each(prompts: Any) -> None:
    request = completions(prompts)
    assert request.n == len(prompts)
    assert msgspec.json.decode(request.body)["prompt"] == prompts
    engine = EngineRequest(StreamId("resp_0"), "completions", "m", request.body)
    assert (engine.prompts, engine.choices) == (len(prompts), len(prompts))
    pair = completions(prompts[:2], n=3)
    engine = EngineRequest(StreamId("resp_0"), "completions", "m", pair.body)
    assert (pair.n, engine.prompts, engine.choices) == (6, 2, 6)


@pytest.mark.parametrize(("prompt", "n", "choices"), [("x", None, 1), ([1, 2], 2, 2), ([[1, 2]], 1, 1), ([""], 3, 3)])
def test_one_prompt_has_n_choices(prompt: Any, n: int | None, choices: int) -> None:
    request = completions(prompt, n=n)
    engine = EngineRequest(StreamId("resp_0"), "completions", "m", request.body)
    assert (request.n, engine.prompts, engine.choices) == (choices, 1, choices)
    of_chat = EngineRequest(StreamId("resp_0"), "chat", "m", chat(n=n, prompt=["a", "b"]).body)
    assert (of_chat.prompts, of_chat.choices) == (1, n or 1), "a chat has one prompt whatever other fields it has"


@pytest.mark.parametrize(("prompts", "n"), [(["a"] * (PROMPT_CHOICES_MAX + 1), 1), (["a"] * 9, CHOICES_MAX)])
def test_too_many_choices_of_all_prompts(prompts: list[str], n: int) -> None:
    words = f"prompt holds {len(prompts)} prompts .*{PROMPT_CHOICES_MAX} choices"
    with pytest.raises(BadRequest, match=words) as raised:
        completions(prompts, n=n)
    assert raised.value.param == "prompt"


@pytest.mark.parametrize(("best_of", "n"), [(None, None), (1, None), (1, 1), (4, 4), (2.0, 2)])
def test_best_of_that_changes_nothing(best_of: Any, n: int | None) -> None:
    assert completions("x", best_of=best_of, n=n).n == (n or 1)


@pytest.mark.parametrize(("best_of", "n"), [(2, None), (4, 2), (0, None)])
def test_best_of_is_refused(best_of: int, n: int | None) -> None:
    words = f"best_of must be absent or equal to n, which is {n or 1}; got {best_of}"
    with pytest.raises(Unsupported, match=words) as raised:
        completions(["a", "b"], best_of=best_of, n=n)
    assert raised.value.param == "best_of"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"functions": [{"name": "weather", "parameters": {}}], "function_call": "auto"}, "functions"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}, "modalities"),
    ],
)
def test_an_answer_that_no_stream_can_carry_is_refused(more: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as raised:
        chat(**more)
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("prompt_logprobs", 0, "echo and logprobs"),
        ("prompt_logprobs", 2, "echo and logprobs"),
        ("return_token_ids", True, "return_tokens_as_token_ids"),
        ("use_beam_search", True, "several choices with n"),
    ],
)
def test_vllms_fields_that_no_stream_can_carry_are_refused(name: str, value: Any, instead: str) -> None:
    """The engine is always asked for a stream: it would pass them over, or refuse a stream that nobody asked for."""
    for make in (chat, functools.partial(completions, "x")):
        with pytest.raises(Unsupported, match=instead) as raised:
            make(**{name: value})
        assert raised.value.param == name
        make(**{name: None})
    chat(return_token_ids=False, use_beam_search=False)


@pytest.mark.parametrize(
    ("name", "value"), [("functions", []), ("functions", None), ("modalities", ["text"]), ("modalities", None)]
)
def test_fields_that_ask_for_text_alone_are_accepted(name: str, value: Any) -> None:
    chat(**{name: value})


@pytest.mark.parametrize(("kind", "field"), [("chat", "messages"), ("completions", "prompt")])
def test_a_missing_field_is_named(kind: Generated, field: str) -> None:
    for body, name in ((b"{}", "model"), (b'{"model":"m"}', field)):
        with pytest.raises(BadRequest, match=f"{name} is missing") as raised:
            parse_create(body, kind)
        assert raised.value.param == name


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON object"),
        (b"[]", "JSON object.*got `array`"),
        (b"null", "JSON object.*got `null`"),
        (b'{"model":"m"', "JSON object"),
        (b'{"model":"m"} x', "JSON object"),
        (b"{'model':'m'}", "JSON object"),
        (b'{"model":"m","x":NaN}', "JSON object"),
        (b'{"model":"m","x":[1e999]}', "out of range"),
        (b'{"model":"m","x":"\\ud800"}', "JSON object"),
        (b'{"model":"m","x":{"y":"\xff"}}', "UTF-8"),
        (b'{"model":"m","\xff":1}', "UTF-8"),
        (b'\xef\xbb\xbf{"model":"m"}', "JSON object"),
        (b'{"model":"m","model":"m"}', "model occurs more than once"),
        (b'{"model":"m","mod\\u0065l":"x"}', "model occurs more than once"),
        (b"{%b}" % b",".join(b'"f%d":1' % k for k in range(1001)), "more than 1000 fields"),
        (b'{"model":"m","messages":[{"role":"user"}],"temperature":1e400}', "out of range"),
        (b'{"model":"m","messages":[{"role":"user"}],"temperature":1' + b"0" * 400 + b"}", "temperature"),
        (b'{"model":"m","messages":[{"role":"user"}],"max_tokens":1' + b"0" * 400 + b"}", "max_tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_invalid_bodies(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as raised:
        parse_create(body, "chat")
    assert len(raised.value.message) < 400


@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "n", "stop", "stream", "user", "temperature", "on_disconnect", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), inner, max_size=2)
            ),
            max_leaves=8,
        ),
    )
)
def test_any_json_is_accepted_or_refused(value: dict[str, Any]) -> None:
    try:
        request = parse_create(json.dumps(value).encode(), "chat")
    except BadRequest:
        return
    assert len(fingerprint(request.body)) == 64


@given(st.binary(max_size=40))
@example(b'{"model":')
@example(b"\\")
@example(b'"\\')
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_create(body, "chat")


# --- depth ---------------------------------------------------------------------------------------------------


def nested(levels: int) -> bytes:
    return b'{"a":[' * (levels // 2) + b"0" + b"]}" * (levels // 2)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(item) for item in value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def test_the_depth_limit() -> None:
    check_depth(nested(JSON_DEPTH_MAX))
    for body in (nested(JSON_DEPTH_MAX + 2), b"[" * 200_000, b'{"a":' * 200_000, b'["\\""' + b"[" * 65):
        with pytest.raises(TooDeep):
            check_depth(body)


def test_brackets_in_strings_are_text() -> None:
    for text in ("[" * 1000, '"[' * 500, '\\"[{' * 500, "]" * 1000 + "[" * 1000):
        check_depth(json.dumps({"a": text, "b": [text] * 100}).encode())
    with pytest.raises(TooDeep):
        check_depth(b'{"a":"' + b"]" * 1000 + b'","b":' + nested(JSON_DEPTH_MAX) + b"}")


def test_many_containers_side_by_side_are_not_deep() -> None:
    check_depth(b"[" + b"[]," * (JSON_CONTAINERS_MAX // 2) + b"[]]")
    with pytest.raises(TooDeep, match=str(JSON_CONTAINERS_MAX)):
        check_depth(b"[" + b"[]," * JSON_CONTAINERS_MAX + b"[]]")


def test_strings_between_containers_cost_little() -> None:
    """A body may be nothing but quotes: they are not cut into pieces one by one."""
    check_depth(b"[" + b"[]," * 100 + b'"",' * 100_000 + b'"["]')
    check_depth(b"[" + b'["["],' * (JSON_CONTAINERS_MAX - 1) + b'"["]')
    for piece in (b'["["],', b'["["],"","",', b'["[","]"],'):
        with pytest.raises(TooDeep, match=str(JSON_CONTAINERS_MAX)):
            check_depth(b"[" + piece * JSON_CONTAINERS_MAX + b"0]")


@pytest.mark.parametrize(
    ("value", "most"),
    [
        (b'"k":1', JSON_MEMBERS_MAX),
        (b'""', JSON_STRINGS_MAX),
        (b"1", JSON_VALUES_MAX),
        (b"1e300", JSON_SLOW_NUMBERS_MAX),
        (b"-1.5E+300", JSON_SLOW_NUMBERS_MAX),
        (b"1" * 100, JSON_SLOW_NUMBERS_MAX),
        (b"0." + b"1" * 70, JSON_SLOW_NUMBERS_MAX),
    ],
)
def test_values_that_would_take_seconds_to_decode_are_refused(value: bytes, most: int) -> None:
    """A decoder holds the GIL: a body of 8 MiB took 23 s for ``1e300``, and 0.8 s for the members of one object."""

    def body(count: int) -> bytes:
        opened, closed = (b"{", b"}") if b":" in value else (b"[", b"]")
        return opened + b",".join([value] * count) + closed

    check_depth(body(most))
    with pytest.raises(TooDeep, match=str(most)):
        check_depth(body(most + 2))
    with pytest.raises(TooDeep, match=str(most)):
        parse_create(b'{"model":"m","messages":[{"role":"user","content":"hi"}],"x":%b}' % body(most + 2), "chat")


def test_the_most_slow_numbers_of_a_body_take_a_few_milliseconds() -> None:
    """A small body is parsed on the event loop, and several times: 12 kB of ``1e308`` held the loop for 0.25 s."""
    numbers = b",".join([b"1e308"] * JSON_SLOW_NUMBERS_MAX)
    content = b'[{"type":"text","text":"hi","x":[%b]}]' % numbers
    body = b'{"model":"m","messages":[{"role":"user","content":%b}]}' % content

    def process_time_s() -> float:
        begun = time.process_time()
        parse_create(body, "chat")
        return time.process_time() - begun

    assert min(process_time_s() for _ in range(5)) < 0.03


def test_a_long_conversation_is_decoded_a_few_times() -> None:
    """An agent sends all that it has read with each request: to parse 450 kB took 23 times as long as to decode it."""
    said = "def f(x: str) -> str: return g([x, {1: 2}])  # é, " * 40
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": json.dumps({"text": said})}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": said}]
    body = msgspec.json.encode({"model": "m", "messages": [*MESSAGES, *turns * 100]})

    def process_time_s(read: Callable[[], object]) -> float:
        begun = time.process_time()
        read()
        return time.process_time() - begun

    parse_s = min(process_time_s(lambda: parse_create(body, "chat")) for _ in range(5))
    assert parse_s < 18 * min(process_time_s(lambda: msgspec.json.decode(body)) for _ in range(5))


def test_many_values_in_strings_are_text() -> None:
    text = b",".join([b'\\"k\\":1e300'] * (2 * JSON_VALUES_MAX // 5)) + b"1" * 100 * JSON_SLOW_NUMBERS_MAX
    check_depth(b'{"a":"' + text + b'","b":[1,2]}')
    with pytest.raises(TooDeep, match=str(JSON_MEMBERS_MAX)):
        check_depth(b'{"a":"' + text + b'","b":{' + b'"k":1,' * JSON_MEMBERS_MAX + b'"l":1}}')


def test_a_prompt_of_the_longest_context_is_accepted() -> None:
    prompt = b"[" + b",".join([b"10000"] * (1 << 20)) + b"]"
    assert parse_create(b'{"model":"m","prompt":%b}' % prompt, "completions").prompt == (prompt,)


@given(
    st.recursive(
        st.none() | st.text('[]{}"\\a', max_size=10),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"\\', max_size=4), inner, max_size=3),
        max_leaves=10,
    ),
    st.integers(0, 70),
)
def test_the_depth_is_counted_exactly(value: Any, more: int) -> None:
    for _ in range(more):
        value = [value, "["]
    body = json.dumps(value).encode()
    if depth_of(value) > JSON_DEPTH_MAX:
        with pytest.raises(TooDeep):
            check_depth(body)
    else:
        check_depth(body)


# --- fingerprints --------------------------------------------------------------------------------------------


def test_a_fingerprint_does_not_depend_on_order_or_spacing() -> None:
    one = msgspec.Raw(b'{"a":{"x":1,"y":[1,2]},"b":"\xc3\xa9"}')
    same = msgspec.Raw(b'{ "b": "\\u00e9", "a": {"y":[1, 2], "x":1} }')
    assert fingerprint(one) == fingerprint(same)
    assert len(fingerprint(one)) == 64


@pytest.mark.parametrize(
    "other",
    [b'{"a":{"x":1,"y":[2,1]}}', b'{"a":{"x":"1","y":[1,2]}}', b'{"a":{"x":1,"y":[1,2]},"b":null}', b'{"a":{}}'],
)
def test_another_body_has_another_fingerprint(other: bytes) -> None:
    assert fingerprint(msgspec.Raw(b'{"a":{"x":1,"y":[1,2]}}')) != fingerprint(msgspec.Raw(other))


def test_numbers_beyond_64_bits_have_fingerprints() -> None:
    one, two = (msgspec.Raw(b'{"seed":%d}' % (10**30 + k)) for k in range(2))
    assert fingerprint(one) != fingerprint(two)


# --- embeddings and rerank -----------------------------------------------------------------------------------


def embeddings(given: Any = "x", **more: Any) -> CreateRequest:
    return parse_embeddings(msgspec.json.encode({"model": "m", "input": given, **more}))


def rerank(query: Any = "q", documents: Any = ("a", "b"), **more: Any) -> CreateRequest:
    return parse_rerank(msgspec.json.encode({"model": "m", "query": query, "documents": documents, **more}))


def test_minimal_embeddings_and_rerank() -> None:
    asked = embeddings("é")
    assert asked == CreateRequest(
        kind="embeddings",
        model="m",
        stream=False,
        n=1,
        include_usage=False,
        logprobs=False,
        user=None,
        session_id=None,
        background=False,
        on_disconnect_s=UNSET,
        body=msgspec.Raw('{"model":"m","input":"é"}'.encode()),
        max_tokens=1,
        input_bytes=4,
    )
    ranked = rerank("é", ["a", "b"])
    body = msgspec.Raw('{"model":"m","query":"é","documents":["a","b"]}'.encode())
    assert ranked == msgspec.structs.replace(asked, kind="rerank", body=body, input_bytes=len('["a","b"]') + 2 * 2)


@pytest.mark.parametrize("make", [embeddings, rerank])
def test_embeddings_and_rerank_take_our_fields_and_have_no_prefix(make: Callable[..., CreateRequest]) -> None:
    long = "x" * 5000
    request = make(
        long, stream=False, session_id="s", user="u", service_tier="flex", deadline_s=2, background=True, vendor=[1.50]
    )
    assert (request.session_id, request.user, request.tier, request.deadline_s) == ("s", "u", 2, 2)
    assert request.background
    assert bytes(request.body).endswith(b',"user":"u","vendor":[1.5]}')
    assert not {"stream", "session_id", "background"} & set(msgspec.json.decode(request.body))
    assert request.prompt == () and block_hashes(b"m", request.prompt) == []
    assert request.prompt_bytes >= 5000


@pytest.mark.parametrize(
    "given",
    ["", "x", ["x"] * BATCH_MAX, [1] * (BATCH_MAX + 1), [[1, 2], [3]], [[1]] * BATCH_MAX],
    ids=lambda given: str(given)[:20],
)
def test_accepted_inputs(given: Any) -> None:
    assert msgspec.json.decode(embeddings(given).body)["input"] == given


@pytest.mark.parametrize("more", [{"dimensions": 1}, {"encoding_format": "base64", "dimensions": None}, {"user": "x"}])
def test_accepted_embeddings(more: dict[str, Any]) -> None:
    assert msgspec.json.decode(embeddings(**more).body) == {"model": "m", "input": "x", **more}


@pytest.mark.parametrize(
    ("more", "name", "words"),
    [
        ({"given": None}, "input", "null"),
        ({"given": []}, "input", "an empty list"),
        ({"given": ["", 1]}, "input", "a list of int, str"),
        ({"given": [[]]}, "input", "a list of list"),
        ({"given": [-1]}, "input", ">= 0"),
        ({"given": [[1, -1]]}, "input", ">= 0"),
        ({"given": [1.5]}, "input", "1.5"),
        ({"given": [True]}, "input", "bool"),
        ({"given": {"text": "x"}}, "input", "object"),
        ({"given": ["x"] * (BATCH_MAX + 1)}, "input", f"at most {BATCH_MAX} items, got {BATCH_MAX + 1}"),
        ({"given": [[1]] * (BATCH_MAX + 1)}, "input", f"got {BATCH_MAX + 1}"),
        ({"encoding_format": "bytes"}, "encoding_format", "float, base64; got 'bytes'"),
        ({"encoding_format": 1}, "encoding_format", "1"),
        ({"dimensions": 0}, "dimensions", "got 0"),
        ({"dimensions": "64"}, "dimensions", '"64"'),
        ({"stream": True}, "stream", "not streamed"),
        ({"session_id": ""}, "session_id", "got 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_embeddings_error_names_the_field(more: dict[str, Any], name: str, words: str) -> None:
    _refused(lambda: embeddings(**more), name, words)


@pytest.mark.parametrize("documents", [["a"], ["a"] * BATCH_MAX, [{"text": "a", "title": "b"}, "c"], [{"text": ""}]])
def test_accepted_documents(documents: Any) -> None:
    assert msgspec.json.decode(rerank("", documents, top_n=0).body)["documents"] == documents


@pytest.mark.parametrize(
    ("more", "name", "words"),
    [
        ({"query": None}, "query", "null"),
        ({"query": ["q"]}, "query", "array"),
        ({"documents": None}, "documents", "null"),
        ({"documents": "a"}, "documents", '"a"'),
        ({"documents": []}, "documents", f"1 to {BATCH_MAX} items, got 0"),
        ({"documents": ["a"] * (BATCH_MAX + 1)}, "documents", f"got {BATCH_MAX + 1}"),
        ({"documents": [1]}, "documents", "int"),
        ({"documents": [{"title": "a"}]}, "documents", "text"),
        ({"documents": [{"text": 1}]}, "documents", "text"),
        ({"top_n": -1}, "top_n", "got -1"),
        ({"top_n": 1.5}, "top_n", "1.5"),
        ({"stream": True}, "stream", "not streamed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_rerank_error_names_the_field(more: dict[str, Any], name: str, words: str) -> None:
    _refused(lambda: rerank(**more), name, words)


def _refused(parse: Callable[[], object], name: str, words: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse()
    assert raised.value.param == name
    assert raised.value.message.startswith(name)
    assert words in raised.value.message
    assert len(raised.value.message) < 500


@pytest.mark.parametrize(
    ("parse", "body", "name"),
    [
        (parse_embeddings, b"{}", "model"),
        (parse_embeddings, b'{"model":"m"}', "input"),
        (parse_rerank, b'{"model":"m"}', "query"),
        (parse_rerank, b'{"model":"m","query":"q"}', "documents"),
    ],
)
def test_missing_fields_of_embeddings_and_rerank_are_named(
    parse: Callable[[bytes], CreateRequest], body: bytes, name: str
) -> None:
    with pytest.raises(BadRequest, match=f"{name} is missing"):
        parse(body)


@pytest.mark.parametrize("kind", ["embeddings", "rerank"])
def test_unstreamed_responses_have_no_dialect(kind: Kind) -> None:
    facts = StreamFacts(StreamId("resp_" + "0" * 32), 1, "m", kind)
    for dialect in (f"openai.{kind}", "openai.chat", "nonsense"):
        with pytest.raises(Unsupported, match=f"/v1/{kind}"):
            encoder_for(dialect, facts)


def test_the_number_of_messages_is_bounded() -> None:
    message = {"role": "user", "content": "hi, you"}
    body = {"model": "m", "messages": [message] * MESSAGES_MAX}
    assert len(parse_create(msgspec.json.encode(body), "chat").prompt) == MESSAGES_MAX
    body["messages"] = [message] * (MESSAGES_MAX + 1)
    with pytest.raises(BadRequest, match=f"holds {MESSAGES_MAX + 1} messages; the limit is {MESSAGES_MAX}") as refused:
        parse_create(msgspec.json.encode(body), "chat")
    assert refused.value.param == "messages"
