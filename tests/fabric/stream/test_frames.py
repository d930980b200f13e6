"""Frames: encoding, decoding and joining of text."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import (
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    Frame,
    Note,
    Open,
    Usage,
    coalesce,
    decode,
    encode,
    encode_text,
    is_end,
    is_text,
    text_parts,
)

RAW = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
).map(lambda value: msgspec.Raw(msgspec.json.encode(value)))
BLOCKS = st.integers(0, 10**6)
COUNTS = st.integers(0, 10**9)
USAGES = st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FRAMES = st.one_of(
    st.builds(Delta, BLOCKS, TEXT, st.integers(0, 99), st.none() | RAW),
    st.builds(Open, BLOCKS, BLOCKS, st.sampled_from(["text", "reasoning", "tool", "item"]), id=st.none() | TEXT),
    st.builds(Close, BLOCKS, st.none() | TEXT),
    st.builds(ChoiceEnd, BLOCKS, TEXT, st.none() | RAW),
    st.builds(Note, st.sampled_from(["started", "prompt", "input"]), st.none() | COUNTS, body=st.none() | RAW),
    st.builds(
        End,
        st.sampled_from(["completed", "cancelled", "failed", "incomplete"]),
        st.none() | USAGES,
        st.none() | st.builds(ErrorInfo, TEXT, TEXT),
    ),
)


def plain(frame: Frame) -> object:
    return msgspec.json.decode(msgspec.json.encode(frame))


@given(FRAMES)
def test_frames_round_trip_in_one_line_without_the_fabrics_separators(frame: Frame) -> None:
    line = encode(frame)
    assert not set(b"\n\r\x1e\x1f") & set(line)
    assert plain(decode(line)) == plain(frame)
    if not isinstance(frame, Delta) or frame.logprobs is None:
        assert encode(decode(line)) == line
    assert is_end(line) == isinstance(frame, End)


@given(st.text("\ud800\udfffa\n\x1f", max_size=8))
def test_text_with_lone_surrogates_still_encodes(text: str) -> None:
    frame = decode(encode_text(0, text))
    assert isinstance(frame, Delta)
    assert frame.text == text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.mark.parametrize("space", ["\n", "\r", "\r\n", "\n\n\t"])
def test_raw_json_from_outside_becomes_one_line(space: str) -> None:
    body = msgspec.Raw(f'{{{space}"a":{space}[1,{space}"x y"]}}'.encode())
    assert (
        encode(ChoiceEnd(0, "stop", body))
        == b'{"k":"choice-end","choice":0,"finish_reason":"stop","detail":{"a":[1,"x y"]}}'
    )


@given(st.binary(min_size=1, max_size=40))
def test_decode_refuses_junk_with_its_own_error(line: bytes) -> None:
    try:
        frame = decode(line)
    except (msgspec.MsgspecError, ValueError):
        return
    assert isinstance(frame, Frame)


@given(st.lists(st.one_of(st.tuples(st.integers(0, 2), TEXT, st.integers(0, 3)), FRAMES), max_size=30))
def test_coalesce_keeps_text_tokens_and_order(items: list[tuple[int, str, int] | Frame]) -> None:
    lines = [encode_text(*item) if isinstance(item, tuple) else encode(item) for item in items]

    def told(some: list[bytes]) -> list[object]:
        out: list[object] = []
        for line in some:
            if not is_text(line):
                out.append(line)
                continue
            block, tokens, quoted = text_parts(line)
            text = msgspec.json.decode(quoted, type=str)
            if out and isinstance(out[-1], tuple) and out[-1][0] == block:
                block, tokens, text = block, out[-1][1] + tokens, out[-1][2] + text
                out.pop()
            out.append((block, tokens, text))
        return out

    joined = coalesce(lines)
    assert told(joined) == told(lines)
    assert len(joined) == len(told(lines))
    assert coalesce(joined) == joined
