"""Hosts whose clocks differ by a minute: gateways 30 s ahead and behind, and an agent behind. Redis' clock counts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stream_fabric.events import PHASES, RequestTrace, decode_event
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.topology import slot_of
from stream_fabric.stream.ids import StreamId, created_ms
from stream_gw.auth import key_digest, new_key
from tests.gateway.processes import Running
from tests.gateway.wire import Gate, chat, whole_events
from tests.support.waiting import eventually

SKEW_S = 30
_SKEWED = """
import time
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + {skew}
time.time_ns = lambda: _time_ns() + {skew} * 1_000_000_000
"""
"""Python imports ``sitecustomize`` before the program: the process's wall clock is off, its monotonic clock is not."""


class Skewed(NamedTuple):
    """Gateways ahead and behind. The model of this name is served by an agent that is behind."""

    ahead: Gate
    behind: Gate
    model: str

    def limited(self, key: str) -> list[Gate]:
        return [Gate(gate.url, gate.pid, key) for gate in (self.ahead, self.behind)]


LIMITED = new_key(HostRandom())


@pytest.fixture(scope="module")
def skewed(platform: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Skewed]:
    def clock(skew: int) -> str:
        folder: Path = tmp_path_factory.mktemp("clock")
        (folder / "sitecustomize.py").write_text(_SKEWED.format(skew=skew))
        return str(folder)

    key, keys = new_key(HostRandom()), tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(
        f"""
        [plan.two]
        tenant = {{ requests_per_min = 2 }}
        [[tenant]]
        id = "free"
        [[tenant.key]]
        sha256 = "{key_digest(key)}"
        [[tenant]]
        id = "limited"
        plan = "two"
        [[tenant.key]]
        sha256 = "{key_digest(LIMITED)}"
        """
    )
    env = {"STREAM_GW_KEYS_FILE": str(keys), "STREAM_GW_TOKEN_SECRET": secrets.token_hex(16)}
    model = "skewed"
    with (
        platform.gateway("--gateway", "ahead", **env, PYTHONPATH=clock(SKEW_S)) as ahead,
        platform.gateway("--gateway", "behind", **env, PYTHONPATH=clock(-SKEW_S)) as behind,
        platform.agent(model, PYTHONPATH=clock(-SKEW_S)),
    ):
        gates = [Gate(each.facts["url"], each.pid, key) for each in (ahead, behind)]
        yield Skewed(gates[0], gates[1], model)


async def served(skewed: Skewed, gate: Gate) -> None:
    async def is_served() -> bool:
        return any(each["id"] == skewed.model for each in (await gate.ask("GET", "/v1/models")).json["data"])

    await eventually(is_served, "the model of the skewed agent")


async def test_streams_run_between_skewed_hosts_and_have_the_right_time(skewed: Skewed) -> None:
    for gate in (skewed.ahead, skewed.behind):
        await served(skewed, gate)
        async with gate.create(chat(20, model=skewed.model)) as exchange:
            body = await exchange.rest()
            stream = StreamId(exchange.headers["x-stream-id"])
        assert whole_events(body)[-1].data == "[DONE]"
        assert abs(created_ms(stream) / 1000 - time.time()) < 5, "Redis and this test share a clock"


async def test_the_phases_of_a_trace_add_up_and_none_is_the_skew(skewed: Skewed, platform: Running) -> None:
    client = RedisClient(platform.redis_url)
    await client.start()
    try:
        for gate in (skewed.ahead, skewed.behind):
            await served(skewed, gate)
            async with gate.create(chat(20, model=skewed.model)) as exchange:
                began = time.monotonic()
                await exchange.rest()
                wall_us = (time.monotonic() - began) * 1e6
                stream = exchange.headers["x-stream-id"]

            async def told(stream: str = stream) -> RequestTrace | None:
                entries = await client.execute(slot_of("events"), "XRANGE", "sg:{events}", "-", "+")
                lines = [line for _, fields in entries for value in fields[1::2] for line in value.splitlines()]
                events = [decode_event(line) for line in lines if stream.encode() in line]
                return next((event for event in events if isinstance(event, RequestTrace)), None)

            trace = await eventually(told, "the trace")
            phases = {name: getattr(trace.phases, name) for name in PHASES}
            assert trace.phases.total_us == trace.wall_us
            assert all(0 <= us <= trace.wall_us for name, us in phases.items() if name != "residual_us"), phases
            assert abs(phases["residual_us"]) < trace.wall_us, phases
            assert trace.wall_us < wall_us + 5e6
            assert abs(trace.at_us / 1e6 - time.time()) < 5, "Redis and this test share a clock"
    finally:
        await client.close()


async def test_the_lease_of_a_skewed_agent_holds(skewed: Skewed) -> None:
    """A lease of 3 s that compared clocks of hosts would have expired 27 s ago, or would never end."""
    await served(skewed, skewed.ahead)
    async with skewed.ahead.create(chat(250, model=skewed.model)) as exchange:
        body = await exchange.rest(30)
    assert whole_events(body)[-1].data == "[DONE]"
    assert {event.id.partition("-")[0] for event in whole_events(body) if event.id} == {"1"}, "no takeover"


async def test_a_deadline_is_as_long_as_asked(skewed: Skewed) -> None:
    for gate in (skewed.ahead, skewed.behind):
        await served(skewed, gate)
        began = time.monotonic()
        reply = await gate.ask(
            "POST", "/v1/chat/completions", chat(5000, model=skewed.model, deadline_s=2, stream=False)
        )
        took_s = time.monotonic() - began
        assert (reply.status, reply.json["error"]["code"]) == (504, "deadline_exceeded")
        assert 1.5 < took_s < 6


async def test_a_capability_token_lives_as_long_everywhere(skewed: Skewed) -> None:
    for mints, checks in ((skewed.ahead, skewed.behind), (skewed.behind, skewed.ahead)):
        minted = await mints.ask("POST", "/v1/tokens", {"scopes": ["read"], "expires_in_s": 3})
        token = Gate(checks.url, checks.pid, minted.json["token"])
        assert (await token.ask("GET", "/v1/models")).status == 200
        began = time.monotonic()

        async def has_expired(token: Gate = token) -> bool:
            return (await token.ask("GET", "/v1/models")).status == 401

        await eventually(has_expired, "the token to expire", 10)
        assert time.monotonic() - began > 1


async def test_limits_are_exact_across_skewed_gateways(skewed: Skewed) -> None:
    gates = skewed.limited(LIMITED)
    asked = [gates[number % 2].ask("POST", "/v1/chat/completions", chat(1)) for number in range(6)]
    replies = await asyncio.gather(*asked)
    assert sorted(reply.status for reply in replies) == [200] * 2 + [429] * 4
    waits = [int(reply.headers["retry-after"]) for reply in replies if reply.status == 429]
    assert all(1 <= wait <= SKEW_S for wait in waits), "half a minute brings one request"
