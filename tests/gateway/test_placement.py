"""Placement as clients see it: sessions, cached prefixes, the queue, deadlines and reasons."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

import anthropic
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_gw.client import Place, StreamGateway
from tests.gateway.processes import Process, Running
from tests.gateway.wire import DONE, Gate, chat, events, refusal, text
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

NARROW, WIDE = "sim-narrow", "sim-wide"


@pytest.fixture(scope="module")
def narrow(platform: Running) -> Iterator[Gate]:
    """A model with one replica that runs two requests, and a gateway that lets six wait, three seconds at most."""
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    sim = f"model={NARROW},itl_ms=10,ttft_ms=20,max_num_seqs=2"
    with (
        Process("agent", "--replica", "narrow", "--room-ratio", "1", "--sim", sim, **env),
        platform.gateway("--queue-max", "6", "--queue-wait-s", "3") as process,
    ):
        yield Gate(process.facts["url"], process.pid, platform.key)


@pytest.fixture(scope="module")
def wide(platform: Running) -> Iterator[Gate]:
    """A model with four replicas of small caches and slow prefill."""
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    sim = f"model={WIDE},itl_ms=2,ttft_ms=0,prefill_tokens_per_s=5000,max_num_seqs=16"
    agents = [Process("agent", "--replica", f"wide{k}", "--sim", sim, **env) for k in range(4)]
    try:
        with platform.gateway() as process:
            yield Gate(process.facts["url"], process.pid, platform.key)
    finally:
        for agent in agents:
            agent.close()


async def placement(gate: Gate, stream: str) -> dict[str, object]:
    reply = await gate.ask("GET", f"/v1/streams/{stream}/placement")
    assert reply.status == 200
    found: dict[str, object] = reply.json
    return found


async def reasons(gate: Gate, stream: str) -> list[tuple[str, str]]:
    """(reason, replica) of each placement, once it is recorded."""

    async def told() -> list[tuple[str, str]]:
        found = await placement(gate, stream)
        return [(p["reason"], p["replica"]) for p in found["placements"]]  # type: ignore[attr-defined,index]

    listed: list[tuple[str, str]] = await eventually(told, "the placement to be told")
    return listed


async def finish(gate: Gate, **more: object) -> str:
    async with gate.create(chat(**{"tokens": 3, "model": WIDE, **more})) as exchange:  # type: ignore[arg-type]
        body = await exchange.rest()
        assert events(body)[-1].data == DONE
        return str(exchange.headers["x-stream-id"])


@pytest.mark.parametrize("field", ["session_id", "conversation", "prompt_cache_key"])
async def test_a_sessions_turns_stay_with_the_replica_that_holds_their_cache(wide: Gate, field: str) -> None:
    name = {field: f"tale-{field}"}
    history = [{"role": "user", "content": "Once upon a time " * 200}]
    first = await finish(wide, messages=history, **name)
    ((_, replica),) = await reasons(wide, first)
    for turn in range(3):
        history += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"And then? {turn}"}]
        stream = await finish(wide, messages=history, **name)
        assert await reasons(wide, stream) == [("pin", replica)]
    # Another tenant's session, or none, of the same name is another
    other = await finish(wide, messages=[{"role": "user", "content": "Hi"}], session_id=f"other-{field}")
    assert (await reasons(wide, other))[0][0] == "load"


async def test_a_cached_prefix_is_found_without_a_session_and_by_a_new_gateway(platform: Running, wide: Gate) -> None:
    manual = [{"role": "system", "content": "The manual says: " + "turn the crank. " * 400}]
    first = await finish(wide, messages=[*manual, {"role": "user", "content": "How?"}])
    ((_, replica),) = await reasons(wide, first)
    holders = {replica}

    async def found_at(gate: Gate, question: str) -> bool:
        """Whether a stream was placed by the prefix. Another holder is as good: where it was not known, it is now."""
        stream = await finish(gate, messages=[*manual, {"role": "user", "content": question}])
        ((reason, chosen),) = await reasons(gate, stream)
        found = reason == "prefix" and chosen in holders
        holders.add(chosen)
        return found

    await eventually(lambda: found_at(wide, "Why?"), "the replica to have told that it is free again")

    async def known_to_a_new_gateway() -> bool:
        with await asyncio.to_thread(platform.gateway) as process:
            return await found_at(Gate(process.facts["url"], process.pid, platform.key), "Since when?")

    await eventually(known_to_a_new_gateway, "the replica's next renewal")


async def test_every_candidate_is_explained(wide: Gate) -> None:
    stream = await finish(wide, messages=[{"role": "user", "content": "Explain"}])
    await reasons(wide, stream)
    found = await placement(wide, stream)
    (placed,) = found["placements"]  # type: ignore[misc]
    assert len(placed["candidates"]) == 4
    assert {c["barred"] for c in placed["candidates"]} == {""}
    best = min(c["score_ms"] for c in placed["candidates"])
    assert next(c for c in placed["candidates"] if c["replica"] == placed["replica"])["score_ms"] == best
    (producer,) = found["producers"]  # type: ignore[misc]
    assert (producer["replica"], producer["attempt"], producer["epoch"]) == (placed["replica"], 1, 1)
    refusal(
        await Gate(wide.url, wide.pid, "sk-wrong").ask("GET", f"/v1/streams/{stream}/placement"), 401, "invalid_api_key"
    )


async def test_a_request_waits_for_room_in_the_kv_cache_and_its_record_says_so(platform: Running) -> None:
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    sim = "model=sim-kv,itl_ms=10,ttft_ms=0,num_blocks=64,max_num_seqs=32"  # 1,024 tokens
    with await asyncio.to_thread(Process, "agent", "--replica", "kv", "--sim", sim, **env):
        gate = platform.gates[0]
        bodies = [
            chat(200, model="sim-kv", seed=k, messages=[{"role": "user", "content": f"{k} " + "x" * 1200}])
            for k in range(4)
        ]
        async with AsyncExitStack() as stack:
            running = [await stack.enter_async_context(gate.create(body)) for body in bodies]
            for exchange in running:
                assert events(await exchange.rest())[-1].data == DONE
            streams = [exchange.headers["x-stream-id"] for exchange in running]
        records = [(await placement(gate, stream))["placements"] for stream in streams]
        barred = [record[0]["candidates"][0]["barred"] for record in records]  # type: ignore[index]
        assert barred[0] == "" and "kv" in barred and "full" not in barred, barred


async def test_queued_requests_get_their_position_and_start_in_order(narrow: Gate) -> None:
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(narrow.create(chat(150, seed=k, model=NARROW))) for k in range(2)]
        for exchange in running:
            await exchange.events(1)
        batch = await stack.enter_async_context(narrow.create(chat(20, seed=5, model=NARROW, service_tier="batch")))
        plain = await stack.enter_async_context(narrow.create(chat(20, seed=6, model=NARROW)))
        socket = await stack.enter_async_context(narrow.socket())
        await socket.create(1, chat(20, seed=7, model=NARROW, service_tier="priority"), queued=True)
        told = await socket.until_t("queued", ch=1)
        assert (told["position"], told["of"]) == (1, 3), "the better tier first"
        seen = b""
        while b": queued 3 of 3\n" not in seen:
            seen += await batch.piece()
        first = asyncio.create_task(plain.rest())
        last = asyncio.create_task(batch.rest())
        await socket.until_t("end", ch=1)
        whole = events(await first)
        assert whole[-1].data == DONE and text(whole)
        assert events(await last)[-1].data == DONE
        for exchange in running:
            assert events(await exchange.rest())[-1].data == DONE


async def test_a_client_is_told_its_place_until_its_answer_begins(narrow: Gate) -> None:
    told: list[Place | None] = []
    async with AsyncExitStack() as stack:
        for k in range(2):
            exchange = await stack.enter_async_context(narrow.create(chat(100, seed=k, model=NARROW)))
            await exchange.events(1)
        client = await stack.enter_async_context(StreamGateway(narrow.url, token=narrow.key))
        stream = client.create(chat(20, seed=8, model=NARROW), on_place=told.append)
        async for _ in stream.text():
            assert told[-1] is None
    assert told[0] == Place(1, 1, None) and stream.status == "completed"


async def until_idle(platform: Running, pool: str) -> None:
    """True once the pool's record shows that nothing runs or waits."""
    client = RedisClient(platform.redis_url)
    await client.start()
    pools = RedisPools(client)

    async def idle() -> bool:
        replicas = await pools.replicas(pool)
        return not await pools.waiting(pool) and not any([await pools.in_flight(pool, r.replica) for r in replicas])

    await eventually(idle, "the pool to be idle")
    await client.close()


async def test_a_full_queue_gives_a_retry_time(platform: Running, narrow: Gate) -> None:
    await until_idle(platform, NARROW)
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(narrow.create(chat(400, seed=k, model=NARROW))) for k in range(8)]
        assert all(exchange.status == 200 for exchange in opened)
        reply = await narrow.ask("POST", "/v1/chat/completions", chat(1, model=NARROW))
        error = refusal(reply, 503, "pool_full")
        assert error["retriable"] is True
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        streams = [exchange.headers["x-stream-id"] for exchange in opened]
        # Leaving the queue makes room in it, also by cancelling
        assert (await narrow.cancel(streams[7]))["result"] == "accepted"

        async def room() -> bool:
            return (
                await narrow.ask("POST", "/v1/chat/completions", chat(1, model=NARROW) | {"background": True})
            ).status == 200

        await eventually(room, "room in the queue")
        for stream in streams:
            await narrow.cancel(stream)


async def test_a_retry_of_a_refused_request_is_no_new_demand(platform: Running, narrow: Gate) -> None:
    await until_idle(platform, NARROW)
    client = RedisClient(platform.redis_url)
    await client.start()
    pools = RedisPools(client)
    before = (await pools.demand_totals(NARROW)).requests
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(narrow.create(chat(400, seed=k, model=NARROW))) for k in range(8)]
        for body in ({}, {"stream": False}, {"background": True}):
            for tries in range(3):
                headers = {"x-stainless-retry-count": str(tries)}
                reply = await narrow.ask("POST", "/v1/chat/completions", chat(1, model=NARROW) | body, headers)
                refusal(reply, 503, "pool_full")
        for tries in range(2):
            headers = {"x-stainless-retry-count": str(tries)}
            body = {"model": NARROW, "input": "Hello", "background": True}
            refusal(await narrow.ask("POST", "/v1/responses", body, headers), 503, "pool_full")
        async with narrow.socket() as socket:
            for retry in range(2):
                await socket.create(1, chat(1, model=NARROW), retry=retry)
                assert (await socket.until_t("error", ch=1))["code"] == "pool_full"
        assert (await pools.demand_totals(NARROW)).requests - before == 8 + 3 + 1 + 1
        for exchange in opened:
            await narrow.cancel(exchange.headers["x-stream-id"])
    await client.close()


async def test_the_official_sdks_say_that_they_try_again() -> None:
    sent: list[str] = []

    async def refuse(request: web.Request) -> web.Response:
        sent.append(request.headers["x-stainless-retry-count"])
        return web.json_response({"error": {"message": "busy"}}, status=503, headers={"retry-after-ms": "1"})

    app = web.Application()
    app.router.add_post("/{path:.*}", refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        async with openai.AsyncOpenAI(base_url=f"{url}v1", api_key="k", max_retries=2) as client:
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model="m", input="Hello")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=2) as other:
            with pytest.raises(anthropic.InternalServerError):
                await other.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "Hello"}])
    assert sent == ["0", "1", "2"] * 2


async def test_a_key_whose_request_was_refused_is_free_again(platform: Running, narrow: Gate) -> None:
    await until_idle(platform, NARROW)
    key = {"idempotency-key": f"refused-{time.time_ns()}"}
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(narrow.create(chat(400, seed=k, model=NARROW))) for k in range(8)]
        reply = await narrow.ask("POST", "/v1/chat/completions", chat(3, model=NARROW), key)
        refusal(reply, 503, "pool_full")
        for exchange in opened:
            await narrow.cancel(exchange.headers["x-stream-id"])
    await until_idle(platform, NARROW)
    reply = await narrow.ask("POST", "/v1/chat/completions", chat(3, model=NARROW), key)
    assert reply.status == 200
    assert events(reply.body)[-1].data == DONE
    again = await narrow.ask("POST", "/v1/chat/completions", chat(3, model=NARROW), key)
    assert again.body == reply.body


async def test_a_request_that_waits_too_long_fails_with_the_reason(platform: Running, narrow: Gate) -> None:
    await until_idle(platform, NARROW)
    async with AsyncExitStack() as stack:
        for k in range(2):
            exchange = await stack.enter_async_context(narrow.create(chat(2000, seed=k, model=NARROW)))
            await exchange.events(1)
            stack.push_async_callback(narrow.cancel, exchange.headers["x-stream-id"])
        began = asyncio.get_running_loop().time()
        async with narrow.create(chat(5, model=NARROW)) as waiting:
            found = events(await waiting.rest())
        assert 2.5 < asyncio.get_running_loop().time() - began < 10
        error = found[-1].json["error"]
        assert (error["code"], error["retriable"]) == ("deadline_exceeded", True)
        key = {"idempotency-key": f"waited-{time.time_ns()}"}
        whole = await narrow.ask("POST", "/v1/chat/completions", chat(5, model=NARROW, stream=False), key)
        assert refusal(whole, 504, "deadline_exceeded")["retriable"] is True
        assert whole.headers["x-should-retry"] == "false", "SDKs would make the surge three times as large"
        assert "retry-after" not in whole.headers
    await until_idle(platform, NARROW)
    assert (await narrow.ask("POST", "/v1/chat/completions", chat(5, model=NARROW, stream=False), key)).status == 200


async def test_a_deadline_holds_in_the_queue_and_at_the_engine(platform: Running, narrow: Gate) -> None:
    await until_idle(platform, NARROW)
    body = chat(2000, model=NARROW, deadline_s=0.6)
    async with AsyncExitStack() as stack:
        began = asyncio.get_running_loop().time()
        running = [await stack.enter_async_context(narrow.create(body | {"seed": k})) for k in range(2)]
        waiting = await stack.enter_async_context(narrow.create(body | {"deadline_s": 0.3}))
        for exchange in running:
            found = events(await exchange.rest())
            assert len(found) > 5
            assert found[-1].json["error"]["code"] == "deadline_exceeded"
            assert not found[-1].json["error"]["retriable"]
        assert 0.5 < asyncio.get_running_loop().time() - began < 8
        error = events(await waiting.rest())[-1].json["error"]
        assert (error["code"], error["retriable"]) == ("deadline_exceeded", False)
    # The engine was told, too: its slots are free
    async with narrow.create(chat(3, model=NARROW)) as exchange:
        assert events(await exchange.rest())[-1].data == DONE
