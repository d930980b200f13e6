"""``stream-gw up`` keeps traces by itself, from one up to the next."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from telemetry.spool import unframe
from tests.gateway.processes import Process, need_redis
from tests.gateway.wire import Gate, chat
from tests.support.waiting import eventually


async def _billed(up: Process) -> dict[str, Any] | None:
    told = up.facts["telemetry"]
    now = datetime.now(UTC)
    parameters = {"since": f"{now - timedelta(hours=2):%F %T}", "until": f"{now + timedelta(hours=2):%F %T}"}
    async with ClientSession() as session:
        body = {"query": "usage", "parameters": parameters}
        headers = {"authorization": f"Bearer {told['token']}"}
        async with session.post(f"{told['url']}/query", json=body, headers=headers) as answer:
            found = await answer.json()
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    return rows[0] if rows else None


async def test_what_was_asked_is_billed_also_after_the_next_up(tmp_path: Path) -> None:
    need_redis()
    flags = ["up", "--port", "0", "--gateways", "1", "--replicas", "1", "--telemetry", "--sim", "itl_ms=1,ttft_ms=1"]
    env = {"XDG_STATE_HOME": str(tmp_path), "STREAM_GW_TELEMETRY_LINGER_S": "0.1"}
    for round_ in (1, 2):
        with Process(*flags, **env) as up:
            (gateway,) = up.facts["gateways"]
            gate = Gate(gateway["url"], gateway["pid"], up.facts["key"])
            answer = await gate.ask("POST", "/v1/chat/completions", {**chat(7), "stream": False})
            assert answer.status == 200, answer.body

            async def billed(up: Process = up, round_: int = round_) -> bool:
                row = await _billed(up)
                return row is not None and (row["requests"], row["output_tokens"]) == (round_, 7 * round_)

            await eventually(billed, "the request to be billed", 20)
    assert (tmp_path / "stream-gw" / "telemetry").is_dir()
    assert list((tmp_path / "stream-gw" / "spool").iterdir()) == []


@pytest.mark.parametrize("spool", ["", "elsewhere"])
async def test_events_that_cannot_leave_wait_beside_the_traces(tmp_path: Path, spool: str) -> None:
    """Or where the operator wants them."""
    need_redis()
    flags = ["up", "--port", "0", "--gateways", "1", "--replicas", "1", "--no-telemetry", "--sim", "itl_ms=1,ttft_ms=1"]
    env = {"XDG_STATE_HOME": str(tmp_path), "STREAM_GW_EVENTS": "kafka", "STREAM_GW_KAFKA_SERVERS": "127.0.0.1:1"}
    folder = tmp_path / spool if spool else tmp_path / "stream-gw" / "spool"
    with Process(*flags, **env, **({"STREAM_GW_EVENTS_SPOOL": str(folder)} if spool else {})) as up:
        (gateway,) = up.facts["gateways"]
        gate = Gate(gateway["url"], gateway["pid"], up.facts["key"])
        answer = await gate.ask("POST", "/v1/chat/completions", {**chat(7), "stream": False})
        assert answer.status == 200, answer.body

        def held() -> bool:
            found = [record for path in folder.glob("*/*-*.*") for record in unframe(path.read_bytes())]
            return {record.kind for record in found} >= {"request", "attempt"}

        await eventually(held, "the events of the request to be on disk", 20)
        assert "there is no spool" not in up.log
