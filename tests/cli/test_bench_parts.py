"""The parts of ``stream-gw bench`` that need no server."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.simulate.traces import Request
from stream_gw.cli.bench.arrivals import Stage, allowed_at_once, poisson
from stream_gw.cli.bench.command import progress
from stream_gw.cli.bench.events import BadAnswer, Chunk, Event, EventReader
from stream_gw.cli.bench.measures import Histogram, quantile, quantiles_of
from stream_gw.cli.bench.reading import Disturbance, Outcome, Status, _Text
from stream_gw.cli.bench.results import Prices, Record, Report
from stream_gw.cli.bench.run import Chaos
from stream_gw.cli.bench.workload import PROFILES, Lengths, Listed, Profile, Replay, Sessions


def said(text: str) -> Chunk:
    return msgspec.convert({"choices": [{"delta": {"content": text}}]}, Chunk)


# --- measures ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(1e-5, 3000), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_a_histogram_has_the_quantiles_of_its_values_within_half_a_percent(times: list[float], share: float) -> None:
    histogram, other = Histogram(), Histogram()
    for time_s in times[::2]:
        histogram.add(time_s)
    for time_s in times[1::2]:
        other.add(time_s)
    histogram.merge(other)
    assert histogram.quantile_s(share) == pytest.approx(quantile(sorted(times), share), rel=0.0051)
    found = histogram.quantiles()
    assert (found.count, found.max_s) == (len(times), max(times))
    assert found.mean_s == pytest.approx(sum(times) / len(times))


def test_no_values_have_no_quantiles() -> None:
    assert Histogram().quantiles() == quantiles_of([])
    assert quantiles_of([]).p99_s is None


# --- events --------------------------------------------------------------------------------------------------

_WIRE = (
    b'id: 1-1\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b': queued 3 of 17\n: hb\ndata: {"choices":[{"delta":{"content":"a\\u00e9"}}]}\r\n\r\n'
    b'data: {"choices":[{"delta":{"content":"b"}}]}\nid: 1-3\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\nid: 1-4\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(_WIRE)), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    reader = EventReader()
    edges = [0, *sorted(cuts), len(_WIRE)]
    events = [event for a, b in itertools.pairwise(edges) for event in reader.receive(_WIRE[a:b])]
    assert [(event.chunk.output if event.chunk else None, event.cursor) for event in events] == [
        ("", "1-1"),
        ("aé", ""),
        ("b", "1-3"),
        ("", "1-4"),
    ]
    assert events[-1].chunk is not None and events[-1].chunk.usage is not None
    assert events[-1].chunk.usage.completion_tokens == 2
    assert reader.done


@pytest.mark.parametrize(
    "data", [b"<html>", b"[1]", b'{"choices":[{"delta":{"content":5}}]}', b'{"error":{"message":"\xff"}}']
)
def test_an_event_that_is_no_chunk_is_told(data: bytes) -> None:
    with pytest.raises(BadAnswer, match="no chunk"):
        EventReader().receive(b"data: " + data + b"\n\n")


def test_all_that_a_reader_sees_is_output() -> None:
    for delta in ({"reasoning_content": "x"}, {"reasoning": "x"}, {"refusal": "x"}, {"tool_calls": [{"index": 0}]}):
        assert msgspec.convert({"choices": [{"delta": delta}]}, Chunk).output
    assert msgspec.convert({"choices": [{"text": "x"}]}, Chunk).output == "x"
    for choices in ([{"delta": {}, "finish_reason": "stop"}], [], None):
        assert not msgspec.convert({"choices": choices}, Chunk).output


# --- the text of a stream that is resumed --------------------------------------------------------------------


def test_a_piece_without_its_cursor_comes_again_after_a_resume_and_counts_once() -> None:
    text = _Text()
    for event in (Event(said("a"), "1-1"), Event(said("b")), Event(said("c"))):
        text.receive(event)
    text.go_back(text.cursor)
    for event in (Event(said("b")), Event(said("c")), Event(said("d"), "1-2")):
        text.receive(event)
    assert (str(text), text.last_seq) == ("abcd", 2)


def test_a_reset_takes_the_pieces_behind_it_back() -> None:
    text = _Text()
    for number, letter in enumerate("abcd", 1):
        text.receive(Event(said(letter), f"1-{number}"))
    text.receive(Event(None, "2-2", reset=True))
    text.receive(Event(said("x"), "2-3"))
    assert str(text) == "abx"


# --- arrivals ------------------------------------------------------------------------------------------------


def test_arrivals_follow_the_ramp_and_then_the_rate() -> None:
    found = [at for seed in range(40) for at in poisson(Stage(50.0, 0, 10.0, 10.0), 10.0, random.Random(seed))]
    assert all(0 <= at < 20 for at in found)
    for begin, end, rate in ((0, 1, 12), (4, 6, 30), (10, 20, 50)):
        seen = sum(begin <= at < end for at in found) / 40 / (end - begin)
        assert seen == pytest.approx(rate, rel=0.12)


def test_arrivals_are_those_of_their_seed() -> None:
    stage = Stage(5.0, 0, 0.0, 20.0)
    first, second, other = (list(poisson(stage, 0.0, random.Random(seed))) for seed in (1, 1, 2))
    assert first == second != other


def test_the_number_at_once_grows_with_the_ramp() -> None:
    stage = Stage(0.0, 20, 10.0, 5.0)
    assert [allowed_at_once(stage, 10, at) for at in (0, 5, 10, 14)] == [10, 15, 20, 20]
    assert allowed_at_once(stage, 0, 0.0) == 1


# --- workload ------------------------------------------------------------------------------------------------

SMALL = Profile("for tests", 20, Lengths(10, 0.5, 2, 50), Lengths(30, 0.5, 4, 100), 3)


def test_a_session_s_turns_repeat_its_history() -> None:
    sessions = Sessions(SMALL, 7, 1.0)
    first = sessions.next_turn()
    sessions.finish(first, "the answer")
    second = sessions.next_turn()
    assert (second.session, second.number) == (first.session, 1)
    assert second.messages[: len(first.messages)] == first.messages
    assert second.messages[len(first.messages)] == {"role": "assistant", "content": "the answer"}
    sessions.finish(second, "more")
    third = sessions.next_turn()
    assert (third.session, third.number) == (0, 2)
    sessions.finish(third, "the last")
    assert sessions.next_turn().session == 1, "a session ends after its turns"


def test_a_failed_turn_ends_its_session() -> None:
    sessions = Sessions(SMALL, 7, 1.0)
    sessions.finish(sessions.next_turn(), None)
    assert sessions.next_turn().session == 1


def test_prompts_are_those_of_their_seed_and_share_the_system_prompt() -> None:
    one, same, other = (Sessions(SMALL, seed, 1.0) for seed in (1, 1, 2))
    turns = [one.next_turn() for _ in range(5)]
    assert turns == [same.next_turn() for _ in range(5)]
    assert turns[0].messages != other.next_turn().messages
    assert len({turn.messages[0]["content"] for turn in turns}) == 1
    assert len({turn.messages[1]["content"] for turn in turns}) == 5


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_s_lengths_are_within_its_bounds(name: str) -> None:
    profile, rng = PROFILES[name], random.Random(0)
    found = sorted(profile.prompt.draw(rng) for _ in range(2001))
    assert profile.prompt.least <= found[0] <= found[-1] <= profile.prompt.most
    assert found[1000] == pytest.approx(profile.prompt.median, rel=0.1)
    words = Sessions(profile, 0, 0.5).next_turn().messages[0]["content"].split()
    assert not profile.system_tokens or len(words) == round(profile.system_tokens * 0.5), "half a word a token"


def test_equal_blocks_of_a_trace_become_equal_text() -> None:
    requests = [Request(0, 0.0, 1000, 5, (1, 2), "0"), Request(1, 1.0, 1300, 9, (1, 2, 3), "0")]
    replay = Replay(requests, 0, 1.0)
    turns = [replay.next_turn() for _ in requests]
    texts = [turn.messages[0]["content"].split() for turn in turns]
    assert [len(words) for words in texts] == [1000, 1300]
    assert texts[0] == texts[1][:1000]
    assert [(turn.session, turn.number, turn.tokens) for turn in turns] == [(0, 0, 5), (0, 1, 9)]
    alone = Replay([Request(n, 0.0, 100, 5, (), str(n)) for n in range(2)], 0, 1.0)
    assert alone.next_turn().messages != alone.next_turn().messages, "a trace without blocks shares nothing"


def test_listed_prompts_come_in_order_and_again(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt":"a","max_tokens":3}\n\n{"messages":[{"role":"user","content":"b"}]}\n')
    listed = Listed(path)
    turns = [listed.next_turn() for _ in range(3)]
    assert [turn.messages[0]["content"] for turn in turns] == ["a", "b", "a"]
    assert [turn.tokens for turn in turns] == [3, 256, 3]


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "no prompt"), ("{}", "line 1: it has neither"), ('{"messages":[]}', "it has neither"), ("x", "line 1")],
)
def test_a_file_of_prompts_that_cannot_be_used_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        Listed(path)


def test_chaos_comes_in_its_shares_and_once_a_request() -> None:
    chaos, rng = Chaos(cut=0.3, cancel=0.2, slow=0.1, cancel_at=9), random.Random(0)
    found = [chaos.draw(rng) for _ in range(5000)]
    shares = [
        sum(map(kind, found)) / 5000
        for kind in (lambda d: d.cut_at > 0, lambda d: d.cancel_at == 9, lambda d: d.is_slow)
    ]
    assert shares == pytest.approx([0.3, 0.2, 0.1], abs=0.02)
    assert all((d.cut_at > 0) + (d.cancel_at > 0) + d.is_slow <= 1 for d in found)
    assert not any(Chaos().draw(rng) for _ in range(100))


def test_the_page_names_every_field_of_the_json() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
    assert not [name for name in Report.__struct_fields__ if f"`{name}`" not in page]


def test_the_progress_of_a_long_soak_walks_over_no_outcomes() -> None:
    class Unwalked(list[Outcome]):
        def __iter__(self) -> Iterator[Outcome]:
            raise AssertionError("half a million take 28 ms, in which no answer is read")

    record = Record([Stage(1.0, 0, 0.0, 9.0)], Prices())
    statuses: list[Status] = ["failed", "completed", "failed"]
    for status in statuses:
        record.add(Outcome(0, 0, 0, 0.0, Disturbance(), True, status=status), Histogram())
    record.outcomes = Unwalked(record.outcomes)
    assert progress(record) == "3 ended, 2 failed"
