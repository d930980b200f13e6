"""Conversion of records to rows: an event goes to its table's columns, an invalid record is kept with the reason.

The same records always give the same rows: no clock and no setting is read here. A block that is read again after a
crash is therefore the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import inspect
from msgspec.structs import astuple

from stream_fabric.events import PHASES, AttemptTrace, Event, FleetEvent, RequestTrace, decode_event
from stream_fabric.limits import TRACE_ONE_IN_MAX
from telemetry.emit.record import Part, Record

TABLES: dict[type, str] = {RequestTrace: "requests", AttemptTrace: "attempts", FleetEvent: "fleet"}
RECORD_BYTES_MAX = 1 << 20
"""Maximum size of an event in bytes. Kafka's own limit for a record is about the same."""
_PIECE = 2000
"""Number of events that are converted to columns at once."""
_INT_MAX = 1 << 48
"""Maximum of an integer field: nine years in microseconds. Sums over a minute stay far from 64 bits."""
_WEIGHTED_MAX = 1 << 42
"""The same for a request, whose figures are multiplied by its weight: 51 days."""
_EARLY_US = 60 * 86_400 * 1_000_000
_LATE_US = 86_400 * 1_000_000
_AT_MIN_US = 1_577_836_800_000_000  # 2020
_AT_MAX_US = 4_102_444_800_000_000  # 2100


@dataclass(frozen=True)
class Poison:
    """A record that is no event."""

    record: Record
    reason: str


@dataclass(frozen=True)
class Batch:
    """The rows of one block by table, and its invalid records."""

    tables: dict[str, pa.Table]
    """Tables by name, without empty ones."""
    poison: list[Poison]

    @property
    def rows(self) -> int:
        return sum(table.num_rows for table in self.tables.values())


@dataclass(frozen=True)
class _Column:
    """A table's column, and its conversion from the events' field."""

    name: str
    type: pa.DataType
    take: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    """Converts the events' fields to the column's values. None: no conversion is needed."""


def _columns_of(event: type) -> list[_Column]:
    """Return the columns of an event's table, from the event's fields."""
    info = inspect.type_info(event)
    assert isinstance(info, inspect.StructType)
    return [_column(field.encode_name, field.type) for field in info.fields]


def _column(name: str, kind: inspect.Type) -> _Column:
    if name == "at_us":
        return _Column("at", pa.timestamp("us", "UTC"))
    match kind:
        case inspect.IntType():
            return _Column(name, pa.int64())
        case inspect.BoolType():
            return _Column(name, pa.bool_())
        case inspect.VarTupleType(item_type=inspect.IntType()):
            return _Column(name, pa.list_(pa.int64()))
        case inspect.VarTupleType():
            return _Column(f"{name}_json", pa.string(), _json_texts)
        case inspect.DictType():
            return _Column(
                name, pa.map_(pa.string(), pa.float64()), lambda values: [list(value.items()) for value in values]
            )
        case inspect.StrType() | inspect.LiteralType() | inspect.UnionType():
            return _Column(name, pa.string())
        case inspect.StructType():
            return _Column(name, pa.null())
    raise AssertionError(f"field {name} has no column")


_encoder = msgspec.json.Encoder()


def _json_texts(values: Sequence[Any]) -> Sequence[str]:
    """Encode each value as JSON, an empty one as the empty string. One call encodes all: JSON escapes line breaks."""
    lines = _encoder.encode_lines(values).decode().split("\n")
    return [line if line != "[]" else "" for line in lines[: len(values)]]


_COLUMNS: dict[type, list[_Column]] = {event: _columns_of(event) for event in TABLES}


def columns(event: type) -> list[str]:
    """Return the column names of an event's table, without those of the record's origin."""
    names = [column.name for column in _COLUMNS[event] if column.name != "phases"]
    return [*names, *PHASES] if event is RequestTrace else names


def build_batch(part: Part, records: Sequence[Record]) -> Batch:
    """Convert the records of one block to rows."""
    pieces: dict[type, list[pa.Table]] = {event: [] for event in TABLES}
    poison: list[Poison] = []
    # Small pieces keep the events, several KiB each, in the processor's caches
    for begin in range(0, len(records), _PIECE):
        for kind, table in _piece_tables(part, records[begin : begin + _PIECE], poison):
            pieces[kind].append(table)
    poison.sort(key=lambda item: item.record.offset)
    tables = {TABLES[kind]: pa.concat_tables(found).combine_chunks() for kind, found in pieces.items() if found}
    return Batch(tables, poison)


def _piece_tables(part: Part, records: Sequence[Record], poison: list[Poison]) -> Iterator[tuple[type, pa.Table]]:
    """Convert a few records to tables; invalid records are added to ``poison``."""
    found: dict[type, tuple[list[Event], list[Record]]] = {event: ([], []) for event in TABLES}
    for record in records:
        try:
            event = _decode_event(record)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            poison.append(Poison(record, " ".join(str(error).split())[:500]))
        else:
            events, origins = found[type(event)]
            events.append(event)
            origins.append(record)
    for kind, (events, origins) in found.items():
        if not events:
            continue
        try:
            yield kind, _table(kind, events, origins, part)
        except _UNFIT:
            good: list[int] = []
            for index, event in enumerate(events):
                try:
                    _table(kind, [event], [origins[index]], part)
                except _UNFIT as error:
                    poison.append(Poison(origins[index], f"it fits no column: {error}"[:500]))
                else:
                    good.append(index)
            if good:
                yield kind, _table(kind, [events[i] for i in good], [origins[i] for i in good], part)


_UNFIT = (OverflowError, ValueError)
"""Errors of values that fit no column. pyarrow's ArrowInvalid and UnicodeEncodeError are ValueErrors."""


def _decode_event(record: Record) -> Event:
    """Decode and check the event in a record. Raises ValueError or MsgspecError for an invalid record."""
    value = record.value
    if value is None:
        raise ValueError("the record has no value")
    if len(value) > RECORD_BYTES_MAX:
        raise ValueError(f"the record has {len(value)} bytes, an event at most {RECORD_BYTES_MAX}")
    event = decode_event(value)
    record_us = record.timestamp * 1000
    at_us = event.at_us
    if not (record_us - _EARLY_US <= at_us <= record_us + _LATE_US and _AT_MIN_US <= at_us < _AT_MAX_US):
        # Tables have one partition a day: events of a wrong clock would create many
        raise ValueError(
            f"at_us {at_us} is not within 60 days before and 1 day after the record's own time, {record_us}"
        )
    return event


def _table(kind: type, events: Sequence[Event], origins: Sequence[Record], part: Part) -> pa.Table:
    """Build the table of events of one kind. Raises ValueError for a value that fits no column."""
    names: list[str] = []
    arrays: list[pa.Array] = []
    most = _WEIGHTED_MAX if kind is RequestTrace else _INT_MAX
    # zip transposes rows to columns in C
    for column, values in zip(_COLUMNS[kind], zip(*map(astuple, events), strict=True), strict=True):
        if column.name == "phases":
            continue
        names.append(column.name)
        taken = values if column.take is None else column.take(values)
        arrays.append(_array(column.name, taken, column.type, most))
    if kind is RequestTrace:
        phases = (event.phases for event in events if isinstance(event, RequestTrace))
        for name, values in zip(PHASES, zip(*map(astuple, phases), strict=True), strict=True):
            names.append(name)
            arrays.append(_array(name, values, pa.int64(), most))
    names += ("_topic", "_partition", "_offset")
    arrays.append(pa.array([part.topic] * len(events), pa.string()))
    arrays.append(pa.array([part.partition] * len(events), pa.int32()))
    arrays.append(pa.array([record.offset for record in origins], pa.int64()))
    return pa.Table.from_arrays(arrays, names=names)


def _array(name: str, values: Sequence[Any], kind: pa.DataType, most: int) -> pa.Array:
    """Build one column. Raises ValueError for a value that does not fit its type, or an integer above ``most``."""
    try:
        array = pa.array(values, kind)
    except _UNFIT as error:
        raise ValueError(f"{name}: {error}") from error
    whole = array.values if pa.types.is_list(kind) else array
    if pa.types.is_int64(whole.type) and len(whole):
        ends = pc.min_max(whole).as_py()
        low, high = (1, TRACE_ONE_IN_MAX) if name == "weight" else (-most, most)
        if ends["min"] < low or ends["max"] > high:
            raise ValueError(f"{name} is not within {low} and {high}")
    return array
