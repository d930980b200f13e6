"""A platform of single processes, so that each can be killed, restarted, or reach Redis through a link of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import astuple

from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.cursor import BEGINNING, Cursor
from stream_fabric.stream.frames import End, Frame, Usage, decode, is_end
from stream_fabric.stream.ids import StreamId, TenantId
from stream_fabric.stream.log import Head
from tests.gateway.processes import Process
from tests.gateway.wire import MODEL, Gate
from tests.support.waiting import eventually

PARTITIONS = 4
KEY = "sk-chaos"
TENANT = TenantId("dev")


@dataclass
class Fleet:
    """Processes on one Redis. What it starts it ends, and a traceback in any log fails the test."""

    redis_url: str
    sim: str
    gates: list[Gate] = field(default_factory=list)
    gateways: list[Process] = field(default_factory=list)
    agents: dict[str, Process] = field(default_factory=dict)
    controllers: list[Process] = field(default_factory=list)
    started: list[Process] = field(default_factory=list)
    tree: Path | None = None
    """Source tree of the next processes; None: this one."""
    keys_file: Path | None = None
    """Keys file of the gateways, with ``KEY`` among its keys; None: ``KEY`` is the development key."""

    async def _start(self, *flags: str, url: str | None = None, **env: str) -> Process:
        env |= {"STREAM_GW_REDIS_URL": url or self.redis_url, "STREAM_GW_PARTITIONS": str(PARTITIONS)}
        process = await asyncio.to_thread(Process, *flags, tree=self.tree, **env)
        self.started.append(process)
        return process

    async def add_agent(self, name: str, url: str | None = None) -> Process:
        """``url``: its own way to Redis."""
        flags = ("agent", "--sim", self.sim, "--replica", name, "--drain-s", "1")
        self.agents[name] = await self._start(*flags, url=url)
        return self.agents[name]

    async def add_gateway(self, name: str, url: str | None = None) -> Gate:
        keys = {"STREAM_GW_KEYS_FILE": str(self.keys_file)} if self.keys_file else {"STREAM_GW_DEV_KEY": KEY}
        env = {**keys, "STREAM_GW_TOKEN_SECRET": "0" * 64}
        flags = ("gateway", "--port", "0", "--gateway", name, "--drain-s", "1")
        process = await self._start(*flags, url=url, **env)
        self.gateways.append(process)
        self.gates.append(Gate(process.facts["url"], process.pid, KEY))
        return self.gates[-1]

    async def add_controller(self) -> Process:
        self.controllers.append(await self._start("controller"))
        return self.controllers[-1]

    async def until_served(self, replicas: int | None = None) -> None:
        """Every gateway knows of the replicas and is ready."""
        wanted = len(self.agents) if replicas is None else replicas
        client = RedisClient(self.redis_url)
        await client.start()

        async def all_ready() -> bool:
            live = await RedisPools(client).replicas(MODEL)
            replies = [await gate.ask("GET", "/readyz") for gate in self.gates]
            models = [(await gate.ask("GET", "/v1/models")).json["data"] for gate in self.gates] if wanted else [1]
            return len(live) >= wanted and all(r.status == 200 for r in replies) and all(models)

        try:
            await eventually(all_ready, "the fleet to be ready", 20)
        finally:
            await client.close()

    async def close(self) -> None:
        outcomes = await asyncio.gather(
            *(asyncio.to_thread(process.close) for process in self.started), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome


@asynccontextmanager
async def fleet(
    redis_url: str,
    *,
    sim: str,
    gateway_urls: Sequence[str] = ("", ""),
    agent_urls: Sequence[str] = ("", ""),
    controller: bool = True,
    tree: Path | None = None,
    keys_file: Path | None = None,
) -> AsyncIterator[Fleet]:
    """``gateway_urls`` and ``agent_urls``: a process each, with its own way to Redis or, empty, the common one."""
    running = Fleet(redis_url, sim, tree=tree, keys_file=keys_file)
    try:
        first: list[Any] = [running.add_agent(f"replica{k}", url or None) for k, url in enumerate(agent_urls)]
        if controller:
            first.append(running.add_controller())
        await asyncio.gather(*first)
        # Gateways last: so each knows every replica from its start, and placement is even
        await asyncio.gather(*(running.add_gateway(f"gateway{k}", url or None) for k, url in enumerate(gateway_urls)))
        await running.until_served()
        yield running
    finally:
        await running.close()


@asynccontextmanager
async def log_of(redis_url: str) -> AsyncIterator[LogReader]:
    client = RedisClient(redis_url)
    await client.start()
    try:
        yield LogReader(client)
    finally:
        await client.close()


class LogReader:
    """Reads the log and the pools directly, past every gateway."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.pools = RedisPools(client)
        self._log = RedisStreamLog(client, Partitions(PARTITIONS))

    async def terminal(self, stream: str) -> End:
        """The stream's one terminal; fails unless the log is dense and ends with it."""
        _, end = await self.whole(stream)
        return end

    async def whole(self, stream: str) -> tuple[list[tuple[int, Frame]], End]:
        """Its frames, each with the number of the epoch that it was made in, and its one terminal; fails unless the log
        is dense and ends with it."""
        lines: list[bytes] = []
        epochs: list[int] = []
        after = BEGINNING
        while True:
            page = await self._log.watch(StreamId(stream), None, None, after)
            assert page is not None, f"{stream} is not in the log"
            if not page.entries:
                break
            for entry in page.entries:
                assert entry.first == len(lines) + 1, f"invariant 2: {stream} goes from {len(lines)} to {entry.first}"
                lines += entry.frames.split(b"\n")
                epochs += [entry.epoch] * (len(lines) - len(epochs))
            after = Cursor(page.entries[-1].epoch, page.entries[-1].last)
        assert page.status != "live", f"{stream} has no terminal"
        assert page.head == len(lines)
        ends = [line for line in lines if is_end(line)]
        assert len(ends) == 1 and lines[-1] == ends[0], f"{stream} has {len(ends)} terminals"
        end = decode(ends[0])
        assert isinstance(end, End)
        return list(zip(epochs, map(decode, lines), strict=True)), end

    async def head(self, stream: str) -> Head:
        (head,) = await self._log.heads(self._log.partition(StreamId(stream)), [StreamId(stream)], None)
        assert head is not None, f"{stream} is not in the log"
        return head

    async def settled(self, stream: str) -> Usage:
        """Return the usage that the stream was settled with."""
        found = await self._log.settled(StreamId(stream))
        assert found is not None, f"{stream} was not settled"
        return found[1]

    async def usage(self) -> tuple[int, Usage]:
        """Streams settled to the tenant in this hour and the one before, and what they have used."""
        hour = int(time.time() // 3600)
        streams, total = 0, Usage()
        for totals in [await self._log.usage(TENANT, at) for at in (hour - 1, hour)]:
            for count, usage in totals.values():
                streams += count
                total = Usage(*(a + b for a, b in zip(astuple(total), astuple(usage), strict=True)))
        return streams, total

    async def in_flight(self, pool: str = MODEL) -> dict[str, int]:
        """Streams that each replica of the pool is believed to run; replicas without a lease included."""
        tag = "{pool:" + pool + "}"
        slot = slot_of(f"pool:{pool}")
        leases = await self.client.execute(slot, "ZRANGE", f"sg:{tag}:leases", 0, -1)
        return {
            replica.decode(): await self.client.execute(slot, "HLEN", f"sg:{tag}:{replica.decode()}:flight")
            for replica in leases
        }

    async def until_no_slot_is_taken(self, within_s: float = 10.0) -> None:
        """Invariant 7."""

        async def free() -> bool:
            return not any((await self.in_flight()).values())

        await eventually(free, "invariant 7: every in-flight list to be empty", within_s)
