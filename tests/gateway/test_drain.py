from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from websockets.exceptions import ConnectionClosed

from tests.gateway.processes import Process, Running
from tests.gateway.test_sse import claimed
from tests.gateway.wire import DONE, Gate, Tokenstream, after_heartbeat, chat, dense, events, refusal, text
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform


@asynccontextmanager
async def gateway(platform: Running, **settings: float) -> AsyncIterator[tuple[Gate, Process]]:
    """A gateway of the test's own, to end."""
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with await asyncio.to_thread(platform.gateway, *flags) as process:
        yield Gate(process.facts["url"], process.pid, platform.key), process


async def ended(process: Process, within_s: float) -> None:
    assert await asyncio.to_thread(process.wait, within_s) == 0


async def test_invariant_9_a_drain_is_invisible(platform: Running, two: Gate) -> None:
    spread_s = 1.5
    async with AsyncExitStack() as stack:
        leaving, process = await stack.enter_async_context(gateway(platform, drain_s=20, drain_spread_s=spread_s))
        plain = await stack.enter_async_context(leaving.create(chat(300, seed=21)))
        collected = asyncio.create_task(
            leaving.ask("POST", "/v1/chat/completions", chat(300, seed=21) | {"stream": False})
        )
        sockets = [await stack.enter_async_context(leaving.socket()) for _ in range(8)]
        for seed, socket in enumerate(sockets):
            await socket.create(1, chat(800, seed=seed))
            await socket.until_t("d", ch=1)
        await leaving.until_open_streams(10)
        process.terminate()
        began = time.monotonic()

        # A connection that is already there hears it by HTTP too
        async def not_ready() -> None:
            while (reply := await leaving.ask("GET", "/readyz")).status == 200:
                await asyncio.sleep(0.01)
            assert (reply.status, reply.body) == (503, b"draining\n")

        await not_ready()
        refusal(await leaving.ask("POST", "/v1/chat/completions", chat(1)), 503, "draining")
        assert (await leaving.ask("GET", "/healthz")).status == 200, "it lives"

        waits = await asyncio.gather(*(_hint(socket, began) for socket in sockets))
        assert all(0 <= wait_ms <= spread_s * 1000 for wait_ms in waits)
        assert max(waits) - min(waits) > spread_s * 1000 / 10, "they are spread"

        body = await plain.rest()
        assert events(body)[-1].data == DONE
        whole = await collected
        assert whole.json["choices"][0]["message"]["content"] == text(events(body))
        await ended(process, 10)
        assert time.monotonic() - began < 15, "it waits for its readers, not for the grace"

        for socket in sockets:
            await _continues(socket, two)


async def test_a_kept_connection_does_not_stay_with_a_gateway_that_drains(platform: Running) -> None:
    async with AsyncExitStack() as stack:
        leaving, process = await stack.enter_async_context(gateway(platform, drain_s=20))
        plain, kept, asked, idle = [await stack.enter_async_context(leaving.connection()) for _ in range(4)]
        await plain.send(leaving.request("POST", "/v1/chat/completions", chat(150, seed=24)))
        await plain.head()
        for connection in (kept, idle):
            await connection.send(leaving.request("GET", "/healthz"))
            assert "connection" not in (await connection.answer()).headers
        await asked.send(leaving.request("POST", "/v1/chat/completions", chat(100, seed=24) | {"stream": False}))
        await leaving.until_open_streams(2)
        process.terminate()

        async def drains() -> bool:
            return (await leaving.ask("GET", "/readyz")).status == 503

        await eventually(drains, "the gateway to drain")
        await kept.send(leaving.request("POST", "/v1/chat/completions", chat(1)))
        refused = await kept.answer()
        refusal(refused, 503, "draining")
        assert refused.headers["connection"] == "close"
        assert await kept.closed() == b""
        whole = await asked.answer()
        assert (whole.status, whole.headers["connection"]) == (200, "close"), "a head that was not out says it too"
        assert await asked.closed() == b""
        assert events(await plain.rest())[-1].data == DONE
        assert await idle.closed() == b"", "closed at the end"
        await ended(process, 10)


async def test_a_gateway_that_leaves_answers_until_its_load_balancer_has_noticed(platform: Running) -> None:
    delay_s = 4.0
    async with gateway(platform, drain_delay_s=delay_s) as (leaving, process), leaving.socket() as socket:
        process.terminate()
        began = time.monotonic()

        async def leaves() -> bool:
            return (await leaving.ask("GET", "/readyz")).status == 503

        await eventually(leaves, "/readyz to say so")
        reply = await leaving.ask("POST", "/v1/chat/completions", chat(3) | {"stream": False})
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert time.monotonic() - began < delay_s, "the machine is too slow to tell"
        await socket.until_t("reconnect")
        assert time.monotonic() - began >= delay_s, "sockets stay meanwhile"
        await ended(process, 10)


async def _hint(socket: Tokenstream, began: float) -> int:
    """The wait that the socket is asked for; it is closed after it, not before."""
    hint = await socket.until_t("reconnect")
    heard = time.monotonic()
    with pytest.raises(ConnectionClosed):
        while True:
            await socket.receive()
    assert socket.connection.close_code == 1012
    wait_ms: int = hint["after_ms"]
    closed = time.monotonic()
    assert closed - began >= wait_ms / 1000
    assert closed - heard < wait_ms / 1000 + 4
    return wait_ms


async def _continues(socket: Tokenstream, elsewhere: Gate) -> None:
    """The frames from the socket and the rest from another gateway make the whole stream."""
    seen = socket.track(1)
    stream, cursor = seen.ok[0]["stream"], seen.data[-1]["s"]
    assert seen.end is None
    assert not seen.errors
    async with elsewhere.socket() as again:
        await again.sub(1, stream, after=f"1-{cursor}")
        await again.until_ended(1)
        rest = again.track(1)
        dense(rest, after=cursor)
    assert rest.end is not None
    assert rest.end["status"] == "completed"
    undisturbed = text(events((await elsewhere.ask("GET", f"/v1/streams/{stream}")).body))
    assert seen.text + rest.text == undisturbed


async def test_invariant_9_what_outlasts_the_grace_is_told_where_to_go_on(platform: Running, two: Gate) -> None:
    async with AsyncExitStack() as stack:
        leaving, process = await stack.enter_async_context(gateway(platform, drain_s=1))
        plain = await stack.enter_async_context(leaving.create(chat(800, seed=22)))
        stream = plain.headers["x-stream-id"]
        start = await plain.piece()
        process.terminate()
        began = time.monotonic()
        body = start + await plain.rest()
        assert time.monotonic() - began >= 0.9, "nothing is cut before the grace has passed"
        told = events(body)[-1]
        error = told.json["error"]
        assert (error["code"], error["retriable"], error["stream_id"]) == ("draining", True, stream)
        assert error["cursor"] == next(event.id for event in reversed(events(body)) if event.id)
        reply = await two.ask("GET", f"/v1/streams/{stream}?after={error['cursor']}")
        assert text(events(body)[:-1]) + text(events(after_heartbeat(reply.body))) == text(
            events((await two.ask("GET", f"/v1/streams/{stream}")).body)
        )
        assert events(reply.body)[-1].data == DONE
        await ended(process, 10)


async def test_readers_that_take_nothing_hold_no_gateway(platform: Running, fast: str) -> None:
    async with gateway(platform, drain_s=0.5) as (leaving, process), AsyncExitStack() as stack:
        stream, _ = await leaving.finished(4000, model=fast, seed=23)
        reader = await stack.enter_async_context(leaving.connection(receive_buffer=4096))
        await reader.send(leaving.request("GET", f"/v1/streams/{stream}"))
        socket = await stack.enter_async_context(leaving.socket(receive_buffer=4096, max_queue=1))
        await socket.sub(1, stream)

        async def both_lag() -> bool:
            return await leaving.gauge("lagging_clients") == 2

        await eventually(both_lag, "both readers to lag")
        process.terminate()
        await ended(process, 10)
        assert '"level": "error"' not in process.log


async def test_invariant_9_a_create_on_its_way_gets_the_grace_too(platform: Running) -> None:
    key = f"drain-{time.time_ns()}"
    body = chat(1500)  # longer than a server waits for its last answers
    await claimed(platform, key, body)  # so that the create waits a second before it begins
    async with gateway(platform, drain_s=30) as (leaving, process), leaving.connection() as exchange:
        await exchange.send(leaving.request("POST", "/v1/chat/completions", body, {"idempotency-key": key}))
        assert (await leaving.ask("GET", "/healthz")).status == 200  # it has been read by now
        process.terminate()
        await exchange.head()
        assert events(await exchange.rest())[-1].data == DONE
        await ended(process, 10)


async def test_an_idle_gateway_leaves_at_once(platform: Running) -> None:
    async with gateway(platform) as (leaving, process), leaving.connection() as idle:
        await idle.send(leaving.request("GET", "/healthz"))
        assert (await idle.answer()).status == 200  # and the connection stays open
        process.terminate()
        began = time.monotonic()
        await ended(process, 20)
        assert time.monotonic() - began < 8
        assert await idle.closed() == b""


async def test_a_second_sigterm_changes_nothing(platform: Running) -> None:
    async with AsyncExitStack() as stack:
        leaving, process = await stack.enter_async_context(gateway(platform))
        plain = await stack.enter_async_context(leaving.create(chat(200)))
        process.terminate()
        await plain.piece()
        process.terminate()
        assert events(await plain.rest())[-1].data == DONE
        await ended(process, 10)


async def test_a_socket_that_comes_while_the_gateway_leaves_is_sent_on(platform: Running) -> None:
    async with AsyncExitStack() as stack:
        leaving, process = await stack.enter_async_context(gateway(platform, drain_s=20, drain_spread_s=0))
        plain = await stack.enter_async_context(leaving.create(chat(400)))
        process.terminate()
        while (await leaving.ask("GET", "/readyz")).status == 200:
            await asyncio.sleep(0.01)
        late = await stack.enter_async_context(leaving.socket())
        assert (await late.until_t("reconnect"))["after_ms"] >= 0
        await late.create(1, chat(1))
        assert await late.close_code(5) == 1012
        assert [error["code"] for error in late.track(1).errors] in ([], ["draining"])
        await plain.rest()
        await ended(process, 10)


async def test_streams_of_a_gateway_that_was_killed_go_on_elsewhere(platform: Running, two: Gate) -> None:
    async with gateway(platform) as (dying, process), dying.create(chat(400, seed=23)) as plain:
        stream = plain.headers["x-stream-id"]
        seen = await plain.events(20)
        process.kill()
        cursor = seen[-1].id
        assert cursor is not None
        tail = (await two.ask("GET", f"/v1/streams/{stream}?after={cursor}")).body
        whole = (await two.ask("GET", f"/v1/streams/{stream}")).body
        assert events(whole)[-1].data == DONE
        assert whole.endswith(after_heartbeat(tail))
        assert text(seen) + text(events(after_heartbeat(tail))) == text(events(whole))


async def test_a_redis_that_is_away_for_a_moment_takes_no_gateway_off_its_balancer(redis_server: RedisServer) -> None:
    """All would leave it at once. Who comes is told when to come again; and for good is no moment."""
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_DEV_KEY": "sk-dev", "STREAM_GW_PARTITIONS": "4"}
    flags = ("gateway", "--port", "0", "--ready-without-redis-s", "3")
    with await asyncio.to_thread(Process, *flags, **env) as process:
        gate = Gate(process.facts["url"], process.pid, "sk-dev")
        assert (await gate.ask("GET", "/readyz")).body == b"ready\n"
        for away, back in ((redis_server.kill, redis_server.start), (redis_server.freeze, redis_server.thaw)):
            away()
            began = time.monotonic()
            reply = await gate.ask("GET", "/readyz")
            assert reply.status == 200 and reply.body.startswith(b"for 0 s: "), reply
            assert time.monotonic() - began < 2.5, "a check would not wait for so long"
            refusal(await gate.ask("POST", "/v1/chat/completions", chat(1)), 503, "fabric_unavailable")

            async def status() -> int:
                return (await gate.ask("GET", "/readyz")).status

            await eventually(lambda: _is(status, 503), "it to leave its balancer")
            assert time.monotonic() - began >= 3
            back()
            await eventually(lambda: _is(status, 200), "it to be ready again")


async def _is(status: Callable[[], Awaitable[int]], wanted: int) -> bool:
    return await status() == wanted
