"""Requests beyond a model's maximum context: refused by the gateway or by the engine, with one code and status."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from stream_fabric.errors import ContextLengthExceeded
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_gw.auth import key_digest, new_key
from tests.fabric.test_placement import FAR_S, info_of
from tests.gateway.in_process import TENANT, in_process
from tests.gateway.processes import Process, Running
from tests.gateway.wire import Gate, chat, refusal

CONTEXT = 120
MODEL = "sim-context"


@pytest.fixture(scope="module")
def short(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gateway whose only tenant may send one request a minute, and a replica with a short context."""
    key = new_key(HostRandom())
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f'[plan.one]\ntenant = {{ requests_per_min = 1 }}\n[[tenant]]\nid = "context"\nplan = "one"\n'
        f'[[tenant.key]]\nsha256 = "{key_digest(key)}"\n'
    )
    sim = f"model={MODEL},itl_ms=1,ttft_ms=0,context={CONTEXT}"
    env = {"STREAM_GW_REDIS_URL": platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    with (
        Process("agent", "--replica", "context", "--sim", sim, **env),
        platform.gateway("--gateway", "context", STREAM_GW_KEYS_FILE=str(path)) as process,
    ):
        yield Gate(process.facts["url"], process.pid, key)


def ask(text: str, tokens: int = 10, **more: object) -> dict[str, object]:
    return chat(tokens, model=MODEL, messages=[{"role": "user", "content": text}], **more)


@pytest.mark.platform
async def test_beyond_the_context_is_400_at_the_gateway_and_costs_nothing(short: Gate) -> None:
    path = "/v1/chat/completions"
    for body in (ask("a " * CONTEXT), ask("a " * CONTEXT, stream=False)):
        error = refusal(await short.ask("POST", path, body), 400, "context_length_exceeded")
        assert (error["param"], error["type"], error["retriable"]) == ("messages", "invalid_request_error", False)
        told = "This model's maximum context length is 120 tokens, and messages takes at least 120;"
        assert error["message"].startswith(told)
        # Anthropic's clients, Claude Code for one, shorten a conversation at these words
        reply = await short.ask("POST", "/v1/messages", body)
        assert reply.status == 400 and reply.json["error"]["message"].startswith(f"prompt is too long: {told}")
    error = refusal(await short.ask("POST", path, ask("Hi", CONTEXT + 1)), 400, "context_length_exceeded")
    assert error["param"] == "max_tokens"
    reply = await short.ask("POST", "/v1/messages", ask("Hi", CONTEXT + 1))
    assert reply.status == 400 and reply.json["error"]["message"].startswith("This model's maximum context length")
    # The plan allows one request a minute: those before took none of it
    reply = await short.ask("POST", path, ask("Hi"))
    assert reply.status == 200, reply
    assert (await short.ask("POST", path, ask("Hi"))).status == 429


@pytest.mark.platform
async def test_what_only_the_engine_can_refuse_has_the_same_code_and_status(short: Gate, one: Gate) -> None:
    text = "".join(map(str, range(CONTEXT * 2)))  # one word
    refusal(await one.ask("POST", "/v1/chat/completions", ask(text, stream=False)), 400, "context_length_exceeded")
    refusal(await one.ask("POST", "/v1/chat/completions", ask(text)), 400, "context_length_exceeded")


@pytest.mark.platform
async def test_output_ends_at_the_context_as_vllm_ends_it(short: Gate, one: Gate) -> None:
    reply = await one.ask("POST", "/v1/chat/completions", ask("a " * 100, CONTEXT, stream=False))
    assert reply.status == 200, reply
    usage, (choice,) = reply.json["usage"], reply.json["choices"]
    assert usage["total_tokens"] == CONTEXT and choice["finish_reason"] == "length"


@pytest.mark.platform
async def test_models_tell_their_context_where_it_is_known(short: Gate, one: Gate) -> None:
    listed = {model["id"]: model for model in (await one.ask("GET", "/v1/models")).json["data"]}
    assert listed[MODEL]["max_model_len"] == CONTEXT
    assert "max_model_len" not in listed["sim-small"]


async def test_a_refused_request_reaches_neither_pool_nor_idempotency_key(redis_client: RedisClient) -> None:
    async with in_process(redis_client) as gate:
        info = info_of("a", models=(gate.model,))
        load = msgspec.structs.replace(info.load, max_model_len=CONTEXT)
        info = msgspec.structs.replace(info, pool=gate.model, load=load, generation=1)
        await gate.pools.report(info, ttl_s=FAR_S, running={})
        await gate.gateway.parts.directory.refresh()
        call = gate.call(key="k", messages=[{"role": "user", "content": "a " * CONTEXT}])
        with pytest.raises(ContextLengthExceeded):
            await gate.gateway.streams.create(call)
        assert (await gate.pools.demand_totals(gate.model)).requests == 0
        fits = gate.call(key="k")
        opened = await gate.gateway.streams.create(fits)
        assert opened is not None and not opened.attached
        assert (await gate.index.claim(TENANT, "k", opened.id, ""))[0] == opened.id
