"""Usage of a running platform: it equals what was streamed, and each caller sees its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stream_fabric.process.host import HostRandom
from stream_gw.auth import key_digest, new_key
from tests.gateway.processes import Process, Running, running
from tests.gateway.wire import Gate, chat
from tests.support.waiting import eventually
from tests.telemetry.asked import TOKEN

pytestmark = pytest.mark.platform

USAGE, ADMIN = "/v1/usage", "/v1/admin/usage"
SIM = "itl_ms=5,ttft_ms=10"
PRICED = {"STREAM_GW_GPU_HOUR_MICRO": "3600000000"}


class Gates(NamedTuple):
    """One gateway as its callers see it. Each test counts requests of tenants that no other test uses."""

    operator: Gate
    acme: Gate
    globex: Gate
    initech: Gate
    second: Gate
    """Another key of Initech."""
    hooli: Gate
    wayne: Gate
    """A key of a tenant whose plan names its models."""
    kane: Gate
    """Another key of that tenant, which is limited to models itself."""
    tyrell: Gate


TENANTS = {
    "operations": ["operator"],
    "acme": ["acme"],
    "globex": ["globex"],
    "initech": ["initech", "second"],
    "hooli": ["hooli"],
    "wayne": ["wayne", "kane"],
    "tyrell": ["tyrell"],
}


@pytest.fixture(scope="module")
def platform() -> Iterator[Running]:
    with running(sim=SIM, **PRICED) as started:
        yield started


@pytest.fixture(scope="module")
def gates(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gates]:
    keys = [new_key(HostRandom()) for _ in Gates._fields]
    lines = ['[price."*"]', "prompt = 1_000_000", "cached = 500_000", "output = 2_000_000"]
    lines += ['[price."*@batch"]', "prompt = 0", "output = 500_000"]
    lines += ["[plan.named]", 'models = ["sim-small"]']
    for tenant, names in TENANTS.items():
        lines += ["[[tenant]]", f'id = "{tenant}"', *(['plan = "named"'] if tenant == "wayne" else [])]
        for name in names:
            lines += ["[[tenant.key]]", f'sha256 = "{key_digest(keys[Gates._fields.index(name)])}"']
            lines += ['scopes = ["admin"]'] if name == "operator" else []
            lines += ['models = ["sim-small"]'] if name == "kane" else []
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("\n".join(lines))
    shared = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    folder: Path = tmp_path_factory.mktemp("engine")
    env = shared | {"STREAM_GW_TELEMETRY_TOKEN": TOKEN, "STREAM_GW_TELEMETRY_LINGER_S": "0.1"}
    with closing(Process("telemetry", "--clickhouse", f"chdb://{folder}", **env)) as telemetry:
        env = {
            "STREAM_GW_KEYS_FILE": str(path), "STREAM_GW_TELEMETRY_URL": telemetry.facts["url"],
            "STREAM_GW_TELEMETRY_TOKEN": TOKEN, "STREAM_GW_TOKEN_SECRET": "0123456789abcdef",
            "STREAM_GW_TRACE_ONE_IN": "1000000",
        }  # fmt: skip
        with platform.gateway(**env) as process:
            made = [Gate(process.facts["url"], process.pid, key) for key in keys]
            yield Gates(*made)


async def sums(gate: Gate, path: str = USAGE, **query: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of an answer by the names of their groups."""
    text = "&".join(f"{name}={value}" for name, value in query.items())
    reply = await gate.ask("GET", f"{path}?{text}")
    assert reply.status == 200, reply.body
    assert reply.headers["cache-control"] == "no-store"
    answer = reply.json
    return {tuple(row[name] for name in answer["group_by"]): row for row in answer["data"]}


async def until_requests(gate: Gate, count: int) -> dict[str, Any]:
    async def there() -> dict[str, Any] | None:
        row = (await sums(gate, group_by="none")).get((), {"requests": 0})
        return row if row["requests"] >= count else None

    found: dict[str, Any] = await eventually(there, f"{count} bills", 20)
    assert found["requests"] == count
    return found


async def streamed(gate: Gate, tokens: int, path: str = "/v1/chat/completions", **more: Any) -> int:
    """Output tokens of a request, as its answer says."""
    body: dict[str, Any] = {"model": "sim-small", "max_tokens": tokens, "seed": 3, "ignore_eos": True, **more}
    body |= (
        {"prompt": "the rivers of the north"}
        if "completions" in path and "chat" not in path
        else {"messages": [{"role": "user", "content": "the rivers of the north"}]}
    )
    reply = await gate.ask("POST", path, body)
    assert reply.status == 200, reply.body
    return int(reply.json["usage"]["completion_tokens"])


async def test_usage_equals_what_was_streamed(gates: Gates) -> None:
    initech, second = gates.initech, gates.second
    alice = await streamed(initech, 20, user="alice", session_id="s1")
    alice += await streamed(second, 30, user="alice", session_id="s2")
    nobody = await streamed(initech, 10, path="/v1/completions")
    async with initech.create(chat(3000, user="bob")) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.events(8)
        await initech.cancel(stream)
        await exchange.rest()
    cancelled = await initech.info(stream)
    assert cancelled["status"] == "cancelled"
    total = await until_requests(initech, 4)
    by_endpoint = await sums(initech, group_by="endpoint")
    assert by_endpoint["completions",]["output_tokens"] == nobody
    assert by_endpoint["chat",]["requests"] == 3
    by_user = {row["output_tokens"]: row for row in (await sums(initech, group_by="user")).values()}
    assert by_user[alice]["requests"] == 2
    named = await sums(initech, group_by="user", user="alice")
    assert [row["output_tokens"] for row in named.values()] == [alice]
    keys = await sums(initech, group_by="key")
    assert all(name for (name,) in keys)
    assert sorted(row["requests"] for row in keys.values()) == [1, 3]
    sessions = await sums(initech, group_by="session,model")
    assert {row["output_tokens"] for (session, _), row in sessions.items() if session} == {20, 30}
    for group in ("model", "key", "user", "session", "endpoint"):
        rows = (await sums(initech, group_by=group)).values()
        for name in ("requests", "prompt_tokens", "output_tokens", "price_micro"):
            assert sum(row[name] for row in rows) == total[name], (group, name)
        assert not any("gpu_us" in row for row in rows), "what it costs is the operator's business"
    told = (await initech.ask("GET", USAGE)).json
    assert told["object"] == "usage" and told["from"] < told["to"]


async def test_a_stream_that_was_failed_over_is_billed_once(gates: Gates, platform: Running) -> None:
    hooli = gates.hooli
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"} | PRICED
    sim = "model=fragile,itl_ms=20,ttft_ms=0"
    with ExitStack() as stack:
        agents = [
            stack.enter_context(Process("agent", "--replica", name, "--sim", sim, **env)) for name in ("f0", "f1")
        ]
        async with hooli.create(chat(200, model="fragile", user="eve")) as exchange:
            stream = exchange.headers["x-stream-id"]
            await exchange.events(30)
            placed = (await hooli.ask("GET", f"/v1/streams/{stream}/placement")).json["placements"][0]["replica"]
            next(agent for agent in agents if agent.facts["replica"] == placed).kill()
            await exchange.rest(30)
        assert (await hooli.info(stream))["status"] == "completed"
        row = await until_requests(hooli, 1)
        assert row["output_tokens"] == 200
        rows = await sums(hooli, group_by="user,endpoint")
        assert [(endpoint, row["requests"]) for (_, endpoint), row in rows.items()] == [("chat", 1)]


async def test_each_caller_sees_its_own(gates: Gates) -> None:
    acme, globex, operator = gates.acme, gates.globex, gates.operator
    await streamed(acme, 12, user="carol")
    await streamed(globex, 7)
    token = (await acme.ask("POST", "/v1/tokens", {"user": "carol"})).json["token"]
    carol = Gate(acme.url, acme.pid, token)

    async def hers() -> bool:
        return bool((await sums(carol, group_by="none")).get(()))

    await eventually(hers, "carol's bill", 20)
    ((_, row),) = (await sums(carol, group_by="key")).items()
    assert (row["requests"], row["output_tokens"]) == (1, 12)
    for query in ("user=alice", "key=another"):
        assert (await carol.ask("GET", f"{USAGE}?{query}")).status == 400
    assert (await acme.ask("GET", f"{USAGE}?tenant=globex")).status == 400
    assert (await acme.ask("GET", f"{USAGE}?group_by=tenant")).status == 400
    assert (await acme.ask("GET", ADMIN)).status == 403
    create_only = (await acme.ask("POST", "/v1/tokens", {"scopes": ["create"]})).json["token"]
    assert (await Gate(acme.url, acme.pid, create_only).ask("GET", USAGE)).status == 403
    mine = await sums(globex, group_by="none")
    theirs = await sums(operator, ADMIN, tenant="globex", group_by="none")
    assert mine[()]["output_tokens"] == theirs[()]["output_tokens"]
    rows = await sums(operator, ADMIN, group_by="tenant,model")
    assert {tenant for tenant, _ in rows} >= {"acme", "globex"}
    for row in rows.values():
        assert row["gpu_us"] > 0 and row["gpu_cost_micro"] > 0
        assert row["margin_micro"] == row["price_micro"] - row["gpu_cost_micro"]


async def test_a_plan_that_names_models_hides_no_key_from_its_tenant(gates: Gates) -> None:
    wayne, kane = gates.wayne, gates.kane
    await streamed(wayne, 9)
    await streamed(kane, 11)
    assert (await until_requests(wayne, 2))["output_tokens"] == 20
    assert len(await sums(wayne, group_by="key")) == 2
    assert (await until_requests(kane, 1))["output_tokens"] == 11, "it is limited to models, others may not be"


async def test_batch_work_is_billed_at_the_price_of_its_tier(gates: Gates) -> None:
    tokens = await streamed(gates.tyrell, 40, service_tier="flex")
    assert (await until_requests(gates.tyrell, 1))["price_micro"] == tokens // 2 == 20
    tokens = await streamed(gates.tyrell, 40)
    price = (await until_requests(gates.tyrell, 2))["price_micro"]
    assert price > 20 + 2 * tokens
    by_tier = await sums(gates.tyrell, group_by="tier")
    assert {tier: row["price_micro"] for (tier,), row in by_tier.items()} == {"batch": 20, "standard": price - 20}


async def test_without_telemetry_usage_says_so(platform: Running) -> None:
    with platform.gateway() as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        reply = await gate.ask("GET", USAGE)
        assert (reply.status, reply.json["error"]["code"]) == (503, "usage_unavailable")
    with platform.gateway(STREAM_GW_TELEMETRY_URL="http://127.0.0.1:1", STREAM_GW_TELEMETRY_TOKEN="x") as process:
        reply = await Gate(process.facts["url"], process.pid, platform.key).ask("GET", USAGE)
        assert (reply.status, reply.json["error"]["retriable"]) == (503, True)
