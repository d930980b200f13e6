"""Events on disk: what was kept is there after anything, nothing torn is read, the bound holds."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.limits import EVENTS_BATCH_MAX
from telemetry.emit.segments import MAGIC, Damaged, decode_segment, encode_record
from telemetry.emit.spool import Spool
from telemetry.emit.transport import Record
from tests.telemetry.sinks import make_spool

MB = 1 << 20


def record(name: str, size: int = 100, kept: bool = False) -> Record:
    return Record(f"{name}:".encode() + b"x" * size, b"key", "attempt" if kept else "request", kept)


def names(records: list[Record]) -> list[str]:
    return [one.value.partition(b":")[0].decode() for one in records]


def drained(spool: Spool) -> list[str]:
    out: list[str] = []
    while (found := spool.next()) is not None:
        segment, records = found
        out += names(records)
        spool.done([segment])
    return out


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != "lock")


def test_what_is_put_comes_out_oldest_first_and_leaves_the_disk_only_when_done(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, MB)
    assert (spool.empty, spool.oldest(), spool.bytes) == (True, None, 0)
    told = spool.put([record("1"), record("2", kept=True), record("3")])
    assert dict(told.spooled) == {"request": 2, "attempt": 1}
    assert spool.bytes == sum(path.stat().st_size for path in files(tmp_path))
    first = spool.next()
    assert first is not None
    second = spool.next()
    assert second is not None
    assert spool.next() is None
    assert sorted(names(first[1]) + names(second[1])) == ["1", "2", "3"]
    assert len(files(tmp_path)) == 2
    spool.release([first[0]])
    assert spool.next() == first
    spool.done([first[0], second[0]])
    assert (files(tmp_path), spool.bytes, spool.oldest()) == ([], 0, None)
    spool.put([record("4")])
    assert drained(spool) == ["4"]
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_records_keep_all_that_their_transport_must_know(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, MB)
    given_ = Record(b"{}", b"resp_1", "request", False, "0af7651916cd43dd8448eb211c80319c", 3)
    spool.put([given_])
    found = spool.next()
    assert found is not None
    assert found[1] == [given_]
    spool.close()


def test_a_segment_is_one_batch_at_most(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, 64 * MB)
    for number in range(30):
        spool.put([record(f"{number}-{n}") for n in range(50)])
    spool.put([record("large", 400 << 10), record("larger", 500 << 10)])
    counts = []
    while (found := spool.next()) is not None:
        counts.append(len(found[1]))
        assert found[0].bytes <= 600 << 10
        spool.done([found[0]])
    assert max(counts) == EVENTS_BATCH_MAX
    assert sum(counts) == 1502
    spool.close()


def test_what_is_held_is_given_to_nobody_until_it_is_released(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, MB)
    spool.put([record("before")])
    held, told = spool.hold([record("held"), record("bill", kept=True)])
    assert told.spooled.total() == 2
    spool.put([record("after")])
    assert drained(spool) == ["before", "after"]
    spool.release(held)
    assert sorted(drained(spool)) == ["bill", "held"]
    spool.close()


# --- bounds ------------------------------------------------------------------------------------------------


def test_over_the_bound_the_rest_makes_room_for_what_must_not_be_dropped(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, 100_000)
    refused = evicted = 0
    for n in range(200):
        told = spool.put([record(f"rest{n}", 1000)])
        refused += len(told.refused)
    assert refused > 90
    bills = 0
    for n in range(200):
        told = spool.put([record(f"bill{n}", 1000, kept=True)])
        evicted += told.evicted.total()
        bills += told.spooled.total()
        if told.refused:
            break
    assert spool.bytes <= 100_000
    assert evicted + refused == 200
    # Only once it is full of nothing else
    assert bills > 90
    out = drained(spool)
    assert len(out) == bills and all(name.startswith("bill") for name in out)
    spool.close()


def test_a_full_disk_costs_the_rest_first_and_tears_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = make_spool(tmp_path, MB)
    spool.put([record("rest", 2000)])
    room = 1000
    write = os.write

    def full(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            room = 10_000 if not (spool.bytes) else 0
            raise OSError(errno.ENOSPC, "No space left on device")
        count = min(len(data), room)
        room -= count
        return write(fd, data[:count])

    monkeypatch.setattr(os, "write", full)
    told = spool.put([record("lost", 1500)])
    assert names(told.failed) == ["lost"] and "No space" in told.error
    told = spool.put([record("bill", 1500, kept=True)])
    # Half of each was written when the disk was found full
    assert told.evicted.total() == 1
    monkeypatch.undo()
    spool.put([record("after")])
    out = drained(spool)
    assert out == (["bill", "after"] if told.spooled else ["after"])
    assert bool(told.spooled) is not bool(told.failed)
    spool.close()


def test_a_segment_that_cannot_be_read_costs_nothing_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = make_spool(tmp_path, 3000)
    spool.put([record("old", 1000)])
    spool.hold([])  # ends the segment
    spool.put([record("rest", 1000)])
    spool.hold([])
    (unreadable, _), read, full = files(tmp_path), Path.read_bytes, spool.bytes

    def broken(path: Path) -> bytes:
        if path == unreadable:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", broken)
    # It would have to make room
    told = spool.put([record("bill", 1500, kept=True)])
    assert names(told.failed) == ["bill"] and "Input/output" in told.error and spool.bytes == full
    told = spool.put([record("bill", 1500, kept=True)])
    assert told.spooled.total() == 1 and told.evicted.total() == 1
    with pytest.raises(OSError, match="Input/output"):
        spool.next()
    found = spool.next()
    assert found is not None and names(found[1]) == ["bill"]
    monkeypatch.undo()
    spool.release([found[0]])
    assert sorted(drained(spool)) == ["bill", "old"]
    assert not spool.bytes
    spool.close()


# --- others' -----------------------------------------------------------------------------------------------


def test_a_living_process_keeps_its_folder_and_a_dead_one_s_is_taken_once(tmp_path: Path) -> None:
    one, two, three = (make_spool(tmp_path, MB) for _ in range(3))
    one.put([record("1"), record("2", kept=True)])
    two.put([record("mine")])
    assert two.adopt() == 0
    one.close()  # as its death does, this lets go of the lock
    assert two.adopt() == 2
    assert three.adopt() == 0
    assert two.bytes == sum(path.stat().st_size for path in files(tmp_path))
    assert drained(two)[0] in ("1", "2")
    assert files(tmp_path) == []
    two.close()
    three.close()
    assert list(tmp_path.iterdir()) == []


def test_what_an_adopter_has_not_delivered_goes_to_the_next(tmp_path: Path) -> None:
    one = make_spool(tmp_path, MB)
    one.put([record("1"), record("2", kept=True)])
    one.close()
    two = make_spool(tmp_path, MB)
    assert two.adopt() == 2
    found = two.next()
    assert found is not None
    two.done([found[0]])
    two.close()
    three = make_spool(tmp_path, MB)
    assert three.adopt() == 1
    assert len(drained(three)) == 1
    three.close()
    assert list(tmp_path.iterdir()) == []


def test_a_spool_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file/spool .*STREAM_GW_EVENTS_SPOOL"):
        make_spool(tmp_path / "file" / "spool", MB)


# --- damage ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 300), max_size=6), st.data())
def test_a_torn_tail_costs_only_what_was_being_written(sizes: list[int], data: st.DataObject) -> None:
    records = [record(str(n), size) for n, size in enumerate(sizes)]
    whole = bytearray(MAGIC)
    ends = [len(whole)]
    for one in records:
        whole += encode_record(one)
        ends.append(len(whole))
    cut = data.draw(st.integers(0, len(whole)))
    assert decode_segment(bytes(whole[:cut])) == records[: sum(end <= cut for end in ends[1:])]


@given(st.integers(0), st.integers(1, 255))
def test_a_changed_byte_is_found(at: int, change: int) -> None:
    records = [record(str(n)) for n in range(4)]
    whole = bytearray(MAGIC + b"".join(map(encode_record, records)))
    at %= len(whole)
    whole[at] ^= change
    try:
        got = decode_segment(bytes(whole))
    except Damaged as damage:
        got = damage.records
    # A length that says more than there is looks like a torn tail
    assert got == records[: len(got)] and len(got) < 4


def test_a_damaged_segment_gives_what_is_sound_and_is_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = make_spool(tmp_path, MB)
    spool.put([record("1"), record("2"), record("3")])
    (path,) = files(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    assert drained(spool) == ["1"]
    (aside,) = files(tmp_path)
    assert aside.parent == tmp_path and aside.name in caplog.text
    spool.close()


# --- death -------------------------------------------------------------------------------------------------

_WRITER = """
import sys, pathlib
from tests.telemetry.sinks import make_spool
from telemetry.emit.transport import Record
spool = make_spool(pathlib.Path(sys.argv[1]), 1 << 30)
spool.adopt()
number = int(sys.argv[2])
while True:
    batch = [Record(b"%d:" % n + b"x" * (n * 37 % 900), b"k", "request", not n % 3) for n in range(number, number + 20)]
    told = spool.put(batch)
    assert told.spooled.total() == 20
    number += 20
    print(number, flush=True)
    if number % 7 == 0 and (found := spool.next()) is not None:
        print("next", flush=True)
        spool.release([found[0]])
"""


def test_killed_at_any_moment_nothing_that_was_kept_is_lost_and_nothing_torn_is_read(tmp_path: Path) -> None:
    """Each writer takes over what the one before left, and goes on; each is killed in the middle of something."""
    upto = 0
    rng = random.Random(7)
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(upto)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(rng.randrange(5, 120)):
            line = writer.stdout.readline().strip()
            upto = int(line) if line.isdecimal() else upto
        writer.kill()
        # Events kept before its death that were not yet read from the pipe count too
        for line in writer.communicate()[0].split():
            upto = int(line) if line.isdecimal() else upto
        assert writer.returncode == -9
    spool = make_spool(tmp_path, 1 << 30)
    spool.adopt()
    out = [int(name) for name in drained(spool)]
    assert upto > 1000
    assert set(range(upto)) <= set(out), "something that was kept is gone"
    assert set(out) <= set(range(upto + 20)), "nobody wrote that"
    spool.close()
    assert list(tmp_path.iterdir()) == []
