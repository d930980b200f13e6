"""PostgreSQL or Redis away, with real gateways: what callers and operators get, and what happens after."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import pytest

from tests.gateway.processes import Process, on_cluster, run_cli
from tests.gateway.wire import Gate, Reply, chat, refusal
from tests.support.postgres import PostgresServer
from tests.support.proxy import Proxy
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.tenancy.conftest import PEPPER

pytestmark = [pytest.mark.platform, pytest.mark.skipif(on_cluster(), reason="stops the Redis of its own")]

COMMAND_S = 5.0
"""Time for a command of Redis; after it a request is refused."""
DATABASE_S = 10.0
"""Time for a statement of the database."""


class Setup(NamedTuple):
    redis: RedisServer
    postgres: PostgresServer
    env: dict[str, str]
    operator: str

    def run(self, *flags: str, **env: str) -> str:
        done = run_cli(*flags, **(self.env | env))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def key(self, *flags: str, **env: str) -> str:
        out = self.run("keys", "add", *flags, **env)
        return out.split("shown once: ")[1].split()[0]

    def gateway(self) -> Process:
        return Process("gateway", **self.env, STREAM_GW_PORT="0")


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    with RedisServer() as redis, PostgresServer() as postgres:
        env = {"STREAM_GW_REDIS_URL": redis.url, "STREAM_GW_PARTITIONS": "1", "STREAM_GW_KEY_PEPPER": PEPPER,
               "STREAM_GW_DATABASE_URL": postgres.url}  # fmt: skip
        made = Setup(redis, postgres, env, "")
        made.run("tenants", "migrate")
        made.run("tenants", "add", "acme")
        yield made._replace(operator=made.key("--tenant", "acme", "--scope", "admin"))


def gate_of(process: Process, key: str) -> Gate:
    return Gate(process.facts["url"], process.pid, key)


async def is_taken(gate: Gate) -> bool:
    return (await gate.ask("GET", "/v1/models")).status == 200


@pytest.mark.timeout(240)
async def test_an_outage_of_sql_reaches_no_caller(setup: Setup) -> None:
    """A gateway that starts meanwhile serves too; a change from right before the outage is published after it."""
    known = setup.key("--tenant", "acme")
    with setup.gateway() as first:
        await eventually(lambda: is_taken(gate_of(first, known)))
        first.signal(signal.SIGSTOP)  # it publishes nothing between the commit and the outage
        late = setup.key("--tenant", "acme", STREAM_GW_REDIS_URL="redis://127.0.0.1:1/0")
        setup.postgres.stop()
        first.signal(signal.SIGCONT)
        with setup.gateway() as second:
            for process in (first, second):
                gate, operator = gate_of(process, known), gate_of(process, setup.operator)
                assert await is_taken(gate)
                assert (await gate.ask("GET", "/readyz")).status == 200
                for method, path, body in (("GET", "/tenants", None), ("POST", "/tenants", {"id": "x"})):
                    began = time.monotonic()
                    reply = await operator.ask(method, f"/v1/admin{path}", body)
                    assert time.monotonic() - began < 1.0, "a refused connection is told at once"
                    refusal(reply, 503, "database_unavailable")
                assert not await is_taken(gate_of(process, late))
                assert process.poll() is None
            setup.postgres.start()
            for process in (first, second):
                await eventually(lambda process=process: is_taken(gate_of(process, late)), "the late key", 90)
                listed = await gate_of(process, setup.operator).ask("GET", "/v1/admin/tenants")
                assert listed.status == 200


@pytest.mark.timeout(120)
async def test_a_database_that_is_silent_is_told_within_its_time_limit(setup: Setup) -> None:
    async with Proxy.before(setup.postgres.port) as link:
        url = setup.postgres.url.replace(str(setup.postgres.port), str(link.port))
        env = setup.env | {"STREAM_GW_DATABASE_URL": url, "STREAM_GW_PORT": "0"}
        with await asyncio.to_thread(Process, "gateway", **env) as process:
            gate = gate_of(process, setup.operator)
            assert (await gate.ask("GET", "/v1/admin/tenants")).status == 200
            link.pause()
            began = time.monotonic()
            asked = asyncio.create_task(ask_slowly(gate, "/v1/admin/tenants"))
            assert await is_taken(gate), "other callers do not wait"
            refusal(await asked, 503, "database_unavailable")
            assert time.monotonic() - began < 2 * DATABASE_S
            link.resume()


async def ask_slowly(gate: Gate, path: str) -> Reply:
    async with asyncio.timeout(3 * DATABASE_S), gate.connection() as exchange:
        await exchange.send(gate.request("GET", path))
        while True:
            with suppress(TimeoutError):
                return await exchange.answer()


@pytest.mark.timeout(120)
async def test_an_outage_of_redis_refuses_within_its_time_limit_and_ends_with_it(setup: Setup) -> None:
    key = setup.key("--tenant", "acme")
    agent = {name: setup.env[name] for name in ("STREAM_GW_REDIS_URL", "STREAM_GW_PARTITIONS")}
    with setup.gateway() as process, Process("agent", "--sim", "itl_ms=1,ttft_ms=1", **agent):
        gate = gate_of(process, key)

        async def answers() -> bool:
            return (await gate.ask("POST", "/v1/chat/completions", chat(2, stream=False))).status == 200

        await eventually(answers, "a first answer")
        setup.redis.stop()
        began = time.monotonic()
        asked = (gate.ask("POST", "/v1/chat/completions", chat(2)) for _ in range(5))
        replies = await asyncio.gather(*asked)
        took_s = time.monotonic() - began
        for reply in replies:
            refusal(reply, 503, "fabric_unavailable")
            assert reply.json["error"]["retriable"] and int(reply.headers["retry-after"]) >= 1
        assert took_s < COMMAND_S + 2
        assert await is_taken(gate), "keys are in memory"
        setup.redis.start()
        await eventually(answers, "answers after the outage", 60)
