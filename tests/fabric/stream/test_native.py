"""The functions of bytes: in Python everywhere, and in C where the suite runs on the wheel (make test-compiled)."""

from __future__ import annotations

import importlib
import os
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import hiredis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.native import python
from stream_fabric.redis import wire

NATIVE = [importlib.import_module("stream_fabric.native._native")] if os.environ.get("STREAM_GW_TEST_COMPILED") else []
"""The wheel's; a tree has none."""

each = pytest.mark.parametrize("functions", [python, *NATIVE], ids=lambda module: module.__name__.rpartition(".")[2])
on_the_wheel = pytest.mark.skipif(not NATIVE, reason="the wheel has the functions in C: make test-compiled")


def outcome(call: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The result, or the error's type."""
    try:
        return call(*args)
    except (TypeError, ValueError, OverflowError) as error:
        return ValueError if isinstance(error, UnicodeEncodeError) else type(error)


# --- what each of them does ----------------------------------------------------------------------------------------


@each
def test_a_message_is_split_into_parts(functions: ModuleType) -> None:
    first, second = b's1\x1f2.ab\x1f7\x1f8\x1f0" a"\n0" b"', b"s2\x1f1.cd\x1f123456789\x1f123456789\x1f{}\x1f"
    assert functions.split_message(first + b"\x1e" + second) == [
        (b"s1", b"2.ab", 7, 8, b'0" a"\n0" b"'),
        (b"s2", b"1.cd", 123456789, 123456789, b"{}\x1f"),
    ]


@each
@pytest.mark.parametrize(
    "payload", [b"", b"s", b"s\x1fe\x1f1\x1f2", b"s\x1fe\x1fx\x1f2\x1f", b"s\x1fe\x1f1\x1f\x1f", b"\x1e"]
)
def test_a_message_of_another_form_is_an_error(functions: ModuleType, payload: bytes) -> None:
    with pytest.raises(ValueError):
        functions.split_message(payload)


@each
def test_a_text_becomes_an_event(functions: ModuleType) -> None:
    blocks = {b"0": (b'{"a":"', b',"b":"', b"}"), b"12": (b"[", b"]"), b"3": ()}
    event = functions.text_event
    assert event(b"data: ", blocks, b'0"x"', 1, 20) == b'data: {"a":"x","b":"x"}\nid: 1-20\n\n'
    assert event(b"", blocks, b'12"\\"', 10, 0) == b'[\\"]\nid: 10-0\n\n'
    for line in (b'1"x"', b'0:2"x"', b'3"x"', b'{"k":"end"}', b"0", b""):
        assert event(b"data: ", blocks, line, 1, 1) is None


@each
def test_bytes_become_a_chunk(functions: ModuleType) -> None:
    assert [functions.chunk(b"x" * size)[:5] for size in (0, 15, 16, 4096)] == [
        b"0\r\n\r\n",
        b"f\r\nxx",
        b"10\r\nx",
        b"1000\r",
    ]


@each
def test_a_text_becomes_a_frame(functions: ModuleType) -> None:
    assert functions.text_frame(0, "é", 1) == b'0"\xc3\xa9"'
    assert functions.text_frame(12, 'a"\\\n\x00\x1f\x7f', 30) == b'12:30"a\\"\\\\\\n\\u0000\\u001f\x7f"'
    with pytest.raises(UnicodeEncodeError):
        functions.text_frame(0, "\ud800", 1)


@each
def test_a_chunk_of_a_known_form_is_read(functions: ModuleType) -> None:
    read = functions.read_chunk
    assert read(b'{"t":"', b'"}', b"", b"", -1, b'{"t":"x y"}') == ("x y", None)
    form = (b'{"t":"', b'","n":', b',"total":', b"}")
    assert read(*form, 0, b'{"t":"\xc3\xa9","n":5,"total":17}') == ("é", 5)
    assert read(*form, 1, b'{"t":"x","n":5,"total":17}') == ("x", 17)
    one = (b'{"t":"', b'","n":', b"", b"}")
    assert read(*one, 0, b'{"t":"x","n":0}') == ("x", 0)
    for data in (
        b'{"t":"","n":5}',
        b'{"t":"x","n":05}',
        b'{"t":"x","n":}',
        b'{"t":"x","n":1234567890}',
        b'{"t":"x","n":-1}',
        b'{"t":"x\\n","n":5}',
        b'{"t":"\x7f","n":5}',
        b'{"t":"\xff","n":5}',
        b'{"t":"\xe2\x80\xa8","n":5}',
        b'{"t":"x","n":5} ',
        b'{"t":"x',
        b"",
    ):
        assert read(*one, 0, data) is None


@each
def test_what_json_has_outside_of_its_strings_is_counted(functions: ModuleType) -> None:
    counts = functions.json_counts
    assert counts(b'{"a":[1,{"b":"x,y:[{\\"\\\\"}],"c":""}', 6) == (3, 2, 0, 6, 3)
    assert counts(b'{"a":[1,{"b":"x,y:[{\\"\\\\"}],"c":""}', 4) is None
    assert counts(b"[1e300,-1.5E+300,1e30,0.%b]" % (b"1" * 70), 0) == (0, 3, 3, 2, 1)
    assert counts(b"[%b,%b]" % (b"1" * 64, b"1" * 63), 0) == (0, 1, 1, 2, 1)
    assert counts(b"", 0) == (0, 0, 0, 0, 0)
    assert counts(b"]]]][", 0)[3:] == (5, 0)
    assert counts(b'"' + b"\\\\" * 1000 + b'","' + b"\\\\" * 1000 + b'\\",[', 2) == (0, 1, 0, 0, 0)


@pytest.mark.parametrize("arg", ["", "é", b"\x00\r\n", 0, -5, 2**63 - 1, -(2**63), 2**63, -(10**30), 1.5, float("inf")])
def test_a_command_is_packed_for_redis(arg: Any) -> None:
    text = arg if isinstance(arg, bytes) else str(arg).encode()
    assert wire.pack_command(("SET", arg)) == b"*2\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (len(text), text)


@pytest.mark.parametrize("arg", [None, True, [], bytearray(b"x"), "\ud800"])
def test_an_argument_that_cannot_be_packed_is_an_error(arg: Any) -> None:
    with pytest.raises((TypeError, UnicodeEncodeError)):
        wire.pack_command(("SET", 1.5, arg))


def test_the_wheel_runs_what_is_in_c() -> None:
    assert wire.pack_command.__module__ == ("stream_fabric.native._native" if NATIVE else "hiredis.hiredis")


@each
def test_a_text_that_may_hold_a_url_is_told(functions: ModuleType) -> None:
    for text in (b'{"image_url":1}', b'"image\\u005furl"', b'"_\\u0075rl"', b'"_ur\\u006C"', b"\\u00e9\\u007a"):
        assert functions.may_hold_url(text), text
    for text in (b"", b'"_url ', b"_url", b'"\\u00e9\\u00"', b"\\u00", b'"\\u0041"', b"\\u05"):
        assert not functions.may_hold_url(text), text


# --- C equals Python -----------------------------------------------------------------------------------------------

small = st.binary(max_size=8)
numbers = st.integers(0, 2**63 - 1) | st.integers(0, 20)
texts = st.text(st.characters() | st.sampled_from('"\\\n\x00\x7fé\u2028\ud800'), max_size=12)
pieces = st.sampled_from(
    [b"\x1e", b"\x1f", b'"', b"0", b"17", b"s", b":", b"\\", b"\xc3\xa9", b"\xff", b"\x1f5\x1f6\x1f", b"{"]
)
soup = st.lists(pieces, max_size=12).map(b"".join)


@on_the_wheel
@given(
    soup
    | st.lists(st.tuples(small, small, numbers, numbers, small), max_size=3).map(
        lambda parts: b"\x1e".join(b"%b\x1f%b\x1f%d\x1f%d\x1f%b" % part for part in parts)
    )
)
def test_split_message_equals_its_oracle(payload: bytes) -> None:
    long = any(len(field) > 18 for field in payload.replace(b"\x1e", b"\x1f").split(b"\x1f"))
    expected = outcome(python.split_message, (payload,))
    assert outcome(NATIVE[0].split_message, (payload,)) in ((expected, ValueError) if long else (expected,))


@on_the_wheel
@given(small, st.dictionaries(st.sampled_from([b"0", b"17", b""]), st.lists(small).map(tuple)), soup, numbers, numbers)
def test_text_event_equals_its_oracle(before: bytes, blocks: Any, line: bytes, epoch: int, seq: int) -> None:
    args = (before, blocks, line, epoch, seq)
    assert NATIVE[0].text_event(*args) == python.text_event(*args)


@on_the_wheel
@given(numbers, texts, numbers)
def test_text_frame_equals_its_oracle(block: int, text: str, tokens: int) -> None:
    args = (block, text, tokens)
    assert outcome(NATIVE[0].text_frame, args) == outcome(python.text_frame, args)


@on_the_wheel
@given(st.binary(max_size=300))
def test_chunk_equals_its_oracle(data: bytes) -> None:
    assert NATIVE[0].chunk(data) == python.chunk(data)


@on_the_wheel
@given(
    texts,
    numbers,
    numbers,
    st.sampled_from([b"", b',"total":', b"x1"]),
    st.sampled_from([b"", b"}", b"1}"]),
    soup,
    st.booleans(),
)
def test_read_chunk_equals_its_oracle(
    text: str, made: int, total: int, between: bytes, tail: bytes, junk: bytes, escaped: bool
) -> None:
    raw = (
        msgspec.json.encode(text.encode("utf-8", "replace").decode())[1:-1]
        if escaped
        else text.encode("utf-8", "replace")
    )
    head, after = b'{"t":"', b'","n":'
    counts = b"%d%b%d" % (made, between, total) if between else b"%d" % made
    for data in (head + raw + after + counts + tail, head + raw + after + counts + junk + tail, head + junk, junk):
        for own in (0, 1) if between else (0,):
            args = (head, after, between, tail, own, data)
            assert NATIVE[0].read_chunk(*args) == python.read_chunk(*args)
        args = (head, b'"}', b"", b"", -1, data)
        assert NATIVE[0].read_chunk(*args) == python.read_chunk(*args)


@on_the_wheel
@given(
    st.text('[]{}"\\,:0123.eE+-a \n', max_size=60).map(str.encode)
    | st.lists(st.sampled_from([b"0e", b"E00", b"0" * 63, b"0", b"0e000", b"+", b'"', b"\\"]), max_size=12).map(
        b"".join
    )
    | st.binary(),
    st.integers(0, 10),
)
def test_json_counts_equals_its_oracle(text: bytes, strings_max: int) -> None:
    assert NATIVE[0].json_counts(text, strings_max) == python.json_counts(text, strings_max)


@on_the_wheel
@given(
    st.lists(st.sampled_from([b"_url", b'"', b"\\", b"\\u00", b"5f", b"75", b"6c", b"u", b"7", b" "]), max_size=20).map(
        b"".join
    )
    | st.binary()
)
def test_may_hold_url_equals_its_oracle(text: bytes) -> None:
    assert NATIVE[0].may_hold_url(text) == python.may_hold_url(text)


@on_the_wheel
def test_threads_may_look_at_long_texts_at_once() -> None:
    """The functions give the lock back meanwhile."""
    text = b'{"a":["b",1e300,{}]},' * 50_000
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(lambda most: NATIVE[0].json_counts(text, most), [10**6, 99_999, 100_000] * 4))
        urls = list(threads.map(NATIVE[0].may_hold_url, [text, text + b'"_url"'] * 4))
    assert counts == [python.json_counts(text, most) for most in [10**6, 99_999, 100_000]] * 4
    assert urls == [False, True] * 4


@on_the_wheel
@given(st.lists(texts | small | st.integers() | st.floats() | st.none() | st.booleans(), max_size=8).map(tuple))
def test_pack_command_equals_hiredis(args: tuple[Any, ...]) -> None:
    expected = outcome(hiredis.pack_command, (args,))
    got = outcome(NATIVE[0].pack_command, (args,))
    # With two wrong arguments, each of both may name another one
    assert got == expected or {got, expected} == {TypeError, ValueError}


@on_the_wheel
def test_nothing_is_leaked() -> None:
    native = NATIVE[0]
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("split_message", (b's\x1fe\x1f1000\x1f2000\x1f0"x"\x1et\x1fe\x1f1000\x1f2000\x1f',)),
        ("split_message", (b's\x1fe\x1f1000\x1f2000\x1f0"x"\x1et',)),
        ("split_message", (b"s\x1fe\x1f1000\x1fx\x1f",)),
        ("text_event", (b"data: ", {b"17": (b"a" * 50, b"b")}, b'17"x"', 1, 2)),
        ("text_event", (b"data: ", {b"17": (b"a" * 50, "b")}, b'17"x"', 1, 2)),
        ("text_event", (b"data: ", {}, b'17"x"', 1, 2)),
        ("chunk", (b"x" * 100,)),
        ("text_frame", (1, "é\n" * 20, 5)),
        ("text_frame", (1, "\ud800", 5)),
        ("read_chunk", (b"{", b'"n":', b"", b"}", 0, b'{\xc3\xa9"n":5000}')),
        ("read_chunk", (b"{", b'"n":', b"", b"}", 0, b'{\xe2\x80\xa8"n":5000}')),
        ("read_chunk", (b"{", b'"n":', b"", b"}", 0, b'{\xff"n":5000}')),
        ("pack_command", (("SET", 1.5, 10**30, b"x", "é"),)),
        ("pack_command", (("SET", 1.5, 10**30, None),)),
        ("pack_command", (("SET", "\ud800"),)),
        ("json_counts", (b'["a",1e300]' * 1000, 1000)),
        ("json_counts", (b'["a",1e300]' * 1000, 999)),
        ("json_counts", (b"[]", "x")),
        ("may_hold_url", (b"\\u00aa" * 30_000,)),
    ]
    for name, args in calls:
        call = getattr(native, name)
        for _ in range(10):
            outcome(call, args)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            outcome(call, args)
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 10_000, (name, args)
