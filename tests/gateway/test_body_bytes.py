"""Bodies that arrive slowly take bounded memory of a gateway: of one tenant, and of all."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest

from stream_fabric.errors import GatewayFull, TooMany
from stream_fabric.limits import BODY_BYTES_MAX, TENANT_BODIES_BYTES_MAX
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.stream.ids import TenantId
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.streams.off_loop import off_loop
from stream_gw.transport.http import Request
from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Gate, Reply, chat, refusal
from tests.support.waiting import eventually

MIB = 1 << 20
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ACME, OTHER, THIRD = map(TenantId, ("acme", "other", "third"))


def test_bytes_are_bounded_by_tenant_and_in_all_and_come_back() -> None:
    bodies = BodyBytes(100, 60)
    bodies.add(ACME, 50)
    with pytest.raises(TooMany, match=r"hold 50 bytes, and the limit is 60.*retry after"):
        bodies.add(ACME, 20)
    bodies.add(OTHER, 45)
    with pytest.raises(GatewayFull, match=r"hold 95 bytes, and the limit is 100.*retry after") as full:
        bodies.add(THIRD, 6)
    assert (full.value.http_status, full.value.retriable, full.value.retry_after_s) == (503, True, 1)
    bodies.remove(ACME, 50)
    bodies.add(THIRD, 55)
    for tenant, size in ((OTHER, 45), (THIRD, 55)):
        bodies.remove(tenant, size)
    assert bodies.total == 0 and bodies._by_tenant == {}, "nothing is kept of tenants that left"


def test_bytes_that_a_request_adds_come_back_at_its_end() -> None:
    bodies = BodyBytes(100, 60)
    with pytest.raises(TooMany), bodies.adding(ACME) as add:
        add(50)
        assert bodies.total == 50
        add(20)
    assert bodies.total == 0 and bodies._by_tenant == {}


async def test_a_body_counts_until_it_was_parsed() -> None:
    """Bodies that waited for a thread did not count: 50 of 7 MiB took 1.1 GB of a gateway."""
    bodies = BodyBytes()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * MIB, "more_body": False}

    async def send(message: object) -> None:
        pytest.fail("nothing is to be answered")

    scope = {"type": "http", "headers": [], "state": {}}
    request = Request(scope, receive, send, HostClock(), HostRandom(), bodies)
    assert await request.parsed(ACME, lambda body: (len(body), bodies.total)) == (MIB, MIB)
    assert bodies.total == 0


async def test_few_large_bodies_are_parsed_at_once() -> None:
    """Threads that parse hold the GIL for most of the time: with six of them the loop waited half a second."""
    lock, running, most = threading.Lock(), 0, 0

    def parse() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait()
        with lock:
            running -= 1

    barrier = threading.Barrier(2, timeout=10)
    await asyncio.gather(*(off_loop(MIB, parse) for _ in range(8)))
    assert most == 2


@pytest.mark.platform
async def test_small_requests_that_build_on_large_responses_take_bounded_memory(platform: Running) -> None:
    """A request of 100 bytes may have a history of 8 MiB, so the history counts as its body does."""
    with await asyncio.to_thread(platform.gateway) as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        image = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * (7 * MIB)}
        body = {"model": MODEL, "max_output_tokens": 1, "input": [{"role": "user", "content": [image]}]}
        first = await gate.ask("POST", RESPONSES, body)
        assert first.status == 200, first
        asked = body | {"input": "Go on", "previous_response_id": first.json["id"]}
        count = 4 * TENANT_BODIES_BYTES_MAX // (7 * MIB)
        replies = await asyncio.gather(*(gate.ask("POST", RESPONSES, asked) for _ in range(count)))
        refused = [reply for reply in replies if reply.status == 429]
        assert refused and {reply.status for reply in replies} <= {200, 429, 503}
        for reply in refused:
            refusal(reply, 429, "too_many")
        assert (await gate.ask("POST", RESPONSES, asked)).status == 200, "nothing counts for ever"


@pytest.mark.platform
async def test_half_sent_bodies_take_bounded_memory_and_the_rest_is_refused(platform: Running) -> None:
    """Three times as many bytes are sent as one tenant may; others are served meanwhile."""
    with await asyncio.to_thread(platform.gateway) as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        assert (await gate.ask("POST", CHAT, chat(1, stream=False))).status == 200
        before = gate.resident_bytes()
        count = 3 * TENANT_BODIES_BYTES_MAX // (7 * MIB)
        async with AsyncExitStack() as stack:
            answers: list[asyncio.Task[Reply]] = []
            for _ in range(count):
                exchange = await stack.enter_async_context(gate.connection())
                answers.append(asyncio.create_task(exchange.answer()))
                head = gate.request("POST", CHAT, b" ", {"content-length": str(BODY_BYTES_MAX)})
                await exchange.send(head + b" " * (7 * MIB))
            held = TENANT_BODIES_BYTES_MAX // (7 * MIB)
            await eventually(lambda: sum(answer.done() for answer in answers) >= count - held, "the refusals", 30)
            for answer in answers:
                if answer.done():
                    refusal(await answer, 429, "too_many")
            grown = gate.resident_bytes() - before
            print(f"\n{count} bodies, {count * 7} MiB sent: {grown // MIB} MiB held")
            assert grown < 2 * TENANT_BODIES_BYTES_MAX
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

        async def served() -> bool:
            return (await gate.ask("POST", CHAT, chat(1, stream=False) | {"pad": "x" * MIB})).status == 200

        await eventually(served, "room after the senders left")
