"""Features in mixtures of two releases: what processes of one begin, those of the other read, cut and continue."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.dialects import Accumulators
from tests.chaos.fleet import LogReader, fleet, log_of
from tests.chaos.test_both_deaths import CASES, THOUGHT, final_objects
from tests.chaos.test_limits_exact import KEYS, TOKENS_PER_MIN
from tests.chaos.test_steering import until_head
from tests.gateway.processes import Running
from tests.gateway.wire import HEARTBEAT, MODEL, Gate, chat
from tests.support.figures import Tell
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

CROWD_S = 4.0
LONGEST = 20
CHATS, RESPONSES = "/v1/chat/completions", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "length": {"type": "integer"}},
    "required": ["name", "length"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find_river", "parameters": SCHEMA}
REPLY = {"name": "river", "schema": SCHEMA, "strict": True}
LONG = [{"role": "user", "content": "Rivers of ice. " * 14_000}]  # 200 kB
ASKS = {"model": MODEL, "stream": True, "max_tokens": 20, "seed": 3, "ignore_eos": True}
RESPONDS = {"model": MODEL, "stream": True, "max_output_tokens": 60, "input": "Tell me of rivers."}
CREATES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (CHATS, chat(20, stream_options={"include_usage": True})),
    "long prompt": (CHATS, chat(20, messages=LONG)),
    "choices": (CHATS, chat(20, n=3, logprobs=True, top_logprobs=2)),
    "tool": (CHATS, chat(60, tools=[{"type": "function", "function": FUNCTION}], tool_choice="required")),
    "schema": (CHATS, chat(60, response_format={"type": "json_schema", "json_schema": REPLY})),
    "reasoning": (CHATS, chat(40, reasoning_effort="low")),
    "prompts": ("/v1/completions", ASKS | {"prompt": ["Tell me of rivers.", "And of lakes."], "n": 2}),
    "messages": ("/v1/messages", ASKS | {"messages": [{"role": "user", "content": "Tell me of rivers."}]}),
    "response": (RESPONSES, RESPONDS | {"reasoning": {"effort": "low"}}),
    "response with a tool": (
        RESPONSES,
        RESPONDS | {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ),
    "response with a schema": (RESPONSES, RESPONDS | {"text": {"format": {"type": "json_schema", **REPLY}}}),
}
"""The spelling of each is the same in both releases. Anthropic's thinking is not: it has a signature since."""
POOLING = {
    "/v1/embeddings": {"model": MODEL, "input": ["Rivers", "Lakes"]},
    "/v1/score": {"model": MODEL, "text_1": "Rivers", "text_2": ["Lakes", "Seas"]},
}


@pytest.mark.parametrize("agents", ["old", "new"])
async def test_gateways_of_two_releases_serve_each_others_streams(
    redis_server: RedisServer, previous: Path, agents: str
) -> None:
    first, second = (previous, None) if agents == "old" else (None, previous)
    async with (
        fleet(
            redis_server.url,
            sim="itl_ms=5,ttft_ms=10,max_num_seqs=64",
            gateway_urls=("",),
            agent_urls=("",),
            tree=first,
        ) as running,
        log_of(running.redis_url) as log,
    ):
        running.tree = second
        await running.add_gateway("other")
        await running.until_served()
        for one, two in (running.gates, running.gates[::-1]):
            await _check_replays(one, two)
            await _check_cancel(one, two, log)
            await _check_input(one, two)
            await _check_stored(one, two)
            await _check_link(one, two)
            for path, body in POOLING.items():
                replies = [await gate.ask("POST", path, body) for gate in (one, two)]
                assert replies[0].status == 200 and replies[0].json["data"] == replies[1].json["data"], replies
        await log.until_no_slot_is_taken()


async def _check_replays(one: Gate, two: Gate) -> None:
    """A stream's bytes are the same at the other gateway, and a repeat with its key finds it there."""
    for name, (path, body) in CREATES.items():
        key = {"Idempotency-Key": uuid.uuid4().hex}
        created, repeated = [await gate.ask("POST", path, body, key) for gate in (one, two)]
        assert created.status == repeated.status == 200, (name, created, repeated)
        stream = created.headers["x-stream-id"]
        assert repeated.headers["x-stream-id"] == stream, name
        again = f"{path}/{stream}?stream=true" if path == RESPONSES else f"/v1/streams/{stream}?after=1-0"
        resumed = await two.ask("GET", again)
        said = [reply.body.replace(HEARTBEAT, b"") for reply in (created, repeated, resumed)]
        assert said[0] == said[1] == said[2], name
        other = await two.ask("POST", path, body | {"temperature": 0.1}, key)
        assert other.status == 422, (name, other)


async def _check_cancel(one: Gate, two: Gate, log: LogReader) -> None:
    stream = await one.background(2000)
    await until_head(two, stream, 5)
    told = await two.cancel(stream)
    frames, end = await log.whole(stream)
    assert (told["result"], end.status) == ("accepted", "cancelled")
    assert told["at"] == f"1-{len(frames) - 1}", "nothing but the terminal follows"
    assert (await one.cancel(stream))["result"] == "already"


async def _check_input(one: Gate, two: Gate) -> None:
    stream = await one.background(60)
    await until_head(two, stream, 5)
    item = {"id": "k1", "item": "In one word."}
    told = [(await gate.ask("POST", f"/v1/streams/{stream}/input", item)).json["result"] for gate in (two, one)]
    assert told == ["accepted", "duplicate"]
    await one.until_status(stream, "completed")


async def _check_stored(one: Gate, two: Gate) -> None:
    made = (await one.ask("POST", RESPONSES, RESPONDS | {"stream": False, "background": True})).json
    path = f"{RESPONSES}/{made['id']}"

    async def ended() -> Any:
        found = (await two.ask("GET", path)).json
        return found if found["status"] not in ("queued", "in_progress") else None

    whole = await eventually(ended, "the response to end")
    assert (await one.ask("GET", path)).json == whole
    body = RESPONDS | {"stream": False, "previous_response_id": made["id"]}
    follows = [(await gate.ask("POST", RESPONSES, body)).json for gate in (two, one)]
    assert follows[0]["usage"]["input_tokens"] == follows[1]["usage"]["input_tokens"] > whole["usage"]["input_tokens"]


async def _check_link(one: Gate, two: Gate) -> None:
    stream, _ = await one.finished(10)
    made = await one.ask("POST", "/v1/tokens", {"scopes": ["read"], "stream": stream})
    holder = {"authorization": f"Bearer {made.json['token']}"}
    path = f"/v1/streams/{stream}?after=1-0"
    assert (await two.ask("GET", path, headers=holder)).status == 200
    assert (await two.ask("DELETE", f"/v1/streams/{stream}/links")).status == 204
    assert (await one.ask("GET", path, headers=holder)).status == 401


@pytest.mark.parametrize("dies", ["old", "new"])
async def test_streams_of_a_dead_replica_and_gateway_go_on_at_the_other_release(
    redis_server: RedisServer, calm: Running, accumulators: Accumulators, previous: Path, dies: str
) -> None:
    first, second = (previous, None) if dies == "old" else (None, previous)
    # The earlier simulator counts no tokens of reasoning, so an answer that it ends has another usage
    cases = {name: case for name, case in CASES.items() if dies == "old" or case[1] is not THOUGHT}
    # The earlier gateway gives thinking no signature; one that reads the log again is of either release
    cases.pop("anthropic.messages with reasoning", None)
    expected = await final_objects(calm, accumulators)
    sim = "itl_ms=60,ttft_ms=20,max_num_seqs=64"
    async with (
        fleet(redis_server.url, sim=sim, gateway_urls=("",), agent_urls=("",), tree=first) as running,
        log_of(running.redis_url) as log,
    ):
        running.tree = second
        await running.add_gateway("other")
        await running.until_served()
        readers = {name: dialect.reader(running.gates, asked) for name, (dialect, asked) in cases.items()}
        reading = {name: asyncio.create_task(reader.read()) for name, reader in readers.items()}
        await eventually(lambda: all(len(reader.kept) >= 15 for reader in readers.values()), "every stream to run")
        await running.add_agent("replica1")
        running.agents["replica0"].kill()
        running.gateways[0].kill()
        await asyncio.gather(*reading.values())
        for name, reader in readers.items():
            frames, end = await log.whole(reader.stream)
            assert len({epoch for epoch, _ in frames}) >= 2, f"{name}: its replica did not die in the middle"
            assert end.status == "completed", f"{name}: {end}"
            assert accumulators.final(reader) == expected[name], name
        await log.until_no_slot_is_taken()


async def test_gateways_and_agents_of_two_releases_keep_one_limit(
    redis_server: RedisServer, previous: Path, tmp_path: Path, tell: Tell
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    sim = "itl_ms=0,ttft_ms=0"
    async with (
        fleet(
            redis_server.url, sim=sim, gateway_urls=("",), agent_urls=("",), tree=previous, keys_file=keys
        ) as running,
        log_of(running.redis_url) as log,
    ):
        running.tree = None
        await running.add_gateway("other")
        await running.add_agent("replica1")
        await running.until_served()
        began = time.monotonic()
        statuses, admitted = Counter[int](), 0

        async def call(number: int) -> None:
            nonlocal admitted
            gate = running.gates[number % 2]
            while time.monotonic() < began + CROWD_S:
                reply = await gate.ask("POST", CHATS, chat(1 + number % LONGEST, stream=False))
                statuses[reply.status] += 1
                if reply.status == 200:
                    admitted += reply.json["usage"]["total_tokens"]
                else:
                    await asyncio.sleep(0.2)

        await asyncio.gather(*map(call, range(40)))
        most = TOKENS_PER_MIN + TOKENS_PER_MIN / 60 * (time.monotonic() - began)
        assert set(statuses) == {200, 429}, statuses

        async def settled() -> bool:
            streams, used = await log.usage()
            return (streams, used.prompt + used.output) == (statuses[200], admitted)

        await eventually(settled, "each stream to be settled once")
        tell(f"{admitted} tokens admitted by two releases, {most:.0f} allowed; {dict(statuses)}")
        assert 0.9 * TOKENS_PER_MIN < admitted <= most + LONGEST
        await log.until_no_slot_is_taken()
