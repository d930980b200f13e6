"""Laws of the dialects of one choice: an encoding depends neither on a reader's start nor on the batching of frames."""

from __future__ import annotations

import pytest
from hypothesis import given

from stream_fabric.stream.frames import Delta
from stream_gw.dialects.facts import StreamFacts
from tests.dialects.laws import ONE_CHOICE, reader
from tests.dialects.strategies import STREAM, Stream, streams

each = pytest.mark.parametrize("dialect", ONE_CHOICE)
singles = streams(single=True)


@each
@given(stream=singles)
def test_a_reader_from_the_middle_gets_the_tail_of_the_whole(dialect: str, stream: Stream) -> None:
    lines = stream.lines
    one = reader(dialect, stream)
    parts = [one.sse([line], 2, seq) for seq, line in enumerate(lines, 1)]
    assert reader(dialect, stream).sse(lines, 2, 1) == b"".join(parts)
    for after in range(len(lines)):
        assert reader(dialect, stream, after).sse(lines[after:], 2, after + 1) == b"".join(parts[after:])
        alone = reader(dialect, stream, after)
        bodies = [chunk for line in lines[after:] for chunk in alone.chunks([line])]
        assert reader(dialect, stream, after).chunks(lines[after:]) == bodies


@each
@given(stream=singles)
def test_only_the_last_event_of_a_frame_carries_its_cursor(dialect: str, stream: Stream) -> None:
    one = reader(dialect, stream)
    for seq, line in enumerate(stream.lines, 1):
        events = one.sse([line], 3, seq).split(b"\n\n")[:-1]
        if dialect == "open.responses":
            assert not any(b"\nid: " in event for event in events), "the specification wants none"
            continue
        assert not any(b"\nid: " in event for event in events[:-1])
        assert not events or events[-1].endswith(b"\nid: 3-%d" % seq)


@each
def test_text_of_a_block_that_never_opened_is_a_fault(dialect: str) -> None:
    stream = Stream(StreamFacts(STREAM, 1, "m"), [Delta(7, "lost")])
    with pytest.raises(KeyError):
        reader(dialect, stream).chunks(stream.lines)
