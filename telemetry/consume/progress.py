"""Reports to ClickHouse up to which moment events are inserted, so that answers can say how fresh they are."""

from __future__ import annotations

import asyncio
import logging

import pyarrow as pa

from stream_fabric.ports import Clock, Random
from telemetry.consume.consumer import Consumer
from telemetry.store.errors import StoreRefused, StoreUnavailable
from telemetry.store.store import Store

_log = logging.getLogger(__name__)

EVERY_S = 10.0
EMIT_S = 5.0
"""Usual maximum time from an event to its log. Events in a spool take longer."""


async def report_progress(consumer: Consumer, store: Store, clock: Clock, random: Random, every_s: float) -> None:
    """Write the progress of the consumer's partitions every ``every_s`` seconds until cancelled."""
    while True:
        known = consumer.complete_until_us(clock.now_us())
        if known:
            moments = [until_us - int(EMIT_S * 1e6) for until_us in known.values()]
            rows = pa.table(
                {
                    "topic": [part.topic for part in known],
                    "partition": pa.array([part.partition for part in known], pa.int32()),
                    "complete_until": pa.array(moments, pa.timestamp("us", "UTC")),
                }
            )
            try:
                await store.insert("ingest_progress", rows, f"progress:{random.token_hex(8)}")
            except (StoreUnavailable, StoreRefused) as error:
                _log.warning("progress not written, retrying: error=%s", error)
        await asyncio.sleep(every_s)
