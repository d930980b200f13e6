"""Answers that ``bench.gpu`` reads, and what vLLM says of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.gpu.replicas import MODEL, Failed
from inference.engines.prometheus import read_metrics

WAIT_S_MAX = 60.0


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

    def gaps_s(self, from_s: float, until_s: float) -> list[float]:
        """Return the pauses between pieces of text that end in this time."""
        return [after - before for before, after in itertools.pairwise(self.times) if from_s < after <= until_s]


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


async def until_each_has(streams: Sequence[Stream], pieces: int) -> None:
    """Wait until each stream has more pieces of text than that. Raises Failed."""
    deadline = time.monotonic() + WAIT_S_MAX
    while any(len(stream.times) <= pieces for stream in streams):
        if time.monotonic() > deadline:
            raise Failed(f"{len(streams)} streams did not have {pieces} pieces each within {WAIT_S_MAX:g} s")
        await asyncio.sleep(0.002)


async def running(session: aiohttp.ClientSession, url: str) -> int:
    """Requests that vLLM says it runs."""
    async with session.get(f"{url}/metrics") as response:
        return read_metrics(await response.read()).running


async def until_running(session: aiohttp.ClientSession, url: str, most: int) -> None:
    """Ask vLLM, which tells nobody by itself, until it runs no more requests than that. Raises Failed."""
    deadline = time.monotonic() + WAIT_S_MAX
    while (count := await running(session, url)) > most:
        if time.monotonic() > deadline:
            raise Failed(f"vLLM still ran {count} requests after {WAIT_S_MAX:g} s")
        await asyncio.sleep(0.001)


async def cancel_stream(session: aiohttp.ClientSession, url: str, key: str, stream: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/streams/{stream}/cancel", headers=headers) as response:
        if response.status >= 300:
            raise Failed(f"a cancel was answered with {response.status}: {await response.text()}")
