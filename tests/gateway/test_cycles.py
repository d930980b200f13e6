"""Streams that have ended leave nothing for Python's cycle collector, whose full run stops every stream."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pytest

from stream_gw.client import StreamGateway
from tests.gateway.processes import Running, clean_env
from tests.gateway.wire import MODEL, Gate, chat

_COUNTED = """
import gc, json, signal, sys
from stream_gw.cli.main import main
signal.signal(signal.SIGUSR2, lambda *_: print(json.dumps({"unreachable": gc.collect()}), flush=True))
gc.set_threshold(0)
sys.exit(main(sys.argv[1:]))
"""
"""A process that collects only when it gets SIGUSR2, and then prints how many objects it found."""
STREAMS = 60


@contextmanager
def counted(*flags: str, **env: str) -> Iterator[tuple[dict[str, Any], int, IO[str]]]:
    """Start a process of ours; yield its ready line, its process id and its stdout."""
    command = [sys.executable, "-c", _COUNTED, flags[0], "--json", *flags[1:]]
    with subprocess.Popen(command, env=clean_env(**env), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline()), process.pid, process.stdout
        finally:
            process.terminate()


async def found(pid: int, stdout: IO[str]) -> int:
    os.kill(pid, signal.SIGUSR2)
    return int(json.loads(await asyncio.to_thread(stdout.readline))["unreachable"])


@pytest.mark.parametrize("transport", ["sse", "whole", "ws"])
async def test_an_ended_stream_leaves_no_cycle_in_its_gateway(platform: Running, transport: str) -> None:
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4", "STREAM_GW_DEV_KEY": platform.key}
    with counted("gateway", "--port", "0", **env) as (facts, pid, stdout):
        gate = Gate(facts["url"], pid, platform.key)

        async def read_all() -> None:
            if transport == "ws":
                async with StreamGateway(gate.url, token=gate.key) as gateway:
                    for seed in range(STREAMS):
                        async with gateway.create(chat(5, seed=seed) | {"model": MODEL}) as stream:
                            assert [item async for item in stream]
                return
            for seed in range(STREAMS):
                reply = await gate.ask("POST", "/v1/chat/completions", chat(5, seed=seed, stream=transport == "sse"))
                assert reply.status == 200

        await read_all()
        await found(pid, stdout)  # caches that are filled once, and connections of the start
        await read_all()
        assert await found(pid, stdout) < 2 * STREAMS, "13 objects a stream before"
