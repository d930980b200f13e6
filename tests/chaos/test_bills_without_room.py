"""Kafka away for longer than the spool holds: replicas that may not serve without bills stop, and go on afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import pytest

from bench.harness import Cores
from bench.outage import TOPIC, Counters, Settlements, compare, read_topic
from bench.platform import PARTITIONS, Platform
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from tests.gateway.processes import need_redis
from tests.support.figures import Tell
from tests.support.kafka import KafkaServer
from tests.support.waiting import eventually
from tests.telemetry.load import make_topics

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

CALLERS = 16
ANSWER_S = 4.0
MIB = 1 << 20


class Callers:
    """Callers that ask again at once; a request that is refused or not answered in time makes its caller wait."""

    def __init__(self, running: Platform) -> None:
        self._url = running.gateway_urls[0] + "/v1/chat/completions"
        self._key = running.key
        self.streams: list[str] = []
        self.unserved = 0
        self.wrong: list[str] = []

    async def run(self, session: aiohttp.ClientSession, number: int) -> None:
        body: dict[str, Any] = {"model": "sim-small", "max_tokens": 2, "ignore_eos": True, "user": f"user-{number}" * 8}
        headers = {"authorization": f"Bearer {self._key}"}
        while True:
            body["messages"] = [{"role": "user", "content": f"{number} {len(self.streams)}"}]
            try:
                async with asyncio.timeout(ANSWER_S), session.post(self._url, json=body, headers=headers) as reply:
                    text = await reply.text()
                    if reply.status == 200:
                        self.streams.append(reply.headers["x-stream-id"])
                        continue
                    if reply.status not in (429, 503):
                        self.wrong.append(f"{reply.status} {text[:200]}")
            except TimeoutError:
                pass
            self.unserved += 1
            await asyncio.sleep(0.2)


def at_risk(running: Platform) -> bool:
    for url in running.metrics_urls:
        with urlopen(url + "/metrics", timeout=10) as answer:
            if re.search(r"^agent_bills_at_risk\S* 1(\.0)?$", answer.read().decode(), re.MULTILINE):
                return True
    return False


async def test_a_replica_stops_before_a_bill_is_lost_and_goes_on_when_they_leave(tmp_path: Path, tell: Tell) -> None:
    need_redis()
    usable = frozenset(os.sched_getaffinity(0))
    with KafkaServer() as kafka:
        await make_topics(kafka.servers, TOPIC)
        environment = {
            "STREAM_GW_PARTITIONS": str(PARTITIONS),
            "STREAM_GW_EVENTS": "kafka",
            "STREAM_GW_KAFKA_SERVERS": kafka.servers,
            "STREAM_GW_EVENTS_TOPIC": TOPIC,
            "STREAM_GW_EVENTS_SPOOL": str(tmp_path / "spool"),
            "STREAM_GW_EVENTS_SPOOL_BYTES_MAX": str(MIB),
            "STREAM_GW_EVENTS_MEMORY_BYTES_MAX": str(4 * MIB),
            "STREAM_GW_SERVE_WITHOUT_BILLS": "never",
        }
        running = Platform(
            Cores(usable, usable),
            tmp_path,
            0,
            command=f"{sys.executable} -m stream_gw.cli.main up --no-telemetry --no-database",
            environment=environment,
            engine=["--engine", "sim", "--sim", "itl_ms=0,ttft_ms=0"],
        )
        client = RedisClient(running.redis_url)
        await client.start()
        try:
            settlements = Settlements(RedisStreamLog(client, await check_partitions(client, PARTITIONS)))
            callers = Callers(running)
            async with aiohttp.ClientSession() as session:
                calling = [asyncio.create_task(callers.run(session, number)) for number in range(CALLERS)]
                await eventually(lambda: len(callers.streams) > 50, "the first answers")
                await asyncio.to_thread(kafka.stop)
                away_at = time.monotonic()

                async def stopped() -> bool:
                    await settlements.ask(callers.streams)
                    return await asyncio.to_thread(at_risk, running)

                await eventually(stopped, "the spool to be full", 120)
                full_s = time.monotonic() - away_at
                await asyncio.sleep(2 * ANSWER_S)  # what runs ends, and the lease says that the replica takes nothing
                served, unserved = len(callers.streams), callers.unserved
                await asyncio.sleep(ANSWER_S + 1)  # longer than each caller takes for one try
                assert len(callers.streams) == served, "requests are served without bills"
                assert callers.unserved > unserved
                await asyncio.to_thread(kafka.start)
                back_at = time.monotonic()
                await eventually(lambda: len(callers.streams) > served + 50, "requests to be served again", 60)
                again_s = time.monotonic() - back_at
                for task in calling:
                    task.cancel()
                await asyncio.gather(*calling, return_exceptions=True)
            await settlements.ask(callers.streams)
            counters = await Counters(running.metrics_urls).quiet(60)
            accounts = compare(await read_topic(kafka.servers), settlements, await settlements.output())
        finally:
            await client.close()
            running.stop()
    tell(
        f"{served} answers until the spool of 1 MiB was full after {full_s:.1f} s; served again {again_s:.1f} s after "
        f"Kafka's start; {accounts}"
    )
    assert callers.wrong == []
    assert not accounts.missing and not accounts.twice and not accounts.other, accounts
    assert counters["events_emitted_total"] and counters["events_billing_dropped_total"] == 0
