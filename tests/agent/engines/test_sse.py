"""Events out of bytes, however they were cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engines.upstream.sse import EventParser, EventTooLarge


def parse(*chunks: bytes, most: int = 1 << 16) -> list[bytes]:
    parser = EventParser(most)
    return [event for chunk in chunks for event in parser.receive(chunk)] + parser.end()


EVENTS = ["one", "zwölf 🚀", '{"a": "b"}', "[DONE]", "two\nlines", " led by a space"]


@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_do_not_depend_on_how_bytes_are_cut(events: list[str], newline: str, data: st.DataObject) -> None:
    text = ": hello\n\n"
    for event in events:
        text += ": beat\n\n" + "".join(f"data: {line}\n" for line in event.split("\n")) + "\n"
    whole = text.replace("\n", newline).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert parse(*chunks) == [event.encode() for event in events]


def test_every_byte_alone() -> None:
    whole = "data: zwölf 🚀\r\n\r\ndata:x\n\n".encode()
    assert parse(*(whole[i : i + 1] for i in range(len(whole)))) == ["zwölf 🚀".encode(), b"x"]


@pytest.mark.parametrize("cut", range(5))
def test_a_byte_order_mark_before_the_first_event_is_left_out(cut: int) -> None:
    whole = b"\xef\xbb\xbfdata: first\n\ndata: \xef\xbb\xbflast\n\n"
    assert parse(whole[:cut], whole[cut:]) == [b"first", b"\xef\xbb\xbflast"]
    assert parse(b"data: first\n\n", b"\xef\xbb\xbfdata: last\n\n") == [b"first"]


def test_other_fields_and_empty_events_are_passed_over() -> None:
    assert parse(b"event: error\nid: 7\nretry: 10\ndata: x\n\n\n\nevent: ping\n\n") == [b"x"]


@pytest.mark.parametrize("tail", [b"data: last", b"data: last\n", b"data: last\r", b"data: last\r\n"])
def test_a_last_event_needs_no_blank_line(tail: bytes) -> None:
    assert parse(b"data: first\n\n" + tail) == [b"first", b"last"]


def test_a_line_and_an_event_have_a_largest_size() -> None:
    for chunks in ([b"data: " + b"x" * 40] * 2, [b"data: " + b"x" * 30 + b"\n"] * 3):
        with pytest.raises(EventTooLarge):
            parse(*chunks, most=64)


def test_a_long_line_in_many_pieces_is_joined_once() -> None:
    began = time.process_time()
    assert parse(b"data: ", *[b"x" * 8] * 200_000, b"\n\n", most=1 << 21) == [b"x" * 1_600_000]
    assert time.process_time() - began < 3
