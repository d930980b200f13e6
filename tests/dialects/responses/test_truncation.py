"""Conversations that are cut: what remains is a conversation, keeps what it must, and fits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_gw.dialects.responses.translate import chat_messages
from stream_gw.dialects.responses.truncation import SUMMARY, Cuttable, input_limit

Json = dict[str, Any]
TEXTS = st.integers(1, 400).map(lambda size: "w " * size)


def user(text: str = "Hi") -> Json:
    return {"role": "user", "content": text}


def system(text: str = "Be brief.") -> Json:
    return {"type": "message", "role": "developer", "content": text}


def answer(text: str = "Hello") -> Json:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(name: str, *, custom: bool = False) -> Json:
    if custom:
        return {"type": "custom_tool_call", "call_id": name, "name": "shell", "input": "ls"}
    return {"type": "function_call", "call_id": name, "name": "read", "arguments": "{}"}


def result(name: str, text: str = "ok", *, custom: bool = False) -> Json:
    return {"type": f"{'custom_tool' if custom else 'function'}_call_output", "call_id": name, "output": text}


def thought() -> Json:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


@st.composite
def works(draw: st.DrawFn, number: int) -> list[Json]:
    """Make what an assistant does in one step: thoughts, calls with their outputs in any order, or an answer."""
    items = [thought()] if draw(st.booleans()) else []
    names = [f"c{number}_{k}" for k in range(draw(st.integers(0, 3)))]
    kinds = {name: draw(st.booleans()) for name in names}
    if not names:
        return [*items, answer(draw(TEXTS))]
    items += [call(name, custom=kinds[name]) for name in names]
    if draw(st.booleans()):
        items.append(user("wait"))
    return items + [result(name, draw(TEXTS), custom=kinds[name]) for name in draw(st.permutations(names))]


@st.composite
def conversations(draw: st.DrawFn) -> list[Json]:
    items = [system()] if draw(st.booleans()) else []
    number = 0
    for _ in range(draw(st.integers(1, 6))):
        items.append(user(draw(TEXTS)))
        for _ in range(draw(st.integers(0, 3))):
            items += draw(works(number))
            number += 1
        if draw(st.integers(0, 5)) == 0:
            items.append(draw(st.sampled_from([system("And more."), answer("Summary") | {SUMMARY: True}])))
    return items


def is_alternating(messages: list[Json]) -> bool:
    """Whether a strict chat template takes the messages: system, user, and each tool message after its call."""
    known: set[str] = set()
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            return False
        known |= {each["id"] for each in message.get("tool_calls", ())}
    roles = [message["role"] for message in messages]
    return "system" not in roles[1:] and roles[roles[0] == "system"] == "user"


def unanswered(items: list[Json]) -> set[str]:
    outputs = {item["call_id"] for item in items if item.get("type", "").endswith("_output")}
    return {item["call_id"] for item in items if "call_id" in item} - outputs


@given(conversations())
def test_what_remains_is_a_conversation_whatever_is_left_out(items: list[Json]) -> None:
    whole = Cuttable(items)
    assert is_alternating(chat_messages(None, items))
    for count in range(len(whole.groups) + 1):
        kept = whole.kept(count)
        messages = chat_messages("Be kind.", kept)  # raises for an output without its call
        assert is_alternating(messages)
        assert unanswered(kept) == unanswered(items), "no call loses its output"
        pinned = [item for item in items if item.get("role") == "developer" or SUMMARY in item]
        assert [item for item in kept if item.get("role") == "developer" or SUMMARY in item] == pinned
        asked = [item for item in items if item.get("role") == "user"]
        assert [item for item in kept if item.get("role") == "user"][-1] is asked[-1]
        assert kept[-1] is items[-1], "the end always remains"
        assert all(one.get("type") != "reasoning" or kept[at + 1 :] for at, one in enumerate(kept[:-1]))


@given(conversations())
def test_the_oldest_go_first(items: list[Json]) -> None:
    groups = Cuttable(items).groups
    flat = [at for group in groups for at in group]
    assert len(flat) == len(set(flat))
    firsts = [group[0] for group in groups]
    assert firsts == sorted(firsts)


@given(conversations(), st.integers(1, 600), st.floats(0.5, 9))
def test_cuts_come_to_an_end_and_fit_where_tokens_follow_from_bytes(
    items: list[Json], limit: int, bytes_per_token: float
) -> None:
    whole = Cuttable(items, "instructions")

    def tokens(count: int) -> int:
        return max(1, int(whole.weight(count) / bytes_per_token))

    count = 0
    if tokens(0) > limit and whole.groups:
        count = whole.next_cut(0, tokens(0), limit)
        assert 0 < count <= len(whole.groups)
        if bytes_per_token >= 1:
            assert tokens(count) <= limit + 1 or count == len(whole.groups)
    assert whole.next_cut(0, tokens(0), 0) == len(whole.groups) or not whole.groups


@given(conversations(), st.integers(1, 600))
def test_only_what_must_go_is_left_out_without_a_count(items: list[Json], limit: int) -> None:
    whole = Cuttable(items)
    count = whole.certain(limit)
    if count:
        words = sum(len(str(item).split(" w")) - 1 for item in whole.kept(count - 1) if item.get("role") == "user")
        outputs = [item for item in whole.kept(count - 1) if item.get("type", "").endswith("_output")]
        words += sum(item["output"].count("w") for item in outputs)
        assert words + 50 > limit


def test_turns_go_before_steps_of_the_last_turn_go() -> None:
    items = [user("1"), answer(), user("2"), call("a"), result("a"), call("b"), result("b"), call("c"), result("c")]
    whole = Cuttable(items)
    assert whole.groups == [(0, 1), (3, 4), (5, 6)]
    assert whole.kept(3) == [items[2], *items[7:]]


def test_parallel_calls_go_with_all_their_outputs() -> None:
    items = [user("1"), call("a"), call("b"), result("b"), user("2"), result("a"), user("3")]
    assert Cuttable(items).groups == [(0, 1, 2, 3, 4, 5)]


def test_a_summary_stays_with_the_message_before_it() -> None:
    summary = answer("Before") | {SUMMARY: True}
    items = [user("1"), user("2"), summary, user("3"), answer(), user("4")]
    whole = Cuttable(items)
    assert whole.groups == [(0,), (3, 4)]
    assert whole.kept(2) == [user("2"), summary, user("4")]


def test_a_long_conversation_is_cut_at_the_same_place_for_several_turns() -> None:
    items: list[Json] = []
    cuts: list[int] = []
    for number in range(100):
        items += [user(f"Question {number}. " + "word " * 40), answer("word " * 80)]
        whole = Cuttable([*items, user("And?")])
        tokens = whole.weight(0) // 4
        cuts.append(0 if tokens <= 8000 else whole.next_cut(0, tokens, 8000))
    assert cuts[-1] > 50
    changes = sum(one != other for one, other in pairwise(cuts))
    assert 5 < changes < 15, "without steps it would be over 50"


def test_a_data_url_weighs_the_same_whatever_its_size() -> None:
    def image(size: int) -> Json:
        url = "data:image/png;base64," + "A" * size
        return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}

    assert Cuttable([image(1 << 20)]).weight(0) == Cuttable([image(1 << 16)]).weight(0) < 5000


@pytest.mark.parametrize(
    ("context", "max_tokens", "limit"),
    [(1000, None, 875), (1000, 100, 900), (1000, 5000, 500), (131072, None, 126976), (0, None, 0), (1, None, 1)],
)
def test_an_answer_has_room(context: int, max_tokens: int | None, limit: int) -> None:
    assert input_limit(context, max_tokens) == limit
