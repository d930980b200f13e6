"""Records that are no events go to the dead letters with a reason; equal records give equal rows."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stream_fabric.events import AttemptTrace, FleetEvent, RequestTrace, encode_event
from stream_gw.settings import GatewaySettings
from telemetry.consume import rows
from telemetry.consume.rows import RECORD_BYTES_MAX, build_batch
from telemetry.emit.record import Part, PlainRecord
from tests.telemetry.load import AT_US, events

PART = Part("t", 3)
AT_MS = AT_US // 1000


def record(value: bytes | None, offset: int = 0, at_ms: int = AT_MS) -> PlainRecord:
    return PlainRecord(offset, at_ms, b"key", value)


def one(kind: type) -> dict[str, object]:
    """A good event, as JSON."""
    event = next(event for event in events(200) if isinstance(event, kind))
    found: dict[str, object] = msgspec.json.decode(encode_event(event))
    return found


def changed(kind: type, **fields: object) -> bytes:
    return msgspec.json.encode({**one(kind), **fields})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "no value"),
        (b"", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, "Expected `object`"),
        (b'{"kind":"request","x":' + b"[" * 100_000, ""),
        (b"x" * (RECORD_BYTES_MAX + 1), "at most"),
        (b'{"kind":"another"}', "Invalid value 'another'"),
        (b'{"kind":"request"}', "missing required field"),
        (changed(RequestTrace, wall_us="soon"), "Expected `int`, got `str`"),
        (changed(FleetEvent, v=2), "schema version 2"),
        (changed(FleetEvent, at_us=0), "60 days"),
        (changed(FleetEvent, at_us=AT_US + 90_000_000_000), "60 days"),
        (changed(FleetEvent, at_us=AT_US - 61 * 86_400_000_000), "60 days"),
        (changed(RequestTrace, wall_us=1 << 60), "wall_us is not within"),
        (changed(RequestTrace, weight=0), "weight is not within 1"),
        (changed(RequestTrace, weight=1 << 20), "weight is not within 1"),
        (changed(RequestTrace, prompt_tokens=1 << 63), "prompt_tokens"),
        (changed(RequestTrace, prompt_tokens=1 << 70), ""),
        (changed(RequestTrace, phases={"decode_us": 1 << 60}), "decode_us is not within"),
        (changed(AttemptTrace, itl_sketch=[1, 1 << 60]), "itl_sketch is not within"),
        (encode_event(next(iter(events(1)))).replace(b'"model0', b'"\\ud800').replace(b'"model', b'"\\ud800'), ""),
    ],
)
def test_what_is_no_event_is_put_aside(value: bytes | None, reason: str) -> None:
    good = encode_event(next(iter(events(1))))
    found = build_batch(PART, [record(good, 5), record(value, 6), record(good, 7)])
    assert found.rows == 2
    assert found.tables["requests"].column("_offset").to_pylist() == [5, 7]
    (poison,) = found.poison
    assert poison.record.offset == 6
    assert reason in poison.reason
    assert 0 < len(poison.reason) <= 500


def test_a_trace_may_stand_for_as_many_requests_as_the_setting_allows() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(trace_one_in=1_000_001)
    one_in = GatewaySettings(trace_one_in=1_000_000).trace_one_in
    found = build_batch(PART, [record(changed(RequestTrace, weight=one_in, wall_us=1 << 42))])
    assert (found.rows, found.poison) == (1, [])
    assert one_in * (1 << 42) < 1 << 63, "the roll-ups sum the product"
    found = build_batch(PART, [record(changed(RequestTrace, weight=one_in, wall_us=(1 << 42) + 1))])
    assert "wall_us is not within" in found.poison[0].reason


def test_a_moment_that_no_table_takes() -> None:
    late = 4_200_000_000_000
    found = build_batch(PART, [record(changed(FleetEvent, at_us=late * 1000), at_ms=late)])
    assert "60 days" in found.poison[0].reason


def test_rows_say_where_they_came_from() -> None:
    records = [record(encode_event(event), 10 + i) for i, event in enumerate(events(200))]
    found = build_batch(PART, records)
    assert set(found.tables) == {"requests", "attempts", "fleet"}
    assert found.rows == 200
    for table in found.tables.values():
        assert set(table.column("_topic").to_pylist()) == {"t"}
        assert set(table.column("_partition").to_pylist()) == {3}
    offsets = sorted(offset for table in found.tables.values() for offset in table.column("_offset").to_pylist())
    assert offsets == list(range(10, 210))


@pytest.mark.parametrize("piece", [1, 3, 64])
def test_rows_do_not_depend_on_the_pieces_they_are_made_in(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(encode_event(event), n) for n, event in enumerate(events(200))]
    for n, value in ((0, b"no event"), (7, changed(RequestTrace, wall_us=1 << 60)), (199, b"")):
        records[n] = record(value, n)
    whole = build_batch(PART, records)
    assert [item.record.offset for item in whole.poison] == [0, 7, 199]
    monkeypatch.setattr(rows, "_PIECE", piece)
    assert build_batch(PART, records) == whole
    assert all(column.num_chunks == 1 for table in whole.tables.values() for column in table.columns)


@given(st.lists(st.one_of(st.binary(max_size=50), st.sampled_from([encode_event(e) for e in events(10)])), max_size=20))
def test_every_record_is_a_row_or_put_aside(values: list[bytes]) -> None:
    records = [record(value, offset) for offset, value in enumerate(values)]
    first, again = build_batch(PART, records), build_batch(PART, records)
    assert first.rows + len(first.poison) == len(values)
    assert [item.record.offset for item in first.poison] == sorted(item.record.offset for item in first.poison)
    assert (first.tables, first.poison) == (again.tables, again.poison)
