"""Budgets of plans, as clients meet them: on real gateways and agents, each test with a tenant of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import openai
import pytest

from stream_fabric.accounts.periods import counter_name
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.accounts import RedisAccounts
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.ids import TenantId
from stream_gw.auth import key_digest, new_key
from tests.gateway.processes import Running
from tests.gateway.wire import DONE, Gate, Reply, chat, events, tokens_of_chunks
from tests.support.waiting import eventually

PLANS = {
    "sse": "tenant_month = { tokens = 700 }",
    "ws": "tenant_month = { tokens = 700 }",
    "whole": "tenant_month = { tokens = 700 }",
    "background": "tenant_month = { tokens = 700 }",
    "choices": "tenant_month = { tokens = 900 }",
    "request": "request = { tokens = 100 }",
    "request-none": "request = { tokens = 20 }",
    "session": "session = { tokens = 150 }",
    "user": "user_day = { tokens = 200 }",
    "money": "tenant_month = { micro = 3000 }",
    "free": "tenant_month = { micro = 0 }",
    "crowd": "tenant_month = { tokens = 4000 }",
    "warned": "tenant_month = { tokens = 1000 }",
    "velocity": "tenant_hour = { tokens = 300 }",
    "sdk": "tenant_month = { tokens = 300 }",
    "used": "tenant_month = { tokens = 500 }",
    "shown": "tenant_month = { tokens = 1000, micro = 5000 }\nbudgets.user_day = { tokens = 90 }",
    "embeddings": "tenant_month = { tokens = 60 }",
    "histories": "tenant_month = { tokens = 100 }",
    "silent": "tenant_month = { tokens = 3000 }",
}
PRICED = {"money": 'price."sim-small" = { prompt = 2500000, cached = 1250000, output = 10000000 }'}


@dataclass(frozen=True)
class Budgeted:
    """Two gateways, and the key of each plan's only tenant."""

    urls: list[Gate]
    keys: dict[str, str]
    redis_url: str

    def gate(self, plan: str, gateway: int = 0) -> Gate:
        at = self.urls[gateway]
        return Gate(at.url, at.pid, self.keys[plan])


@pytest.fixture(scope="module")
def budgeted(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Budgeted]:
    keys = {plan: new_key(HostRandom()) for plan in PLANS}
    lines = []
    for plan, budgets in PLANS.items():
        lines += [f"[plan.{plan}]", f"budgets.{budgets}", "[[tenant]]", f'id = "{plan}"', f'plan = "{plan}"']
        lines += [PRICED.get(plan, ""), "[[tenant.key]]", f'sha256 = "{key_digest(keys[plan])}"']
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("\n".join(lines))
    with (
        platform.gateway("--gateway", "budgets-1", STREAM_GW_KEYS_FILE=str(path)) as first,
        platform.gateway("--gateway", "budgets-2", STREAM_GW_KEYS_FILE=str(path)) as second,
    ):
        gates = [Gate(process.facts["url"], process.pid, "") for process in (first, second)]
        yield Budgeted(gates, keys, platform.redis_url)


async def used(gate: Gate, unit: str = "tokens") -> int:
    """Use of the budget of a month, running streams included, as the tenant sees it."""
    reply = await gate.ask("GET", "/v1/limits")
    found: int = next(each for each in reply.json["budgets"] if each["budget"] == "tenant_month")[unit]["used"]
    return found


async def settled(gate: Gate, wanted: int, unit: str = "tokens") -> None:
    async def reached() -> bool:
        return await used(gate, unit=unit) == wanted

    await eventually(reached, f"{wanted} {unit} settled", 5.0)


async def refused(gate: Gate, **more: Any) -> Reply:
    reply = await gate.ask("POST", "/v1/chat/completions", chat(100, **more))
    assert reply.status == 429, reply
    assert reply.json["error"]["code"] == "budget_exceeded"
    assert reply.json["error"]["type"] == "rate_limit_error"
    return reply


# --- the stop ----------------------------------------------------------------------------------------------


async def test_a_stream_stops_exactly_at_its_budget(budgeted: Budgeted) -> None:
    gate = budgeted.gate("sse")
    async with gate.create(chat(5000, stream_options={"include_usage": True})) as exchange:
        assert exchange.status == 200
        found = events(await exchange.rest())
    assert found[-1].data == DONE
    chunks = [event.json for event in found[:-1]]
    last, usage = chunks[-2]["choices"][0], chunks[-1]["usage"]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "budget")
    assert usage["total_tokens"] == 700
    assert tokens_of_chunks(chunks) == usage["completion_tokens"]
    stream = exchange.headers["x-stream-id"]
    assert (await gate.info(stream))["status"] == "incomplete"
    await settled(gate, 700)


async def test_a_websocket_ends_with_status_incomplete(budgeted: Budgeted) -> None:
    gate = budgeted.gate("ws")
    async with gate.socket() as socket:
        await socket.create(1, chat(5000))
        await socket.until_ended(1)
        track = socket.track(1)
    assert track.end is not None and track.end["status"] == "incomplete"
    assert "error" not in track.end
    total = track.end["usage"]["prompt"] + track.end["usage"]["output"]
    assert total == 700
    chunks = [chunk for message in track.data for chunk in message["f"]]
    assert chunks[-1]["choices"][0]["stop_reason"] == "budget"


async def test_a_whole_answer_ends_at_its_budget(budgeted: Budgeted) -> None:
    gate = budgeted.gate("whole")
    reply = await gate.ask("POST", "/v1/chat/completions", chat(5000, stream=False))
    assert reply.status == 200, reply
    (choice,) = reply.json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "budget")
    assert reply.json["usage"]["total_tokens"] == 700


async def test_a_stream_that_nobody_reads_stops_too(budgeted: Budgeted) -> None:
    gate = budgeted.gate("background")
    stream = await gate.background(5000)
    await gate.until_status(stream, "incomplete")
    await settled(gate, 700)


async def test_choices_share_the_budget_of_their_request(budgeted: Budgeted) -> None:
    gate = budgeted.gate("choices")
    reply = await gate.ask("POST", "/v1/chat/completions", chat(5000, stream=False, n=3))
    assert [choice["stop_reason"] for choice in reply.json["choices"]] == ["budget"] * 3
    assert reply.json["usage"]["total_tokens"] == 900


async def test_each_request_has_a_budget_of_its_own(budgeted: Budgeted) -> None:
    gate = budgeted.gate("request")
    for number in range(2):
        reply = await gate.ask("POST", "/v1/chat/completions", chat(5000, number, stream=False))
        assert reply.json["usage"]["total_tokens"] == 100
        assert reply.json["choices"][0]["stop_reason"] == "budget"
    short = await gate.ask("POST", "/v1/chat/completions", chat(20, stream=False))
    assert short.json["choices"][0]["finish_reason"] == "length"
    assert "stop_reason" not in short.json["choices"][0]


async def test_money_is_a_budget(budgeted: Budgeted) -> None:
    gate = budgeted.gate("money")
    reply = await gate.ask("POST", "/v1/chat/completions", chat(5000, stream=False))
    usage = reply.json["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    price = (usage["prompt_tokens"] - cached) * 2.5 + cached * 1.25 + usage["completion_tokens"] * 10
    # The prompt was reserved as uncached, before the engine knew how much of it is cached
    assert 3000 - 10 - cached * 1.25 <= price <= 3000
    await settled(gate, int(price + 0.5), "micro")
    await refused(gate)


async def test_a_model_without_a_price_costs_no_money(budgeted: Budgeted) -> None:
    reply = await budgeted.gate("free").ask("POST", "/v1/chat/completions", chat(600, stream=False))
    assert reply.json["usage"]["completion_tokens"] == 600


async def test_eight_streams_on_two_gateways_share_a_budget(budgeted: Budgeted) -> None:
    async def ask(number: int) -> int:
        reply = await budgeted.gate("crowd", number % 2).ask(
            "POST", "/v1/chat/completions", chat(5000, number, stream=False)
        )
        return reply.json["usage"]["total_tokens"] if reply.status == 200 else 0

    total = sum(await asyncio.gather(*map(ask, range(8))))
    assert 3600 <= total <= 4000
    await settled(budgeted.gate("crowd"), total)


async def test_a_replica_that_stands_still_loses_nothing(budgeted: Budgeted, platform: Running) -> None:
    """Grants are absolute: what was asked before a pause is not asked for twice."""
    gate = budgeted.gate("silent")
    async with gate.create(chat(5000, stream_options={"include_usage": True})) as exchange:
        for _ in range(3):
            await exchange.events(60)
            with platform.silent():
                await asyncio.sleep(0.3)
        found = events(await exchange.rest())
    assert found[-2].json["usage"]["total_tokens"] == 3000


# --- refusals ----------------------------------------------------------------------------------------------


async def test_a_used_month_refuses_until_it_ends(budgeted: Budgeted) -> None:
    gate, other = budgeted.gate("used", 0), budgeted.gate("used", 1)
    reply = await gate.ask("POST", "/v1/chat/completions", chat(5000, stream=False))
    assert reply.json["usage"]["total_tokens"] == 500
    refusal = await refused(other)
    error = refusal.json["error"]
    assert "tenant_month budget of 500 tokens" in error["message"]
    now = datetime.now(UTC)
    following = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    assert following.strftime("%Y-%m-%dT00:00:00Z") in error["message"]
    assert abs(int(refusal.headers["retry-after"]) - (following - now).total_seconds()) < 30
    assert refusal.headers["x-should-retry"] == "false", "the SDKs would retry at once"
    assert error["retriable"] is True


async def test_a_response_over_a_budget_is_refused_before_what_it_builds_on_is_read(budgeted: Budgeted) -> None:
    gate = budgeted.gate("histories")
    asked = {"model": "sim-small", "input": "Go on", "previous_response_id": "resp_" + "0" * 32}
    assert (await gate.ask("POST", "/v1/responses", asked)).status == 404, "below the budget"
    assert (await gate.ask("POST", "/v1/chat/completions", chat(600, stream=False))).status == 200
    await refused(gate)
    reply = await gate.ask("POST", "/v1/responses", asked)
    assert (reply.status, reply.json["error"]["code"]) == (429, "budget_exceeded")
    assert "tenant_month budget of 100 tokens" in reply.json["error"]["message"]


async def test_a_session_and_a_request_are_refused_for_good(budgeted: Budgeted) -> None:
    gate = budgeted.gate("session")
    first = await gate.ask("POST", "/v1/chat/completions", chat(5000, stream=False, session_id="s1"))
    assert first.json["usage"]["total_tokens"] == 150
    small = budgeted.gate("request-none")
    for reply in (await refused(gate, session_id="s1"), await refused(small)):
        assert "retry-after" not in reply.headers
        assert reply.headers["x-should-retry"] == "false"
        assert reply.json["error"]["retriable"] is False
    other = await gate.ask("POST", "/v1/chat/completions", chat(20, stream=False, session_id="s2"))
    assert other.status == 200


async def test_each_user_has_a_day_of_its_own(budgeted: Budgeted) -> None:
    gate = budgeted.gate("user")
    reply = await gate.ask("POST", "/v1/chat/completions", chat(5000, stream=False, user="ann"))
    assert reply.json["usage"]["total_tokens"] == 200
    await refused(gate, user="ann")
    assert (await gate.ask("POST", "/v1/chat/completions", chat(20, stream=False, user="bob"))).status == 200


async def test_embeddings_count_their_prompts(budgeted: Budgeted) -> None:
    gate = budgeted.gate("embeddings")
    body = {"model": "sim-small", "input": "one two three four five six seven eight"}
    first = await gate.ask("POST", "/v1/embeddings", body)
    assert first.status == 200
    await settled(gate, first.json["usage"]["total_tokens"])
    for _ in range(20):
        reply = await gate.ask("POST", "/v1/embeddings", body)
        if reply.status == 429:
            break
    assert reply.json["error"]["code"] == "budget_exceeded"
    assert 0 < await used(gate) <= 60


async def test_an_sdk_reads_the_end_and_the_refusal(budgeted: Budgeted) -> None:
    gate = budgeted.gate("sdk")
    messages: Any = [{"role": "user", "content": "Tell me of rivers."}]
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=gate.key) as client:
        reasons, text = [], []
        async for chunk in await client.chat.completions.create(
            model="sim-small", messages=messages, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        ):
            reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            text += [choice.delta.content or "" for choice in chunk.choices]
        assert reasons == ["length"] and len("".join(text)) > 500
        began = time.monotonic()
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="sim-small", messages=messages, max_tokens=100)
        assert caught.value.code == "budget_exceeded"
        assert time.monotonic() - began < 5


# --- warnings ----------------------------------------------------------------------------------------------


async def fleet_events(budgeted: Budgeted, tenant: str) -> list[dict[str, Any]]:
    """The fleet events of a tenant, from the event stream in Redis."""
    client = RedisClient(budgeted.redis_url)
    await client.start()
    try:
        entries = await client.execute(slot_of("events"), "XRANGE", "sg:{events}", "-", "+")
    finally:
        await client.close()
    found = []
    for _, fields in entries:
        for value in fields[1::2]:
            for line in value.splitlines():
                if b'"kind":"fleet"' in line and f'"tenant":"{tenant}"'.encode() in line:
                    found.append(json.loads(line))
    return found


async def test_a_budget_warns_once(budgeted: Budgeted) -> None:
    gate = budgeted.gate("warned")
    first = await gate.ask("POST", "/v1/chat/completions", chat(760, stream=False))
    assert first.status == 200 and "x-budget-warning" not in first.headers
    await settled(gate, first.json["usage"]["total_tokens"])
    seen = []
    for _ in range(3):
        reply = await gate.ask("POST", "/v1/chat/completions", chat(20, stream=False))
        seen.append(reply.headers.get("x-budget-warning"))
    assert all(each is not None and each.startswith("tenant_month 8") for each in seen), seen
    async with gate.create(chat(5)) as exchange:
        assert exchange.headers["x-budget-warning"].startswith("tenant_month ")
    async with gate.socket() as socket:
        await socket.create(1, chat(5))
        await socket.until_ended(1)
        assert socket.track(1).ok[0]["headers"]["x-budget-warning"].startswith("tenant_month ")

    async def reported() -> list[dict[str, Any]]:
        return await fleet_events(budgeted, "warned")

    (event,) = await eventually(reported, "the event")
    assert event["what"] == "budget_warning"
    assert event["state"] == counter_name("tenant_month", int(time.time() * 1000))
    metrics = (await gate.ask("GET", "/metrics")).body.decode()
    assert 'budget_events_total{budget="tenant_month",event="budget_warning"}' in metrics


async def test_an_hour_that_is_used_up_trips(budgeted: Budgeted) -> None:
    gate = budgeted.gate("velocity")
    reply = await gate.ask("POST", "/v1/chat/completions", chat(5000, stream=False))
    assert reply.json["usage"]["total_tokens"] == 300
    refusal = await refused(gate)
    assert "tenant_hour" in refusal.json["error"]["message"]
    async with gate.socket() as socket:
        await socket.create(1, chat(5))
        error = await socket.until_t("error", ch=1)
    assert error["code"] == "budget_exceeded" and error["retriable"]
    assert error["headers"]["x-budget-warning"] == refusal.headers["x-budget-warning"]
    assert int(refusal.headers["retry-after"]) <= 3600

    async def tripped() -> bool:
        return "velocity_trip" in [event["what"] for event in await fleet_events(budgeted, "velocity")]

    await eventually(tripped, "the event")
    await refused(gate)
    whats = [event["what"] for event in await fleet_events(budgeted, "velocity")]
    assert sorted(whats) == ["budget_warning", "velocity_trip"]


async def test_the_limits_page_shows_budgets(budgeted: Budgeted) -> None:
    gate = budgeted.gate("shown")
    reply = await gate.ask("POST", "/v1/chat/completions", chat(20, stream=False, user="ann"))
    total = reply.json["usage"]["total_tokens"]
    await settled(gate, total)
    (month,) = (await gate.ask("GET", "/v1/limits")).json["budgets"]
    assert month["tokens"] == {"limit": 1000, "used": total, "remaining": 1000 - total}
    assert month["micro"] == {"limit": 5000, "used": 0, "remaining": 5000}
    assert month["resets_at"].endswith("-01T00:00:00Z")
    day, _ = (await gate.ask("GET", "/v1/limits?user=ann")).json["budgets"]
    assert day["budget"] == "user_day" and day["tokens"]["used"] == total


async def test_nothing_stays_reserved(budgeted: Budgeted) -> None:
    """After all streams of the tests above have ended, each counter holds only what was used."""
    client = RedisClient(budgeted.redis_url)
    await client.start()
    accounts = RedisAccounts(client)
    name = counter_name("tenant_month", int(time.time() * 1000))

    async def all_settled() -> bool:
        found = [await accounts.budgets(TenantId(plan), [name]) for plan in PLANS]
        return all(each[name].reserved_tokens == each[name].reserved_micro == 0 for each in found)

    try:
        await eventually(all_settled, "all reservations settled", 5.0)
    finally:
        await client.close()
