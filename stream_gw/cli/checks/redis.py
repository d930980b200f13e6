"""Checks of Redis: whether it answers, its version, memory limit, eviction and persistence.

Asks by redis-py, whatever the URL's mode, because a second client finds faults that ours would share.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
)

from stream_fabric.errors import FabricError, FabricFull, FabricRefused, FabricUnavailable
from stream_fabric.limits import LEASE_TTL_S
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.ports import Clock
from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import RedisClient, logins
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.divided_pools import DividedPools
from stream_fabric.redis.streams import held_partitions
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis_url import Address, RedisUrl
from stream_gw.cli.checks.report import Report

_TIMEOUT_S = 3.0
_VERSION_MIN = (6, 0)
_VERSION_SHARDED = (7, 0)
_USED_MAX = 0.9
"""Share of Redis' memory in use from which the check warns."""
_CLOCK_S_MAX = 2.0
"""Seconds between the clocks of this host and of Redis from which the check warns."""
_SAFE_POLICY = "noeviction"
_UNWRITABLE = {
    "READONLY": "name the primary in STREAM_GW_REDIS_URL, or the sentinels with redis+sentinel://",
    "NOREPLICAS": "bring its replicas back, or CONFIG SET min-replicas-to-write to as many as there are",
    "MISCONF": "see Redis's log: it cannot save its data, and refuses writes until this is repaired",
}
"""Replies of a Redis that refuses every write, with the remedy."""
_REMEDY = "start Redis, or correct STREAM_GW_REDIS_URL (rediss:// where the server speaks TLS)"


async def check_redis(report: Report, redis_url: str, partitions: int | None = None) -> bool:
    """Check Redis; return whether it can be used.

    ``partitions``: the environment's number, which must be that of Redis; None: not known.
    """
    try:
        url = RedisUrl.parse(redis_url)
        options = _options(url)
    except ValueError as error:
        report.missing("a usable Redis URL", str(error))
        return False
    where = ", ".join(map(str, url.addresses))
    try:
        async with _primaries(url, options) as primaries:
            for address, primary in primaries.items():
                await primary.ping()
                await _check_primary(report, url, address, primary)
    except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
        _notice_cancel()
        login = isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError)
        remedy = await _remedy(redis_url) or f"{error or 'it does not answer'}; {_REMEDY}"
        report.missing(f"{'a login to ' if login else ''}Redis at {where}", remedy)
        return False
    _notice_cancel()
    await _check_fleet(report, redis_url, where, partitions)
    return True


def _notice_cancel() -> None:
    """End a check that Ctrl-C has ended: until Python 3.12, ``asyncio.wait_for``, which redis-py uses, may go on."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _remedy(redis_url: str) -> str:
    """Return why the platform's own client fails and what to do: its words are for an operator. Empty: it works."""
    client = RedisClient(redis_url, timeout_s=_TIMEOUT_S)
    try:
        await client.start()
    except FabricRefused as error:  # it has a remedy of its own
        return str(error)
    except FabricUnavailable as error:
        return f"{error}; {_REMEDY}"
    except FabricError as error:
        return str(error)
    finally:
        await client.close()
    return ""


def _options(url: RedisUrl) -> dict[str, Any]:
    """Make the redis-py client's options. Raises ValueError for certificate files that cannot be used."""
    logins(url)
    return {
        "username": url.username,
        "password": url.password,
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        "decode_responses": True,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        **_tls(url),
    }


def _tls(url: RedisUrl) -> dict[str, Any]:
    if not url.tls:
        return {}
    return {"ssl": True, "ssl_ca_certs": url.ca, "ssl_certfile": url.cert, "ssl_keyfile": url.key}


@contextlib.asynccontextmanager
async def _primaries(url: RedisUrl, options: dict[str, Any]) -> AsyncIterator[dict[Address, Redis]]:
    """Yield a client of each server that accepts writes."""
    match url.mode:
        case "cluster":
            seeds = [ClusterNode(*address) for address in url.addresses]
            async with RedisCluster(startup_nodes=seeds, **options) as cluster:
                nodes = cluster.get_primaries()
            addresses = [Address(str(node.host), int(node.port)) for node in nodes]
        case "sentinel":
            login = {"username": url.sentinel_user, "password": url.sentinel_password}
            sentinel = Sentinel(  # type: ignore[no-untyped-call]  # redis-py does not annotate it
                [tuple(address) for address in url.addresses], sentinel_kwargs=options | login
            )
            try:
                addresses = [Address(*await sentinel.discover_master(url.master))]
            finally:
                for each in sentinel.sentinels:
                    await each.aclose()
        case _:
            addresses = [url.addresses[0]]
    clients = {
        address: Redis(host=address.host, port=address.port, db=url.database, **options) for address in addresses
    }
    try:
        yield clients
    finally:
        for client in clients.values():
            await client.aclose()


async def _check_primary(report: Report, url: RedisUrl, address: Address, primary: Redis) -> None:
    at = f" at {address}"
    try:
        info: dict[str, Any] = await primary.info()
    except (NoPermissionError, ResponseError):
        info = {}
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if not version:
        report.ok(f"Redis{at} answers, {url.mode}", "version unknown, because the user may not run INFO")
    elif numbers < _VERSION_MIN:
        report.missing(f"a Redis of version 6 or later{at}", "upgrade it", found=version)
    elif url.mode == "cluster" and numbers < _VERSION_SHARDED:
        report.missing(
            f"sharded publish and subscribe{at}",
            "upgrade to Redis 7: before it, every node of a cluster carries every message",
            found=f"Redis {version}",
            needed=False,
        )
    else:
        report.ok(f"Redis{at} answers, {url.mode}", f"version {version}")
    await check_clock(report, at, primary, HostClock())
    await _check_memory(report, at, primary, info)
    if info:
        _check_persistence(report, at, info)


async def check_clock(report: Report, at: str, primary: Redis, host: Clock) -> None:
    """Compare the clock of a primary with this host's: of a cluster's nodes each counts usage by its own."""
    sent_us = host.now_us()
    seconds, micros = await primary.time()
    received_us = host.now_us()
    ahead_s = (seconds * 1_000_000 + micros - (sent_us + received_us) // 2) / 1e6
    if abs(ahead_s) <= _CLOCK_S_MAX + (received_us - sent_us) / 2e6:
        report.ok(f"clock of Redis{at}", "that of this host")
        return
    report.missing(
        f"one time at Redis{at} and this host",
        "correct the clock that is wrong (chronyc tracking, timedatectl): bills and budgets count by Redis' clocks, "
        "and hours of usage disagree when the nodes of a cluster differ",
        found=f"Redis is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}",
        needed=False,
    )


async def _check_memory(report: Report, at: str, primary: Redis, info: dict[str, Any]) -> None:
    try:
        config = await primary.config_get("maxmemory-policy", "maxmemory")
    except (NoPermissionError, ResponseError):  # a managed Redis has no CONFIG, and a user may lack the right
        config = {"maxmemory-policy": info.get("maxmemory_policy", ""), "maxmemory": info.get("maxmemory", 0)}
    policy = str(config.get("maxmemory-policy", ""))
    if not policy:
        report.missing(
            f"the maxmemory-policy{at}",
            f"see to it that it is {_SAFE_POLICY}; the user may run neither CONFIG GET nor INFO",
            found="unknown",
            needed=False,
        )
        return
    if policy == _SAFE_POLICY:
        report.ok(f"maxmemory-policy{at}", policy)
    else:
        remedy = "CONFIG SET maxmemory-policy noeviction: Redis at its limit then evicts no log of a running stream"
        evicted = int(info.get("evicted_keys", 0))
        found = f"{policy}, {evicted} keys evicted since Redis started" if evicted else policy
        report.missing(f"a safe maxmemory-policy{at}", remedy, found=found)
    limit = int(config.get("maxmemory") or 0)
    used = int(info.get("used_memory", 0))
    if limit and used > _USED_MAX * limit:
        remedy = (
            "raise maxmemory, or find what fills it with redis-cli --bigkeys: at the limit requests answer 503 "
            "fabric_full; logs of ended streams leave after 15 minutes"
        )
        found = f"{used >> 20} MiB used of {limit >> 20} MiB"
        report.missing(f"free memory{at}", remedy, found=found, needed=used >= limit)
    elif limit:
        report.ok(f"maxmemory{at}", f"{limit >> 20} MiB, {used >> 20} MiB used")
    else:
        remedy = "CONFIG SET maxmemory to less than the host has: Redis at its limit refuses, a killed Redis loses all"
        report.missing(f"a memory limit{at}", remedy, found="maxmemory 0", needed=False)


def _check_persistence(report: Report, at: str, info: dict[str, Any]) -> None:
    for name, what in (("rdb_last_bgsave_status", "snapshot"), ("aof_last_write_status", "append-only file")):
        status = str(info.get(name, "ok"))
        if status != "ok":
            remedy = "see Redis's log: with stop-writes-on-bgsave-error it refuses writes until this is repaired"
            report.missing(f"a working {what}{at}", remedy, found=f"{name} {status}")
    if int(info.get("aof_enabled", 0)):
        report.ok(f"persistence{at}", "append-only file")
    elif int(info.get("connected_slaves", 0)):
        report.ok(f"persistence{at}", f"no append-only file; {info['connected_slaves']} replicas hold a copy")
    else:
        remedy = "appendonly yes, or a replica: a restart loses running streams, accounts and the partition count"
        report.missing(f"persistence{at}", remedy, found="no append-only file and no replica", needed=False)


async def _check_fleet(report: Report, url: str, where: str, partitions: int | None) -> None:
    """Check the platform's rights by its own client, and the partitions, and count the live replicas."""
    client = RedisClient(url, timeout_s=_TIMEOUT_S)
    try:
        await client.start()
        await _check_writes(report, client, where, partitions or 1)
        pools = DividedPools(client)
        by_pool = {name: replicas for name in await pools.pools() if (replicas := await pools.replicas(name))}
        plans = await RedisControl(client).plans()
        held = await held_partitions(client)
    except FabricError as error:
        report.missing(f"the platform's rights on Redis at {where}", f"{error}; see the runbook, Securing Redis")
        return
    finally:
        await client.close()
        await asyncio.sleep(0)
    if held is not None and partitions not in (None, held.count):
        remedy = f"set STREAM_GW_PARTITIONS={held.count}, or use another Redis: no process of this environment starts"
        ours = f"this environment has {partitions}, and Redis holds streams in {held.count}"
        report.missing("the partitions of this Redis", remedy, found=ours)
    _check_batch_hosts(report, plans, by_pool)
    found = list(by_pool.values())
    if found:
        several = "" if len(found) == 1 else "s"
        report.ok(f"{sum(map(len, found))} replicas alive in {len(found)} pool{several}")
        for info in (info for infos in found for info in infos if info.blocked):
            remedy = "see the log of its agent, and the runbook: Alert: BreakerOpen, Alert: BillsAtRisk"
            report.missing(f"requests for replica {info.replica}", remedy, found=f"it takes none: {info.blocked}")
        sizes = Counter(info.pool for infos in found for info in infos)
        if alone := sorted(cell for cell, count in sizes.items() if count == 1 and cell != pool_of(cell)):
            remedy = "set STREAM_GW_CELLS of the pool's agents lower: a failover does not leave the cell"
            found_one = f"one in {', '.join(alone[:5])}" + (" and others" if len(alone) > 5 else "")
            report.missing("two replicas in each cell", remedy, found=found_one, needed=False)
    else:
        remedy = f"start stream-gw agent; its lease expires {LEASE_TTL_S:g} s after the last renewal"
        report.missing("a live replica", remedy, needed=False)


async def _check_writes(report: Report, client: RedisClient, where: str, partitions: int) -> None:
    """Write a key of each partition. A replica, or a primary without its replicas, answers reads as if it were well."""
    for name in (f"p{k}" for k in range(partitions)):
        try:
            await client.execute(slot_of(name), "SET", f"sg:{{{name}}}:doctor", "", "PX", 1000)
        except FabricFull:  # the check of the memory tells
            continue
        except FabricUnavailable as error:
            remedy = next((remedy for code, remedy in _UNWRITABLE.items() if code in str(error)), _REMEDY)
            report.missing(f"writes to Redis at {where}", remedy, found=str(error))
            return


def _check_batch_hosts(
    report: Report, plans: Mapping[str, PoolPlan], by_pool: Mapping[str, Sequence[ReplicaInfo]]
) -> None:
    """Check that batch hosts run the base model of their home pools: a stream begins at one and ends at the other."""
    for home, plan in plans.items():
        for host in plan.overload_marks.batch_pools if plan.overload_marks is not None else ():
            if home not in by_pool or host not in by_pool:
                continue
            ours, theirs = _base_models(by_pool[home]), _base_models(by_pool[host])
            what = f"the base model of pool {home} at its batch host {host}"
            files = [{info.artifact for info in by_pool[pool] if info.artifact} for pool in (home, host)]
            if not ours & theirs:
                serves = f"it serves {', '.join(sorted(theirs))}, and the pool {', '.join(sorted(ours))}"
                report.missing(what, "name another pool in batch_pools of the pools file", found=serves)
            elif all(files) and not files[0] & files[1]:
                remedy = "load the same files in both pools: a stream that moves would continue with another model"
                report.missing(what, remedy, found="its files differ (artifact in stream-gw replicas --json)")


def _base_models(infos: Sequence[ReplicaInfo]) -> set[str]:
    return {model for info in infos for model in info.models if model not in info.adapters}
