"""Joined deltas keep true positions: a client cut after any of them resumes with nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.stream.frames import Close, Open, coalesce_from, encode, encode_text, is_text, text_parts

_LINES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 2), st.text(max_size=3), st.integers(1, 3)).map(lambda t: encode_text(*t)),
        st.sampled_from([encode(Open(0, 0, "text")), encode(Close(0))]),
    ),
    min_size=1,
    max_size=12,
)


@given(_LINES, st.integers(1, 1000))
def test_each_joined_line_names_the_last_frame_in_it(lines: list[bytes], first: int) -> None:
    joined = coalesce_from(first, lines)
    assert joined[-1][0] == first + len(lines) - 1
    start = first
    for last, line in joined:
        held = lines[start - first : last - first + 1]
        if is_text(line):
            block, tokens, quoted = text_parts(line)
            parts = [text_parts(one) for one in held]
            assert {part[0] for part in parts} == {block}
            assert sum(part[1] for part in parts) == tokens
            assert b"".join(part[2][1:-1] for part in parts) == quoted[1:-1]
        else:
            assert held == [line]
        start = last + 1
