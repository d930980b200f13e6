"""``stream-gw up`` keeps traces by itself, from one up to the next."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

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
