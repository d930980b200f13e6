"""Stream ids, cursors and epochs."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stream_fabric.errors import CursorInvalid
from stream_fabric.stream.cursor import Cursor, Epoch
from stream_fabric.stream.ids import (
    derived_id,
    is_stream_id,
    moved_to,
    new_stream_id,
    partition_of,
    spread_of,
)


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_stream_ids_are_uuid7_that_sort_by_time(unix_ms: int, entropy: bytes) -> None:
    stream = new_stream_id(unix_ms, entropy)
    assert is_stream_id(stream)
    assert re.fullmatch(r"resp_[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}", stream)
    assert new_stream_id((unix_ms + 1) % 2**48, entropy) > stream or unix_ms == 2**48 - 1
    assert 0 <= partition_of(stream, 16) < 16
    assert derived_id("msg_", stream, 10) == f"msg_{stream[5:]}a"


@pytest.mark.parametrize("bits", range(13))
def test_an_id_is_moved_to_any_partition(bits: int) -> None:
    partitions = 1 << bits
    for partition in range(0, partitions, max(1, partitions // 64)):
        fresh = new_stream_id(partition, partition.to_bytes(10, "little"))
        stream = moved_to(fresh, partition, partitions)
        assert is_stream_id(stream) and stream[:-4] == fresh[:-4]
        assert partition_of(stream, partitions) == partition


def test_a_moved_id_keeps_what_randomness_its_partition_leaves() -> None:
    fresh = [new_stream_id(7, b"\0" * 8 + number.to_bytes(2, "big")) for number in range(1 << 16)]
    assert len({moved_to(stream, 3, 16) for stream in fresh}) > 4000, "of 4096"


@pytest.mark.parametrize("others", [2, 7, 12, 16, 64])
def test_what_is_spread_by_an_id_does_not_follow_its_partition(others: int) -> None:
    """Such as a sample of one in ``others``: the streams of a pool lie in one or two partitions."""
    draw = random.Random(7)
    counts = [0] * others
    for number in range(200 * others):
        stream = moved_to(new_stream_id(number, draw.randbytes(10)), number % 2, 16)
        counts[spread_of(stream.encode()) % others] += 1
    assert min(counts) > 120 and max(counts) < 290, "about 200 each"


def test_stream_ids_refuse_junk() -> None:
    with pytest.raises(ValueError, match="10 bytes"):
        new_stream_id(0, b"short")
    for junk in ("", "resp_", "resp_" + "g" * 32, "resp_" + "0" * 33, "resp_" + "0" * 32 + "\n", "msg_" + "0" * 32):
        assert not is_stream_id(junk)


@given(st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1))
def test_cursors_round_trip(epoch: int, seq: int) -> None:
    cursor = Cursor(epoch, seq)
    assert Cursor.parse(str(cursor)) == cursor


@given(st.one_of(st.text(max_size=40), st.from_regex(r"[-+ _0-9a-fx.٣]{0,8}-[-+ _0-9a-fx.٣]{0,40}")))
@example("1-\uff12")
@example("01-1")
@example("1-1\n")
@example("1-1-1")
@example("1-" + "9" * 16)
def test_cursors_refuse_every_other_spelling(text: str) -> None:
    try:
        cursor = Cursor.parse(text)
    except CursorInvalid as error:
        assert "cursor" in error.message
    else:
        assert str(cursor) == text


@given(st.integers(1, 9999), st.text("0123456789abcdef", max_size=8))
def test_epochs_round_trip(n: int, nonce: str) -> None:
    assert Epoch.parse(str(Epoch(n, nonce))) == Epoch(n, nonce)
