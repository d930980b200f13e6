"""The vocabulary of telemetry: what is said once is read the same, and sketches and money are exact."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.events import (
    PHASES,
    SCHEMA_VERSION,
    AttemptTrace,
    FleetEvent,
    Phases,
    Prices,
    RequestTrace,
    billable,
    decode_event,
    encode_event,
    event_key,
    sampled,
)
from stream_fabric.gap_histogram import ITL_BUCKETS, itl_bounds_us, itl_bucket
from stream_fabric.process.stats import locate_quantile, percentile
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, new_stream_id

STREAM = StreamId("resp_" + "0" * 32)
REQUEST = RequestTrace(
    "r", 1, GatewayId("g"), "created", "completed", TenantId("t"), 10, Phases(gateway_us=4, decode_us=6), stream=STREAM
)
ATTEMPT = AttemptTrace("a", 1, STREAM, TenantId("t"), "m", "m", ReplicaId("r"), "completed", billed=True)
FLEET = FleetEvent("f", 1, "scale", "controller", pool="m", figures={"wanted": 3.0})


def test_events_are_read_as_they_were_written() -> None:
    for event in (REQUEST, ATTEMPT, FLEET):
        assert decode_event(encode_event(event)) == event


def test_a_newer_schema_and_nonsense_are_told_apart() -> None:
    newer = encode_event(msgspec.structs.replace(ATTEMPT, v=SCHEMA_VERSION + 1))
    with pytest.raises(ValueError, match=f"version {SCHEMA_VERSION + 1}"):
        decode_event(newer)
    for record in (b"", b"{}", b'{"kind":"request"}', b"\xff", b'{"kind":"bill","id":"x"}'):
        with pytest.raises(msgspec.MsgspecError):
            decode_event(record)


def test_fields_that_are_not_known_are_passed_over() -> None:
    record = encode_event(FLEET)[:-1] + b',"added_later":[1]}'
    assert decode_event(record) == FLEET


def test_only_the_bill_may_never_be_dropped() -> None:
    assert [billable(e) for e in (REQUEST, ATTEMPT, msgspec.structs.replace(ATTEMPT, billed=False), FLEET)] == [
        False,
        True,
        False,
        False,
    ]


def test_all_of_a_stream_has_one_key() -> None:
    assert event_key(REQUEST) == event_key(ATTEMPT) == STREAM.encode()
    assert event_key(msgspec.structs.replace(REQUEST, stream="")) == b"r"


def test_phases_add_up() -> None:
    every = Phases(**{name: 10**k for k, name in enumerate(PHASES)})
    assert every.total_us == int("1" * len(PHASES))


@given(st.integers(0, 1 << 40))
def test_every_gap_is_in_its_bucket(gap_us: int) -> None:
    bucket = itl_bucket(gap_us)
    low, high = itl_bounds_us(bucket)
    assert low <= gap_us
    assert gap_us < high or bucket == ITL_BUCKETS - 1
    assert high - low <= max(1, low / 4)


@given(st.lists(st.integers(1, 5_000_000), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_sketch_tells_quantiles_within_an_eighth(gaps: list[int], share: float) -> None:
    sketch = [0] * ITL_BUCKETS
    for gap in gaps:
        sketch[itl_bucket(gap)] += 1
    found = locate_quantile(sketch, share, len(gaps))
    assert found is not None
    assert sum(itl_bounds_us(found.bucket)) / 2 == pytest.approx(percentile(sorted(gaps), share), rel=0.126, abs=1)


def test_money_is_rounded_once() -> None:
    cheap = Prices(prompt=150_000, cached=75_000, output=600_000)  # 0.15, 0.075 and 0.60 for a million tokens
    assert cheap.of(1_000_000, 0, 0) == 150_000
    assert cheap.of(1_000_000, 1_000_000, 1_000_000) == 675_000
    assert cheap.of(3, 0, 0) == 0
    assert cheap.of(4, 0, 0) == 1
    assert cheap.of(10, 99, 0) == cheap.of(10, 10, 0)


def test_the_sample_is_the_same_everywhere_and_of_its_size() -> None:
    streams = [new_stream_id(k, k.to_bytes(10, "big")) for k in range(20_000)]
    kept = sum(sampled(s, 10) for s in streams)
    assert 1800 < kept < 2200
    assert all(sampled(s, 1) for s in streams[:10])
