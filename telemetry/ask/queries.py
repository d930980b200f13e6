"""The saved queries of ``saved.sql``: each question that the asking code, the cookbook and a console put to ClickHouse.

An input is a parameter, ``{name:Type}``, which the server binds; no text of a query depends on what somebody gave.
Quantiles are of bfloat16 sketches: within 0.4 %, the same whatever the order, small, and they know weights.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from string import Template

from stream_fabric.errors import BadRequest, NotFound
from stream_fabric.events import PHASES
from telemetry.ask.named_queries import Query

Value = str | int | float

COHORT = ("model", "pool", "replica", "tenant", "region", "tier")
"""Properties that select a cohort, beside its time."""
PHASE_NAMES = tuple(name.removesuffix("_us") for name in PHASES)
TOP = 20
HOUR_US = 3_600_000_000
EVER_US = 4_102_444_800_000_000

_FILES = ("saved.sql", "saved_ops.sql", "saved_usage.sql")
_ENTRY = re.compile(r"\{(\w+):([\w()', ]+)\}")
_TYPES: Mapping[str, tuple[type, ...]] = {"Int64": (int,), "String": (str,)}
_FROM, _UNTIL = "{from_us:Int64}", "{until_us:Int64}"


def _matches_if_given(name: str) -> str:
    """Return the SQL condition that a column equals its parameter, or that the parameter is empty."""
    return f"({{{name}:String}} = '' OR {name} = {{{name}:String}})"


def _in_window(column: str, start: str, end: str) -> str:
    """Return the SQL condition that a time column lies between two times in µs, the end excluded."""
    return (
        f"({column} >= fromUnixTimestamp64Micro({start}, 'UTC') AND {column} < fromUnixTimestamp64Micro({end}, 'UTC'))"
    )


DIMENSIONS: Mapping[str, str] = {
    "model": "model", "key": "key", "user": "user_hash", "session": "session_hash", "endpoint": "endpoint",
    "tier": "tier", "tenant": "tenant",
}  # fmt: skip
"""Dimensions that usage can be grouped by, and their columns in ``bills``."""
USAGE_SUMS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "price_micro")
LONG_DIMENSIONS = ("model", "tenant")
"""Dimensions of usage over long ranges."""


def _group(number: int, names: Iterable[str]) -> str:
    """Return the SQL of a group's name: the column of the dimension that a parameter names; empty for none."""
    parameter = f"{{group_{number}:String}}"
    each = ", ".join(f"{parameter} = '{name}', toString({DIMENSIONS[name]})" for name in names)
    return f"multiIf({each}, '')"


_EACH_PHASE = ", ".join(f"{{phase:String}} = '{name.removesuffix('_us')}', {name}" for name in PHASES)
_PARTS: Mapping[str, str] = {
    "window": _in_window("at", _FROM, _UNTIL),
    "around": _in_window("at", f"{_FROM} - 7200000000", f"{_UNTIL} + 7200000000"),
    "cohort": f"({' AND '.join(map(_matches_if_given, COHORT))})",
    "tenant": _matches_if_given("tenant"),
    "band": "(prompt_tokens >= {prompt_from:Int64} AND prompt_tokens < {prompt_until:Int64})",
    "quantiles": ", ".join(
        f"quantilesBFloat16Weighted(0.5, 0.95, 0.99)({name}, toUInt64(weight)) AS {name}_q" for name in PHASES
    ),
    "means": ", ".join(f"sum({name} * weight) / sum(weight) AS {name}_mean" for name in PHASES),
    "phases": ", ".join(PHASES),
    "minutes": "(minute >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000)) "
    "AND minute < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000)))",
    "if_ended": _matches_if_given("ended"),
    "if_model": _matches_if_given("model"),
    "hours": "hour >= fromUnixTimestamp(intDiv({from_us:Int64}, 1000000)) "
    "AND hour < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))",
    "from_hour": "hour >= fromUnixTimestamp(intDiv({from_us:Int64}, 3600000000) * 3600) "
    "AND hour < fromUnixTimestamp(intDiv({until_us:Int64}, 1000000))",
    "bucket": "multiIf({bucket:String} = 'hour', toInt64(toUnixTimestamp(hour)) * 1000000, {bucket:String} = 'day', "
    "toInt64(toUnixTimestamp(toStartOfDay(hour))) * 1000000, {bucket:String} = 'month', "
    "toInt64(toUnixTimestamp(toDateTime(toStartOfMonth(hour), 'UTC'))) * 1000000, 0)",
    "group_1": _group(1, DIMENSIONS),
    "group_2": _group(2, DIMENSIONS),
    "group_long_1": _group(1, LONG_DIMENSIONS),
    "group_long_2": _group(2, LONG_DIMENSIONS),
    "after_group": "(bucket_us, name_1, name_2) > ({after_us:Int64}, {after_1:String}, {after_2:String})",
    "after_hour": "(hour_us, tenant, model) > ({after_us:Int64}, {after_1:String}, {after_2:String})",
    "usage_sums": ", ".join(f"sum(bills.{name}) AS {name}" for name in USAGE_SUMS),
    "adjusted_sums": ", ".join(f"sumIf(bills.{name}, adjusts) AS adjusted_{name}" for name in USAGE_SUMS),
    "phase": f"multiIf({_EACH_PHASE}, {{phase:String}} = 'ttft', ttft_us, requests.wall_us)",
}


@dataclass(frozen=True)
class Saved(Query):
    """A query of ``saved.sql``. ``defaults``: values of parameters that may be left out."""

    name: str = ""
    defaults: Mapping[str, Value] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, str]:
        """Name → ClickHouse type of each parameter in the SQL."""
        return dict(_ENTRY.findall(self.sql))

    def values(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """Check the given parameters and add the defaults. Raises BadRequest."""
        wanted = self.parameters
        if unknown := sorted(set(given) - set(wanted)):
            raise BadRequest(f"query {self.name} has no {', '.join(unknown)}; it takes {', '.join(sorted(wanted))}")
        values = {name: value for name, value in {**self.defaults, **given}.items() if name in wanted}
        if missing := sorted(set(wanted) - set(values)):
            raise BadRequest(f"query {self.name} needs {', '.join(missing)}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, _TYPES[wanted[name]]):
                raise BadRequest(f"{name} of query {self.name} is {wanted[name]}, got {value!r}")
        return values


def _read_saved() -> dict[str, Saved]:
    """Parse the files of saved queries, and insert the common SQL parts."""
    folder = resources.files("telemetry.ask")
    text = "\n".join(folder.joinpath(name).read_text("utf-8") for name in _FILES)
    found = {}
    for part in text.split("\n-- name: ")[1:]:
        name, _, rest = part.partition("\n")
        assert name not in found, f"two saved queries are named {name}"
        lines = rest.splitlines()
        about = next(line[10:] for line in lines if line.startswith("-- tells: "))
        given = [line[12:].partition(" = ") for line in lines if line.startswith("-- default: ")]
        sql = " ".join(line.strip() for line in lines if not line.startswith("--")).strip().removesuffix(";")
        defaults = {key: ast.literal_eval(value) for key, _, value in given}
        everyone: dict[str, Value] = {**dict.fromkeys(COHORT, ""), "top": TOP}
        found[name] = Saved(Template(sql).substitute(_PARTS), about, name, {**everyone, **defaults})
    return found


SAVED: Mapping[str, Saved] = _read_saved()


def saved(name: str) -> Saved:
    """Return the saved query of this name. Raises NotFound, which lists all names."""
    found = SAVED.get(name)
    if found is None:
        raise NotFound(f"there is no query {name!r}; there are {', '.join(sorted(SAVED))}")
    return found
