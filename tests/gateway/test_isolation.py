"""Isolation of callers: models that they may not use, and streams of other tenants and users, look absent."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from stream_fabric.accounts.records import PlanRecord, TenantRecord
from stream_fabric.errors import ModelNotFound
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import ALL_SCOPES, KeyStore, Principal, key_digest, new_key
from tests.gateway.conftest import Tenants
from tests.gateway.in_process import Reading, in_process
from tests.gateway.processes import Process, Running
from tests.gateway.wire import MODEL, Gate, Reply, chat, refusal

SLASHED = "org/sim-fast"
ABSENT = "org/not-here"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/ui/chat": {"id": "c", "messages": [{"id": "u", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}]},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Hi"]},
    "/v1/classify": {"input": "Hi"},
    "/v1/score": {"queries": "Hi", "documents": ["Hi"]},
}


@pytest.fixture(scope="module")
def slashed(platform: Running) -> Iterator[str]:
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    with Process("agent", "--replica", "slashed", "--sim", f"model={SLASHED},itl_ms=0,ttft_ms=0", **env):
        yield SLASHED


@pytest.fixture(scope="module")
def by_credential(
    platform: Running, slashed: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Gate]]:
    """A gateway as callers see it that may use all models, or only ``MODEL`` by their key or by their plan."""
    keys = {name: new_key(HostRandom()) for name in ("all", "key", "plan")}
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f"""
        [[tenant]]
        id = "acme"
        [[tenant.key]]
        sha256 = "{key_digest(keys["all"])}"
        [[tenant.key]]
        sha256 = "{key_digest(keys["key"])}"
        models = ["{MODEL}"]
        [[tenant]]
        id = "globex"
        plan = "small"
        [[tenant.key]]
        sha256 = "{key_digest(keys["plan"])}"
        [plan.small]
        models = ["{MODEL}"]
        model."{SLASHED}" = {{ streams = 3 }}
        """
    )
    env = {"STREAM_GW_KEYS_FILE": str(path), "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16)}
    with platform.gateway("--gateway", "isolation", **env) as process:
        yield {name: Gate(process.facts["url"], process.pid, key) for name, key in keys.items()}


@pytest.fixture(params=["key", "plan", "token of all", "token of plan"])
async def narrow(request: pytest.FixtureRequest, by_credential: dict[str, Gate]) -> Gate:
    """A caller that may use ``MODEL`` alone."""
    kind, _, owner = request.param.partition(" of ")
    if kind != "token":
        return by_credential[kind]
    gate = by_credential[owner]
    asked = {"models": [MODEL]} if owner == "all" else {}
    return Gate(gate.url, gate.pid, (await gate.ask("POST", "/v1/tokens", asked)).json["token"])


def alike(reply: Reply, name: str) -> tuple[int, dict[str, str], Any]:
    """A reply without what differs between any two of them: ids, dates, and the name that was asked for."""
    text = re.sub(r"req_[0-9a-f]+", "req", reply.body.decode().replace(name, "NAME"))
    headers = {
        key: value for key, value in reply.headers.items() if key not in ("x-request-id", "date", "content-length")
    }
    return reply.status, headers, text


# --- models ----------------------------------------------------------------------------------------------------


async def test_only_allowed_models_are_listed(narrow: Gate, by_credential: dict[str, Gate]) -> None:
    listed = (await narrow.ask("GET", "/v1/models")).json["data"]
    assert [model["id"] for model in listed] == [MODEL]
    assert {MODEL, SLASHED} <= {
        model["id"] for model in (await by_credential["all"].ask("GET", "/v1/models")).json["data"]
    }


async def test_one_model_is_described(narrow: Gate, by_credential: dict[str, Gate]) -> None:
    everything = by_credential["all"]
    listed = {model["id"]: model for model in (await everything.ask("GET", "/v1/models")).json["data"]}
    for path in (SLASHED, "org%2Fsim-fast"):
        assert (await everything.ask("GET", f"/v1/models/{path}")).json == listed[SLASHED]
    assert listed[SLASHED] | {"id": SLASHED, "object": "model"} == listed[SLASHED]
    assert (await narrow.ask("GET", f"/v1/models/{MODEL}")).json == listed[MODEL]
    assert (await everything.ask("HEAD", f"/v1/models/{MODEL}")).status == 200
    error = refusal(await everything.ask("GET", f"/v1/models/{ABSENT}"), 404, "model_not_found")
    assert error["param"] == "model" and SLASHED in error["message"]
    refusal(await everything.ask("POST", f"/v1/models/{MODEL}"), 405, "method_not_allowed")


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_that_is_not_allowed_looks_absent(narrow: Gate, path: str) -> None:
    replies = [await narrow.ask("POST", path, BODIES[path] | {"model": name}) for name in (SLASHED, ABSENT)]
    error = refusal(replies[0], 404, "model_not_found")
    assert error["message"].endswith(f"models that you may use: {MODEL}")
    assert alike(replies[0], SLASHED) == alike(replies[1], ABSENT)


async def test_a_model_that_is_not_allowed_looks_absent_elsewhere(narrow: Gate) -> None:
    for path in ("/v1/models/", "/v1/limits?model="):
        replies = [await narrow.ask("GET", path + name) for name in (SLASHED, ABSENT)]
        refusal(replies[0], 404, "model_not_found")
        assert alike(replies[0], SLASHED) == alike(replies[1], ABSENT)
    limits = await narrow.ask("GET", "/v1/limits")
    assert limits.status == 200 and SLASHED.encode() not in limits.body


async def test_a_model_that_is_not_allowed_looks_absent_on_a_socket(narrow: Gate) -> None:
    told = []
    async with narrow.socket() as socket:
        for number, name in enumerate((SLASHED, ABSENT)):
            await socket.create(number, chat(1) | {"model": name})
            error = await socket.until_t("error", ch=number)
            assert error["code"] == "model_not_found"
            told.append({**error, "ch": 0, "message": error["message"].replace(name, "NAME")})
    assert told[0] == told[1]


async def test_a_refusal_by_name_asks_nobody(redis_client: RedisClient) -> None:
    """A model that is not allowed is refused, existing or not, while Redis cannot answer."""
    async with in_process(redis_client) as made:
        made.pools_link.pause()
        for name in (made.model, ABSENT):
            with pytest.raises(ModelNotFound, match=r"may use: none"):
                async with asyncio.timeout(0.1):
                    await made.gateway.parts.directory.pool_of(name, frozenset({"another"}))


async def test_a_caller_who_stays_is_held_to_the_plan_of_now(redis_client: RedisClient) -> None:
    tenant = f"t-{HostRandom().token_hex(4)}"
    keys = KeyStore([PlanRecord("p"), TenantRecord(tenant, "p")])
    async with in_process(redis_client, keys=keys) as made:
        call = replace(made.call(), who=Principal(TenantId(tenant), ALL_SCOPES))
        opened = await made.gateway.streams.create(call)
        assert opened is not None
        opened.subscribe(Reading()).close()
        keys.apply("plan:p", PlanRecord("p", models=("another",)))
        with pytest.raises(ModelNotFound):
            await made.gateway.streams.create(replace(made.call(), who=call.who))


# --- streams ---------------------------------------------------------------------------------------------------


async def everything_about(gate: Gate, stream: str) -> list[tuple[int, dict[str, str], Any]]:
    """Replies to all requests that name a stream."""
    base, item = f"/v1/streams/{stream}", {"id": "i1", "item": {}}
    asked: list[tuple[str, str, Any]] = [
        *((method, base + query, None) for method in ("GET", "HEAD") for query in ("", "?after=1-2", "?mode=coalesce")),
        ("GET", base + "?after=1-2&dialect=openai.chat", None),
        ("GET", base + "/info", None),
        ("GET", base + "/placement", None),
        ("POST", base + "/input", item),
        ("POST", base + "/cancel", None),
        ("POST", base + "/cancel", None),
    ]
    return [alike(await gate.ask(method, path, body), stream) for method, path, body in asked]


async def everything_on_a_socket(gate: Gate, stream: str) -> list[dict[str, Any]]:
    told = []
    async with gate.socket() as socket:
        for number, mode in enumerate(("tokens", "coalesce", "snapshot")):
            await socket.send("sub", ch=number, stream=stream, after="1-0", mode=mode)
            told.append(await socket.until_t("error", ch=number))
        await socket.send("input", id="i", stream=stream, item={})
        told.append(await socket.until_t("error", id="i"))
        await socket.send("cancel", id="c", stream=stream)
        told.append(await socket.until_t("ack", id="c"))
    return [{**each, "message": each.get("message", "").replace(stream, "NAME"), "request_id": ""} for each in told]


def unknown() -> str:
    return "resp_" + secrets.token_hex(16)


async def test_another_tenants_stream_looks_as_if_it_never_existed(tenants: Tenants) -> None:
    running = await tenants.acme.background(3000, user="u1")
    ended, _ = await tenants.acme.finished(2, user="u1")
    for stream in (running, ended):
        assert await everything_about(tenants.globex, stream) == await everything_about(tenants.globex, unknown())
        on_socket = await everything_on_a_socket(tenants.globex, stream)
        assert on_socket == await everything_on_a_socket(tenants.globex, unknown())
    assert (await tenants.globex.ask("GET", "/v1/streams?user=u1")).json["data"] == []
    listed = (await tenants.acme.ask("GET", "/v1/streams?user=u1")).json["data"]
    assert running in [each["id"] for each in listed]
    assert (await tenants.acme.info(running))["status"] == "live", "another tenant's cancel did nothing"
    assert (await tenants.acme.cancel(running))["result"] == "accepted"


async def test_another_users_stream_looks_as_if_it_never_existed(tenants: Tenants) -> None:
    minted = await tenants.acme.ask("POST", "/v1/tokens", {"user": "u1"})
    holder = Gate(tenants.acme.url, tenants.acme.pid, minted.json["token"])
    stream = await tenants.acme.background(3000, user="u2")
    assert await everything_about(holder, stream) == await everything_about(holder, unknown())
    replies = [await holder.ask("GET", f"/v1/streams?user={user}") for user in ("u2", "nobody")]
    assert alike(replies[0], "u2") == alike(replies[1], "nobody")
    assert (await tenants.acme.cancel(stream))["result"] == "accepted"
