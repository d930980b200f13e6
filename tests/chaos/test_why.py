"""Traces of a request whose replica was killed for real."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from telemetry.ask.http import HttpAsk
from telemetry.ask.why.explain import Answer, why
from tests.chaos.fleet import PARTITIONS, fleet, log_of
from tests.chaos.readers import SseReader, until_running
from tests.gateway.processes import Process, run_cli
from tests.gateway.wire import MODEL
from tests.support.figures import Tell
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.telemetry.asked import TOKEN

pytestmark = pytest.mark.chaos

TOKENS, READERS = 100, 6


async def test_why_names_the_replica_that_was_killed_and_its_recovery_adds_up(
    redis_server: RedisServer, tmp_path: Path, tell: Tell
) -> None:
    env = {
        "STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": str(PARTITIONS),
        "STREAM_GW_TELEMETRY_TOKEN": TOKEN, "STREAM_GW_TELEMETRY_LINGER_S": "0.1",
    }  # fmt: skip
    with closing(await asyncio.to_thread(Process, "telemetry", "--clickhouse", f"chdb://{tmp_path}/t", **env)) as door:
        url = door.facts["url"]
        async with (
            fleet(redis_server.url, sim="itl_ms=60,ttft_ms=60,max_num_seqs=64") as running,
            log_of(running.redis_url) as log,
        ):
            readers = [SseReader(running.gates[k % 2 :], k, TOKENS) for k in range(READERS)]
            reading = [asyncio.create_task(reader.read()) for reader in readers]
            await until_running(readers)
            victim = running.agents["replica0"]
            killed = victim.facts["replica"]
            lost = [r for r in readers if (await log.head(r.stream)).replica == killed]
            assert 0 < len(lost) < READERS, "some are on each"
            victim.kill()
            await asyncio.gather(*reading)
            found = {reader.stream: await _told(HttpAsk(url, TOKEN), reader.stream) for reader in readers}

        worst, told_s, seen_s = 0.0, [], []
        for reader in readers:
            story = found[reader.stream].story
            assert sum(segment.us for segment in story.segments()) == story.wall_us
            residual = abs(story.spent("residual_us")) / story.wall_us
            worst = max(worst, residual)
            assert residual < 0.02, f"{residual:.1%} of {reader.stream}'s time are not accounted for"
            if reader not in lost:
                assert found[reader.stream].cause != "killed replica"
                assert story.spent("recovery_us") == 0
                continue
            answer = found[reader.stream]
            assert answer.cause == "killed replica", answer.likely
            assert f"Replica {killed} died (its lease expired); " in answer.likely
            assert [row["ended"] for row in story.attempts] == ["lost", "completed"]
            assert story.bill is not None and story.bill["replica"] in answer.likely
            # The client's silence is the recovery plus a second prefill
            silent_s = max(b - a for a, b in pairwise(reader.heard_at))
            after = story.spent("recovery_us") + story.bill["prefill_us"] + story.bill["engine_queue_us"]
            assert after / 1e6 == pytest.approx(silent_s, rel=0.1, abs=0.15)
            told_s.append(after / 1e6)
            seen_s.append(silent_s)
        tell(
            f"recovery as told {max(told_s):.2f} s, as its clients heard it {max(seen_s):.2f} s; of {READERS} requests "
            f"at most {worst:.2%} not accounted for"
        )

        flags = {"STREAM_GW_TELEMETRY_URL": url, "STREAM_GW_TELEMETRY_TOKEN": TOKEN}
        done = await asyncio.to_thread(run_cli, "traces", "why", lost[0].stream, **flags)
        assert done.returncode == 0, done.stderr
        assert f"likely cause: Replica {killed} died" in done.stdout
        done = await asyncio.to_thread(run_cli, "traces", "pool", MODEL, "--json", **flags)
        life = [(row["what"], row["state"]) for row in json.loads(done.stdout) if row["replica"] == killed]
        assert life == [("lease", "ready"), ("dead", "")], done.stderr


async def _told(ask: HttpAsk, stream: str) -> Answer:
    async def whole() -> Answer | None:
        if not await ask.query("find", {"id": stream, "stream": stream, "from_us": 0, "until_us": 1 << 51}):
            return None
        found = await why(ask, stream)
        attempts = max((reader.row["attempts"] for reader in found.story.line), default=0)
        whole = found.story.line and found.story.bill is not None and len(found.story.attempts) == attempts
        return found if whole else None

    found: Answer = await eventually(whole, f"{stream} to be told", 30)
    return found
