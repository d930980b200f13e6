"""Keys of the database on real gateways: new keys, revoked keys, suspended tenants, and what is open meanwhile."""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from websockets.exceptions import ConnectionClosed

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.ids import StreamId, TenantId, UserId
from stream_gw.cli.main import main
from tests.gateway.processes import Running, clean_env, run_cli
from tests.gateway.responses_socket.wire import opened
from tests.gateway.wire import Gate, Tokenstream, chat, whole_events
from tests.support.figures import Tell
from tests.support.waiting import eventually

REVOKED_S = 2.0
"""Time in which a revoked key ends everywhere."""
SLACK_S = 1.0
"""Further time on a machine that runs other tests."""


@dataclass
class Fleet:
    """Two gateways that take the keys of a database, one of them with the database itself."""

    gates: list[Gate]
    env: dict[str, str] = field(repr=False)

    def run(self, *flags: str) -> Any:
        """Run a command of the operator in this process; return its JSON."""
        out = io.StringIO()
        with (
            patch.dict(os.environ, clean_env(**self.env), clear=True),
            redirect_stdout(out),
            ThreadPoolExecutor(1) as thread,  # the test's own thread has a loop already
        ):
            assert thread.submit(main, [*flags, "--json"]).result() == 0
        return json.loads(out.getvalue())

    def tenant(self, *plan: str) -> tuple[str, str, str]:
        """Add a tenant with a plan of its own and a key. Returns (tenant, key id, key)."""
        name = f"t-{secrets.token_hex(3)}"
        self.run("plans", "add", name, *plan)
        self.run("tenants", "add", name, "--plan", name)
        return name, *self.key(name)

    def key(self, tenant: str) -> tuple[str, str]:
        made = self.run("keys", "add", "--tenant", tenant)
        return made["id"], made["key"]

    async def gate(self, key: str, gateway: int = 0) -> Gate:
        """Return a gateway with this key, once it takes the key."""
        at = self.gates[gateway]
        gate = Gate(at.url, at.pid, key)

        async def taken() -> bool:
            return (await gate.ask("GET", "/v1/models")).status == 200

        await eventually(taken, "the new key to be taken", 5.0)
        return gate


async def forget_tenants(redis_url: str) -> None:
    """Remove what another database has published: its revisions are higher than those of a new one."""
    client = RedisClient(redis_url)
    await client.start()
    try:
        await client.execute(slot_of("tenants"), "DEL", "sg:{tenants}:records", "sg:{tenants}:revisions")
    finally:
        await client.close()


@pytest.fixture(scope="module")
def fleet(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    path: Path = tmp_path_factory.mktemp("tenants") / "tenants.db"
    shared = {"STREAM_GW_KEY_PEPPER": secrets.token_hex(16), "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16)}
    database = {"STREAM_GW_DATABASE_URL": f"sqlite:///{path}"}
    env = shared | database | {"STREAM_GW_REDIS_URL": platform.redis_url}
    asyncio.run(forget_tenants(platform.redis_url))
    run_cli("tenants", "migrate", **env)
    with (
        platform.gateway("--gateway", "with-database", **env) as first,
        platform.gateway("--gateway", "without", **shared) as second,
    ):
        yield Fleet([Gate(each.facts["url"], each.pid, "") for each in (first, second)], env)


async def seconds_until(happens: Callable[[], Any]) -> float:
    began = time.monotonic()
    await eventually(happens, "the revocation to arrive", REVOKED_S + SLACK_S)
    return time.monotonic() - began


@asynccontextmanager
async def capability(gate: Gate) -> AsyncIterator[Gate]:
    reply = await gate.ask("POST", "/v1/tokens", {"scopes": ["create", "read"], "expires_in_s": 600})
    assert reply.status == 200, reply
    yield Gate(gate.url, gate.pid, reply.json["token"])


async def test_a_revoked_key_ends_everything_within_two_seconds(fleet: Fleet, tell: Tell) -> None:
    """An open response, one that is not streamed, a WebSocket and a capability token, on both gateways."""
    tenant, key_id, key = fleet.tenant()
    one, two = await fleet.gate(key), await fleet.gate(key, 1)
    _, other_key = fleet.key(tenant)
    other = await fleet.gate(other_key)
    whole = asyncio.create_task(two.ask("POST", "/v1/chat/completions", chat(5000, stream=False)))
    async with (
        one.create(chat(5000)) as first,
        two.create(chat(5000)) as second,
        two.socket() as socket,
        capability(one) as token,
        token.create(chat(5000)) as minted,
        other.create(chat(60)) as kept,
    ):
        await socket.receive()
        for exchange in (first, second, minted):
            await exchange.events(3)
        streams = [each.headers["x-stream-id"] for each in (first, second, minted)]
        background = await one.background(5000)
        began = time.monotonic()
        await asyncio.to_thread(fleet.run, "keys", "revoke", key_id)
        committed_s = time.monotonic() - began
        took_s = []
        for exchange in (first, second, minted):
            last = whole_events(await exchange.rest(REVOKED_S + SLACK_S))[-1]
            took_s.append(time.monotonic() - began - committed_s)
            assert last.json["error"]["code"] in ("api_key_revoked", "cancelled"), last
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await socket.receive(REVOKED_S + SLACK_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4401
        took_s.append(time.monotonic() - began - committed_s)
        reply = await asyncio.wait_for(whole, REVOKED_S + SLACK_S)
        assert reply.status in (401, 499, 500, 502), reply
        for gate in (one, two, token):  # a stream may have ended because the other gateway cancelled it

            async def refused(gate: Gate = gate) -> bool:
                return (await gate.ask("POST", "/v1/chat/completions", chat(2))).status == 401

            await seconds_until(refused)
        for stream in (*streams, background):
            await other.until_status(stream, "cancelled", 3.0)
        await kept.rest()
        assert kept.status == 200, "another key of the tenant goes on"
    assert max(took_s) < REVOKED_S + SLACK_S
    tell(f"a revoked key ended its last connection {max(took_s):.2f} s after the command returned")


async def test_a_plan_may_let_running_streams_finish(fleet: Fleet) -> None:
    tenant, key_id, key = fleet.tenant("--finish-revoked")
    gate = await fleet.gate(key)
    _, other_key = fleet.key(tenant)
    other = await fleet.gate(other_key)
    stream = await gate.background(1500)
    fleet.run("keys", "revoke", key_id)

    async def refused() -> bool:
        return (await gate.ask("GET", "/v1/models")).status == 401

    await seconds_until(refused)
    info = await other.info(stream)
    assert info["status"] == "live"
    await other.until_status(stream, "completed", 60.0)


async def test_a_suspended_tenant_is_refused_until_it_is_resumed(fleet: Fleet) -> None:
    tenant, _, key = fleet.tenant()
    gate = await fleet.gate(key, 1)
    fleet.run("tenants", "suspend", tenant)

    async def has_status(status: int) -> bool:
        return (await gate.ask("GET", "/v1/models")).status == status

    await seconds_until(lambda: has_status(401))
    fleet.run("tenants", "resume", tenant)
    await seconds_until(lambda: has_status(200))


async def test_a_plan_in_force_changes_within_two_seconds(fleet: Fleet) -> None:
    tenant, _, key = fleet.tenant()
    gate = await fleet.gate(key, 1)
    assert (await gate.ask("POST", "/v1/chat/completions", chat(2))).status == 200
    fleet.run("plans", "set", tenant, "--tenant-requests-per-min", "0")

    async def limited() -> bool:
        return (await gate.ask("POST", "/v1/chat/completions", chat(2))).status == 429

    await seconds_until(limited)


async def test_tokens_alone_can_be_revoked(fleet: Fleet) -> None:
    _, key_id, key = fleet.tenant()
    gate = await fleet.gate(key)
    async with capability(gate) as token:
        assert (await token.ask("POST", "/v1/chat/completions", chat(2))).status == 200
        fleet.run("keys", "revoke", key_id, "--tokens-only")

        async def refused() -> bool:
            return (await token.ask("POST", "/v1/chat/completions", chat(2))).status == 401

        await seconds_until(refused)
    assert (await gate.ask("GET", "/v1/models")).status == 200


async def forget_in_index(redis_url: str, tenant: str, user: str, stream: str) -> None:
    client = RedisClient(redis_url)
    await client.start()
    try:
        await RedisIndex(client).remove_live(TenantId(tenant), UserId(user), [StreamId(stream)])
    finally:
        await client.close()


async def test_a_suspended_user_ends_everything_within_two_seconds(fleet: Fleet) -> None:
    """Its streams, its key, its WebSocket; other users of the tenant go on."""
    tenant, _, key = fleet.tenant()
    one, two = await fleet.gate(key), await fleet.gate(key, 1)
    own = await fleet.gate(fleet.run("keys", "add", "--tenant", tenant, "--user", "ann")["key"], 1)
    async with (
        one.create(chat(5000, user="ann")) as first,
        own.create(chat(5000)) as second,
        own.socket() as socket,
        two.create(chat(200, user="bob")) as kept,
    ):
        await socket.receive()
        for exchange in (first, second):
            await exchange.events(3)
        unread = await one.background(5000, user="ann")
        # As after an hour without another stream of hers, or after many others
        for stream in (first.headers["x-stream-id"], unread):
            await forget_in_index(fleet.env["STREAM_GW_REDIS_URL"], tenant, "ann", stream)
        await asyncio.to_thread(fleet.run, "users", "add", "ann", "--tenant", tenant, "--suspended")
        for exchange in (first, second):
            last = whole_events(await exchange.rest(REVOKED_S + SLACK_S))[-1]
            assert last.json["error"]["code"] in ("user_suspended", "cancelled"), last
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                await socket.receive(REVOKED_S + SLACK_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4403

        async def refused() -> bool:
            asked = one.ask("POST", "/v1/chat/completions", chat(2, user="ann")), own.ask("GET", "/v1/models")
            return [reply.status for reply in await asyncio.gather(*asked)] == [403, 403]

        await seconds_until(refused)
        reply = await two.ask("POST", "/v1/chat/completions", chat(2, user="ann"))
        assert (reply.status, reply.json["error"]["code"], reply.json["error"]["param"]) == (
            403, "user_suspended", "user"
        )  # fmt: skip
        for stream in (first.headers["x-stream-id"], second.headers["x-stream-id"], unread):
            await one.until_status(stream, "cancelled", 3.0)
        await kept.rest()
        assert kept.status == 200, "another user goes on"
    fleet.run("users", "delete", "ann", "--tenant", tenant)

    async def taken() -> bool:
        return (await one.ask("POST", "/v1/chat/completions", chat(2, user="ann"))).status == 200

    await seconds_until(taken)


async def test_limits_of_a_user_and_of_a_key_change_within_two_seconds(fleet: Fleet) -> None:
    tenant, key_id, key = fleet.tenant()
    gate = await fleet.gate(key, 1)
    fleet.run("users", "add", "ann", "--tenant", tenant, "--requests-per-min", "0")

    async def status(user: str, expected: int) -> bool:
        return (await gate.ask("POST", "/v1/chat/completions", chat(2, user=user))).status == expected

    await seconds_until(lambda: status("ann", 429))
    assert await status("bob", 200)
    fleet.run("users", "set", "ann", "--tenant", tenant, "--plan-limits")
    await seconds_until(lambda: status("ann", 200))
    fleet.run("keys", "set", key_id, "--requests-per-min", "0")
    await seconds_until(lambda: status("bob", 429))
    fleet.run("keys", "set", key_id, "--plan-limits")
    await seconds_until(lambda: status("bob", 200))


async def test_rights_of_a_key_change_on_an_open_socket(fleet: Fleet) -> None:
    _, key_id, key = fleet.tenant()
    gate = await fleet.gate(key, 1)
    async with gate.socket() as socket, capability(gate) as token:
        await socket.receive()
        fleet.run("keys", "set", key_id, "--scope", "read", "--label", "reader")

        async def refused(on: Gate) -> bool:
            return (await on.ask("POST", "/v1/chat/completions", chat(2))).status == 403

        for each in (gate, token):
            await seconds_until(lambda each=each: refused(each))
        await socket.send("create", ch=1, body=chat(2))
        reply = await answer(socket)
        assert (reply["t"], reply["code"]) == ("error", "forbidden"), reply
        fleet.run("keys", "set", key_id, "--scope", "read", "--scope", "create", "--models", "none")
        await seconds_until(lambda: model_is_absent(gate))
        await socket.send("create", ch=2, body=chat(2))
        assert (await answer(socket))["code"] == "model_not_found"


async def answer(socket: Tokenstream) -> dict[str, Any]:
    """Return the next message about a stream; heartbeats come between on a slow machine."""
    while "ch" not in (message := await socket.receive()):
        pass
    return message


async def model_is_absent(gate: Gate) -> bool:
    return (await gate.ask("POST", "/v1/chat/completions", chat(2))).status == 404


async def test_a_revoked_key_ends_its_responses_sockets(fleet: Fleet) -> None:
    tenant, key_id, key = fleet.tenant()
    one = await fleet.gate(key)
    other = await fleet.gate(fleet.key(tenant)[1], 1)
    async with opened(one) as ws:
        await ws.create(tokens=100_000)
        response = (await ws.until("response.created"))["response"]["id"]
        await asyncio.to_thread(fleet.run, "keys", "revoke", key_id)
        with pytest.raises(ConnectionClosed):
            async with asyncio.timeout(REVOKED_S + SLACK_S):
                while True:
                    await ws.receive()
        assert ws.connection.close_code == 4401
    await other.until_status(response, "cancelled", REVOKED_S + SLACK_S)
