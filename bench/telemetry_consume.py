"""How fast the consumer brings events from Kafka into ClickHouse, for a core of its own.

A topic of six partitions is filled first; then one ``stream-gw telemetry`` takes it all. Twice: with ClickHouse's
engine behind HTTP in another process, so that the consumer's processor time is its own, and with the engine inside it.
Rates are events for a second of the consumer's processor time, which a busy machine disturbs little, and for a second
of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from bench.harness import cpu_s
from tests.support.clickhouse import ClickHouseFront
from tests.support.kafka import KafkaServer
from tests.telemetry.load import Log, make_topics

BLOCK_ROWS = 20_000


def rss_mib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


def quantile(page: str, name: str, share: float) -> str:
    """Quantile of a histogram on a metrics page: the bucket's upper bound."""
    buckets = [(float(at), float(n)) for at, n in re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$', page, re.M)]
    for at, count in buckets:
        if count >= share * buckets[-1][1]:
            return f"<= {at * 1000:.0f} ms"
    return "?"


async def measure(events: int, url: str, kafka: KafkaServer, log: Log, group: str) -> str:
    log.settings |= {"clickhouse": url, "telemetry_group": group, "telemetry_block_rows": BLOCK_ROWS}
    consumer = await log.consume()
    used, began = cpu_s(consumer.process.pid), time.monotonic()
    await log.consumed(timeout_s=600)
    took, used = time.monotonic() - began, cpu_s(consumer.process.pid) - used
    with urlopen(f"{consumer.url}/metrics") as answer:
        page = answer.read().decode()
    peak = rss_mib(consumer.process.pid)
    await consumer.stop()
    insert = [quantile(page, "telemetry_insert_seconds", share) for share in (0.5, 0.99)]
    blocks = re.search(r"^telemetry_block_rows_count (\S+)$", page, re.M)
    assert blocks is not None
    return (
        f"{used / events * 1e6:.1f} us of processor time an event, {events / used:,.0f} events/s of a core, "
        f"{events / took:,.0f} events/s by the clock; "
        f"{float(blocks[1]):.0f} blocks, insert p50 {insert[0]}, p99 {insert[1]}; peak {peak} MiB"
    )


async def run(events: int) -> None:
    with KafkaServer() as kafka, ClickHouseFront() as front, tempfile.TemporaryDirectory() as folder:
        await make_topics(kafka.servers, "ev", "ev.dlq")
        log = Log(
            {"events": "kafka", "kafka_servers": kafka.servers, "events_topic": "ev", "telemetry_dlq_topic": "ev.dlq"}
        )
        began = time.monotonic()
        await log.add(events)
        print(f"{events} events produced in {time.monotonic() - began:.1f} s")
        print("engine behind HTTP:", await measure(events, front.url, kafka, log, "http"), flush=True)
        front.kill()
        print("engine inside:     ", await measure(events, f"chdb://{folder}/data", kafka, log, "chdb"), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench.telemetry_consume", description=__doc__, formatter_class=raw)
    parser.add_argument("--events", type=int, default=300_000)
    args = parser.parse_args(argv)
    asyncio.run(run(args.events))
    return 0


if __name__ == "__main__":
    sys.exit(main())
