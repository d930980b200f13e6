"""``stream-gw pools``: what the controllers want of each declared pool and why, and an operator's hold."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from stream_fabric.errors import FabricUnavailable
from stream_fabric.learned import STARTS_MIN, Learned, decode_learned
from stream_fabric.plans import PoolPlan
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.pool import RedisPools, ReplicaInfo
from stream_fabric.redis.wire import ReplyError

Say = Callable[[str], None]


class Row(NamedTuple):
    name: str
    plan: PoolPlan | None
    infos: Sequence[ReplicaInfo]
    waiting: int
    held_s: float
    learned: Learned | str | None = None
    """Or why it cannot be told; None: nothing, or it was not asked for."""


_decoder = msgspec.json.Decoder(Learned)


async def show(redis_url: str, *, json: bool, say: Say, learned: bool = False) -> None:
    """``learned``: also what controllers have learned. Raises FabricUnavailable."""
    async with _fabric(redis_url) as (control, pools):
        plans = await control.plans()
        rows = []
        for name in sorted({*plans, *await pools.pools()}):
            waiting, _ = await pools.line(name, [])
            held_s = await control.held_s(name)
            known = await _learned(control, name) if learned else None
            rows.append(Row(name, plans.get(name), await pools.replicas(name), waiting, held_s, known))
        leader = await control.leader()
    say(as_json(leader, rows) if json else as_text(leader, rows, time.time()))


async def _learned(control: RedisControl, pool: str) -> Learned | str:
    record = await control.learned(pool)
    if record is None:
        return "nothing yet"
    try:
        return decode_learned(record, _decoder) or "another version's: it is learned anew"
    except ValueError as error:
        return f"it cannot be read: {error}"


async def hold(redis_url: str, pool: str, seconds: float, *, json: bool, say: Say) -> None:
    """``seconds`` 0: let go. Raises FabricUnavailable, and ValueError for a pool that nobody has declared."""
    async with _fabric(redis_url) as (control, _):
        plans = await control.plans()
        if pool not in plans:
            raise ValueError(f"no controller plans a pool {pool!r}; there are {', '.join(sorted(plans)) or 'none'}")
        await control.hold(pool, seconds)
    if json:
        say(msgspec.json.encode({"pool": pool, "held_s": seconds}).decode())
    elif seconds:
        say(f"nothing of pool {pool} is taken away for {_ago(seconds)}; more may come")
    else:
        say(f"pool {pool} is not held any more")


def as_json(leader: str, rows: Sequence[Row]) -> str:
    return msgspec.json.encode(
        {
            "leader": leader,
            "pools": [
                {
                    "pool": row.name,
                    "plan": None if row.plan is None else msgspec.structs.asdict(row.plan),
                    "replicas": states(row.infos),
                    "waiting": row.waiting,
                    "held_s": row.held_s,
                    **({} if row.learned is None else {"learned": _as_value(row.learned)}),
                }
                for row in rows
            ],
        }
    ).decode()


def _as_value(learned: Learned | str) -> object:
    return msgspec.to_builtins(learned) if isinstance(learned, Learned) else None


def states(infos: Sequence[ReplicaInfo]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for info in infos:
        found[info.state] = found.get(info.state, 0) + 1
    return found


def as_text(leader: str, rows: Sequence[Row], now: float) -> str:
    if not rows:
        return "no pool; start an agent with stream-gw agent, or declare pools to a controller with --pools-file"
    lines = []
    for row in rows:
        there = ", ".join(f"{count} {state}" for state, count in sorted(states(row.infos).items()))
        lines.append(f"pool {row.name}: {there or 'no replica'}; {row.waiting} waiting")
        plan = row.plan
        if plan is None:
            lines.append("  nobody plans it: declare it to the controllers with --pools-file")
            continue
        lines.append(f"  wanted: {plan.ready} ready, {plan.warm} warm, {plan.pods} in all")
        if plan.resting:
            lines.append(f"  resting: {plan.resting}, which finishes its streams")
        if plan.victim:
            lines.append(f"  may go: {plan.victim}, which has nothing left to do")
        if plan.shedding:
            lines.append(f"  refused of late, for the work ahead of them: {', '.join(plan.shedding)}")
        if plan.shifting and plan.surge:
            lines.append(f"  given away of late: what tolerates a cache miss, to {', '.join(plan.surge.adjacent)}")
        ago = f", {_ago(now - plan.at_us / 1e6)} ago" if plan.at_us else ""
        lines.append(f"  why: {plan.reason}{ago}")
        if "burn_1h" in plan.figures:
            burns = f"{plan.figures['burn_5m']:.1f} over 5 min, {plan.figures['burn_1h']:.1f} over 1 h"
            lines.append(f"  first tokens over the objective then, as a multiple of what may be: {burns}")
        if row.held_s:
            lines.append(f"  held: nothing is taken away for another {_ago(row.held_s)}")
        if row.learned is not None:
            lines += _learned_text(row.learned, plan, now)
    if any(row.plan for row in rows):
        lines.append(f"planned by {leader}" if leader else "no controller leads: plans stay as they are")
    return "\n".join(lines)


def _learned_text(learned: Learned | str, plan: PoolPlan, now: float) -> list[str]:
    if isinstance(learned, str):
        return [f"  learned: {learned}"]
    age = f"from traces {_ago(now - learned.learned_s)} ago" if learned.learned_s else "nothing from traces yet"
    lines = [f"  learned: {age}"]
    if len(learned.starts_s) < STARTS_MIN:
        lines.append(f"    cold start: {plan.cold_start_s:.0f} s as declared, {len(learned.starts_s)} seen")
    else:
        lines.append(f"    cold start: {plan.cold_start_s:.0f} s, of the last {len(learned.starts_s)}")
    for one in learned.routes:
        lines.append(
            f"    {one.model} {one.dialect} {one.tier}, {one.requests:.0f} requests: prompts of {one.prompt.p50:.0f} "
            f"(p90 {one.prompt.p90:.0f}, p99 {one.prompt.p99:.0f}) tokens, answers of {one.output.p50:.0f} "
            f"(p90 {one.output.p90:.0f}, p99 {one.output.p99:.0f}, mean {one.output.mean:.0f})"
        )
    if learned.speeds:
        each = ", ".join(f"{speed.tokens_per_s:.0f} of {speed.batch:.0f}" for speed in learned.speeds)
        lines.append(f"    tokens a second of a replica, by how many decode at once: {each}")
    jump = learned.jump(plan.cold_start_s)
    if jump is not None:
        lines.append(
            f"    within a cold start arrivals rise by less than {jump.requests:.2f} requests "
            f"({jump.output_tokens:.0f} output tokens) a second, 99 times in a hundred"
        )
    return lines


def _ago(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@asynccontextmanager
async def _fabric(redis_url: str) -> AsyncIterator[tuple[RedisControl, RedisPools]]:
    client = RedisClient(redis_url)
    try:
        await client.start()
        yield RedisControl(client), RedisPools(client)
    except ReplyError as error:
        raise FabricUnavailable(f"Redis refuses: {error}") from error
    finally:
        await client.close()
