"""``stream-gw up`` on the real vLLM, which serves LoRA adapters beside their model."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.gateway.processes import alive, need_redis
from tests.gateway.wire import DONE, refusal
from tests.support.waiting import eventually
from tests.vllm.continued import CHAT, COMPLETIONS, USAGE, chunks_of, until
from tests.vllm.real import (
    FIGURES,
    MODEL,
    SMALL,
    Direct,
    Home,
    Up,
    chat,
    children,
    command_line,
    endless,
    folded,
    lora_slots,
    server_below,
    starting_up,
    tokens_of,
    up,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FLAGS = (*SMALL, "--served-model-name", MODEL, "--kv-cache-memory-bytes", str(8 << 20))


@pytest.fixture(scope="module")
def running(home: Home) -> Iterator[Up]:
    need_redis()
    adapters = [f"{name}={home.model(f'tiny-adapters/{name}')}" for name in ("one", "two")]
    began = time.monotonic()
    with up(home.model(), home.python, *FLAGS, *lora_slots(2), "--lora-modules", *adapters) as started:
        FIGURES.append(f"stream-gw up with vLLM and two adapters: ready after {time.monotonic() - began:.1f} s")
        yield started


@pytest.fixture
def direct(running: Up) -> Direct:
    (agent,) = running.agents
    return server_below(agent)[1]


async def test_the_models_are_the_model_and_its_adapters(running: Up) -> None:
    async def listed() -> list[dict[str, object]]:  # a gateway looks once a second
        found: list[dict[str, object]] = (await running.gate.ask("GET", "/v1/models")).json["data"]
        return found

    models = await eventually(listed, "the models")
    assert [model["id"] for model in models] == ["one", MODEL, "two"]
    assert not any(model["simulated"] for model in models)


async def test_each_name_is_answered_by_its_adapter(running: Up, direct: Direct) -> None:
    texts = {}
    for model in (MODEL, "one", "two"):
        body = chat(model=model, max_tokens=30, ignore_eos=True)
        expected, expected_usage = folded(await direct.chunks(CHAT, body))
        reply = await running.gate.ask("POST", CHAT, {**body, "stream": True, "stream_options": USAGE})
        assert reply.status == 200, reply
        assert f"data: {DONE}\n".encode() in reply.body[-100:]
        chunks = chunks_of(reply.body)
        got, usage = folded(chunks)
        assert got == expected
        assert {chunk["model"] for chunk in chunks} == {model}
        assert (tokens_of(usage)[0], tokens_of(usage)[2]) == (tokens_of(expected_usage)[0], 30)
        texts[model] = got[0].text
    assert len(set(texts.values())) == 3, texts


async def test_an_unknown_adapter_is_not_found(running: Up) -> None:
    for path, body in ((CHAT, chat(model="three")), (COMPLETIONS, {"model": "three", "prompt": "x"})):
        error = refusal(await running.gate.ask("POST", path, body), 404, "model_not_found")
        assert error["param"] == "model" and not error["retriable"]


async def test_ctrl_c_ends_everything(running: Up) -> None:
    """Comes last. All of it is gone when ``up`` has returned, vLLM's own processes too, and with a stream running."""
    left = running.children
    assert len(left) >= 7, "Redis, a gateway, a controller, an agent, its guard, vLLM and its engine"
    async with running.gate.create({**endless(), "stream": True, "background": True}) as exchange:
        await until(exchange, b'"content":"', 5)
    began = time.monotonic()
    running.process.signal(signal.SIGINT)
    await eventually(lambda: running.process.poll() is not None, "its end", 60)
    took = time.monotonic() - began
    assert running.process.poll() == 0
    assert not [command_line(pid) for pid in left if alive(pid)]
    FIGURES.append(f"Ctrl-C of stream-gw up with a stream that nobody reads: all gone after {took:.1f} s")


async def test_an_up_killed_while_vllm_loads_leaves_nothing(home: Home) -> None:
    need_redis()
    with starting_up(home.model(), home.python, *FLAGS) as process:

        def begun() -> list[int]:
            return [pid for pid in children(process.pid) if "EngineCore" in "".join(command_line(pid)[:1])]

        await eventually(begun, "vLLM's engine to begin", 400)
        left = children(process.pid)
        began = time.monotonic()
        process.kill()
        await eventually(lambda: not any(map(alive, left)), f"the end of {[command_line(pid)[:6] for pid in left]}", 30)
        FIGURES.append(f"stream-gw up killed while vLLM loads: all gone after {time.monotonic() - began:.1f} s")
