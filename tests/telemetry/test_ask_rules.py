"""Causes by explicit rules, and the time put together: pure, from rows that are made up here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.events import PHASES
from telemetry.ask.compare import Change, Cohort, Diff, Side, Tail
from telemetry.ask.reconcile import disagreement_reason, hour_agrees, received_whole
from telemetry.ask.text import rows_text, why_text
from telemetry.ask.why.causes import RULES, cause_sentence, duration, findings
from telemetry.ask.why.explain import Answer, stream_id_in
from telemetry.ask.why.story import MEMBERS_MIN, CohortFigures, Story, assemble, prompt_band

T0 = 1_795_168_800_000_000
PLAIN = {
    "gateway_us": 500, "admission_us": 1000, "fabric_us": 2000, "engine_queue_us": 3000, "prefill_us": 50_000,
    "decode_us": 2_000_000,
}  # fmt: skip
USUAL = CohortFigures(
    "others like it",
    400,
    {
        **{
            name: (float(PLAIN.get(name, 0)), float(PLAIN.get(name, 0)) * 1.5, float(PLAIN.get(name, 0)) * 2)
            for name in PHASES
        },
        "output_tokens": (150.0, 250.0, 300.0),
        "token_us": (13_000.0, 15_000.0, 16_000.0),
        "wall_us": (2_056_500.0, 3e6, 4e6),
        "ttft_us": (55_000.0, 60_000.0, 70_000.0),
    },
    cached_share=0.7,
)


def reader(at: int = 0, **changes: Any) -> dict[str, Any]:
    phases = dict.fromkeys(PHASES, 0) | {name: changes.pop(name, PLAIN.get(name, 0)) for name in PHASES}
    wall = sum(phases.values())
    row: dict[str, Any] = {
        "at_us": T0 + at + wall,
        "wall_us": wall,
        "role": "created",
        "ended": "completed",
        "tenant": "acme",
        "gateway": "gw-1",
        "stream": "resp_1",
        "request_id": "req_1",
        "trace_id": "",
        "user_hash": "",
        "model": "m",
        "adapter": "",
        "artifact": "",
        "pool": "p",
        "replica": "r-1",
        "session_hash": "",
        "dialect": "openai.chat",
        "transport": "sse",
        "http_status": 200,
        "error_code": "",
        "placement": "load",
        "queue_position": 0,
        "prompt_tokens": 1000,
        "cached_tokens": 700,
        "output_tokens": 150,
        "streamed_tokens": 150,
        "first_seq": 1,
        "last_seq": 154,
        "cancel_point": "",
        "ttft_us": wall - phases["decode_us"],
        "price_micro": 0,
        "scores_json": "",
    }
    return {**row, **phases, **changes}


def attempt(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "at_us": T0 + 2_056_000,
        "replica": "r-1",
        "ended": "completed",
        "attempt": 1,
        "epoch": 1,
        "waited_us": 0,
        "inbox_us": 500,
        "engine_queue_us": 3000,
        "prefill_us": 50_000,
        "decode_us": 2_000_000,
        "model": "m",
        "pool": "p",
        "believed_cached_tokens": 700,
        "prompt_tokens": 1000,
        "cached_tokens": 700,
        "output_tokens": 150,
        "generated_tokens": 150,
        "error_code": "",
        "last_seq": 154,
        "billed": True,
        "price_micro": 0,
        "tenant": "acme",
    }
    return {**row, **changes}


def story(
    readers: list[dict[str, Any]] | None = None, attempts: list[dict[str, Any]] | None = None, **more: Any
) -> Story:
    made = assemble("resp_1", "resp_1", [reader()] if readers is None else readers, attempts or [attempt()])
    return replace(made, **{"cohort": USUAL, **more})


def causes(of: Story) -> list[str]:
    return [finding.cause for finding in findings(of)]


def test_nothing_stands_out_of_what_is_ordinary() -> None:
    assert findings(story()) == []
    assert cause_sentence([]) == "Nothing is unusual."
    assert "likely cause: Nothing is unusual." in why_text(Answer(story(), []))


DEAD = attempt(ended="lost", replica="r-9", billed=False, generated_tokens=0)
CASES: dict[str, tuple[Story, list[str]]] = {
    "slow client": (story([reader(client_stall_us=5_000_000)]), ["slow client"]),
    "full queue": (story([reader(pool_queue_us=4_000_000, queue_position=12)]), ["full queue"]),
    "overloaded engine": (story([reader(engine_queue_us=3_000_000)]), ["overloaded engine"]),
    "slow tokens": (story([reader(decode_us=9_000_000)], [attempt(decode_us=9_000_000)]), ["overloaded engine"]),
    "token stall": (
        story([reader(decode_us=3_900_000)], [attempt(decode_us=3_900_000, itl_max_us=1_900_000)]), ["token stall"],
    ),
    "repaired reply": (story([reader(check_us=2_900_000, schema_check="valid", repairs=1)]), ["repaired reply"]),
    "schema check": (story([reader(check_us=1_900_000, schema_check="unchecked", repairs=0)]), ["schema check"]),
    "answer moderation": (story([reader(check_us=1_900_000)]), ["answer moderation"]),
    "steered": (story([reader(steer_us=1_500_000, inputs=2)]), ["steered"]),
    "admission slow": (story([reader(admission_us=900_000)]), ["admission slow"]),
    "gateway slow": (story([reader(gateway_us=900_000)]), ["gateway slow"]),
    "fabric slow": (story([reader(fabric_us=900_000)]), ["fabric slow"]),
    "unaccounted": (story([reader(residual_us=900_000)]), ["unaccounted"]),
    "cold prefix": (
        story([reader(prefill_us=900_000, cached_tokens=0)], [attempt(cached_tokens=0, prefill_us=900_000)]),
        ["cold prefix"],
    ),
    "slow prefill": (story([reader(prefill_us=900_000)], [attempt(prefill_us=900_000)]), ["slow prefill"]),
    "long answer": (
        story([reader(decode_us=20_000_000, output_tokens=1500)],
              [attempt(output_tokens=1500, generated_tokens=1500, decode_us=20_000_000)]),
        ["long answer"],
    ),
    "killed replica": (
        story([reader(recovery_us=3_500_000)], [DEAD, attempt(attempt=2, epoch=2, replica="r-2")]),
        ["killed replica"],
    ),
    "handed over": (
        story([reader(recovery_us=3_500_000)], [attempt(ended="handed_over", billed=False), attempt(attempt=2)]),
        ["handed over"],
    ),
    "made again": (
        story([reader(recovery_us=40_000, prefill_us=1_300_000)],
              [attempt(ended="handed_over", billed=False), attempt(attempt=2, prefill_us=1_250_000)]),
        ["handed over"],
    ),
    "yielded": (
        story([reader(pool_queue_us=3_500_000)], [attempt(ended="yielded", billed=False), attempt(epoch=2)]),
        ["yielded"],
    ),
    "nobody took over": (
        story([reader(ended="failed", error_code="replica_lost")], [attempt(ended="failed", billed=True)]),
        ["killed replica"],
    ),
    "failed": (story([reader(ended="failed", error_code="engine_error")]), ["failed"]),
    "refused": (
        story([reader(role="refused", ended="refused", http_status=503, error_code="pool_full", decode_us=0)]),
        ["refused"],
    ),
    "resume gap": (
        story([reader(ended="left"), reader(at=2_056_500, role="resumed", resume_gap_us=9_000_000, first_seq=80)]),
        ["resume gap"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_cause_is_named_and_no_other(name: str) -> None:
    of, expected = CASES[name]
    assert causes(of) == expected
    text = why_text(Answer(of, findings(of)))
    assert "likely cause: " + cause_sentence(findings(of)).split()[0] in text


def test_what_is_said_names_who_and_how_much() -> None:
    assert "Replica r-9 died; r-2 continued the stream after 3.6 s." in cause_sentence(
        findings(CASES["killed replica"][0])
    )
    dead = {"what": "dead", "replica": "r-9", "reason": "its lease expired", "at_us": T0}
    told = replace(CASES["killed replica"][0], fleet=(dead,))
    assert "Replica r-9 died (its lease expired)" in cause_sentence(findings(told))
    assert "pool p had a free slot: the request waited 4.0 s in the queue behind 11 others" in cause_sentence(
        findings(CASES["full queue"][0])
    )
    assert "0 of 1000 prompt tokens were cached; of prompts of its cohort it is 70%" in cause_sentence(
        findings(CASES["cold prefix"][0])
    )
    assert "placement expected 700" in cause_sentence(findings(CASES["cold prefix"][0]))


def test_the_costlier_of_two_comes_first_and_the_other_is_told_if_it_cost_half() -> None:
    two = findings(story([reader(client_stall_us=5_000_000, pool_queue_us=3_000_000)]))
    assert [finding.cause for finding in two] == ["slow client", "full queue"]
    assert cause_sentence(two).startswith("The client did not read")
    assert "Also: no replica of pool p had a free slot" in cause_sentence(two)
    two = findings(story([reader(client_stall_us=3_000_000, pool_queue_us=9_000_000)]))
    assert [finding.cause for finding in two] == ["full queue", "slow client"]
    assert "Also" not in cause_sentence(two)


def test_of_a_tie_the_earlier_rule_is_told() -> None:
    tied = findings(story([reader(client_stall_us=4_000_000, pool_queue_us=4_000_000)]))
    assert [finding.cost_us for finding in tied] == [4_000_000, 4_000_000]
    assert [finding.cause for finding in tied] == ["slow client", "full queue"]
    names = [rule.__name__ for rule in RULES]
    assert names.index("slow_client") < names.index("full_queue")


def test_a_wait_that_all_have_is_told_after_what_stands_out() -> None:
    crowded = replace(USUAL, figures={**USUAL.figures, "pool_queue_us": (4e6, 6e6, 7e6)})
    common = findings(story([reader(pool_queue_us=5_000_000)], cohort=crowded))
    assert [finding.cause for finding in common] == ["full queue"]
    assert common[0].common
    assert "the median of its cohort is 4.0 s." in cause_sentence(common)
    both = findings(story([reader(pool_queue_us=5_000_000, client_stall_us=2_000_000)], cohort=crowded))
    assert [finding.cause for finding in both] == ["slow client", "full queue"], "the stall stands out"


def test_without_a_cohort_waiting_is_still_named_and_nothing_else_is_guessed() -> None:
    few = replace(USUAL, members=MEMBERS_MIN - 1)
    assert causes(story([reader(client_stall_us=5_000_000)], cohort=few)) == ["slow client"]
    long = [attempt(output_tokens=1500, generated_tokens=1500, decode_us=20_000_000)]
    assert causes(story([reader(decode_us=20_000_000, output_tokens=1500)], long, cohort=few)) == []
    assert "too few for a comparison" in why_text(Answer(story(cohort=few), []))


def test_a_session_is_its_own_example() -> None:
    cold = ([reader(prefill_us=900_000, cached_tokens=0)], [attempt(cached_tokens=0, prefill_us=900_000)])
    never_cached = story(*cold, session_share=0.0, session_members=9)
    assert causes(never_cached) == ["slow prefill"]
    assert causes(story(*cold, session_share=0.0, session_members=2)) == ["cold prefix"], "that says little"
    warm = findings(story(*cold, session_share=0.95, session_members=3))
    assert "of earlier prompts of its session it is 95%" in warm[0].says


def test_a_short_pause_before_the_first_token_counts_by_the_time_until_it() -> None:
    long = {"decode_us": 30_000_000, "output_tokens": 150}
    assert causes(story([reader(admission_us=400_000, **long)], [attempt(decode_us=2_000_000)])) == ["admission slow"]
    assert causes(story([reader(admission_us=40_000, **long)], [attempt(decode_us=2_000_000)])) == []


def test_who_follows_whom() -> None:
    first = reader(ended="left")
    later = reader(at=5_000_000, role="resumed", resume_gap_us=2_943_500, first_seq=80, id="b")
    beside = reader(at=1000, role="attached", id="c", ended="left", decode_us=1_000_000)
    told = assemble("x", "x", [later, beside, first], [])
    assert [r.role for r in told.line] == ["created", "resumed"]
    assert [r.role for r in told.beside] == ["attached"]
    dangling = reader(ended="stalled", client_stall_us=9_000_000)
    instead = reader(at=1_000_000, role="resumed", first_seq=50, decode_us=12_000_000)
    told = assemble("x", "x", [dangling, instead], [])
    assert [r.role for r in told.line] == ["created", "resumed"], "its old connection was not yet known to be dead"
    assert any(segment.name == "overlap" and segment.us < 0 for segment in told.segments())
    assert sum(segment.us for segment in told.segments()) == told.wall_us


def test_a_retry_by_idempotency_key_beside_the_dead_connection_is_the_clients() -> None:
    for dead in (
        reader(ended="left", decode_us=4_000_000),
        reader(ended="stalled", decode_us=1_000_000, client_stall_us=60_000_000),  # noticed after the retry's end
    ):
        retry = reader(at=3_000_000, role="attached", id="b", gateway="gw-2", decode_us=5_000_000)
        told = assemble("x", "x", [dead, retry], [attempt()])
        assert (told.outcome, [each.role for each in told.line]) == ("completed", ["created", "attached"])
        assert sum(segment.us for segment in told.segments()) == told.wall_us
        text = why_text(Answer(told, findings(told)))
        assert "reader 2: retry by idempotency key at gw-2, completed" in text
        assert "both readers" in text
    two_tabs = [reader(), reader(at=1_000_000, role="attached", id="b")]
    assert [each.role for each in assemble("x", "x", two_tabs, []).line] == ["created"], "the first one was not dead"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**7),
            st.integers(0, 10**7),
            st.integers(-1000, 1000),
            st.sampled_from(("created", "resumed", "attached")),
            st.sampled_from(("left", "completed", "stalled")),
        ),
        max_size=5,
    ),
    st.lists(st.integers(0, 10**7), max_size=3),
)
def test_the_segments_always_add_up(readers: list[tuple[int, int, int, str, str]], attempts: list[int]) -> None:
    rows = [
        reader(at, role=role, ended=ended, decode_us=decode, residual_us=residual, first_seq=1 + (role == "resumed"))
        for at, decode, residual, role, ended in readers
    ]
    told = assemble("x", "x", rows, [attempt(at_us=T0 + at) for at in attempts])
    assert sum(segment.us for segment in told.segments()) == told.wall_us
    why_text(Answer(told, findings(told)))


def test_bands_and_ids() -> None:
    assert prompt_band(0) == (0, 128)
    assert prompt_band(2048) == (2048, 8192)
    digits = "01a1f8661a02798c8a56369fe4b7a96b"
    for id in (f"resp_{digits}", f"chatcmpl-{digits}", f"msg_{digits}", digits, f"resp_{digits}_1"):
        assert stream_id_in(id) == f"resp_{digits}"
    assert stream_id_in("req_0123") == ""
    assert [duration(us) for us in (0, 300, 4200, 87_000, 3_500_000)] == ["0 ms", "0.30 ms", "4.2 ms", "87 ms", "3.5 s"]


# --- diff ------------------------------------------------------------------------------------------------------


def side(ttft: float, **phases: dict[str, float]) -> Side:
    """``phases``: replica → its means."""
    rows = [
        {"replica": name, "requests": 10, **{f"{p}_mean": given.get(p, 0.0) for p in PHASES}}
        for name, given in phases.items()
    ]
    profile = {"members": 100, "ttft_us_q": [0, 0, ttft, 0, 0], "wall_us_q": [0, 0, ttft, 0, 0]}
    tail = Tail.of(rows)
    return Side(Cohort(0, 1), profile, {(by, at): tail for by in ("ttft", "wall") for at in ("p95", "p99")})  # type: ignore[misc]


def test_diff_says_which_phase_through_which_replica() -> None:
    a = side(100_000, x={"engine_queue_us": 5000, "prefill_us": 90_000}, y={"prefill_us": 90_000})
    b = side(520_000, x={"engine_queue_us": 765_000, "prefill_us": 90_000}, y={"prefill_us": 130_000})
    assert Diff(a, b).sentence("ttft", "p99") == (
        "p99 TTFT rose 420 ms, from 100 ms to 520 ms: +380 ms engine queue on replica x."
    )
    assert Diff(a, b).changes("ttft", "p99")[0] == Change("engine_queue_us", 380_000, "x")


def test_diff_names_no_replica_where_it_is_spread() -> None:
    a = side(100_000, x={"prefill_us": 90_000}, y={"prefill_us": 90_000})
    b = side(200_000, x={"prefill_us": 190_000}, y={"prefill_us": 190_000})
    assert Diff(a, b).sentence("ttft", "p99").endswith("+100 ms prefill.")


# --- reconcile -------------------------------------------------------------------------------------------------


def shown_to(first: int, last: int, tokens: int, ended: str = "") -> dict[str, Any]:
    ended = ended or ("completed" if last == 10 else "left")
    return {"first_seq": first, "last_seq": last, "streamed_tokens": tokens, "ended": ended}


@pytest.mark.parametrize(
    ("readers", "whole"),
    [
        ([shown_to(1, 10, 7)], (7, 7)),
        ([shown_to(1, 9, 7)], None),
        ([shown_to(1, 9, 7, "cancelled")], (7, 7)),
        ([shown_to(2, 10, 7)], None),
        ([shown_to(1, 4, 3), shown_to(5, 10, 4)], (7, 7)),
        ([shown_to(5, 10, 4), shown_to(1, 4, 3)], (7, 7)),
        ([shown_to(1, 4, 3), shown_to(6, 10, 4)], None),
        ([shown_to(1, 6, 5), shown_to(5, 10, 4)], (5, 9)),
        ([shown_to(1, 10, 7), shown_to(5, 10, 4)], (7, 7)),
        ([shown_to(1, 6, 5), shown_to(5, 10, 4), shown_to(7, 10, 2)], (7, 7)),
        ([], None),
    ],
    ids=["one", "not to the end", "to its cancel", "not from the start", "two", "any order", "a hole", "an overlap",
         "and a part", "one of two without an overlap", "none"],
)  # fmt: skip
def test_a_stream_is_whole_where_its_readers_cover_it(
    readers: list[dict[str, Any]], whole: tuple[int, int] | None
) -> None:
    assert received_whole(readers) == whole


def test_a_stream_whose_reader_was_cut_off_before_its_end_was_not_received_whole() -> None:
    cut = shown_to(1, 7, 5, "failed")  # its key was revoked
    assert received_whole([cut], 10) is None
    assert received_whole([cut, shown_to(8, 10, 2)], 10) == (7, 7), "another reader got the rest"
    assert received_whole([shown_to(1, 10, 7, "failed")], 10) == (7, 7), "the stream itself failed"


def test_what_engines_made_beyond_the_bill_is_no_disagreement() -> None:
    bill = {"billed_output": 10, "bills": 1, "generated": 14, "silent": 0}
    assert disagreement_reason(bill, 10, (10, 10)) == ""
    assert disagreement_reason(bill, None, None) == ""
    assert disagreement_reason(bill, None, (8, 12)) == "", "somewhere between"
    assert "fewer tokens" in disagreement_reason(bill, None, (8, 9))
    assert "fewer tokens than were billed" in disagreement_reason({**bill, "generated": 9}, 10, (10, 10))
    assert disagreement_reason({**bill, "generated": 9, "silent": 1}, 10, (10, 10)) == "", (
        "a replica that died told of nothing"
    )
    assert "another count" in disagreement_reason(bill, 11, (10, 10))
    assert "more tokens" in disagreement_reason(bill, 10, (11, 11))
    assert "2 bills" in disagreement_reason({**bill, "bills": 2}, 10, (10, 10))


def test_an_hour_agrees_but_for_bills_told_just_after_it() -> None:
    ours, theirs = (5, 100, 50, 200), (5, 100, 50, 200)
    none = (0, 0, 0, 0)
    assert hour_agrees(ours, theirs, none, none)
    assert not hour_agrees((5, 100, 50, 210), theirs, none, none)
    assert hour_agrees((6, 120, 50, 210), theirs, none, (1, 20, 0, 10)), "one was told in the hour after"
    assert hour_agrees((4, 80, 50, 190), theirs, (1, 20, 0, 10), none), "one is the hour before's"
    assert not hour_agrees((4, 80, 50, 180), theirs, (1, 20, 0, 10), none)
    assert hour_agrees((9, 100, 50, 200), theirs, none, none), "streams without a token have no bill"


def test_a_stall_is_named_by_its_tokens_where_their_times_are_told() -> None:
    times = [50_000, *[5_000] * 811, 1_900_000, *[5_000] * 100]
    row = attempt(
        decode_us=sum(times[1:]), itl_max_us=1_900_000, token_us=times, generated_tokens=len(times), output_tokens=913
    )
    of = story([reader(decode_us=sum(times[1:]), output_tokens=913)], [row], cohort=CohortFigures(""))
    (first, *_) = findings(of)
    assert first.cause == "token stall"
    assert "paused for 1.9 s between tokens 812 and 813; its other tokens took 5.0 ms each" in first.says
    assert first.cost_us == 1_900_000
    text = why_text(Answer(of, findings(of)))
    assert "times of 913 tokens: first token after 50 ms" in text
    assert "longest gaps 1.9 s between tokens 812 and 813, 5.0 ms between tokens 1 and 2" in " ".join(text.split())


def test_what_is_no_stall() -> None:
    for row in (
        attempt(itl_max_us=150_000),  # as long as ten tokens: a busy step
        attempt(itl_max_us=1_900_000, generated_tokens=3),
        attempt(itl_max_us=0),
    ):
        assert causes(story([reader()], [row])) == []
    late = attempt(decode_us=3_900_000, itl_max_us=1_900_000, token_us=[50_000, *[13_000] * 40])
    (found,) = findings(story([reader(decode_us=3_900_000)], [late]))
    assert "between two of its tokens" in found.says, "its times end before it"
    steered = attempt(decode_us=3_900_000, itl_max_us=1_900_000, token_us=[50_000, *[13_000] * 40, 2_500_000])
    (found,) = findings(story([reader(decode_us=3_900_000)], [steered]))
    assert "between two of its tokens" in found.says, "they have the wait after an input, which is no gap"


def test_inputs_are_told_with_their_times_and_those_of_a_dead_replica_without() -> None:
    told = [[T0 + 500_000, "applied", "", 8000, 60_000], [T0 + 900_000, "refused", "no_text", 2000]]
    steered = story([reader(inputs=2, steer_us=60_000)], [attempt(inputs_json=json.dumps(told), steer_us=60_000)])
    text = why_text(Answer(steered, []))
    lines = text[text.index("inputs (") :].splitlines()
    assert lines[1].split() == ["input", "came", "at", "result", "waited", "next", "token", "total"]
    assert lines[2].split() == ["1.1", "+500", "ms", "applied", "8.0", "ms", "60", "ms", "68", "ms"]
    assert lines[3].split() == ["1.2", "+900", "ms", "refused", "2.0", "ms", "-", "-", "no_text"]
    assert "1 more applied by a replica that died" in lines[4]
    assert "steering 60 ms" in text and "inputs" not in why_text(Answer(story(), []))


def test_a_cell_with_many_lines_stays_one_row() -> None:
    assert rows_text([{"prompt": "a\nstream  resp_fake"}]).splitlines() == ["  prompt", "  a\\nstream  resp_fake"]
