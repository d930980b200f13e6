"""Costs of a large fleet before any request comes: reports of replicas, and gateways' reads of them.

    python -m bench.fleet [--replicas 2000] [--pools 1] [--gateways 8] [--seconds 15]

Real leases of simulated replicas report to one Redis; each gateway's real directory reads it. One second of the fleet's
life takes as long as this machine needs: first every replica reports, then the gateways refresh one after another, and
the CPU and bytes of each refresh are measured alone. Prints figures per second of the fleet's life.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from bench.fabric import cpu_us
from bench.harness import Cores, describe, memory, pin, table
from bench.place import redis_on
from inference.agent.lease import Lease
from inference.agent.observe.load_tracker import LoadTracker
from inference.agent.observe.replica_events import ReplicaEvents
from inference.agent.replica import LeasePolicy, ReplicaStatus
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from stream_fabric.events import NoEvents
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.process.fleet_events import FleetEventReporter
from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pools import RedisPools
from stream_fabric.stream.ids import ReplicaId
from stream_gw.routing.directory import Directory

SLOWDOWN = 40.0
"""Real seconds that a second of the fleet's life may take."""
SLOTS = 64
_LEASE_S = 600.0
_SHARED_BLOCKS = 4
_WARM_UP = 3


class FleetLoop(asyncio.SelectorEventLoop):
    """An event loop on the fleet's clock, which runs slower than the host's and can skip to the next second."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() / SLOWDOWN + self.skipped_s


class SimulatedLease(Lease):
    """The real lease, of a replica whose load is made up."""

    load_now = EngineLoad(SLOTS // 2, 0, SLOTS)
    prefill_ms_now = 0.0

    def info(self) -> ReplicaInfo:
        return msgspec.structs.replace(
            super().info(),
            load=self.load_now,
            prefill_ms=self.prefill_ms_now,
            decode_ms=self.load_now.running * 60.0,
            tokens_per_s=random.uniform(900, 1100),
            queue_p99_ms=random.uniform(5, 80),
        )


class Replica:
    """A replica that serves ``requests_per_s`` prompts, each of shared and of new blocks."""

    def __init__(self, pools: RedisPools, pool: str, number: int, options: argparse.Namespace) -> None:
        self._options = options
        name = ReplicaId(f"replica-{number:05}-6b0183aad81fa1")
        engine = SimEngine(SimSettings())
        events = ReplicaEvents(FleetEventReporter(NoEvents(), HostClock(), "agent"), pool, name, _LEASE_S)
        cell = pool if options.cells == 1 else f"{pool}~{number // options.pools % options.cells}"
        policy = LeasePolicy(cell, "sim", (f"model-of-{pool}",), True, _LEASE_S, 1.0, "eu-west-1", "H100")
        status = ReplicaStatus(engine, events, standby=False)
        status.started = True
        self._load = LoadTracker(engine, {}, events)
        self._load.prefixes.set_capacity(options.blocks)
        self._load.prefixes.touch([random.getrandbits(32) for _ in range(options.blocks)])
        self._lease = SimulatedLease(policy, name, pools, {}, status, self._load, events, asyncio.TaskGroup())

    async def live_a_second(self) -> None:
        count = random.randrange(2 * self._options.requests_per_s + 1)
        for _ in range(count):
            new = [random.getrandbits(32) for _ in range(self._options.prompt_blocks - _SHARED_BLOCKS)]
            self._load.prefixes.touch([*range(_SHARED_BLOCKS), *new])
        lease = self._lease
        running = min(max(lease.load_now.running + random.randrange(-4, 5), 0), SLOTS)
        lease.load_now = EngineLoad(running, 0, SLOTS)
        lease.prefill_ms_now = random.expovariate(1 / 150)
        await lease.renew()


async def at_most(limit: int, calls: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    turns = iter(calls)

    async def worker() -> None:
        for call in turns:
            await call()

    await asyncio.gather(*(worker() for _ in range(limit)))


async def output_bytes(client: RedisClient) -> int:
    reply = (await client.execute(0, "INFO", "stats")).decode()
    return int(reply.partition("total_net_output_bytes:")[2].split()[0])


async def measure(url: str, redis_pid: int, options: argparse.Namespace) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, FleetLoop)
    agents = [RedisClient(url) for _ in range(8)]
    probe = RedisClient(url)
    clients = [RedisClient(url) for _ in range(options.gateways)]
    for client in (*agents, *clients, probe):
        await client.start()
    ports = [RedisPools(client) for client in agents]
    names = [f"pool-{number:04}" for number in range(options.pools)]
    replicas = [
        Replica(ports[number % len(ports)], names[number % len(names)], number, options)
        for number in range(options.replicas)
    ]
    directories = [Directory(RedisPools(client), RedisControl(client).plans) for client in clients]
    costs: dict[str, list[float]] = {
        name: [] for name in ("gateway cpu ms", "gateway MB", "redis ms a gateway", "agent cpu us", "redis us a report")
    }
    used = names[: round(len(names) * options.used)] or names[:1]
    base_kib = 0
    for second in range(-_WARM_UP, options.seconds):
        starts_at = loop.time()
        own, served = time.process_time(), cpu_us(redis_pid)
        await at_most(64, [replica.live_a_second for replica in replicas])
        if second >= 0:
            costs["agent cpu us"].append((time.process_time() - own) * 1e6 / len(replicas))
            costs["redis us a report"].append((cpu_us(redis_pid) - served) / len(replicas))
        base_kib = base_kib or memory(os.getpid()).rss_kib
        for directory in directories:
            before, own, served = await output_bytes(probe), time.process_time(), cpu_us(redis_pid)
            await directory.refresh()
            took_s, served_us = time.process_time() - own, cpu_us(redis_pid) - served
            if second >= 0:
                costs["gateway cpu ms"].append(took_s * 1000)
                costs["gateway MB"].append((await output_bytes(probe) - before) / 1e6)
                costs["redis ms a gateway"].append(served_us / 1000)
            for name in used:
                await directory.pool_of(f"model-of-{name}")
        if loop.time() - starts_at > 1:
            raise SystemExit(
                f"a second of the fleet took {(loop.time() - starts_at) * SLOWDOWN:.0f} s; use fewer replicas"
            )
        loop.skipped_s += starts_at + 1 - loop.time()
    directory, name = directories[0], names[0]
    prompt = [*range(_SHARED_BLOCKS), *(random.getrandbits(32) for _ in range(options.prompt_blocks - _SHARED_BLOCKS))]
    own = time.process_time()
    for _ in range(20):
        cell = name if options.cells == 1 else directory.choose_cell(name, f"model-of-{name}", "", prompt)
        assert directory.candidates(cell, f"model-of-{name}", prompt)
    figures = {name: statistics.mean(values) for name, values in costs.items()}
    figures["candidates us"] = (time.process_time() - own) / 20 * 1e6
    figures["MiB a gateway"] = (memory(os.getpid()).rss_kib - base_kib) / 1024 / options.gateways
    for client in (*agents, *clients, probe):
        await client.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=2000)
    parser.add_argument("--pools", type=int, default=1, help="pools that the replicas are divided into")
    parser.add_argument("--cells", type=int, default=1, help="cells of each pool")
    parser.add_argument("--used", type=float, default=1.0, help="share of the pools that each gateway has requests for")
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--seconds", type=int, default=15, help="seconds of the fleet's life")
    parser.add_argument("--blocks", type=int, default=3000, help="blocks of 512 bytes that a replica has cached")
    parser.add_argument("--requests-per-s", type=int, default=5, help="of one replica, on average")
    parser.add_argument("--prompt-blocks", type=int, default=24)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    cores = Cores.pick()
    pin(os.getpid(), cores.rest)
    gc.disable()  # it would look at eight gateways and all replicas; a gateway's own collections are rare
    with redis_on(cores) as (url, process), asyncio.Runner(loop_factory=FleetLoop) as runner:
        figures = runner.run(measure(url, process.pid, options))
    print(
        table(["per second of the fleet's life", "mean"], [[name, f"{value:.2f}"] for name, value in figures.items()])
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": describe(), "options": vars(options), "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
