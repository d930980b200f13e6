"""Trace queries beyond those that run at once wait their turn, a bounded number of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stream_fabric.errors import TooMany
from stream_fabric.stream.ids import TenantId
from stream_gw.admin import traces
from stream_gw.admin.traces import AT_ONCE_MAX, WAITING_MAX, Traces
from stream_gw.auth import Principal
from tests.support.waiting import eventually

OPERATOR = Principal(TenantId("operations"), frozenset({"admin"}))


class SlowTelemetry:
    """Answers each query with ``[]``, once it may."""

    def __init__(self) -> None:
        self.running = self.most = self.port = 0
        self.may_answer = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.running += 1
        self.most = max(self.most, self.running)
        await self.may_answer.wait()
        self.running -= 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n[]")
        await writer.drain()
        writer.close()


@pytest_asyncio.fixture
async def slow() -> AsyncIterator[SlowTelemetry]:
    telemetry = SlowTelemetry()
    server = await asyncio.start_server(telemetry.serve, "127.0.0.1", 0)
    telemetry.port = server.sockets[0].getsockname()[1]
    yield telemetry
    telemetry.may_answer.set()
    server.close()


async def test_queries_wait_their_turn_and_are_all_answered(slow: SlowTelemetry) -> None:
    asked = Traces(f"http://127.0.0.1:{slow.port}", "token")
    many = [asyncio.create_task(asked.get(OPERATOR, "", b"")) for _ in range(AT_ONCE_MAX + WAITING_MAX)]
    await eventually(lambda: slow.running == AT_ONCE_MAX)
    with pytest.raises(TooMany, match="retry after 2 s"):
        await asked.get(OPERATOR, "", b"")
    slow.may_answer.set()
    assert await asyncio.gather(*many) == [(200, b"[]")] * len(many)
    assert slow.most == AT_ONCE_MAX


async def test_a_query_without_a_turn_is_told_so(slow: SlowTelemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "WAIT_S", 0.05)
    asked = Traces(f"http://127.0.0.1:{slow.port}", "token")
    many = [asyncio.create_task(asked.get(OPERATOR, "", b"")) for _ in range(AT_ONCE_MAX)]
    await eventually(lambda: slow.running == AT_ONCE_MAX)
    with pytest.raises(TooMany):
        await asked.get(OPERATOR, "", b"")
    slow.may_answer.set()
    await asyncio.gather(*many)
    assert await asked.get(OPERATOR, "", b"") == (200, b"[]"), "its place in the queue is free again"
