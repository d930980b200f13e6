"""``stream-gw pools``: prints each pool's plan and its reason; an operator's hold forbids scaling down."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from stream_fabric.pool.plan import PoolPlan
from stream_fabric.pool.records import ReplicaInfo
from stream_fabric.pool.traffic_model import JUMP_SHARES, STARTS_MIN, Jump, TrafficModel, decode_traffic_model
from stream_fabric.process.settings import FabricSettings
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from stream_fabric.redis.divided_pools import DividedPools
from stream_gw.cli.flags import add_fabric_flags, read_settings, seconds

Say = Callable[[str], None]


def add_flags(parser: argparse.ArgumentParser) -> None:
    common = add_fabric_flags(parser)
    parser.add_argument("--learned", action="store_true", help="also print each pool's traffic model and its age")
    verbs = parser.add_subparsers(dest="verb", metavar="{hold,release}", title="without a verb: list the pools")
    hold_parser = verbs.add_parser("hold", help="forbid scaling down, as during a rollout", parents=[common])
    hold_parser.add_argument("pool", help="name of the pool")
    hold_parser.add_argument(
        "--for-s", type=seconds, default=3600.0, help="duration in seconds, 0 to 3600 (default 3600)"
    )
    release = verbs.add_parser("release", help="end a hold before its time", parents=[common])
    release.add_argument("pool", help="name of the pool")


def run(args: argparse.Namespace) -> int:
    url = read_settings(FabricSettings, args).redis_url
    if args.verb is None:
        asyncio.run(show(url, json=args.json, say=print, learned=args.learned))
    else:
        duration_s = args.for_s if args.verb == "hold" else 0.0
        asyncio.run(hold(url, args.pool, duration_s, json=args.json, say=print))
    return 0


class Row(NamedTuple):
    """One pool, as the command prints it."""

    name: str
    plan: PoolPlan | None
    infos: Sequence[ReplicaInfo]
    waiting: int
    held_s: float
    learned: TrafficModel | str | None = None
    """The traffic model, or why there is none. None: not requested."""


_decoder = msgspec.json.Decoder(TrafficModel)


async def show(redis_url: str, *, json: bool, say: Say, learned: bool = False) -> None:
    """Print all pools; ``learned``: with their traffic models. Raises FabricError."""
    async with _open_fabric(redis_url) as (control, pools):
        plans = await control.plans()
        rows = []
        for name in sorted({*plans, *await pools.pools()}):
            waiting, _ = await pools.queue_positions(name, [])
            held_s = await control.held_s(name)
            known = await _read_traffic_model(control, name) if learned else None
            rows.append(Row(name, plans.get(name), await pools.replicas(name), waiting, held_s, known))
        leader = await control.leader()
    say(as_json(leader, rows) if json else as_text(leader, rows, time.time()))


async def _read_traffic_model(control: RedisControl, pool: str) -> TrafficModel | str:
    """Return the pool's traffic model, or the reason why there is none."""
    record = await control.learned(pool)
    if record is None:
        return "nothing yet"
    try:
        return decode_traffic_model(record, _decoder) or "another version's record; controllers learn anew"
    except ValueError as error:
        return f"it cannot be read: {error}"


async def hold(redis_url: str, pool: str, seconds: float, *, json: bool, say: Say) -> None:
    """Forbid scaling down for ``seconds``; 0 allows it again. Raises FabricError; ValueError for an unplanned pool."""
    async with _open_fabric(redis_url) as (control, _):
        plans = await control.plans()
        if pool not in plans:
            raise ValueError(f"no controller plans a pool {pool!r}; there are {', '.join(sorted(plans)) or 'none'}")
        await control.hold(pool, seconds)
    if json:
        say(msgspec.json.encode({"pool": pool, "held_s": seconds}).decode())
    elif seconds:
        say(f"pool {pool} does not scale down for {_duration_text(seconds)}; it may scale up")
    else:
        say(f"pool {pool} may scale down again")


def as_json(leader: str, rows: Sequence[Row]) -> str:
    return msgspec.json.encode(
        {
            "leader": leader,
            "pools": [
                {
                    "pool": row.name,
                    "plan": None if row.plan is None else _plan_fields(row.plan),
                    "replicas": count_by_state(row.infos),
                    "waiting": row.waiting,
                    "held_s": row.held_s,
                    **({} if row.learned is None else {"learned": _traffic_model_value(row.learned)}),
                }
                for row in rows
            ],
        }
    ).decode()


def _plan_fields(plan: PoolPlan) -> dict[str, object]:
    """Return all fields under the names that the plan has in Redis."""
    return {field.encode_name: getattr(plan, field.name) for field in msgspec.structs.fields(plan)}


def _traffic_model_value(learned: TrafficModel | str) -> object:
    """Return the traffic model for JSON output; None when there is none."""
    return msgspec.to_builtins(learned) if isinstance(learned, TrafficModel) else None


def count_by_state(infos: Sequence[ReplicaInfo]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for info in infos:
        found[info.state] = found.get(info.state, 0) + 1
    return found


def as_text(leader: str, rows: Sequence[Row], now: float) -> str:
    if not rows:
        return "no pool; start an agent with stream-gw agent, or declare pools to a controller with --pools-file"
    lines = []
    for row in rows:
        there = ", ".join(f"{count} {state}" for state, count in sorted(count_by_state(row.infos).items()))
        lines.append(f"pool {row.name}: {there or 'no replica'}; {row.waiting} waiting")
        plan = row.plan
        if plan is None:
            lines.append("  no plan: declare the pool to the controllers with --pools-file")
            continue
        lines.append(f"  wanted: {plan.ready} ready, {plan.warm} warm, {plan.pods} in all")
        if plan.resting:
            lines.append(f"  stops taking requests: {plan.resting}; it is warm once its streams have ended")
        if plan.victims:
            lines.append(f"  to be removed, idle: {', '.join(plan.victims)}")
        if plan.rejecting_tiers:
            lines.append(f"  rejected recently for overload, tiers: {', '.join(plan.rejecting_tiers)}")
        if plan.is_overflowing and plan.overload_marks:
            lines.append(
                f"  overflowed recently, where a cache miss is tolerable, to: {', '.join(plan.overload_marks.adjacent)}"
            )
        if plan.is_yielding:
            lines.append("  batch work yields, or recently did, to requests of higher tiers")
        ago = f", {_duration_text(now - plan.at_us / 1e6)} ago" if plan.at_us else ""
        lines.append(f"  why: {plan.reason}{ago}")
        if "burn_1h" in plan.figures:
            burns = f"{plan.figures['burn_5m']:.1f} over 5 min, {plan.figures['burn_1h']:.1f} over 1 h"
            lines.append(f"  burn rate of the first-token objective then (1: the whole error budget): {burns}")
        if row.held_s:
            lines.append(f"  held: no scaling down for another {_duration_text(row.held_s)}")
        if row.learned is not None:
            lines += _traffic_model_lines(row.learned, plan, now)
    if any(row.plan for row in rows):
        lines.append(f"planned by {leader}" if leader else "no controller leads: plans do not change")
    return "\n".join(lines)


def _traffic_model_lines(learned: TrafficModel | str, plan: PoolPlan, now: float) -> list[str]:
    if isinstance(learned, str):
        return [f"  learned: {learned}"]
    age = (
        f"from traces {_duration_text(now - learned.learned_s)} ago" if learned.learned_s else "nothing from traces yet"
    )
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
        lines.append(f"    tokens/s of a replica, by how many decode at once: {each}")
    jump = learned.jump(plan.cold_start_s)
    if jump is not None:
        title = "rise in arrivals within a cold start, by the share of the time in which it is no more"
        lines.append(f"    {title}: {_rises(jump, plan)}")
    return lines


def _rises(jump: Jump, plan: PoolPlan) -> str:
    """Format a jump's distribution: requests per second, and replicas of work where a replica's speed is known."""
    parts = []
    for share, rise in zip(JUMP_SHARES, jump.rises, strict=True):
        replica = plan.typical_replica
        work = f" ({jump.in_replicas(share, replica):.1f} replicas)" if replica is not None and rise else ""
        parts.append(f"{share * 100:g}%: {rise:.2f}/s{work}")
    return ", ".join(parts)


def _duration_text(seconds: float) -> str:
    """Format a duration with one unit: d, h, min or s."""
    seconds = max(seconds, 0.0)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@asynccontextmanager
async def _open_fabric(redis_url: str) -> AsyncIterator[tuple[RedisControl, DividedPools]]:
    client = RedisClient(redis_url)
    try:
        await client.start()
        yield RedisControl(client), DividedPools(client)
    finally:
        await client.close()
