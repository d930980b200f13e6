"""``/v1/admin`` of a real gateway: who may call it, and what it changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from websockets.asyncio.client import connect

from stream_fabric.accounts.records import Limits, PlanRecord, TenantRecord, UserRecord, decode_record
from stream_fabric.events import Prices
from stream_fabric.limits import ADMIN_BODY_BYTES_MAX
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.tenants import RedisTenants
from stream_gw.auth.peppered import peppered_digest
from stream_gw.tenancy import open_tenancy
from stream_gw.tenancy.models import KeyCreate, TenantCreate
from tests.gateway.processes import Process
from tests.gateway.wire import Gate, Reply
from tests.support.redis import RedisServer
from tests.support.waiting import eventually
from tests.tenancy.conftest import PEPPER

ROUTES = [
    ("GET", "/v1/admin/tenants"),
    ("POST", "/v1/admin/tenants"),
    ("GET", "/v1/admin/tenants/acme"),
    ("PATCH", "/v1/admin/tenants/acme"),
    ("DELETE", "/v1/admin/tenants/acme"),
    ("GET", "/v1/admin/keys"),
    ("POST", "/v1/admin/keys"),
    ("GET", "/v1/admin/users?tenant=acme"),
    ("POST", "/v1/admin/users"),
    ("GET", "/v1/admin/users/acme/ann"),
    ("PATCH", "/v1/admin/users/acme/ann"),
    ("DELETE", "/v1/admin/users/acme/ann"),
    ("GET", "/v1/admin/prices"),
    ("GET", "/v1/admin/prices/m"),
    ("PUT", "/v1/admin/prices/m"),
    ("DELETE", "/v1/admin/prices/m"),
    ("PATCH", "/v1/admin/keys/x"),
    ("DELETE", "/v1/admin/keys/x"),
    ("POST", "/v1/admin/keys/x/rotate"),
    ("GET", "/v1/admin/plans"),
    ("POST", "/v1/admin/plans"),
    ("GET", "/v1/admin/plans/default"),
    ("PATCH", "/v1/admin/plans/default"),
    ("DELETE", "/v1/admin/plans/default"),
    ("GET", "/v1/admin/audit"),
]


class Setup(NamedTuple):
    """A gateway as its operator sees it, and other keys."""

    redis: RedisServer
    operator: Gate
    tenant: str
    limited: str
    """A key with scope admin that is limited to a model."""
    bare: Gate
    """A gateway without a database."""
    lost: Gate
    """A gateway whose database cannot be reached."""
    process: Process


async def make_keys(url: str, redis_url: str) -> list[str]:
    """Make the operator's key, a tenant's, and one with scope admin that is limited to a model."""
    client = RedisClient(redis_url)
    await client.start()
    try:
        async with open_tenancy(url, RedisTenants(client), HostClock(), HostRandom(), PEPPER) as tenancy:
            async with tenancy.change("cli:test") as session:
                await session.tenants.create(TenantCreate("ops"))
                asked = (
                    KeyCreate("ops", scopes=("admin",)),
                    KeyCreate("ops"),
                    KeyCreate("ops", scopes=("admin",), models=("m",)),
                )
                made = [await session.keys.create(each) for each in asked]
            assert tenancy.unpublished is None
    finally:
        await client.close()
    return [key.key for key in made]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    url = f"sqlite:///{tmp_path_factory.mktemp('admin') / 'tenants.db'}"
    with RedisServer() as redis:
        keys = asyncio.run(make_keys(url, redis.url))
        env = {"STREAM_GW_REDIS_URL": redis.url, "STREAM_GW_PARTITIONS": "1", "STREAM_GW_KEY_PEPPER": PEPPER,
               "STREAM_GW_TOKEN_SECRET": "sixteen bytes at least", "STREAM_GW_PORT": "0"}  # fmt: skip
        with (
            Process("gateway", **env, STREAM_GW_DATABASE_URL=url) as process,
            Process("gateway", **env) as bare,
            Process("gateway", **env, STREAM_GW_DATABASE_URL="postgresql://u:hunter2@127.0.0.1:1/x") as lost,
        ):
            gates = [Gate(each.facts["url"], each.pid, keys[0]) for each in (process, bare, lost)]
            yield Setup(redis, gates[0], keys[1], keys[2], gates[1], gates[2], process)
            assert "hunter2" not in lost.log and lost.log.count("tenants not published") == 1


async def ask(setup: Setup, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    reply = await setup.operator.ask(method, f"/v1/admin{path}", body)
    assert reply.status == status, reply
    return json.loads(reply.body) if reply.body else None


def code_of(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"])


async def published(setup: Setup) -> dict[str, Any]:
    client = RedisClient(setup.redis.url)
    await client.start()
    try:
        _, found = await RedisTenants(client).changes(0)
    finally:
        await client.close()
    return {name: decode_record(name, record) if record else None for name, record in found.items()}


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_only_an_operator_may_call(setup: Setup, method: str, path: str) -> None:
    gate = setup.operator
    for key, status in ((setup.tenant, 403), (setup.limited, 403), ("sk-unknown", 401)):
        reply = await gate.ask(method, path, {}, {"authorization": f"Bearer {key}"})
        assert reply.status == status, reply
    reply = await setup.bare.ask(method, path, {})
    assert (reply.status, code_of(reply)) == (404, "no_database")
    assert "STREAM_GW_DATABASE_URL" in reply.body.decode()
    assert (await setup.bare.ask(method, path, {}, {"authorization": f"Bearer {setup.tenant}"})).status == 403


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[0] not in ("GET", "DELETE")])
async def test_a_large_body_is_refused(setup: Setup, method: str, path: str) -> None:
    """It is decoded on the event loop."""
    reply = await setup.operator.ask(method, path, {"label": "x" * ADMIN_BODY_BYTES_MAX})
    assert (reply.status, code_of(reply)) == (413, "body_too_large")


async def test_a_database_that_is_away_is_told(setup: Setup) -> None:
    for method, path in ROUTES:
        if method == "GET" or method == "DELETE":
            reply = await setup.lost.ask(method, path)
            assert (reply.status, code_of(reply)) == (503, "database_unavailable")
            assert "retry-after" in reply.headers and b"hunter2" not in reply.body
    assert (await setup.lost.ask("GET", "/v1/models")).status == 200, "published keys serve"


async def is_accepted(setup: Setup, key: str) -> bool:
    """Whether a gateway without the database accepts the key."""
    return (await setup.bare.ask("GET", "/v1/models", None, {"authorization": f"Bearer {key}"})).status == 200


async def test_the_life_of_a_tenant(setup: Setup) -> None:
    plan = await ask(setup, "POST", "/plans", {"name": "gold", "tenant": {"streams": 3}, "models": ["m"]}, 201)
    assert plan["tier"] == "interactive" and plan["tenant"] == {"streams": 3}
    await ask(setup, "POST", "/tenants", {"id": "acme", "plan": "gold", "prices": {"m": {"prompt": 4}}}, 201)
    key = await ask(setup, "POST", "/keys", {"tenant": "acme", "label": "ci", "expires_in_s": 1000}, 201)
    new = await ask(setup, "POST", f"/keys/{key['id']}/rotate", {"grace_s": 5}, 201)
    assert new["key"] != key["key"] and new["label"] == "ci"
    assert await ask(setup, "GET", "/tenants/acme") in (await ask(setup, "GET", "/tenants"))["data"]
    await eventually(lambda: is_accepted(setup, key["key"]))
    listed = await ask(setup, "GET", "/keys?tenant=acme")
    assert {each["id"] for each in listed["data"]} == {key["id"], new["id"]}
    assert "digest" not in listed["data"][0] and "key" not in listed["data"][0]
    record = (await published(setup))["tenant:acme"]
    assert {each.digest for each in record.keys} == {
        peppered_digest(each["key"], PEPPER.encode()) for each in (key, new)
    }
    assert (await ask(setup, "DELETE", f"/keys/{new['id']}?tokens_only=true"))["generation"] == 1
    assert (await ask(setup, "DELETE", f"/keys/{key['id']}"))["revoked_at"]

    async def is_refused() -> bool:
        return not await is_accepted(setup, key["key"])

    await eventually(is_refused)
    assert len((await ask(setup, "GET", "/keys?tenant=acme&revoked=true"))["data"]) == 2
    assert (await ask(setup, "PATCH", "/tenants/acme", {"suspended": True, "plan": "default"}))["suspended"]
    assert (await ask(setup, "PATCH", "/plans/gold", {"tier": "batch", "models": None}))["tenant"] == {"streams": 3}
    assert (await published(setup))["plan:gold"] == PlanRecord("gold", "batch", tenant=Limits(streams=3))
    await ask(setup, "DELETE", "/plans/gold", status=204)
    await ask(setup, "DELETE", "/tenants/acme", status=204)
    found = await published(setup)
    assert found["tenant:acme"] is None and found["plan:gold"] is None
    audit = await ask(setup, "GET", "/audit?limit=2")
    assert [each["action"] for each in audit["data"]] == ["tenant.delete", "plan.delete"] and audit["has_more"]
    older = await ask(setup, "GET", f"/audit?after={audit['last_id']}&subject=tenant:acme")
    assert [each["action"] for each in older["data"]] == ["tenant.change", "tenant.create"] and not older["has_more"]
    assert {each["who"] for each in audit["data"]} == {setup.operator.key.split("_")[1]}
    for secret in (key["key"], new["key"]):
        assert secret not in json.dumps([audit, older]) and secret not in setup.process.log


async def test_the_life_of_a_user(setup: Setup) -> None:
    await ask(setup, "POST", "/tenants", {"id": "ausr"}, 201)
    made = await ask(setup, "POST", "/users", {"tenant": "ausr", "id": "a/b c", "limits": {"streams": 2}}, 201)
    assert (made["suspended"], made["limits"], made["created_by"]) == (False, {"streams": 2}, setup.operator.key[4:16])
    path = "/users/ausr/a/b%20c"
    assert await ask(setup, "GET", path) == made
    assert (await ask(setup, "PATCH", path, {"suspended": True}))["limits"] == {"streams": 2}
    assert (await published(setup))["user:ausr:a/b c"] == UserRecord("ausr", "a/b c", True, Limits(streams=2))
    assert [each["id"] for each in (await ask(setup, "GET", "/users?tenant=ausr"))["data"]] == ["a/b c"]
    await ask(setup, "DELETE", path, status=204)
    assert (await published(setup))["user:ausr:a/b c"] is None
    for method, body in (("GET", None), ("PATCH", {}), ("DELETE", None)):
        await ask(setup, method, path, body, 404)
    events = (await ask(setup, "GET", "/audit?subject=user:ausr:a/b%20c"))["data"]
    assert [each["action"] for each in events] == ["user.delete", "user.change", "user.create"]


async def test_a_key_is_changed_in_place(setup: Setup) -> None:
    await ask(setup, "POST", "/tenants", {"id": "chg"}, 201)
    key = await ask(setup, "POST", "/keys", {"tenant": "chg"}, 201)
    changed = await ask(setup, "PATCH", f"/keys/{key['id']}", {"label": "x", "scopes": ["read"], "expires_in_s": 60})
    assert (changed["label"], changed["scopes"], changed["id"]) == ("x", ["read"], key["id"])
    assert changed["expires_at"] > key["created_at"] and "key" not in changed
    assert (await published(setup))["tenant:chg"].keys[0].scopes == ("read",)
    for body in ({"user": "ann"}, {"scopes": []}, {"expires_in_s": 0}):
        await ask(setup, "PATCH", f"/keys/{key['id']}", body, 400)
    await ask(setup, "DELETE", f"/keys/{key['id']}")
    await ask(setup, "PATCH", f"/keys/{key['id']}", {}, 409)


async def test_prices_of_models(setup: Setup) -> None:
    price = {"prompt": 3, "output": 4, "cached": None, "model": "org/m"}
    assert await ask(setup, "PUT", "/prices/org/m", {"prompt": 3, "output": 4}) == price
    await ask(setup, "PUT", "/prices/*", {"output": 1})
    assert await ask(setup, "GET", "/prices/org/m") == price
    listed = await ask(setup, "GET", "/prices?limit=1")
    assert (listed["last_id"], listed["has_more"]) == ("*", True)
    assert (await ask(setup, "GET", "/prices?after=*"))["data"] == [price]
    assert (await published(setup))["prices"].prices["org/m"] == Prices(3, 3, 4)
    await ask(setup, "DELETE", "/prices/org/m", status=204)
    await ask(setup, "DELETE", "/prices/org/m", status=404)
    await ask(setup, "GET", "/prices/org/m", status=404)
    for body in ({"prompt": -1}, {"prompt": 1 << 41}, {"input": 1}):
        await ask(setup, "PUT", "/prices/m", body, 400)
    await ask(setup, "PUT", "/prices/a%01b", {}, 400)
    events = (await ask(setup, "GET", "/audit?subject=price:org/m"))["data"]
    assert events[0]["after"] is None and events[1]["before"] is None


async def test_lists_come_in_pages(setup: Setup) -> None:
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        await ask(setup, "POST", "/tenants", {"id": name}, 201)
    first = await ask(setup, "GET", "/tenants?limit=2&after=page-")
    assert [each["id"] for each in first["data"]] == names[:2] and first["has_more"]
    rest = await ask(setup, "GET", f"/tenants?limit=3&after={first['last_id']}")
    assert [each["id"] for each in rest["data"]] == names[2:] and not rest["has_more"]
    assert await ask(setup, "GET", "/tenants?after=page-9") == {
        "object": "list", "data": [], "has_more": False, "last_id": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "says"),
    [
        ("POST", "/tenants", {"id": "x", "color": "red"}, 400, "invalid_request", "color"),
        ("POST", "/tenants", {"id": "x y"}, 400, "invalid_request", "$.id"),
        ("POST", "/tenants", {"id": "x\n"}, 400, "invalid_request", "$.id"),
        ("POST", "/tenants", {"id": "x", "plan": "none"}, 404, "not_found", "plan 'none'"),
        ("POST", "/tenants", {"id": "x", "label": "\u0000"}, 400, "invalid_request", "$.label"),
        ("POST", "/plans", {"name": "default"}, 409, "conflict", "exists"),
        ("POST", "/plans", {"name": "p", "tenant": {"streams": -1}}, 400, "invalid_request", "$.tenant.streams"),
        ("POST", "/plans", {"name": "p", "tenant": {"speed": 1}}, 400, "invalid_request", "speed"),
        ("PATCH", "/plans/default", {"name": "p"}, 400, "invalid_request", "name"),
        ("POST", "/keys", {"tenant": "none"}, 404, "not_found", "tenant 'none'"),
        ("POST", "/keys", {"tenant": "a", "scopes": ["root"]}, 400, "invalid_request", "$.scopes"),
        ("POST", "/keys", {"tenant": "a", "scopes": []}, 400, "invalid_request", "$.scopes"),
        ("POST", "/keys/none/rotate", {"grace_s": -1}, 400, "invalid_request", "$.grace_s"),
        ("POST", "/keys/none/rotate", None, 404, "not_found", "key 'none'"),
        ("GET", "/tenants?limit=0", None, 400, "invalid_request", "limit"),
        ("GET", "/tenants?limit=5000", None, 400, "invalid_request", "limit"),
        ("GET", "/tenants?page=2", None, 400, "invalid_request", "page"),
        ("GET", "/audit?after=x", None, 400, "invalid_request", "after"),
        ("GET", f"/audit?after={1 << 63}", None, 400, "invalid_request", "after"),
        ("PUT", "/tenants", {}, 405, "method_not_allowed", "GET"),
    ],
)
async def test_errors_say_what_is_wrong(
    setup: Setup, method: str, path: str, body: Any, status: int, code: str, says: str
) -> None:
    reply = await setup.operator.ask(method, f"/v1/admin{path}", body)
    assert reply.status == status, reply
    error = json.loads(reply.body)["error"]
    assert says in error["message"], error
    if status != 405:
        assert error["code"] == code


async def test_the_gateway_publishes_again_what_redis_loses(setup: Setup) -> None:
    await ask(setup, "POST", "/tenants", {"id": "kept"}, 201)
    await asyncio.to_thread(setup.redis, "DEL", "sg:{tenants}:records", "sg:{tenants}:revisions")

    async def is_back() -> bool:
        return (await published(setup)).get("tenant:kept") == TenantRecord("kept", "default")

    await eventually(is_back)


async def test_a_new_key_is_known_to_every_gateway_at_once(setup: Setup) -> None:
    await ask(setup, "POST", "/tenants", {"id": "quick"}, 201)
    for _ in range(6):
        key = (await ask(setup, "POST", "/keys", {"tenant": "quick"}, 201))["key"]
        for gate in (setup.operator, setup.bare):
            reply = await Gate(gate.url, gate.pid, key).ask("GET", "/v1/models")
            assert reply.status == 200, reply
        key = (await ask(setup, "POST", "/keys", {"tenant": "quick"}, 201))["key"]
        for path in ("/v1/stream", "/v1/responses"):
            url = setup.bare.url.replace("http", "ws") + path
            async with connect(url, additional_headers={"authorization": f"Bearer {key}"}) as socket:
                await (await socket.ping())
            key = (await ask(setup, "POST", "/keys", {"tenant": "quick"}, 201))["key"]
    unknown = Gate(setup.bare.url, setup.bare.pid, "sgw_000000000000_unknown")
    assert {(await unknown.ask("GET", "/v1/models")).status for _ in range(3)} == {401}


async def test_a_socket_takes_a_new_key_and_a_token_of_one_at_once(setup: Setup) -> None:
    await ask(setup, "POST", "/tenants", {"id": "sockets"}, 201)
    bare, url = setup.bare, setup.bare.url.replace("http", "ws")

    async def new_key() -> str:
        return str((await ask(setup, "POST", "/keys", {"tenant": "sockets"}, 201))["key"])

    async def new_token() -> str:
        minter = Gate(setup.operator.url, setup.operator.pid, await new_key())
        return str((await minter.ask("POST", "/v1/tokens", {})).json["token"])

    for make in (new_key, new_token):
        reply = await Gate(bare.url, bare.pid, await make()).ask("GET", "/v1/models")
        assert reply.status == 200, reply
        async with bare.socket(headers={}) as socket:
            await socket.send("auth", token=await make())
            await socket.send("create", ch=1, body={"model": "m", "messages": [], "user": "x" * (300 << 10)})
            assert (await socket.receive())["t"] == "hi"
            assert (await socket.receive())["t"] == "error", "a long message behind the first auth waits for it"
            await socket.send("auth", token=await make())
            await socket.sub(1, "resp_" + "0" * 32)
            assert (await socket.receive())["code"] == "not_found", "the renewal has no answer"
            await socket.send("auth", token="sgw_000000000000_unknown")
            assert (await socket.receive())["code"] == "invalid_api_key"
        async with connect(url + "/v1/ui/chat") as chat:
            for _ in range(2):
                frame = {"type": "resume", "requestId": "r", "id": "c", "body": {}}
                await chat.send(json.dumps(frame | {"headers": {"Authorization": f"Bearer {await make()}"}}))
                assert json.loads(await chat.recv()) == {"type": "no-active", "requestId": "r"}
