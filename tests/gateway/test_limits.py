"""Limits of plans, as clients meet them: on real gateways, each test with a tenant of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import openai
import pytest

from stream_fabric.process.host import HostRandom
from stream_gw.auth import key_digest, new_key
from tests.gateway.processes import Running
from tests.gateway.responses_socket.wire import code_of, opened
from tests.gateway.wire import MODEL, Gate, Reply, chat, tokens_of_chunks, whole_events
from tests.support.waiting import eventually

PLANS = {
    "requests": "tenant = { requests_per_min = 2 }",
    "tokens": "tenant = { tokens_per_min = 1000 }",
    "small": "tenant = { tokens_per_min = 100 }",
    "streams": "tenant = { streams = 1 }",
    "streams-cut": "tenant = { streams = 1 }",
    "streams-cancelled": "tenant = { streams = 1 }",
    "attach": "tenant = { requests_per_min = 1 }",
    "released": "tenant = { streams = 1 }",
    "sockets": "tenant = { requests_per_min = 2 }",
    "users": "user = { streams = 1 }",
    "keys": "key = { requests_per_min = 1 }",
    "models": 'model."*" = { requests_per_min = 1 }',
    "shown": 'tenant = { requests_per_min = 100, streams = 3 }\nmodel."sim-small" = { tokens_per_min = 500 }',
    "crowd": "tenant = { tokens_per_min = 1000 }",
    "inputs": "tenant = { requests_per_min = 2 }",
    "histories": "tenant = { requests_per_min = 1 }",
    "histories-streams": "tenant = { streams = 1 }",
    "prepared": "tenant = { requests_per_min = 1 }",
    "stored": "tenant = { requests_per_min = 1 }",
    "repeats": "tenant = { requests_per_min = 2 }",
    "successors": "tenant = { requests_per_min = 1 }",
    "both": "tenant = { requests_per_min = 50, tokens_per_min = 5000 }",
}


@dataclass(frozen=True)
class Limited:
    """Two gateways, and the keys of each plan's only tenant."""

    urls: list[Gate]
    keys: dict[str, list[str]]

    def gate(self, plan: str, gateway: int = 0, key: int = 0) -> Gate:
        at = self.urls[gateway]
        return Gate(at.url, at.pid, self.keys[plan][key])


@pytest.fixture(scope="module")
def limited(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    keys = {plan: [new_key(HostRandom()) for _ in range(2)] for plan in PLANS}
    lines = []
    for plan, limits in PLANS.items():
        lines += [f"[plan.{plan}]", limits, "[[tenant]]", f'id = "{plan}"', f'plan = "{plan}"']
        lines += [line for key in keys[plan] for line in ("[[tenant.key]]", f'sha256 = "{key_digest(key)}"')]
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("\n".join(lines))
    with (
        platform.gateway("--gateway", "limits-1", STREAM_GW_KEYS_FILE=str(path)) as first,
        platform.gateway("--gateway", "limits-2", STREAM_GW_KEYS_FILE=str(path)) as second,
    ):
        yield Limited([Gate(process.facts["url"], process.pid, "") for process in (first, second)], keys)


async def refused(gate: Gate, tokens: int = 10, **more: object) -> Reply:
    reply = await gate.ask("POST", "/v1/chat/completions", chat(tokens, **more))
    assert reply.status == 429, reply
    assert reply.json["error"]["code"] == "rate_limit_exceeded"
    return reply


async def admitted(gate: Gate, tokens: int = 10, **more: object) -> Reply:
    reply = await gate.ask("POST", "/v1/chat/completions", chat(tokens, **more))
    assert reply.status == 200, reply
    return reply


async def test_requests_are_counted_across_gateways(limited: Limited) -> None:
    one, two = limited.gate("requests", 0), limited.gate("requests", 1)
    first, second = await admitted(one), await admitted(two)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in (first, second)] == ["1", "0"]
    reply = await refused(one)
    assert 1 <= int(reply.headers["retry-after"]) <= 30
    assert int(reply.headers["retry-after-ms"]) <= 30_000
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    error = reply.json["error"]
    assert error["retriable"] is True
    assert error["type"] == "rate_limit_error"
    assert "limit of 2 requests per minute of your tenant" in error["message"]


async def test_anthropics_clients_read_the_limits_under_their_names(limited: Limited) -> None:
    gate = limited.gate("both")
    body = {"model": "sim-small", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        before = time.time()
        reply = await gate.ask("POST", path, body)
        assert reply.status == 200, reply
        for kind in ("requests", "tokens"):
            figures = {name: reply.headers[f"anthropic-ratelimit-{kind}-{name}"] for name in ("limit", "remaining")}
            assert figures == {name: reply.headers[f"x-ratelimit-{name}-{kind}"] for name in figures}
            reset = datetime.strptime(reply.headers[f"anthropic-ratelimit-{kind}-reset"], "%Y-%m-%dT%H:%M:%S%z")
            assert before - 2 <= reset.timestamp() <= time.time() + 62
    other = await admitted(gate)
    assert not [name for name in other.headers if name.startswith("anthropic-")]
    refusal = await gate.ask("POST", "/v1/messages", {**body, "max_tokens": 9_000})
    assert refusal.status == 429 and refusal.json["error"]["type"] == "rate_limit_error"
    assert refusal.headers["anthropic-ratelimit-tokens-limit"] == refusal.headers["x-ratelimit-limit-tokens"]


async def test_what_a_stream_did_not_use_comes_back_when_it_ends(limited: Limited) -> None:
    gate = limited.gate("tokens")
    async with gate.create(chat(900)) as exchange:
        left = int(exchange.headers["x-ratelimit-remaining-tokens"])
        assert left < 100
        stream = exchange.headers["x-stream-id"]
        await exchange.events(5)
        await refused(gate, 200)
        await gate.cancel(stream)
        body = await exchange.rest()
    used = tokens_of_chunks(event.json for event in whole_events(body) if event.data.startswith("{"))

    async def settled() -> int | None:
        (entry,) = (await gate.ask("GET", "/v1/limits")).json["data"]
        found: int = entry["tokens_per_minute"]["used"]
        return found if found < 800 else None

    # The prompt is counted too, and the bucket drains meanwhile
    assert used - 50 <= await eventually(settled, "the settlement") <= used + 100


async def test_a_request_that_no_wait_allows_is_not_retried(limited: Limited) -> None:
    reply = await gate_of(limited, "small", chat(500))
    assert reply.status == 429
    assert reply.headers["x-should-retry"] == "false"
    assert "retry-after" not in reply.headers
    assert reply.json["error"]["retriable"] is False
    assert "lower max_tokens" in reply.json["error"]["message"]


async def gate_of(limited: Limited, plan: str, body: object) -> Reply:
    return await limited.gate(plan).ask("POST", "/v1/chat/completions", body)


async def test_an_sdk_reads_the_refusal(limited: Limited) -> None:
    gate = limited.gate("small")
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=gate.key) as client:
        began = time.monotonic()
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(
                model="sim-small", messages=[{"role": "user", "content": "hi"}], max_tokens=5000
            )
    assert caught.value.code == "rate_limit_exceeded"
    assert time.monotonic() - began < 5, "the SDK must not retry what no wait allows"


async def until_admitted(gate: Gate, within_s: float, **more: object) -> float:
    """Ask until a request is admitted; return how long that took."""
    began = time.monotonic()

    async def asked() -> bool:
        reply = await gate.ask("POST", "/v1/chat/completions", chat(2, **more))
        return reply.status == 200

    await eventually(asked, "a free place", within_s)
    return time.monotonic() - began


async def test_the_place_of_a_running_stream_is_free_when_it_ends(limited: Limited) -> None:
    gate, other = limited.gate("streams", 0), limited.gate("streams", 1)
    async with gate.create(chat(60)) as exchange:
        await exchange.events(1)
        reply = await refused(other)
        assert "limit of 1 running streams" in reply.json["error"]["message"]
        await exchange.rest()
    assert await until_admitted(other, 2.0) < 2.0


async def test_the_place_is_free_after_a_cancel_and_after_the_reader_left(limited: Limited) -> None:
    gate = limited.gate("streams-cancelled")
    async with gate.create(chat(2000)) as exchange:
        await exchange.events(1)
        await gate.cancel(exchange.headers["x-stream-id"])
    assert await until_admitted(gate, 2.0) < 2.0
    left = limited.gate("streams-cut")
    async with left.create(chat(2000)) as exchange:
        await exchange.events(1)
    # A plain stream is cancelled 2 s after its last reader left
    assert await until_admitted(left, 6.0) < 6.0


async def test_a_repeated_request_attaches_for_free(limited: Limited) -> None:
    gate, headers = limited.gate("attach"), {"idempotency-key": "once"}
    for number in range(3):
        async with limited.gate("attach", number % 2).create(chat(20), headers) as exchange:
            assert exchange.status == 200
            await exchange.rest()
    await refused(gate)


async def test_a_refused_request_leaves_its_idempotency_key_free(limited: Limited) -> None:
    gate, headers = limited.gate("released"), {"idempotency-key": "again"}
    async with gate.create(chat(40)) as exchange:
        await exchange.events(1)
        reply = await gate.ask("POST", "/v1/chat/completions", chat(2), headers)
        assert reply.status == 429
        await exchange.rest()
    began = time.monotonic()

    async def asked() -> bool:
        return (await gate.ask("POST", "/v1/chat/completions", chat(2), headers)).status == 200

    await eventually(asked, "the same key admitted", 2.0)
    assert time.monotonic() - began < 2.0


async def test_users_keys_and_models_have_limits_of_their_own(limited: Limited) -> None:
    gate = limited.gate("users")
    async with gate.create(chat(100, user="ann")) as exchange:
        await exchange.events(1)
        await refused(gate, user="ann")
        await admitted(gate, 2, user="bob")
        await exchange.rest()
    await admitted(limited.gate("keys", key=0))
    await refused(limited.gate("keys", key=0))
    await admitted(limited.gate("keys", key=1))
    await admitted(limited.gate("models"))
    reply = await refused(limited.gate("models"))
    assert "model 'sim-small'" in reply.json["error"]["message"]


async def test_the_limits_page_shows_what_is_left(limited: Limited) -> None:
    gate = limited.gate("shown")
    await admitted(gate)
    reply = await gate.ask("GET", "/v1/limits")
    assert reply.status == 200
    assert reply.json["object"] == "limits"
    tenant, model = reply.json["data"]
    assert tenant["applies_to"] == "tenant"
    assert tenant["requests_per_minute"] == {"limit": 100, "used": 1, "remaining": 99}
    assert tenant["running_streams"]["limit"] == 3
    assert (model["applies_to"], model["model"]) == ("model", "sim-small")
    assert model["tokens_per_minute"]["limit"] == 500


async def test_the_limits_need_a_key(limited: Limited) -> None:
    at = limited.urls[0]
    assert (await Gate(at.url, at.pid, "sk-none").ask("GET", "/v1/limits")).status == 401


async def test_a_crowd_on_two_gateways_gets_no_more_than_the_limit(limited: Limited) -> None:
    """200 callers ask at once. What they used exceeds the limit by no more than the error of the prompts' estimates."""
    began = time.monotonic()

    async def ask(number: int) -> int:
        body = chat(40, stream=False, seed=number)
        reply = await limited.gate("crowd", number % 2).ask("POST", "/v1/chat/completions", body)
        return reply.json["usage"]["total_tokens"] if reply.status == 200 else 0

    used = sum(await asyncio.gather(*map(ask, range(200))))
    refilled = 1000 * (time.monotonic() - began) / 60
    assert 800 <= used <= 1.1 * (1000 + refilled)


async def test_an_input_counts_as_a_request(limited: Limited) -> None:
    one, two = limited.gate("inputs"), limited.gate("inputs", 1)
    stream = await one.background(2000)
    path = f"/v1/streams/{stream}/input"
    replies = [await gate.ask("POST", path, {"id": "a", "item": "Shorter."}) for gate in (one, two)]
    assert [reply.json for reply in replies] == [{"result": "accepted"}, {"result": "duplicate"}], "and once only"
    over = await two.ask("POST", path, {"id": "b", "item": "Shorter."})
    assert (over.status, over.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(over.headers["retry-after"]) > 0
    await one.cancel(stream)


async def test_a_successor_that_a_limit_refuses_gives_its_input_back(limited: Limited) -> None:
    one = limited.gate("successors")
    async with opened(one) as ws:
        await ws.create(tokens=2000, store=False)
        response = (await ws.until("response.created"))["response"]["id"]
        await ws.until("response.output_text.delta")
        await ws.send({"type": "response.steer", "previous_response_id": response, "input": "Be brief."})
        assert (await ws.ended())["response"]["incomplete_details"] == {"reason": "steered"}
        while len(ws.steers) < 2:
            await ws.receive()
    accepted, failed = ws.steers
    assert (
        failed["error"]["code"] == "successor_creation_failed" and "requests per minute" in failed["error"]["message"]
    )
    assert failed["steer"] == {**accepted["steer"], "input": "Be brief."}


@pytest.mark.parametrize("plan", ["histories", "histories-streams"])
async def test_a_request_over_a_limit_is_refused_before_what_it_builds_on_is_read(limited: Limited, plan: str) -> None:
    """A response that does not exist is told only to those whose request may run."""
    gate = limited.gate(plan)
    asked: dict[str, object] = {"model": MODEL, "input": "Go on", "previous_response_id": "resp_" + "0" * 32}
    assert (await gate.ask("POST", "/v1/responses", asked)).status == 404, "below the limit"
    stream = await gate.background(3000)
    assert (await gate.ask("POST", "/v1/responses", asked)).status == 429
    async with opened(gate) as ws:
        refused = await ws.turn(previous_response_id=asked["previous_response_id"])
        assert code_of(refused) == (429, "rate_limit_exceeded")
    for path in ("/v1/responses/input_tokens", "/v1/responses/compact", "/v1/open/responses/compact"):
        assert (await gate.ask("POST", path, asked)).status == 429, path
    unknown = await gate.ask("POST", "/v1/responses", asked, {"Idempotency-Key": "never used"})
    assert unknown.status == 429, "only a known key attaches to a stream"
    await gate.ask("POST", f"/v1/streams/{stream}/cancel")


async def test_a_repeat_by_key_attaches_over_the_limit(limited: Limited) -> None:
    gate, key = limited.gate("repeats"), {"Idempotency-Key": "repeated"}
    asked: dict[str, object] = {"model": MODEL, "input": "Go on", "max_output_tokens": 5, "store": False}
    asked["previous_response_id"] = (await gate.ask("POST", "/v1/responses", asked | {"store": True})).json["id"]
    first = await gate.ask("POST", "/v1/responses", asked, key)
    assert first.status == 200, first
    assert (await gate.ask("POST", "/v1/responses", asked)).status == 429
    again = await gate.ask("POST", "/v1/responses", asked, key)
    assert (again.status, again.json["id"]) == (200, first.json["id"])


async def test_reads_of_what_is_stored_have_a_limit_of_their_own(limited: Limited) -> None:
    """60 for each request: a client may ask each second whether a background response has ended."""
    made = await limited.gate("stored").ask(
        "POST", "/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 5}
    )
    assert made.status == 200, made
    path = f"/v1/responses/{made.json['id']}"
    for each in (path, f"{path}/input_items"):
        replies = await asyncio.gather(*(limited.gate("stored", n % 2).ask("GET", each) for n in range(80)))
        refused = [reply for reply in replies if reply.status != 200]
        assert refused and all(reply.status == 429 for reply in refused), refused[:1]
        error = refused[0].json["error"]
        assert error["code"] == "rate_limit_exceeded" and "60 calls per minute for what is stored" in error["message"]
    reply = await limited.gate("stored").ask("POST", "/v1/responses", {"model": MODEL, "input": "Hi"})
    assert reply.status == 429 and "1 requests per minute" in reply.json["error"]["message"]


async def test_requests_that_generate_nothing_are_refused_before_what_they_build_on_is_read(limited: Limited) -> None:
    async with opened(limited.gate("prepared")) as ws:
        assert code_of(await ws.turn(generate=False, previous_response_id="resp_" + "0" * 32))[0] == 404
        assert (await ws.turn(generate=False))["status"] == "completed"
        refused = await ws.turn(generate=False, previous_response_id="resp_" + "0" * 32)
        assert code_of(refused) == (429, "rate_limit_exceeded")


async def test_a_model_that_is_not_there_is_told_before_what_a_request_builds_on_is_read(limited: Limited) -> None:
    gate, asked = limited.gate("shown"), {"model": "other", "input": "x", "previous_response_id": "resp_" + "0" * 32}
    for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        reply = await gate.ask("POST", path, asked)
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found"), path


async def test_each_request_of_a_responses_socket_counts(limited: Limited) -> None:
    async with opened(limited.gate("sockets")) as ws:
        for _ in range(2):
            assert (await ws.turn(generate=False))["status"] == "completed", "what generates nothing costs nothing"
        assert code_of(await ws.turn(generate=False)) == (429, "rate_limit_exceeded"), "but each is stored"
        for lane in (None, "a"):
            assert (await ws.turn(lane))["status"] == "incomplete"
        refused = await ws.turn("b", store=False)
        assert code_of(refused) == (429, "rate_limit_exceeded") and refused["stream_id"] == "b"
        told = refused["error"]["headers"]
        assert told["x-ratelimit-limit-requests"] == "2" and int(told["retry-after"]) > 0
