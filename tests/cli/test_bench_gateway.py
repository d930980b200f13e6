"""``stream-gw bench`` against gateways that resume, cancel or replay wrongly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from tests.agent.engines.upstream import SSE, Handler, server
from tests.cli.bench_target import CHAT, DONE, measured, piece


class FaultyGateway:
    """Answers and resumes as a gateway does. ``fault``: ``repeats`` or ``loses`` a piece at a resume, ``runs on``
    behind a cancel, ``is silent`` at a cancel and at a replay, or ``dies`` in the answer; empty: none."""

    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._cancelled: dict[str, int] = {}
        self._count = 0

    async def create(self, request: web.Request) -> web.StreamResponse:
        self._count += 1
        return await self._follow(request, f"resp_{self._count}", 0)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        if "after" not in request.query and self._fault == "is silent":
            await asyncio.sleep(60)
        after = int(request.query.get("after", "1-0").rpartition("-")[2])
        if after and self._fault == "repeats":
            after -= 1
        if after and self._fault == "loses":
            after += 1
        return await self._follow(request, request.match_info["id"], after)

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        if self._fault == "is silent":
            await asyncio.sleep(60)
        if self._fault == "dies":
            return web.json_response({"result": "terminal", "status": "failed"})
        at = self._cancelled.setdefault(request.match_info["id"], 30)
        return web.json_response({"result": "accepted", "at": f"1-{at}", "status": "cancelled"})

    async def _follow(self, request: web.Request, stream: str, after: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={**SSE, "x-stream-id": stream})
        await response.prepare(request)
        for seq in range(after + 1, 61):
            if self._fault == "dies" and seq == 20 and self._count > 2:  # the first two are the probe
                await response.write(b'data: {"error":{"code":"replica_lost","message":"gone"}}\nid: 1-20\n\n')
                return response
            if seq > self._cancelled.get(stream, 60) + 2 * (self._fault == "runs on"):
                error = {"error": {"code": "cancelled", "message": "cancelled"}}
                await response.write(b"data: " + json.dumps(error).encode() + b"\nid: 1-%d\n\n" % seq)
                return response
            await asyncio.sleep(0.001)
            await response.write(piece(f"{seq} ").rstrip() + b"\nid: 1-%d\n\n" % seq)
        await response.write(DONE)
        return response


@pytest.mark.parametrize(
    ("fault", "flag"),
    [("", "--cut"), ("", "--cancel"), ("repeats", "--cut"), ("loses", "--cut"), ("runs on", "--cancel")],
)
async def test_a_gateway_that_resumes_or_cancels_wrongly_is_found_out(tmp_path: Path, fault: str, flag: str) -> None:
    gateway = FaultyGateway(fault)
    routes = {CHAT: gateway.create, "/v1/streams/{id}/cancel": gateway.cancel}
    async with server(routes, {"/v1/streams/{id}": gateway.resume}) as url:
        flags = (flag, "1", "--cancel-at", "5", "--concurrency", "2", "--requests", "6", "--duration", "30")
        code, found = await measured(tmp_path, url, *flags)
    seen = found["disturbances"]
    right = 0 if fault else 6
    if flag == "--cut":
        assert (code, seen["cut"], seen["resumed"], seen["exact"]) == (bool(fault), 6, 6, right)
    else:
        assert (code, seen["named_cancels"], seen["exact_cancels"]) == (bool(fault), 6, right)


@pytest.mark.parametrize(
    ("fault", "flag", "errors"),
    [
        ("is silent", "--cut", {}),
        ("is silent", "--cancel", {"cancel failed": 2}),
        ("dies", "--cancel", {"replica_lost": 2}),
    ],
)
async def test_a_gateway_that_answers_no_cancel_or_replay_fails_the_run(
    tmp_path: Path, fault: str, flag: str, errors: dict[str, int]
) -> None:
    gateway = FaultyGateway(fault)
    routes: dict[str, Handler] = {CHAT: gateway.create, "/v1/streams/{id}/cancel": gateway.cancel}
    async with asyncio.timeout(30), server(routes, {"/v1/streams/{id}": gateway.resume}) as url:
        flags = (flag, "1", "--cancel-at", "5", "--concurrency", "2", "--requests", "2", "--timeout", "1")
        code, found = await measured(tmp_path, url, *flags)
    assert (code, found["stages"][0]["errors"], found["disturbances"]["exact"]) == (1, errors, 0)
