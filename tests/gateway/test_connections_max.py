"""Connections that do nothing: how many a gateway holds, and that it lives on when there are more."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from typing import Any

from stream_fabric.limits import CONNECTIONS_MAX
from stream_fabric.process.host import HostClock
from stream_gw.transport.connection import EdgeServer, make_server, most_connections
from tests.gateway.wire import Gate
from tests.support.waiting import eventually

OK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def gate_of(server: EdgeServer) -> Gate:
    return Gate(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", 0, "")


def test_a_gateway_keeps_open_files_for_itself() -> None:
    assert most_connections(1 << 20) == CONNECTIONS_MAX
    assert most_connections(1024) == 768
    assert most_connections(256) == 192, "a quarter is kept where there are few"


def test_a_process_raises_its_limit_of_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = "from stream_fabric.process.host import raise_open_files; print(raise_open_files())"
    low = min(hard, 64)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({low}, {hard})); {program}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) == hard


async def test_connections_over_the_limit_are_cut_and_the_others_are_served() -> None:
    cut: list[None] = []
    server = make_server(ok, HostClock(), "127.0.0.1", 0, 3, lambda: cut.append(None))
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.started, "the server to start")
    gate = gate_of(server)
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(gate.connection()) for _ in range(3)]
        await eventually(lambda: len(server.server_state.connections) == 3, "the connections")
        async with gate.connection() as over:
            with contextlib.suppress(ConnectionError):
                assert await over.closed() == b""
        assert cut, "the fourth is cut"
        for exchange in held:
            await exchange.send(OK)
            await exchange.head()
            assert exchange.status == 200, "those within the limit are served"
        held[0].abort()
        await eventually(lambda: len(server.server_state.connections) == 2, "one to leave")
        assert (await gate.ask("GET", "/")).status == 200, "its place is free"
    assert len(cut) == 1
    server.should_exit = True
    await task
