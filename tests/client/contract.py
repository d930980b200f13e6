"""Contract of the Python client on any gateway: each function takes a target, and all else from the wire.

Nothing here knows what the engine says: an answer is compared with the gateway's own replay of it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from stream_gw.client import BEGINNING, Data, GatewayError, Position, Stream, StreamGateway
from stream_gw.client import link as link_module
from tests.client.cutter import Cutter
from tests.support.waiting import eventually


@dataclass(frozen=True)
class Target:
    url: str
    key: str
    model: str

    def body(self, prompt: str = "Tell me a story.", tokens: int = 40) -> dict[str, object]:
        return {"model": self.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}

    def gateway(self, url: str | list[str] | None = None, **options: object) -> StreamGateway:
        return StreamGateway(url or self.url, token=self.key, **options)  # type: ignore[arg-type]


async def read(stream: Stream) -> str:
    return "".join([text async for text in stream.text()])


async def first(stream: Stream, items: int) -> None:
    """Read on, for ``items`` items that carry something."""
    async for item in stream:
        items -= isinstance(item, Data) and bool(item.chunks)
        if items <= 0:
            return


async def reads_a_whole_answer(target: Target) -> None:
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        text = await read(stream)
        assert text and stream.status == "completed" and stream.usage
        assert await read(gateway.subscribe(await stream.ready())) == text
        assert await read(gateway.subscribe(await stream.ready(), mode="snapshot")) == text
        assert await read(gateway.subscribe(await stream.ready(), mode="coalesce")) == text


async def carries_many_streams_on_one_socket(target: Target) -> None:
    async with Cutter.before(target.url) as cutter, target.gateway(cutter.url) as gateway:
        streams = [gateway.create(target.body(f"Tell me story {n}.")) for n in range(5)]
        texts = await asyncio.gather(*(read(stream) for stream in streams))
        assert cutter.accepted == 1
        assert len({stream.id for stream in streams}) == 5 and all(texts)


async def continues_after_cuts(target: Target) -> None:
    async with Cutter.before(target.url) as cutter, target.gateway(cutter.url) as gateway:
        stream = gateway.create(target.body())
        seqs: list[int] = []
        parts: list[str] = []
        async for item in stream:
            assert isinstance(item, Data)
            seqs.append(item.seq)
            parts += [chunk["choices"][0]["delta"].get("content") or "" for chunk in item.chunks if chunk["choices"]]
            if len(seqs) in (2, 5, 9):
                cutter.cut()
        assert cutter.accepted >= 2
        assert seqs == sorted(set(seqs))
        assert "".join(parts) == await read(gateway.subscribe(await stream.ready()))


async def continues_from_a_cursor(target: Target) -> None:
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await first(stream, 4)
        cursor = stream.cursor
        seqs = [item.seq async for item in gateway.subscribe(await stream.ready(), after=cursor)]
        assert seqs and min(seqs) > Position.parse(cursor).seq
        await read(stream)


async def tells_the_end_to_one_who_has_it_all(target: Target) -> None:
    async with target.gateway() as gateway:
        stream = gateway.create(target.body())
        await read(stream)
        again = gateway.subscribe(await stream.ready(), after=stream.cursor)
        assert await read(again) == ""
        assert again.status == "completed" and again.usage


async def creates_once_for_one_key(target: Target) -> None:
    async with target.gateway() as gateway:
        one = gateway.create(target.body(), key=(key := f"once-{id(gateway)}-{asyncio.get_running_loop().time()}"))
        two = gateway.create(target.body(), key=key)
        assert await read(one) == await read(two)
        assert one.id == two.id
        other = gateway.create(target.body("Another prompt."), key=key)
        with pytest.raises(GatewayError) as caught:
            await read(other)
        assert caught.value.code == "idempotency_mismatch"


async def cancels(target: Target) -> None:
    async with target.gateway() as gateway:
        stream = gateway.create(target.body(tokens=4000))
        await first(stream, 2)
        ack = await stream.cancel()
        assert ack.result in ("accepted", "already", "pending") and ack.at
        await read(stream)
        assert stream.status == "cancelled"
        assert (await stream.cancel()).result in ("already", "terminal")
        seqs = [item.seq async for item in gateway.subscribe(await stream.ready())]
        assert max(seqs) <= Position.parse(ack.at).seq + 1


async def cancels_a_resumed_stream(target: Target) -> None:
    async with target.gateway() as gateway:
        stream = gateway.create(target.body(tokens=4000))
        await first(stream, 2)
        cursor, stream_id = stream.cursor, await stream.ready()
        stream.close()
    async with target.gateway() as gateway:
        resumed = gateway.subscribe(stream_id, after=cursor)
        await first(resumed, 1)
        assert (await resumed.cancel()).result in ("accepted", "pending")
        await read(resumed)
        assert resumed.status == "cancelled"


async def cancels_while_disconnected(target: Target) -> None:
    async with Cutter.before(target.url) as cutter, target.gateway(cutter.url) as gateway:
        stream = gateway.create(target.body(tokens=4000))
        await first(stream, 2)
        cutter.refuses = True
        cutter.cut()
        stopping = asyncio.create_task(stream.cancel())
        await asyncio.sleep(0.2)
        assert not stopping.done()
        cutter.refuses = False
        assert (await stopping).result in ("accepted", "already", "pending", "terminal")
        await read(stream)
        assert stream.status == "cancelled"


async def cancels_by_http_where_no_socket_opens(target: Target) -> None:
    async with Cutter.before(target.url) as cutter, target.gateway(cutter.url) as gateway:
        stream = gateway.create(target.body(tokens=4000))
        await first(stream, 2)
        cutter.refuses_sockets = True
        cutter.cut()
        await eventually(lambda: gateway.link is None)
        ack = await stream.cancel()
        assert ack.result in ("accepted", "pending") and gateway.link is None
        cutter.refuses_sockets = False
        await read(stream)
        assert stream.status == "cancelled"


async def notices_a_dead_socket_soon_after_a_sleep(target: Target) -> None:
    with pytest.MonkeyPatch.context() as patch:
        async with Cutter.before(target.url) as cutter, target.gateway([cutter.url, target.url]) as gateway:
            stream = gateway.create(target.body(tokens=4000), on_exit="cancel")
            await first(stream, 2)
            link, clock = gateway.link, time.time
            patch.setattr(link_module.time, "time", lambda: clock() + 3600)
            await asyncio.sleep(link_module.WATCH_S * 2)
            assert gateway.link is link, "a socket that answers stays"
            cutter.stall()
            patch.setattr(link_module.time, "time", lambda: clock() + 7200)
            await eventually(lambda: gateway.link not in (None, link), timeout_s=10)
            await first(stream, 2)
            await stream.cancel()


async def a_slow_reader_gets_everything(target: Target) -> None:
    async with target.gateway(queue_items=4) as gateway:
        stream = gateway.create(target.body())
        seqs = []
        async for item in stream:
            seqs.append(item.seq)
            await asyncio.sleep(0.01)
        assert seqs == sorted(set(seqs))
        assert stream.status == "completed"


async def tells_what_is_refused(target: Target) -> None:
    async with StreamGateway(target.url, token="sk-nobody") as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.create(target.body()))
        assert caught.value.code == "invalid_api_key"
    async with target.gateway() as gateway:
        with pytest.raises(GatewayError) as caught:
            await read(gateway.subscribe("resp_" + "0" * 32, after=BEGINNING))
        assert caught.value.code == "not_found"


CONTRACT = [
    reads_a_whole_answer,
    carries_many_streams_on_one_socket,
    continues_after_cuts,
    continues_from_a_cursor,
    tells_the_end_to_one_who_has_it_all,
    creates_once_for_one_key,
    cancels,
    cancels_a_resumed_stream,
    cancels_while_disconnected,
    cancels_by_http_where_no_socket_opens,
    notices_a_dead_socket_soon_after_a_sleep,
    a_slow_reader_gets_everything,
    tells_what_is_refused,
]
