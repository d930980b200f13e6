"""Plans with a retention of their own: however a stream ends, nothing of it stays in Redis for longer."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stream_fabric.limits import RETENTION_S, ZERO_RETENTION_S
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_gw.auth import key_digest, new_key
from tests.gateway.processes import Process, Running, on_cluster
from tests.gateway.wire import Gate, chat, events, refusal, text
from tests.support.redis_content import keys_with
from tests.support.waiting import eventually

pytestmark = [pytest.mark.platform, pytest.mark.skipif(on_cluster(), reason="it scans one Redis")]

PLANS = {"nothing": "retention_s = 0", "short": "retention_s = 120", "usual": ""}


@dataclass(frozen=True)
class Plans:
    platform: Running
    gates: dict[str, Gate]
    keys_file: Path
    client: RedisClient

    def gateway(self, name: str) -> Any:
        return self.platform.gateway("--gateway", name, STREAM_GW_KEYS_FILE=str(self.keys_file))

    async def holds(self, marker: str, stream: str = "\0") -> dict[str, int]:
        """Keys that hold the marker, and those of the stream, with their remaining time in ms."""
        return await keys_with(self.client, marker.encode(), stream.encode())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    keys = {plan: new_key(HostRandom()) for plan in PLANS}
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        "".join(
            f'[plan.{plan}]\n{terms}\n[[tenant]]\nid = "{plan}"\nplan = "{plan}"\n'
            f'[[tenant.key]]\nsha256 = "{key_digest(keys[plan])}"\n'
            for plan, terms in PLANS.items()
        )
    )
    return path, keys


@pytest.fixture(scope="module")
def gateway(platform: Running, keys: tuple[Path, dict[str, str]]) -> Iterator[Process]:
    with platform.gateway("--gateway", "privacy", STREAM_GW_KEYS_FILE=str(keys[0])) as process:
        yield process


@pytest_asyncio.fixture
async def plans(platform: Running, gateway: Process, keys: tuple[Path, dict[str, str]]) -> AsyncIterator[Plans]:
    client = RedisClient(platform.redis_url)
    await client.start()
    gates = {plan: Gate(gateway.facts["url"], gateway.pid, key) for plan, key in keys[1].items()}
    yield Plans(platform, gates, keys[0], client)
    await client.close()


def asked(marker: str, tokens: int = 8, **more: Any) -> dict[str, Any]:
    return chat(tokens, messages=[{"role": "user", "content": f"my secret is {marker}"}], **more)


def new_marker() -> str:
    return "mark" + secrets.token_hex(12)


async def gone(plans: Plans, marker: str, stream: str) -> None:
    """Nothing holds the prompt, and of the stream only its record without content stays."""

    async def seen() -> bool:
        found = await plans.holds(marker, stream)
        return all(name.endswith(f"{stream}:m") and ttl <= ZERO_RETENTION_S * 1000 for name, ttl in found.items())

    await eventually(seen, f"nothing to hold {marker}")
    assert not await plans.holds(marker)


async def expiring(plans: Plans, marker: str, stream: str, within_s: int) -> dict[str, int]:
    """Whatever holds the prompt or is of the stream ends in time."""

    async def seen() -> dict[str, int] | None:
        found = await plans.holds(marker, stream)
        ends = all(0 < ttl <= within_s * 1000 for ttl in found.values())
        # A log that came between the listing of keys and the reading of their times is in the next listing
        return found if ends and (await plans.holds(marker, stream)).keys() == found.keys() else None

    try:
        found: dict[str, int] = await eventually(seen, f"everything of {stream} to expire in {within_s} s")
    except AssertionError:
        print(await plans.holds(marker, stream))
        raise
    return found


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_was_read_is_deleted_at_once(plans: Plans, streamed: bool) -> None:
    marker, gate = new_marker(), plans.gates["nothing"]
    async with gate.create(asked(marker, 40, stream=streamed)) as exchange:
        assert exchange.status == 200
        stream, body = exchange.headers["x-stream-id"], await exchange.rest()
    assert (text(events(body)) if streamed else body).strip()
    await gone(plans, marker, stream)
    for path in ("", "/info"):
        assert refusal(await gate.ask("GET", f"/v1/streams/{stream}{path}"), 404, "not_found")["retriable"] is False


async def test_other_plans_keep_what_was_read(plans: Plans) -> None:
    for plan, kept_s in (("usual", RETENTION_S), ("short", 120)):
        marker, gate = new_marker(), plans.gates[plan]
        stream, _ = await gate.finished(8, messages=[{"role": "user", "content": marker}])
        found = await expiring(plans, marker, stream, kept_s)
        assert {name[-1] for name in found} >= set("ml"), found
        assert min(found.values()) > (kept_s - 60) * 1000
        assert (await gate.ask("GET", f"/v1/streams/{stream}")).status == 200


async def test_a_socket_that_has_everything_deletes_it(plans: Plans) -> None:
    marker = new_marker()
    async with plans.gates["nothing"].socket() as socket:
        await socket.create(1, asked(marker))
        while socket.track(1).end is None:
            await socket.receive()
        stream = socket.track(1).ok[0]["stream"]
    await gone(plans, marker, stream)


async def test_the_last_of_several_readers_deletes_it(plans: Plans) -> None:
    marker, gate = new_marker(), plans.gates["nothing"]
    with plans.gateway("privacy-2") as process:
        other = Gate(process.facts["url"], process.pid, gate.key)
        stream = await gate.background(200, messages=[{"role": "user", "content": marker}])
        readers = [at.ask("GET", f"/v1/streams/{stream}") for at in (gate, other, gate)]
        bodies = [events(reply.body) for reply in await asyncio.gather(*readers)]
        assert len({text(body) for body in bodies}) == 1 and text(bodies[0])
        await gone(plans, marker, stream)


async def test_what_nobody_reads_expires(plans: Plans) -> None:
    marker, gate = new_marker(), plans.gates["nothing"]
    stream = await gate.background(8, messages=[{"role": "user", "content": marker}])
    found = await expiring(plans, marker, stream, ZERO_RETENTION_S)
    assert any(name.endswith(":l") for name in found), "it is kept until it is read"
    assert (await gate.ask("GET", f"/v1/streams/{stream}")).status == 200
    await gone(plans, marker, stream)


async def test_a_cancelled_stream_is_deleted(plans: Plans) -> None:
    marker, gate = new_marker(), plans.gates["nothing"]
    async with gate.create(asked(marker, 4000)) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.events(3)
        await gate.cancel(stream)
        await exchange.rest()
    await gone(plans, marker, stream)
    marker = new_marker()
    stream = await gate.background(4000, messages=[{"role": "user", "content": marker}])
    await gate.cancel(stream)  # nobody reads it
    await expiring(plans, marker, stream, ZERO_RETENTION_S)


async def test_inputs_go_with_their_stream(plans: Plans) -> None:
    marker, gate = new_marker(), plans.gates["nothing"]
    stream = await gate.background(100)
    reply = await gate.ask("POST", f"/v1/streams/{stream}/input", {"id": "a", "item": marker})
    assert reply.status == 202, reply
    await expiring(plans, marker, stream, ZERO_RETENTION_S)


async def test_a_reader_that_leaves_ends_it(plans: Plans) -> None:
    marker, gate = new_marker(), plans.gates["nothing"]
    async with gate.create(asked(marker, 4000)) as exchange:
        stream = exchange.headers["x-stream-id"]
        await exchange.events(3)
    await expiring(plans, marker, stream, ZERO_RETENTION_S)


async def test_a_refused_request_leaves_nothing(plans: Plans) -> None:
    marker, gate = new_marker(), plans.gates["nothing"]
    assert (await gate.ask("POST", "/v1/chat/completions", asked(marker, model="nobody-has-it"))).status == 404
    assert not await plans.holds(marker)


async def test_a_stream_of_dead_replicas_is_deleted(plans: Plans) -> None:
    """One replica dies and the other continues the stream, then that one dies as well."""
    marker, gate, model = new_marker(), plans.gates["nothing"], f"m-{secrets.token_hex(4)}"
    env = {"STREAM_GW_REDIS_URL": plans.platform.redis_url, "STREAM_GW_PARTITIONS": "4"}
    sim = f"model={model},itl_ms=20,ttft_ms=0"
    with Process("agent", "--replica", "a", "--sim", sim, **env) as first:
        body = asked(marker, 4000, model=model, deadline_s=15)

        async def served() -> bool:
            return any(each["id"] == model for each in (await gate.ask("GET", "/v1/models")).json["data"])

        await eventually(served, "the gateway to know the model")
        async with gate.create(body) as exchange:
            stream = exchange.headers["x-stream-id"]
            await exchange.events(3)
            with Process("agent", "--replica", "b", "--sim", sim, **env) as second:
                first.kill()
                await exchange.events(100)
                second.kill()
                await exchange.rest(60.0)
    await gone(plans, marker, stream)


async def test_a_stream_of_a_dead_gateway_is_deleted(plans: Plans) -> None:
    marker, key = new_marker(), plans.gates["nothing"].key
    with plans.gateway("privacy-3") as process:
        gate = Gate(process.facts["url"], process.pid, key)
        async with gate.create(asked(marker, 1000)) as exchange:
            stream = exchange.headers["x-stream-id"]
            await exchange.events(3)
            os.kill(process.pid, signal.SIGKILL)
    await expiring(plans, marker, stream, ZERO_RETENTION_S)
