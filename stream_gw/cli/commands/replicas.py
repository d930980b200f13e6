"""``stream-gw replicas``: what each pool's replicas do, and an operator's word to one of them."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import msgspec

from stream_fabric.errors import FabricUnavailable
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pool import RedisPools, ReplicaInfo
from stream_fabric.redis.wire import ReplyError

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


class Row(NamedTuple):
    """One replica."""

    info: ReplicaInfo
    in_flight: int
    """Streams that it runs or that are in its inbox."""


class Pool(NamedTuple):
    name: str
    waiting: int
    rows: tuple[Row, ...]


# --- what is there ---------------------------------------------------------------------------------------------


async def read(pools: RedisPools) -> list[Pool]:
    """Every pool with its live replicas."""
    busy = asyncio.Semaphore(_AT_ONCE)

    async def row(info: ReplicaInfo) -> Row:
        async with busy:
            in_flight = await pools.in_flight(info.pool, info.replica)
            return Row(info, len(in_flight))

    found = []
    for name in await pools.pools():
        infos = sorted(await pools.replicas(name), key=lambda info: info.replica)
        waiting, _ = await pools.line(name, [])
        found.append(Pool(name, waiting, tuple(await asyncio.gather(*map(row, infos)))))
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
    """For 120 columns; what replicas have in common stands above them."""
    if not any(pool.rows or pool.waiting for pool in found):
        return "no live replica; start one with stream-gw agent"
    lines = []
    for pool in found:
        if not pool.rows and not pool.waiting:  # its last replica has left
            continue
        ready = sum(row.info.state == "ready" for row in pool.rows)
        lines.append(f"pool {pool.name}: {ready} of {_count(len(pool.rows), 'replica')} ready, {pool.waiting} waiting")
        kinds: dict[str, list[Row]] = {}
        for row in pool.rows:
            kinds.setdefault(_kind(row.info), []).append(row)
        for kind, rows in sorted(kinds.items()):
            lines += textwrap.wrap(kind, _WIDTH, initial_indent="  ", subsequent_indent="    ")
            lines += _aligned([_HEAD, *(_cells(row) for row in rows)])
        for info in (row.info for row in pool.rows if row.info.sleepless):
            told = f"{info.replica} stays awake where it was to sleep: {info.sleepless}"
            lines += textwrap.wrap(told, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines.append("")
    return "\n".join([*lines, *textwrap.wrap(_LEGEND, _WIDTH)])


def _kind(info: ReplicaInfo) -> str:
    """What is likely to be the same of many replicas."""
    where = ", ".join(filter(None, (info.engine, info.hardware, info.region and f"region {info.region}")))
    simulated = "SIMULATED, no model answers: " if info.simulated else ""
    return f"{simulated}{', '.join(info.models)} ({where})"


def _cells(row: Row) -> tuple[str, ...]:
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
    """None: its engine has not told of any prompt."""
    asked = info.load.prefix_queries_tokens
    return info.load.prefix_hits_tokens / asked if asked else None


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first and the last column begin at the left, the figures end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            [row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]]  # names differ in length
        )
        for row in rows
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# --- a word to one ---------------------------------------------------------------------------------------------


def find(infos: Iterable[ReplicaInfo], name: str) -> ReplicaInfo:
    """The replica of that name, or the only one whose name begins so. Raises ValueError with the candidates."""
    everyone = sorted(infos, key=lambda info: (info.replica, info.pool))
    found = [info for info in everyone if info.replica == name] or [
        info for info in everyone if name and info.replica.startswith(name)
    ]
    if len(found) == 1:
        return found[0]
    if not everyone:
        raise ValueError("there is no live replica")
    names = [f"{info.replica} (pool {info.pool}, {info.state})" for info in found or everyone]
    more = len(names) - _NAMES_SHOWN
    shown = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    if found:
        raise ValueError(f"{name!r} may be any of {shown}; give more of the name")
    raise ValueError(f"no live replica's name begins with {name!r}; there are {shown}")


class Heard(NamedTuple):
    """What became of the word."""

    replica: str
    pool: str
    state: str
    """``gone``: it has left its pool."""
    in_flight: int
    ready: int
    """Replicas of its pool that are ready now."""
    heard: bool
    """False: nobody has waited for it."""


async def tell(pools: RedisPools, verb: Verb, name: str, wait_s: float | None) -> Heard:
    """``wait_s``: until its state shows that it has heard; None: don't wait. Raises ValueError where the replica cannot
    do it and TimeoutError where it has not heard."""
    info = find([info for pool in await pools.pools() for info in await pools.replicas(pool)], name)
    wanted: Literal["draining", "ready"] = "draining" if verb == "drain" else "ready"
    if verb == "activate" and info.state == "draining":
        raise ValueError(f"{info.replica} is draining and will leave; start its agent again instead")
    await pools.desire(info.pool, info.replica, wanted)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (wait_s or 0.0)
    while True:
        heard = await _look(pools, info, wanted)
        if heard.heard:
            return heard
        if heard.state == "gone":
            raise ValueError(f"{info.replica} died before it could be told; its streams go elsewhere")
        if verb == "activate" and heard.state == "draining":
            raise ValueError(f"{info.replica} has begun to drain and will leave; start its agent again instead")
        if wait_s is None:
            return heard
        if loop.time() >= deadline:
            raise TimeoutError(
                f"{info.replica} is still {heard.state} after {wait_s:g} s; it hears of {wanted!r} at its next report, "
                f"which comes with each renewal of its lease (its agent's log tells of failures)"
            )
        await asyncio.sleep(_POLL_S)


async def _look(pools: RedisPools, info: ReplicaInfo, wanted: str) -> Heard:
    now = await pools.replicas(info.pool)
    ready = sum(other.state == "ready" for other in now)
    for other in now:
        if other.replica == info.replica:
            in_flight = len(await pools.in_flight(info.pool, info.replica))
            return Heard(info.replica, info.pool, other.state, in_flight, ready, other.state == wanted)
    # One that left is forgotten at once; one that died is on the list until its streams are elsewhere
    left = wanted == "draining" and info.replica not in await pools.expired(info.pool)
    return Heard(info.replica, info.pool, "gone", 0, ready, left)


def outcome(verb: Verb, heard: Heard) -> str:
    who = f"{heard.replica} of pool {heard.pool}"
    if not heard.heard:
        return f"{who} has been told to {verb}; it is {heard.state}, with {_streams(heard)} in flight"
    if heard.state == "gone":
        lines = [f"{who} has left"]
    elif verb == "drain":
        end = "it leaves when they have ended, or hands over what its drain time does not see the end of"
        lines = [f"{who} is draining; {_streams(heard)} still in flight" + (f": {end}" if heard.in_flight else "")]
    else:
        lines = [f"{who} is ready"]
    if verb == "drain" and not heard.ready:
        lines.append(f"no replica of pool {heard.pool} is ready now: requests wait in its queue, or are refused")
    return "\n".join(lines)


def _streams(heard: Heard) -> str:
    return _count(heard.in_flight, "stream")


# --- the command -----------------------------------------------------------------------------------------------


async def show(redis_url: str, *, json: bool, say: Say) -> None:
    """Raises FabricUnavailable."""
    async with _pools(redis_url) as pools:
        found = await read(pools)
    say(as_json(found) if json else as_text(found))


async def order(redis_url: str, verb: Verb, name: str, wait_s: float | None, *, json: bool, say: Say) -> None:
    """Raises FabricUnavailable, ValueError or TimeoutError."""
    async with _pools(redis_url) as pools:
        heard = await tell(pools, verb, name, wait_s)
    say(_json(heard._asdict()) if json else outcome(verb, heard))


@asynccontextmanager
async def _pools(redis_url: str) -> AsyncIterator[RedisPools]:
    client = RedisClient(redis_url)
    try:
        await client.start()
        yield RedisPools(client)
    except ReplyError as error:
        raise FabricUnavailable(f"Redis refuses: {error}") from error
    finally:
        await client.close()
