"""Batch requests on a pool of spot replicas that are reclaimed, on real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.control.test_overload_platform import MODEL, ask, platform
from tests.gateway.processes import run_cli
from tests.gateway.wire import Gate, chat
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.telemetry.asked import TOKEN

pytestmark = pytest.mark.platform

STREAMS = 3


async def whole(gate: Gate, number: int) -> tuple[str, str]:
    """A batch request's stream and its text."""
    async with gate.create(chat(400, seed=number, service_tier="batch", model=MODEL)) as exchange:
        assert exchange.status == 200
        lines = (await exchange.rest(90)).split(b"\n")
    assert b"data: [DONE]" in lines
    chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert not any("error" in chunk for chunk in chunks)
    deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    return exchange.headers["x-stream-id"], "".join(deltas)


async def test_batch_streams_whose_spot_replicas_are_reclaimed_come_whole_from_the_home_pool(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """One replica dies without notice, the other one has a notice of a second."""
    pools = f"""
    [pool.north]
    models = ["{MODEL}"]
    replicas_max = 1
    batch_pools = ["north-spot"]
    [pool.north-spot]
    models = ["{MODEL}"]
    """
    async with platform(redis_server, tmp_path / "pools.toml", pools) as up:
        telemetry = await up.start("telemetry", "--clickhouse", f"chdb://{tmp_path}/t", "--telemetry-linger-s", "0.1")
        await up.agent("north", "n1", "itl_ms=20,ttft_ms=10,max_num_seqs=8")
        flags = ("--pool", "north-spot", "--drain-s", "1")
        sim = f"model={MODEL},itl_ms=20,ttft_ms=10,max_num_seqs=2"
        spot = [await up.start("agent", "--replica", name, "--sim", sim, *flags) for name in ("s1", "s2")]
        await up.start("controller", "--pools-file", str(tmp_path / "pools.toml"))
        await up.planned("north")
        await up.planned("north-spot")
        assert (await up.gates[0].ask("GET", "/v1/models")).json["data"]
        await asyncio.sleep(1.5)  # gateways read plans each second

        batch = [asyncio.create_task(whole(up.gates[number % 2], number)) for number in range(STREAMS)]
        others = [ask(up.gates[n % 2], ("interactive", "standard")[n % 2], 10 + n, 20) for n in range(4)]
        assert {told.placement["replica"][:2] for told in await asyncio.gather(*others)} == {"n1"}
        await asyncio.sleep(1.0)
        spot[0].kill()
        await asyncio.sleep(1.5)
        spot[1].terminate()
        told = await asyncio.gather(*batch)

        for number, (stream, text) in enumerate(told):
            moves: list[dict[str, Any]] = (await up.gates[0].ask("GET", f"/v1/streams/{stream}/placement")).json[
                "placements"
            ]
            print([(move["attempt"], move["replica"], move["reason"]) for move in moves])
            assert moves[0]["batch_host"] == {"home": "north", "to": "north-spot"}
            assert moves[0]["replica"][0] == "s" and moves[-1]["replica"].startswith("n1") and "queue" not in moves
            assert [move["attempt"] for move in moves] == list(range(1, len(moves) + 1))
            assert (await whole(up.gates[0], number))[1] == text, "as it is when nobody disturbs it"
        assert (await ask(up.gates[0], "interactive", 20, 20)).placement["replica"].startswith("n1")
        assert (await up.pools.demand_totals("north-spot")).requests == 0

        env = {"STREAM_GW_TELEMETRY_URL": telemetry.facts["url"], "STREAM_GW_TELEMETRY_TOKEN": TOKEN}

        async def why() -> str | None:
            done = await asyncio.to_thread(run_cli, "traces", "why", told[0][0], **env)
            return done.stdout if "placement" in done.stdout else None

        text = await eventually(why, "the trace", 30)
        assert "placement: batch_host" in text and "batch host north-spot of pool north" in text, text
