"""Answers that ``bench.gpu`` reads, and what vLLM says of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.gpu.replicas import MODEL, Failed


def words_of(seed: str, words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(("def", "self", "return", "import", "for", "in", "class", "None")) for _ in range(words))


@dataclass
class Stream:
    """An answer that a task reads."""

    id: str = ""
    times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    usage: dict[str, Any] = field(default_factory=dict)
    finish: str | None = None
    error: str = ""

    @property
    def silence_s(self) -> float:
        return max((after - before for before, after in itertools.pairwise(self.times)), default=0.0)


async def read(session: aiohttp.ClientSession, url: str, key: str, body: dict[str, Any], stream: Stream) -> None:
    wish = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/completions", json=wish | body, headers=headers) as response:
        stream.id = response.headers.get("x-stream-id", "")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            stream.error = json.dumps(chunk["error"]) if chunk.get("error") else stream.error
            stream.usage = chunk.get("usage") or stream.usage
            for choice in chunk.get("choices") or ():
                if choice.get("text"):
                    stream.times.append(time.monotonic())
                stream.finish = choice.get("finish_reason") or stream.finish


async def until(condition: Callable[[], bool], what: str, within_s: float = 60.0, pause_s: float = 0.002) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"{what} did not come within {within_s:g} s")
        await asyncio.sleep(pause_s)


async def running(session: aiohttp.ClientSession, url: str) -> int:
    """Requests that vLLM says it runs."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))


async def cancel_stream(session: aiohttp.ClientSession, url: str, key: str, stream: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/streams/{stream}/cancel", headers=headers) as response:
        if response.status >= 300:
            raise Failed(f"a cancel was answered with {response.status}: {await response.text()}")
