"""KV caches of tenants: shared by default, apart where their plan says so."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from stream_fabric.process.host import HostRandom
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import key_digest, new_key
from stream_gw.privacy.kv_isolation import cache_salt, prefix_scope, salted_body
from tests.gateway.processes import Process, Running
from tests.gateway.wire import Gate, refusal

CACHED = "sim-cached"
ACME, GLOBEX = TenantId("acme"), TenantId("globex")


def test_a_salt_depends_on_tenant_and_client_and_cannot_be_chosen() -> None:
    salts = [cache_salt(*args) for args in ((ACME, None), (GLOBEX, None), (ACME, "s"), (GLOBEX, "s"), (None, "s"))]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 32 and int(salt, 16) >= 0 for salt in salts)
    assert cache_salt(ACME, "s") == salts[2], "stable"
    assert cache_salt(None, None) == ""
    assert not {cache_salt(tenant, salt) for tenant in (None, GLOBEX) for salt in salts} & set(salts)


def test_a_salt_goes_into_the_engines_body_and_into_the_scope_of_hints() -> None:
    body = msgspec.Raw(b'{"model":"m","prompt":"x"}')
    assert salted_body(body, "") is body and prefix_scope("m", "") == b"m"
    assert msgspec.json.decode(salted_body(body, "ab")) == {"cache_salt": "ab", "model": "m", "prompt": "x"}
    assert len({prefix_scope("m", ""), prefix_scope("m", "a"), prefix_scope("m", "b")}) == 3


@pytest.fixture(scope="module")
def gates(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Gate]]:
    """Tenants whose caches are apart (``a``, ``b``) or shared (``c``, ``d``), on one replica."""
    keys = {name: new_key(HostRandom()) for name in "abcd"}
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    tenants = [
        f'[[tenant]]\nid = "{name}"\nplan = "{"apart" if name in "ab" else "shared"}"\n'
        f'[[tenant.key]]\nsha256 = "{key_digest(key)}"\n'
        for name, key in keys.items()
    ]
    path.write_text("".join(tenants) + "[plan.apart]\nkv_isolation = true\n[plan.shared]\n")
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    sim = f"model={CACHED},itl_ms=0,ttft_ms=0"
    with (
        Process("agent", "--replica", "cached", "--sim", sim, **env),
        platform.gateway("--gateway", "kv", STREAM_GW_KEYS_FILE=str(path)) as process,
    ):
        yield {name: Gate(process.facts["url"], process.pid, key) for name, key in keys.items()}


async def cached(gate: Gate, prompt: str, **more: Any) -> tuple[int, int]:
    """Cached tokens of a completion: as the engine found them, and as placement believed."""
    body = {"model": CACHED, "prompt": prompt, "max_tokens": 1, **more}
    reply = await gate.ask("POST", "/v1/completions", body)
    assert reply.status == 200, reply
    placed = (await gate.ask("GET", f"/v1/streams/{reply.headers['x-stream-id']}/placement")).json
    (placement,) = placed["placements"]
    (candidate,) = placement["candidates"]
    details = reply.json["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0), candidate["matched_tokens"]


def new_prompt() -> str:
    return secrets.token_hex(4000)


async def test_tenants_of_a_plan_with_isolation_share_no_cached_tokens(gates: dict[str, Gate]) -> None:
    prompt = new_prompt()
    assert await cached(gates["c"], prompt) == (0, 0)
    for name in "ab":
        assert await cached(gates[name], prompt) == (0, 0), "nothing of others"
        found, matched = await cached(gates[name], prompt)
        assert found > 1000 and matched > 1000, "a tenant's second request hits"
    found, matched = await cached(gates["d"], prompt)
    assert found > 1000 and matched > 1000, "other plans share"


async def test_a_clients_salt_is_combined_with_its_tenant(gates: dict[str, Gate]) -> None:
    prompt = new_prompt()
    for name in "abc":
        assert await cached(gates[name], prompt, cache_salt="s") == (0, 0)
    assert (await cached(gates["a"], prompt, cache_salt="s"))[0] > 1000
    assert await cached(gates["a"], prompt) == (0, 0), "its own requests without the salt are apart"
    victim = cache_salt(TenantId("a"), None)
    assert await cached(gates["c"], prompt, cache_salt=victim) == (0, 0), "a client cannot name another's salt"
    error = refusal(
        await gates["a"].ask("POST", "/v1/completions", {"model": CACHED, "prompt": "x", "cache_salt": 5}),
        400,
        "invalid_request",
    )
    assert error["param"] == "cache_salt"
