"""Reconstruction of lost bills: what Redis settled and no bill says, by tenant, hour and model.

Each difference becomes one row of ``bills`` that adjusts its hour. A second run finds no difference. Two runs at once
write the same row, because its id and the name of its insert follow from the hour and the number of earlier rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import TenantId
from telemetry.ask.queries import HOUR_US, Value
from telemetry.ask.reconcile import PAGE, Row, Settled, hour_agrees, hour_rows
from telemetry.ask.store_ask import StoreAsk
from telemetry.ask.usage.lost_bills import LostBills
from telemetry.store.store import Store

_FIGURES = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_NONE = (0, 0, 0, 0)


async def rebuild(
    store: Store, settled: Settled, from_us: int, until_us: int, now_us: int, tenant: str = "", *, write: bool
) -> list[LostBills]:
    """Return what closed hours lack, and with ``write`` add it to ClickHouse. Raises the store's and fabric's errors.

    An hour is closed 10 minutes after its end: until then its last bills may be on their way.
    """
    ask = StoreAsk(store)
    from_us = from_us - from_us % HOUR_US
    until_us = min(until_us + -until_us % HOUR_US, (now_us - 600_000_000) // HOUR_US * HOUR_US)
    found: list[LostBills] = []
    for name in [tenant] if tenant else await _tenants(ask, from_us, until_us):
        window: dict[str, Value] = {"from_us": from_us, "until_us": until_us, "tenant": name}
        wider: dict[str, Value] = {**window, "until_us": until_us + HOUR_US}
        ledger = _by_hour(await hour_rows(ask, "bills_by_hour", window))
        edges = _by_hour(await hour_rows(ask, "billed_near_hours", wider))
        prices = _mean_prices(ledger)
        for hour_us in range(from_us, until_us, HOUR_US):
            for model, (streams, used) in sorted((await settled.usage(TenantId(name), hour_us // HOUR_US)).items()):
                billed = ledger.get((hour_us, model), {})
                ours = (streams, used.prompt, used.cached, used.output)
                late = _figures(edges.get((hour_us, model), {})), _figures(edges.get((hour_us + HOUR_US, model), {}))
                if not hour_agrees(ours, _figures(billed), *late):
                    lost = _lost(hour_us, name, model, streams, used, billed, prices)
                    found += [lost] if any(getattr(lost, figure) for figure in _TOKENS) else []
    if write:
        for lost in found:
            await store.insert("bills", _row(lost), lost.id)
    return found


async def _tenants(ask: StoreAsk, from_us: int, until_us: int) -> list[str]:
    found: list[str] = []
    window: dict[str, Value] = {"from_us": from_us, "until_us": until_us + HOUR_US, "top": PAGE}
    while rows := await ask.query("tenant_names", {**window, "after": found[-1] if found else ""}):
        found += [str(row["tenant"]) for row in rows]
    return found


def _by_hour(rows: Iterable[Row]) -> dict[tuple[int, str], Row]:
    return {(int(row["hour_us"]), str(row["model"])): row for row in rows}


def _figures(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in _FIGURES) if row else _NONE


def _mean_prices(ledger: Mapping[tuple[int, str], Row]) -> dict[str, tuple[int, int]]:
    """Return by model (price, tokens) of the tenant's bills that did arrive, without the rows that adjust hours."""
    sums: dict[str, tuple[int, int]] = {}
    for (_, model), row in ledger.items():
        price, tokens = sums.get(model, (0, 0))
        tokens += sum(int(row[name]) - int(row[f"adjusted_{name}"]) for name in ("prompt_tokens", "output_tokens"))
        sums[model] = price + int(row["price_micro"]) - int(row["adjusted_price_micro"]), tokens
    return sums


def _lost(
    hour_us: int,
    tenant: str,
    model: str,
    streams: int,
    used: Usage,
    billed: Mapping[str, Any],
    prices: Mapping[str, tuple[int, int]],
) -> LostBills:
    def less(settled: int, name: str) -> int:
        # Only what earlier rows have added is taken back: bills are right where Redis has lost a part of its account
        return max(settled - int(billed.get(name, 0)), -int(billed.get(f"adjusted_{name}", 0)))

    prompt, output = less(used.prompt, "prompt_tokens"), less(used.output, "output_tokens")
    price, tokens = prices.get(model, (0, 0))
    if prompt + output < 0:  # bills came after all: the earlier rows give back their own price
        price = int(billed["adjusted_price_micro"])
        tokens = int(billed["adjusted_prompt_tokens"]) + int(billed["adjusted_output_tokens"])
    return LostBills(
        hour_us, tenant, model, less(streams, "requests"), prompt, less(used.cached, "cached_tokens"), output,
        less(used.reasoning, "reasoning_tokens"), price * (prompt + output) // tokens if tokens else 0, tokens > 0,
        int(billed.get("adjusting", 0)),
    )  # fmt: skip


def _row(lost: LostBills) -> pa.Table:
    texts = {"tenant": lost.tenant, "model": lost.model, "key": "", "user_hash": "", "session_hash": "", "endpoint": "",
             "id": lost.id, "pool": ""}  # fmt: skip
    numbers = {
        name: getattr(lost, name)
        for name in ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "price_micro")
    } | {"gpu_us": 0, "gpu_cost_micro": 0}
    return pa.table(
        {
            "hour": pa.array([lost.hour_us // 1_000_000], pa.uint32()),
            **{name: [text] for name, text in texts.items()},
            "adjusts": [True],
            **{name: pa.array([number], pa.int64()) for name, number in numbers.items()},
        }
    )
