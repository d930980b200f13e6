"""Moderated plans on real processes: what clients get, and that flagged text is nowhere."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_gw.auth import key_digest, new_key
from tests.gateway.processes import Process, Running, on_cluster
from tests.gateway.wire import DONE, Gate, chat, events, refusal, text
from tests.support.moderation import ModerationServer
from tests.support.redis_content import keys_with

pytestmark = [pytest.mark.platform, pytest.mark.skipif(on_cluster(), reason="it scans one Redis")]

PLANS = ("off", "prompt", "all", "tight")
WORD = "lease"
"""A word that the simulator says now and then."""
MODEL = "sim-moderated"


@dataclass(frozen=True)
class Moderated:
    gates: dict[str, Gate]
    client: RedisClient
    server: ModerationServer
    remote: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["rules", "endpoint"])
async def moderated(
    request: pytest.FixtureRequest, platform: Running, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Moderated]:
    folder: Path = tmp_path_factory.mktemp("moderation")
    keys = {plan: new_key(HostRandom()) for plan in PLANS}
    (folder / "keys.toml").write_text(
        "".join(
            f'[plan.{plan}]\nmoderation = "{"prompt" if plan == "tight" else plan}"\n'
            f"tenant = {{ requests_per_min = {1 if plan == 'tight' else 1000} }}\n"
            f'[[tenant]]\nid = "m-{plan}-{request.param}"\nplan = "{plan}"\n'
            f'[[tenant.key]]\nsha256 = "{key_digest(keys[plan])}"\n'
            for plan in PLANS
        )
    )
    (folder / "rules.toml").write_text(f'[violence]\nwords = ["{WORD}"]\n')
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ModerationServer.running(WORD))
        env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
        if request.param == "rules":
            checks = {"STREAM_GW_MODERATION_RULES_FILE": str(folder / "rules.toml")}
        else:
            checks = {"STREAM_GW_MODERATION_URL": server.url, "STREAM_GW_MODERATION_KEY": "sk-m"}
        model = f"{MODEL}-{request.param}"
        flags = ("agent", "--replica", model, "--sim", f"model={model},itl_ms=2,ttft_ms=0")
        agent = await asyncio.to_thread(Process, *flags, **env, **checks)
        stack.callback(agent.close)
        gateway = stack.enter_context(
            await asyncio.to_thread(
                platform.gateway, "--gateway", model, STREAM_GW_KEYS_FILE=str(folder / "keys.toml"), **checks
            )
        )
        client = RedisClient(platform.redis_url)
        await client.start()
        stack.push_async_callback(client.close)
        gates = {plan: Gate(gateway.facts["url"], gateway.pid, key) for plan, key in keys.items()}
        yield Moderated(gates, client, server, request.param == "endpoint")


def body(moderated: Moderated, seed: int, tokens: int = 300, **more: Any) -> dict[str, Any]:
    model = f"{MODEL}-{'endpoint' if moderated.remote else 'rules'}"
    return chat(tokens, seed=seed, model=model, **more)


async def said(moderated: Moderated, flagged: bool, tokens: int = 300) -> tuple[int, str]:
    """A seed, and the text that the simulator says with it: with the word somewhere after the beginning, or without."""
    for seed in range(1, 200):
        _, data = await moderated.gates["off"].finished(**body(moderated, seed, tokens) | {"tokens": tokens})
        found = text(events(data))
        if (found.find(WORD) > 300) if flagged else (WORD not in found):
            return seed, found
    raise AssertionError("no such seed")


pytestmark.append(pytest.mark.asyncio(loop_scope="module"))


async def test_a_flagged_prompt_is_refused_before_it_is_placed(moderated: Moderated) -> None:
    marker = f"{WORD} of {secrets.token_hex(8)}"
    messages = [{"role": "user", "content": [{"type": "text", "text": marker}]}]
    for plan in ("prompt", "all"):
        for stream in (True, False):
            gate = moderated.gates[plan]
            asked = body(moderated, 1, 5, messages=messages, stream=stream)
            error = refusal(await gate.ask("POST", "/v1/chat/completions", asked), 400, "content_filter")
            assert error["type"] == "invalid_request_error" and error["retriable"] is False
            assert "violence" in error["message"]
        (entry,) = (await gate.ask("GET", "/v1/limits")).json["data"]
        assert entry["requests_per_minute"]["used"] == 0, "it was not charged"
    assert not await keys_with(moderated.client, marker.encode())
    async with moderated.gates["all"].socket() as socket:
        await socket.create(1, body(moderated, 1, 5, messages=messages))
        while not socket.track(1).errors:
            await socket.receive()
        assert socket.track(1).errors[0]["code"] == "content_filter"
    assert (await moderated.gates["off"].ask("POST", "/v1/chat/completions", asked)).status == 200


async def test_limits_come_before_moderation(moderated: Moderated) -> None:
    """A tenant that has reached its limits loads no moderation endpoint, nor learns what it would say."""
    gate, path = moderated.gates["tight"], "/v1/chat/completions"
    flagged = body(moderated, 1, 5, messages=[{"role": "user", "content": f"a {WORD}"}])
    refusal(await gate.ask("POST", path, flagged), 400, "content_filter")
    key = secrets.token_hex(8)
    refusal(await gate.ask("POST", path, flagged, {"Idempotency-Key": key}), 400, "content_filter")
    stream = await gate.background(3000, **{k: v for k, v in body(moderated, 1).items() if k == "model"})
    asked = len(moderated.server.bodies)
    refusal(await gate.ask("POST", path, flagged), 429, "rate_limit_exceeded")
    refusal(await gate.ask("POST", path, flagged, {"Idempotency-Key": key}), 429, "rate_limit_exceeded")
    item = {"id": "a", "item": f"a {WORD}"}
    refusal(await gate.ask("POST", f"/v1/streams/{stream}/input", item), 429, "rate_limit_exceeded")
    assert len(moderated.server.bodies) == asked
    await gate.cancel(stream)


async def test_flagged_text_reaches_no_reader_and_not_redis(moderated: Moderated) -> None:
    seed, whole = await said(moderated, flagged=True)
    gate = moderated.gates["all"]
    async with gate.create(body(moderated, seed)) as exchange:
        stream, data = exchange.headers["x-stream-id"], await exchange.rest()
    found = events(data)
    assert found[-1].data == DONE
    finish = [c["finish_reason"] for e in found[:-1] for c in e.json["choices"] if c["finish_reason"]]
    assert finish == ["content_filter"]
    told = text(found)
    assert told and whole.startswith(told) and WORD not in told
    assert (await gate.info(stream))["status"] == "incomplete"
    again = await gate.ask("GET", f"/v1/streams/{stream}")
    assert text(events(again.body)) == told
    (log,) = [key for key in await keys_with(moderated.client, b"\0", stream.encode()) if key.endswith(":l")]
    assert frames_text(await moderated.client.execute(0, "XRANGE", log, "-", "+")) == told


def frames_text(entries: list[Any]) -> str:
    frames = [line for _, fields in entries for line in fields[3].split(b"\n")]
    return "".join(msgspec.json.decode(line[line.index(b'"') :]) for line in frames if line[:1].isdigit())


async def test_an_answer_without_flagged_text_comes_whole(moderated: Moderated) -> None:
    seed, whole = await said(moderated, flagged=False, tokens=40)
    for plan in ("prompt", "all"):
        _, data = await moderated.gates[plan].finished(40, **body(moderated, seed, 40))
        assert text(events(data)) == whole


async def test_an_answer_that_is_not_streamed(moderated: Moderated) -> None:
    seed, whole = await said(moderated, flagged=True)
    reply = await moderated.gates["all"].ask(
        "POST", "/v1/chat/completions", body(moderated, seed, stream=False, stream_options=None)
    )
    assert reply.status == 200, reply
    (choice,) = reply.json["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert whole.startswith(choice["message"]["content"]) and WORD not in choice["message"]["content"]
    assert 0 < reply.json["usage"]["completion_tokens"] < 300, "what was held back is not billed"


async def test_every_open_choice_ends(moderated: Moderated) -> None:
    seed, _ = await said(moderated, flagged=True)
    reply = await moderated.gates["all"].ask(
        "POST", "/v1/chat/completions", body(moderated, seed, stream=False, n=3, stream_options=None)
    )
    choices = reply.json["choices"]
    assert len(choices) == 3
    assert "content_filter" in {choice["finish_reason"] for choice in choices}
    assert all(WORD not in choice["message"]["content"] for choice in choices)


async def test_a_socket_gets_the_reason(moderated: Moderated) -> None:
    seed, _ = await said(moderated, flagged=True)
    async with moderated.gates["all"].socket() as socket:
        await socket.create(1, body(moderated, seed))
        track = socket.track(1)
        while track.end is None:
            await socket.receive()
    assert track.end["status"] == "incomplete"
    assert WORD not in track.text and track.text
    reasons = [c["finish_reason"] for m in track.data for f in m["f"] for c in f.get("choices", ())]
    assert "content_filter" in reasons


async def test_the_openai_sdk_reads_the_reason(moderated: Moderated) -> None:
    seed, _ = await said(moderated, flagged=True)
    gate = moderated.gates["all"]
    asked = body(moderated, seed)
    async with openai.AsyncOpenAI(base_url=f"{gate.url}/v1", api_key=gate.key, max_retries=0) as client:
        fields = {name: asked[name] for name in ("model", "messages", "max_tokens", "seed")}
        extra = {"ignore_eos": True}
        stream = await client.chat.completions.create(**fields, stream=True, extra_body=extra)
        reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices]
        assert [reason for reason in reasons if reason] == ["content_filter"]
        whole = await client.chat.completions.create(**fields, extra_body=extra)
        assert whole.choices[0].finish_reason == "content_filter"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model=asked["model"], messages=[{"role": "user", "content": f"a {WORD}"}]
            )
        assert caught.value.code == "content_filter"


async def test_an_endpoint_that_fails_refuses_prompts_and_ends_answers(moderated: Moderated) -> None:
    if not moderated.remote:
        pytest.skip("rules do not fail")
    gate, server = moderated.gates["all"], moderated.server
    try:
        async with gate.create(body(moderated, 1, 4000)) as exchange:
            await exchange.events(3)
            server.trouble = "status"
            found = events(await exchange.rest())
        assert found[-1].json["error"]["code"] == "moderation_unavailable"
        error = refusal(
            await gate.ask("POST", "/v1/chat/completions", body(moderated, 1, 5)), 503, "moderation_unavailable"
        )
        assert error["retriable"] is True
    finally:
        server.trouble = ""


async def test_inputs_are_checked_as_prompts(moderated: Moderated) -> None:
    gate = moderated.gates["prompt"]
    stream = await gate.background(3000, **{k: v for k, v in body(moderated, 1).items() if k == "model"})
    path = f"/v1/streams/{stream}/input"
    assert (await gate.ask("POST", path, {"id": "a", "item": "fine"})).status == 202
    before = await used_requests(gate)
    refusal(await gate.ask("POST", path, {"id": "b", "item": f"a {WORD}"}), 400, "content_filter")
    assert await used_requests(gate) <= before, "it was not charged"
    await gate.cancel(stream)


async def used_requests(gate: Gate) -> int:
    (entry,) = (await gate.ask("GET", "/v1/limits")).json["data"]
    found: int = entry["requests_per_minute"]["used"]
    return found


async def test_without_moderation_a_moderated_plan_is_refused(
    moderated: Moderated, one: Gate, platform: Running
) -> None:
    """On the agents of the platform, which have none."""
    gate = moderated.gates["all"]
    reply = await gate.ask("POST", "/v1/chat/completions", chat(5, stream=False))
    error = refusal(reply, 503, "moderation_unavailable")
    assert "STREAM_GW_MODERATION_URL" in error["message"]
