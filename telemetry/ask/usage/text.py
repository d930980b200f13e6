"""Texts of ``stream-gw usage show`` and ``rebuild`` for a terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from telemetry.ask.queries import USAGE_SUMS
from telemetry.ask.text import money_text, rows_text, time_text
from telemetry.ask.usage.lost_bills import LostBills

_FORMULA = re.compile(r"[\s\x00-\x1f]*[=+@|%\uff1d\uff0b\uff0d\uff20-]")
"""Beginning of a text that a spreadsheet runs, also in full width; the exports of ``/ops`` have the same rule."""


def usage_text(page: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format all rows of usage as a table, with the moment up to which it is complete."""
    until = time_text(int(page["complete_until"] * 1e6))[:19] if page["complete_until"] else "not known"
    begins, ends = (time_text(page[name] * 1_000_000)[:16] for name in ("from", "to"))
    head = f"{begins} to {ends}, complete until {until}"
    shown = [
        {**({"begins": time_text(row["begins"] * 1_000_000)[:16]} if "begins" in row else {}),
         **{name: value for name, value in row.items() if name != "begins"}}
        for row in rows
    ]  # fmt: skip
    more = f"\nonly the first {len(shown)} rows; choose a shorter range or coarser groups" if page["has_more"] else ""
    return f"{head}\n{rows_text(shown)}{more}"


def usage_csv(page: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Format all rows of usage as CSV: times in UTC, money exact, in units of the currency."""
    begins = ["begins"] if page["bucket"] != "none" else []
    names = [*begins, *page["group_by"], *USAGE_SUMS, "gpu_us", "gpu_cost_micro", "margin_micro"]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(name.removesuffix("_micro") for name in names)
    for row in rows:
        table.writerow(_csv_value(name, row[name]) for name in names)
    return out.getvalue().rstrip("\n")


def _csv_value(name: str, value: Any) -> str:
    if name == "begins":
        return time_text(value * 1_000_000)[:19].replace(" ", "T") + "Z"
    if isinstance(value, str) and _FORMULA.match(value):
        return f"'{value}"
    return money_text(value) if name.endswith("_micro") else str(value)


def rebuild_text(found: Sequence[LostBills], *, written: bool) -> str:
    """List the bills that Redis has and ClickHouse lacks."""
    if not found:
        return "no bill is missing"
    rows = [
        {"hour_us": one.hour_us, "tenant": one.tenant, "model": one.model, "requests": one.requests,
         "prompt": one.prompt_tokens, "cached": one.cached_tokens, "output": one.output_tokens,
         "price_micro": one.price_micro}
        for one in found
    ]  # fmt: skip
    end = "written" if written else "nothing is written; repeat with --write"
    unpriced = sum(not one.priced for one in found)
    note = f"; {unpriced} without a price, because no bill of that tenant and model arrived" if unpriced else ""
    return f"{rows_text(rows)}\n{len(found)} hours of a tenant and model lack bills{note}: {end}"
