"""Regions, smaller models and tier free, as clients meet them: real gateways and agents."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest

from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_gw.auth import key_digest, new_key
from stream_gw.streams.ladder.ladder import with_model
from tests.gateway.processes import Running
from tests.gateway.wire import Gate, Reply, chat
from tests.support.waiting import eventually

EU, BIG, SMALL = "model-eu", "model-big", "model-small"
PLANS = {
    "eu": 'regions = ["eu"]',
    "us": 'regions = ["us"]',
    "both": 'regions = ["us", "eu"]',
    "none": "",
    "ladder": f'fallbacks."{BIG}" = ["absent", "{SMALL}"]',
    "barred": f'models = ["{BIG}"]\nfallbacks."{BIG}" = ["{SMALL}"]',
    "free": 'tier = "free"',
    "paid": f'fallbacks."{BIG}" = ["{SMALL}"]\nbudgets.tenant_month = {{ micro = 100000000 }}',
}
PRICED = {
    "paid": f"""price."{BIG}" = {{ prompt = 50000000, output = 90000000 }}
price."{SMALL}" = {{ prompt = 2000000, output = 4000000 }}"""
}


@dataclass(frozen=True)
class Fleet:
    """A gateway without a region and one in the US, and each plan's key."""

    anywhere: Gate
    in_us: Gate
    keys: dict[str, str]
    redis_url: str

    @asynccontextmanager
    async def saturated(self, model: str) -> AsyncIterator[None]:
        """Requests fill the model's only replica, and one of them waits in its queue."""
        held = [asyncio.create_task(self.chat("none", model, 150)) for _ in range(4)]
        client = RedisClient(self.redis_url)
        await client.start()
        pools = RedisPools(client)

        async def waits() -> bool:
            return (await pools.queue_positions(model, []))[0] > 0

        await eventually(waits, "a request to wait")
        yield
        await asyncio.gather(*held)
        await client.close()

    async def ask(self, plan: str, method: str, path: str, body: object = None, *, us: bool = False) -> Reply:
        at = self.in_us if us else self.anywhere
        return await Gate(at.url, at.pid, self.keys[plan]).ask(method, path, body)

    async def chat(self, plan: str, model: str, tokens: int = 5, *, us: bool = False, **more: object) -> Reply:
        return await self.ask(plan, "POST", "/v1/chat/completions", chat(tokens, model=model, **more), us=us)


@pytest.fixture(scope="module")
def fleet(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    keys = {plan: new_key(HostRandom()) for plan in PLANS}
    lines = []
    for plan, terms in PLANS.items():
        lines += [f"[plan.{plan}]", terms, "[[tenant]]", f'id = "{plan}"', f'plan = "{plan}"']
        lines += [PRICED.get(plan, ""), "[[tenant.key]]"]
        lines += [f'sha256 = "{key_digest(keys[plan])}"', *(['regions = ["us"]'] if plan == "both" else [])]
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("\n".join(lines))
    with contextlib.ExitStack() as stack:
        for name, *flags in ((EU, "--region", "eu"), (BIG, "--sim", _sim(BIG, 1)), (SMALL, "--sim", _sim(SMALL, 8))):
            stack.enter_context(contextlib.closing(platform.agent(name, *flags)))
        gates: list[Gate] = []
        for name, region in (("anywhere", ""), ("in-us", "us")):
            process = stack.enter_context(
                platform.gateway("--gateway", name, STREAM_GW_KEYS_FILE=str(path), STREAM_GW_REGION=region)
            )
            gates.append(Gate(process.facts["url"], process.pid, ""))
        anywhere, in_us = gates
        yield Fleet(anywhere, in_us, keys, platform.redis_url)


def _sim(model: str, slots: int) -> str:
    return f"model={model},itl_ms=20,ttft_ms=0,max_num_seqs={slots}"


async def _until_served(fleet: Fleet, *models: str) -> None:
    async def served() -> bool:
        listed = (await fleet.ask("none", "GET", "/v1/models")).json["data"]
        return {each["id"] for each in listed} >= set(models)

    await eventually(served, "the agents to join")


async def test_a_pinned_tenant_is_served_in_its_region_or_refused(fleet: Fleet) -> None:
    await _until_served(fleet, EU)
    assert (await fleet.chat("eu", EU)).status == 200
    refused = await fleet.chat("us", EU)
    assert refused.status == 503 and refused.json["error"]["code"] == "region_unavailable", refused
    assert refused.headers["retry-after"] == "2"
    assert (await fleet.chat("both", EU)).json["error"]["code"] == "region_unavailable", "the key has one region"


async def test_models_of_other_regions_look_absent(fleet: Fleet) -> None:
    await _until_served(fleet, EU)
    for plan, seen in (("eu", True), ("us", False), ("none", True)):
        listed = (await fleet.ask(plan, "GET", "/v1/models")).json["data"]
        assert (EU in {each["id"] for each in listed}) == seen, plan
        assert (await fleet.ask(plan, "GET", f"/v1/models/{EU}")).status == (200 if seen else 404)


async def test_a_gateway_of_another_region_refuses_a_pinned_tenant(fleet: Fleet) -> None:
    await _until_served(fleet, EU)
    for reply in (await fleet.chat("eu", EU, us=True), await fleet.ask("eu", "GET", "/v1/models", us=True)):
        assert reply.status == 421 and reply.json["error"]["code"] == "wrong_region", reply
        assert "eu" in reply.json["error"]["message"]
    assert (await fleet.chat("none", EU, us=True)).status == 200


async def test_a_saturated_model_is_answered_by_a_smaller_one(fleet: Fleet) -> None:
    await _until_served(fleet, BIG, SMALL)

    async def is_answered_by_its_own() -> bool:
        return "x-served-model" not in (await fleet.chat("ladder", BIG)).headers

    await eventually(is_answered_by_its_own, "the gateway to see that there is room")
    async with fleet.saturated(BIG):
        smaller, own, barred = await asyncio.gather(
            fleet.chat("ladder", BIG), fleet.chat("ladder", BIG, fallback=False), fleet.chat("barred", BIG)
        )
    assert smaller.headers["x-served-model"] == SMALL and f'"model":"{SMALL}"'.encode() in smaller.body, smaller
    for reply in (own, barred):
        assert reply.status == 200 and "x-served-model" not in reply.headers, reply
        assert f'"model":"{BIG}"'.encode() in reply.body


async def test_a_retry_attaches_to_what_the_smaller_model_answered(fleet: Fleet) -> None:
    await _until_served(fleet, BIG, SMALL)
    at = Gate(fleet.anywhere.url, fleet.anywhere.pid, fleet.keys["ladder"])
    key = {"Idempotency-Key": "once"}
    async with fleet.saturated(BIG):
        first, again = [await at.ask("POST", "/v1/chat/completions", chat(5, model=BIG), key) for _ in range(2)]
        async with at.socket() as socket:
            await socket.create(1, chat(5, model=BIG), key="once")
            await socket.until_ended(1)
            repeated = socket.track(1)
            await socket.create(2, chat(5, model=BIG))
            await socket.until_ended(2)
            new = socket.track(2)
    for ok in (*repeated.ok, *new.ok):
        assert ok["headers"] == {"x-served-model": SMALL}
    for reply in (first, again):
        assert reply.headers["x-served-model"] == SMALL
    assert first.headers["x-stream-id"] == again.headers["x-stream-id"]
    assert f'"model":"{SMALL}"'.encode() in first.body and f'"model":"{SMALL}"'.encode() in again.body


async def test_a_money_budget_counts_the_price_of_the_model_that_answers(fleet: Fleet) -> None:
    """The bill is at this price too."""
    await _until_served(fleet, BIG, SMALL)
    async with fleet.saturated(BIG):
        reply = await fleet.chat("paid", BIG, 20, stream=False)
    assert reply.headers["x-served-model"] == SMALL
    usage = reply.json["usage"]
    wanted = usage["prompt_tokens"] * 2 + usage["completion_tokens"] * 4

    async def used() -> int:
        (month,) = (await fleet.ask("paid", "GET", "/v1/limits")).json["budgets"]
        found: int = month["micro"]["used"]
        return found

    async def settled() -> bool:
        return await used() == wanted

    await eventually(settled, f"{wanted} micro-units settled", 5.0)


async def test_tier_free_is_a_tier(fleet: Fleet) -> None:
    await _until_served(fleet, SMALL)
    assert (await fleet.chat("free", SMALL, service_tier="interactive")).status == 200
    assert (await fleet.chat("none", SMALL, service_tier="free")).status == 200
    assert (await fleet.ask("free", "GET", "/v1/limits")).json["highest_tier"] == "free"


def test_the_engine_gets_the_body_that_the_client_wrote_but_for_the_model() -> None:
    body = msgspec.Raw(b'{"temperature":0.70,"model":"big","messages":[{"role":"user","content":"h\\u00e9"}]}')
    wanted = b'{"temperature":0.70,"model":"sm\\"all","messages":[{"role":"user","content":"h\\u00e9"}]}'
    assert bytes(with_model(body, 'sm"all')) == wanted
