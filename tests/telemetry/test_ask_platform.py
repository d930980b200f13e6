"""Questions to a running platform: why a request was slow, and whether its accounts agree."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from telemetry.ask.http import HttpAsk
from telemetry.ask.why.explain import Answer, why
from tests.gateway.processes import Process, Running, run_cli, running
from tests.gateway.wire import Gate, chat
from tests.support.waiting import eventually
from tests.telemetry.asked import TOKEN

pytestmark = pytest.mark.platform


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


# --- what was made to go wrong -----------------------------------------------------------------------------------


@contextmanager
def _agent(platform: Running, name: str, sim: str, *flags: str, **env: str) -> Iterator[Process]:
    """A replica of a model of its own."""
    env |= {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    with closing(Process("agent", "--replica", name, "--sim", f"model=sim-{name},{sim}", *flags, **env)) as process:
        yield process


async def _until_served(gate: Gate, model: str) -> None:
    async def served() -> bool:
        return model in {one["id"] for one in (await gate.ask("GET", "/v1/models")).json["data"]}

    await eventually(served, f"{model} to be served")


def _adds_up(found: Answer) -> None:
    story = found.story
    assert sum(segment.us for segment in story.segments()) == story.wall_us
    assert abs(story.spent("residual_us")) < 0.02 * story.wall_us + 5000, story.segments()


async def test_why_of_a_client_that_really_reads_slowly(platform: Running, door: str) -> None:
    one, _ = platform.gates
    with _agent(platform, "quick", "itl_ms=0,ttft_ms=0"):
        await _until_served(one, "sim-quick")
        async with one.connection(4096) as exchange:
            exchange.pause_s = 0.015
            await exchange.send(one.request("POST", "/v1/chat/completions", chat(4000, model="sim-quick")))
            await exchange.head()
            await exchange.rest(60)
        found = await _told(HttpAsk(door, TOKEN), exchange.headers["x-stream-id"])
    _adds_up(found)
    assert found.cause == "slow client"
    assert found.story.spent("client_stall_us") > 0.5 * found.story.wall_us


async def test_why_of_a_request_that_really_waited_in_a_queue(platform: Running, door: str) -> None:
    one, _ = platform.gates
    with _agent(platform, "single", "itl_ms=10,ttft_ms=10,max_num_seqs=1", "--room-ratio", "1"):
        await _until_served(one, "sim-single")
        async with one.create(chat(200, model="sim-single")) as busy:
            await busy.events(2)
            began = time.monotonic()
            async with one.create(chat(5, model="sim-single")) as waiting:
                stream = waiting.headers["x-stream-id"]
                await waiting.rest()
            took_us = (time.monotonic() - began) * 1e6
            await busy.rest()
        found = await _told(HttpAsk(door, TOKEN), stream)
    _adds_up(found)
    assert found.cause == "full queue", found.likely
    assert 0.6 * took_us < found.story.spent("pool_queue_us") < took_us


async def test_why_of_a_prefix_that_really_was_cold(platform: Running, door: str) -> None:
    """A session's replica leaves, and its next turn is computed anew by another."""
    one, _ = platform.gates
    ask = HttpAsk(door, TOKEN)
    words = "Of rivers, and of what lies at their banks. " * 400
    turns = [{"role": "user", "content": words}]

    async def turn(number: int) -> Answer:
        turns.append({"role": "user", "content": f"And then, {number}?"})
        stream = await _answered(one, 3, model="sim-cold", session_id="s-cold", messages=turns)
        return await _told(ask, stream)

    sim = "itl_ms=2,ttft_ms=5,prefill_tokens_per_s=5000"
    with _agent(platform, "cold", sim):
        await _until_served(one, "sim-cold")
        warm = [await turn(number) for number in range(5)]
    # Nothing is named, or what a busy machine really does to a turn
    assert {found.cause for found in warm[1:]} <= {"", "fabric slow"}, [found.likely for found in warm[1:]]

    async def known() -> bool:
        directory = (await one.ask("GET", "/v1/models")).json["data"]
        return "sim-cold" in {model["id"] for model in directory}

    async def forgotten() -> bool:
        return not await known()

    # A gateway that still believed in the first replica would let the turn wait for it
    await eventually(forgotten, "the first replica to be forgotten")
    with _agent(platform, "cold", sim) as other:
        await eventually(known, "the other replica to be known")
        found = await turn(5)
        assert found.story.fact("replica") == other.facts["replica"]
    _adds_up(found)
    assert found.cause == "cold prefix", found.likely
    assert found.story.cached_tokens < 100 < found.story.prompt_tokens


async def test_why_of_an_engine_that_really_stood_still(platform: Running, door: str) -> None:
    one, _ = platform.gates
    with _agent(platform, "still", "itl_ms=10,ttft_ms=10", STREAM_GW_TRACE_TOKENS_ONE_IN="1") as agent:
        await _until_served(one, "sim-still")
        async with one.create(chat(150, model="sim-still")) as exchange:
            stream = exchange.headers["x-stream-id"]
            await exchange.events(40)
            agent.signal(signal.SIGSTOP)
            await asyncio.sleep(1.5)  # shorter than its lease lives
            agent.signal(signal.SIGCONT)
            await exchange.rest()
        found = await _told(HttpAsk(door, TOKEN), stream)
    _adds_up(found)
    assert found.cause == "token stall", found.likely
    (row,) = found.story.attempts
    assert len(row["token_us"]) == 150
    assert 1_300_000 < max(row["token_us"]) == row["itl_max_us"]
    at = row["token_us"].index(row["itl_max_us"])
    assert f"between tokens {at} and {at + 1}" in found.likely
    assert 30 < at < 60
