"""What a running platform tells can be asked: why, and whether its accounts agree."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from telemetry.ask.http import HttpAsk
from telemetry.ask.why import Answer, why
from tests.gateway.processes import Process, Running, run_cli, running
from tests.gateway.wire import Gate, chat
from tests.support.waiting import eventually
from tests.telemetry.asked import TOKEN


@pytest.fixture(scope="module")
def platform() -> Iterator[Running]:
    with running(sim="itl_ms=5,ttft_ms=10") as started:
        yield started


@pytest.fixture(scope="module")
def door(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("engine")
    env = {
        "STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4", "STREAM_GW_TELEMETRY_TOKEN": TOKEN,
        "STREAM_GW_TELEMETRY_LINGER_S": "0.1",
    }  # fmt: skip
    with closing(Process("telemetry", "--clickhouse", f"chdb://{folder}", **env)) as process:
        yield process.facts["url"]


async def _told(ask: HttpAsk, stream: str, readers: int = 1) -> Answer:
    async def whole() -> Answer | None:
        rows = await ask.query("find", {"id": stream, "stream": stream, "from_us": 0, "until_us": 1 << 51})
        if not rows:
            return None
        found = await why(ask, stream)
        told = len(found.story.line) + len(found.story.beside)
        return found if told == readers and found.story.bill is not None else None

    found: Answer = await eventually(whole, f"{stream} to be told", 20)
    return found


async def _answered(gate: Gate, tokens: int, **more: Any) -> str:
    async with gate.create(chat(tokens, **more)) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.rest()
    return str(stream)


async def test_a_platforms_own_story_and_its_accounts(platform: Running, door: str) -> None:
    ask = HttpAsk(door, TOKEN)
    one, two = platform.gates
    plain = await asyncio.gather(*(_answered(one, 20 + n) for n in range(10)))
    async with one.create(chat(2000)) as exchange:
        cancelled = exchange.headers["x-stream-id"]
        await exchange.events(8)
        await two.cancel(cancelled)
        await exchange.rest()
    async with one.create(chat(120), {"idempotency-key": f"k{time.time_ns()}"}) as exchange:
        resumed = exchange.headers["x-stream-id"]
        last = (await exchange.events(20))[-1].id
    await asyncio.sleep(0.3)  # away, which the story tells
    async with two.open("GET", f"/v1/streams/{resumed}", headers={"last-event-id": last}) as exchange:
        await exchange.rest()

    for stream in plain:
        story = (await _told(ask, stream)).story
        assert sum(segment.us for segment in story.segments()) == story.wall_us
        assert story.outcome == "completed"
    found = await _told(ask, resumed, 2)
    assert [reader.role for reader in found.story.line] == ["created", "resumed"]
    assert found.story.spent("resume_gap_us") > 200_000
    assert found.cause == "resume gap"
    assert (await _told(ask, cancelled)).story.outcome == "cancelled"

    done = await asyncio.to_thread(
        run_cli, "usage", "reconcile", "--since", "1h", "--json",
        STREAM_GW_TELEMETRY_URL=door, STREAM_GW_TELEMETRY_TOKEN=TOKEN, STREAM_GW_REDIS_URL=platform.redis_url,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 0, report["disagreements"]
    assert report["agrees"]
    assert report["streams"] == report["whole"] == report["held"] == 12
    assert report["settled_output"] == report["billed_output"] == report["streamed_output"]
