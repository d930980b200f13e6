"""Cost of budgets: CPU time of Redis for the accounts' calls, and of a token on the agent.

    python -m bench.budgets [--calls 4000] [--rounds 7]

Calls of the variants alternate, so that a slow moment of the machine costs all alike. Figures are medians of the
rounds. Redis is one that the command starts.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from typing import Any

from bench.harness import describe, table
from inference.agent.budgets.allowance import Allowance
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import RunningStream
from stream_fabric.accounts.account import Settlement, Subject
from stream_fabric.accounts.budgets import Claim, Spend
from stream_fabric.accounts.periods import expires_ms
from stream_fabric.accounts.records import Limits
from stream_fabric.events import Prices
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.stream.ids import StreamId, TenantId
from tests.support.redis import RedisServer

LIMITS = Limits(requests_per_min=10**9, tokens_per_min=10**9, streams=10**6)
SUBJECTS = [Subject(name, LIMITS) for name in ("tenant", "key:k", "model:m")]
NAMES = ("tenant_month:2099-12", "tenant_hour:2099-12-31T10", "user_day:u:2099-12-31", "session:s")


def spend(count: int) -> Spend | None:
    claims = tuple(Claim(name, 10**11, 10**11, expires_ms(name)) for name in NAMES[:count])
    return Spend(claims, 100, 256, Prices(1, 1, 1)) if claims else None


async def calls(client: RedisClient, variant: int, number: int, count: int) -> dict[str, float]:
    """Microseconds of Redis's CPU for an admission, an extension and a settlement."""
    tenant, asked, accounts = TenantId(f"t{variant}"), spend(variant), RedisAccounts(client)
    streams = [StreamId(f"resp_{number}_{index}") for index in range(count)]
    took = {"admit": -await spent_us(client)}
    for stream in streams:
        await accounts.admit(tenant, stream, SUBJECTS, 356, asked)
    took["admit"] += (now := await spent_us(client))
    took["extend"] = -now
    for stream in streams if asked is not None else ():
        await accounts.extend(tenant, stream, 512)
    took["extend"] += (now := await spent_us(client))
    took["settle"] = -now
    for stream in streams:
        await accounts.settle(tenant, [Settlement(stream, 300, 1, 0, 200)])
    took["settle"] += await spent_us(client)
    return {what: us / count for what, us in took.items()}


async def spent_us(client: RedisClient) -> float:
    """CPU time that Redis has spent, in microseconds: a busy machine changes it less than the time of the calls."""
    info = await client.execute(0, "INFO", "cpu")
    return sum(float(each) for each in re.findall(rb"used_cpu_(?:sys|user):([\d.]+)", info)) * 1e6


def tokens(limited: bool, count: int = 20_000) -> float:
    """Nanoseconds of ``RunningStream.text``; a stream with a budget never has to ask."""
    owner: Any = type("Owner", (), {"__getattr__": lambda self, name: lambda *_: None})()
    work = Work(EngineRequest(StreamId("resp_1"), "chat", "m", b"{}"), "1.aa", TenantId("t"), b"", None)  # type: ignore[arg-type]
    stream = RunningStream(work, 0, lambda *_: None, owner, 0.0, AttemptTiming(HostClock(), 0, 0))
    if limited:
        stream.limit(Allowance(1 << 40, 100, 1 << 40, 1))
    began = time.process_time_ns()
    for _ in range(count):
        stream.text(0, "river ")
    return (time.process_time_ns() - began) / count


async def measure(rounds: int, count: int) -> None:
    found: dict[int, list[dict[str, float]]] = {0: [], 1: [], 4: []}
    on_tokens: dict[bool, list[float]] = {False: [], True: []}
    with RedisServer() as server:
        client = RedisClient(server.url)
        await client.start()
        try:
            for number in range(rounds + 1):
                for variant, figures in found.items():
                    figures.append(await calls(client, variant, number, count // rounds))
                for limited, each in on_tokens.items():
                    each.append(tokens(limited))
        finally:
            await client.close()
    rows = [
        (f"{variant} budgets", *(f"{statistics.median(r[what] for r in figures[1:]):.1f}" for what in figures[0]))
        for variant, figures in found.items()
    ]
    print(table(("CPU of Redis in µs", "admit", "extend", "settle"), rows))
    without, limited = (statistics.median(on_tokens[kind][1:]) for kind in (False, True))
    print(f"\na token on the agent: {without:.0f} ns without a budget, {limited:.0f} ns with one")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.budgets", description=__doc__)
    parser.add_argument("--calls", type=int, default=4000, help="calls of each kind and variant")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    print("; ".join(f"{name} {value}" for name, value in describe().items()))
    asyncio.run(measure(args.rounds, args.calls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
