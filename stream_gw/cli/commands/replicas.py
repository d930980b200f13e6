"""``stream-gw replicas``: lists replicas with their load; drains or activates one."""

from __future__ import annotations

import argparse
import asyncio
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import msgspec

from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.process.settings import FabricSettings
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.divided_pools import DividedPools
from stream_gw.cli.flags import add_fabric_flags, read_settings, seconds

Say = Callable[[str], None]
Verb = Literal["drain", "activate"]

_WIDTH = 120
_POLL_S = 0.1
_AT_ONCE = 32
_NAMES_SHOWN = 20
_HEAD = ("state", "running", "in flight", "load ms", "tokens/s", "KV", "prefix", "hits", "p99 ms", "replica")
_LEGEND = (
    "running: sequences of the engine's slots; in flight: streams of the room; load: pending work; prefix: blocks "
    "held; hits: prompt tokens found in its cache; p99: queue time of the last minute"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    common = add_fabric_flags(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="{drain,activate}", title="without a verb: list the replicas")
    for name, text in (
        ("drain", "stop new requests, finish running streams, end the agent"),
        ("activate", "let a warm replica (started with --standby) take requests"),
    ):
        verb = verbs.add_parser(name, help=text, parents=[common])
        verb.add_argument("replica", help="name of the replica, or a prefix that no other replica has")
        verb.add_argument("--no-wait", action="store_true", help="return before the replica has changed its state")
        verb.add_argument(
            "--wait-s", type=seconds, default=30.0, help="time for the change in seconds, 0 to 3600 (default 30)"
        )


def run(args: argparse.Namespace) -> int:
    url = read_settings(FabricSettings, args).redis_url
    if args.verb is None:
        asyncio.run(show(url, json=args.json, say=print))
    else:
        wait_s = None if args.no_wait else args.wait_s
        asyncio.run(request_and_print(url, args.verb, args.replica, wait_s, json=args.json, say=print))
    return 0


class Row(NamedTuple):
    """One replica."""

    info: ReplicaInfo
    in_flight: int
    """Streams that the replica runs, or that are in its inbox."""


class Pool(NamedTuple):
    """One pool with its live replicas."""

    name: str
    waiting: int
    rows: tuple[Row, ...]


# --- the list --------------------------------------------------------------------------------------------------


async def read(pools: DividedPools) -> list[Pool]:
    """Read every pool with its live replicas."""
    busy = asyncio.Semaphore(_AT_ONCE)

    async def read_row(info: ReplicaInfo) -> Row:
        async with busy:
            in_flight = await pools.in_flight(info.pool, info.replica)
            return Row(info, len(in_flight))

    found = []
    for name in await pools.pools():
        infos = sorted(await pools.replicas(name), key=lambda info: info.replica)
        waiting, _ = await pools.queue_positions(name, [])
        found.append(Pool(name, waiting, tuple(await asyncio.gather(*map(read_row, infos)))))
    return found


def as_json(found: Sequence[Pool]) -> str:
    return _json(
        [
            {
                "pool": pool.name,
                "waiting": pool.waiting,
                "replicas": [
                    {
                        **msgspec.structs.asdict(row.info),
                        "load": msgspec.structs.asdict(row.info.load),
                        "load_ms": row.info.prefill_ms + row.info.decode_ms,
                        "in_flight": row.in_flight,
                        "prefix_hit_share": _hit_share(row.info),
                    }
                    for row in pool.rows
                ],
            }
            for pool in found
        ]
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def as_text(found: Sequence[Pool]) -> str:
    """Format a table of at most 120 columns. Values that replicas share are above their rows."""
    if not any(pool.rows or pool.waiting for pool in found):
        return "no live replica; start one with stream-gw agent"
    lines = []
    for pool in found:
        if not pool.rows and not pool.waiting:  # the pool's last replica has left
            continue
        ready = sum(row.info.state == "ready" for row in pool.rows)
        lines.append(
            f"pool {pool.name}: {ready} of {_counted_noun(len(pool.rows), 'replica')} ready, {pool.waiting} waiting"
        )
        kinds: dict[str, list[Row]] = {}
        for row in pool.rows:
            kinds.setdefault(_group_heading(row.info), []).append(row)
        for kind, rows in sorted(kinds.items()):
            lines += textwrap.wrap(kind, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            lines += _aligned([_HEAD, *(_table_cells(row) for row in rows)])
        for info in (row.info for row in pool.rows if row.info.blocked):
            line = f"{info.replica} takes no requests: {info.blocked}"
            lines += textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        for info in (row.info for row in pool.rows if row.info.sleepless):
            line = f"{info.replica} cannot sleep as its plan says: {info.sleepless}"
            lines += textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines.append("")
    return "\n".join([*lines, *textwrap.wrap(_LEGEND, _WIDTH)])


def _group_heading(info: ReplicaInfo) -> str:
    """Heading of the replicas that have the same models, engine and hardware."""
    where = ", ".join(filter(None, (info.engine, info.hardware, info.region and f"region {info.region}")))
    simulated = "SIMULATED, no model answers: " if info.simulated else ""
    return f"{simulated}{', '.join(info.models)} ({where})"


def _table_cells(row: Row) -> tuple[str, ...]:
    info, load = row.info, row.info.load
    share = _hit_share(info)
    return (
        info.state,
        f"{load.running}/{load.slots}",
        f"{row.in_flight}/{info.room}",
        f"{info.prefill_ms + info.decode_ms:.0f}",
        f"{info.tokens_per_s:.0f}",
        f"{load.kv_used_ratio:.0%}" if load.kv_capacity_tokens or load.kv_used_ratio else "-",
        str(info.prefix_blocks),
        "-" if share is None else f"{share:.0%}",
        f"{info.queue_p99_ms:.0f}",
        info.replica,
    )


def _hit_share(info: ReplicaInfo) -> float | None:
    """Share of prompt tokens found in the cache; None: the engine has not reported a prompt."""
    queried = info.load.prefix_queries_tokens
    return info.load.prefix_hits_tokens / queried if queried else None


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the first and the last column left, the figures between them right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            [row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]  # names differ in length
        )
        for row in rows
    ]


def _counted_noun(number: int, what: str) -> str:
    """Format a number with its noun, in the plural unless the number is 1."""
    return f"{number} {what}{'' if number == 1 else 's'}"


# --- drain and activate ----------------------------------------------------------------------------------------


def find(infos: Iterable[ReplicaInfo], name: str) -> ReplicaInfo:
    """Return the replica with that name, or the only one with that prefix. Raises ValueError with the candidates."""
    everyone = sorted(infos, key=lambda info: (info.replica, info.pool))
    found = [info for info in everyone if info.replica == name] or [
        info for info in everyone if name and info.replica.startswith(name)
    ]
    if len(found) == 1:
        return found[0]
    if not everyone:
        raise ValueError("there is no live replica")
    names = [f"{info.replica} (pool {pool_of(info.pool)}, {info.state})" for info in found or everyone]
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    if found:
        raise ValueError(f"{name!r} may be any of {shown}; give more of the name")
    raise ValueError(f"no live replica's name begins with {name!r}; there are {shown}")


class Result(NamedTuple):
    """State of the replica after the request."""

    replica: str
    pool: str
    state: str
    """``gone``: the replica has left its pool."""
    in_flight: int
    ready: int
    """Number of replicas of the pool that are ready now."""
    heard: bool
    """True: the state is the requested one. False: the command did not wait for it."""


async def request(pools: DividedPools, verb: Verb, name: str, wait_s: float | None) -> Result:
    """Ask a replica to drain or to become ready, and wait ``wait_s`` for the change (None: do not wait).

    Raises ValueError when the replica cannot do it, TimeoutError when it has not changed in time.
    """
    info = find([info for pool in await pools.pools() for info in await pools.replicas(pool)], name)
    wanted: Literal["draining", "ready"] = "draining" if verb == "drain" else "ready"
    if verb == "activate" and info.state == "draining":
        raise ValueError(f"{info.replica} is draining and will leave; start its agent again instead")
    await pools.request_state(info.pool, info.replica, wanted)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (wait_s or 0.0)
    while True:
        result = await _read_result(pools, info, wanted)
        if result.heard:
            return result
        if result.state == "gone":
            raise ValueError(f"{info.replica} died before it read the request; its streams go to other replicas")
        if verb == "activate" and result.state == "draining":
            raise ValueError(f"{info.replica} has begun to drain and will leave; start its agent again instead")
        if wait_s is None:
            return result
        if loop.time() >= deadline:
            raise TimeoutError(
                f"{info.replica} is still {result.state} after {wait_s:g} s; its agent reads the request {wanted!r} "
                f"at its next lease renewal: see the agent's log, or wait longer with --wait-s"
            )
        await asyncio.sleep(_POLL_S)


async def _read_result(pools: DividedPools, info: ReplicaInfo, wanted: str) -> Result:
    """Read the replica's present state; ``wanted`` is the requested one."""
    pool = pool_of(info.pool)
    now = await pools.replicas(pool)
    ready = sum(other.state == "ready" for other in now)
    for other in now:
        if other.replica == info.replica:
            in_flight = len(await pools.in_flight(info.pool, info.replica))
            return Result(info.replica, pool, other.state, in_flight, ready, other.state == wanted)
    # A replica that left is gone at once; a dead one stays listed until its streams are recovered
    left = wanted == "draining" and info.replica not in await pools.expired(info.pool)
    return Result(info.replica, pool, "gone", 0, ready, left)


def outcome_text(verb: Verb, result: Result) -> str:
    who = f"{result.replica} of pool {result.pool}"
    if not result.heard:
        return f"{who} was asked to {verb}; it is {result.state}, with {_in_flight_text(result)} in flight"
    if result.state == "gone":
        lines = [f"{who} has left"]
    elif verb == "drain":
        end = "it leaves when they have ended; at the end of its drain time it hands the rest over"
        lines = [
            f"{who} is draining; {_in_flight_text(result)} still in flight" + (f": {end}" if result.in_flight else "")
        ]
    else:
        lines = [f"{who} is ready"]
    if verb == "drain" and not result.ready:
        lines.append(f"no replica of pool {result.pool} is ready now: requests wait in its queue or are refused")
    return "\n".join(lines)


def _in_flight_text(result: Result) -> str:
    return _counted_noun(result.in_flight, "stream")


# --- the command -----------------------------------------------------------------------------------------------


async def show(redis_url: str, *, json: bool, say: Say) -> None:
    """Print all replicas. Raises FabricError."""
    async with _open_pools(redis_url) as pools:
        found = await read(pools)
    say(as_json(found) if json else as_text(found))


async def request_and_print(
    redis_url: str, verb: Verb, name: str, wait_s: float | None, *, json: bool, say: Say
) -> None:
    """Drain or activate one replica and print the outcome. Raises FabricError, ValueError or TimeoutError."""
    async with _open_pools(redis_url) as pools:
        result = await request(pools, verb, name, wait_s)
    say(_json(result._asdict()) if json else outcome_text(verb, result))


@asynccontextmanager
async def _open_pools(redis_url: str) -> AsyncIterator[DividedPools]:
    client = RedisClient(redis_url)
    try:
        await client.start()
        yield DividedPools(client)
    finally:
        await client.close()
