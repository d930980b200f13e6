"""Saturates a gateway from the fabric: frames are appended to the logs as an agent would, without one.

Engine, agent and reader together make about 13,000 tokens a second on one core, which leaves a gateway nine tenths
idle and its caches cold. Here the appends of many streams go to Redis straight from this process, each group's next as
soon as its readers have the last, and every token is checked. ``bench.tokens`` runs it for the saturated phase.

    python -m bench.fabric PORT GATEWAY_PID REDIS_PID REDIS_URL PARTITIONS KEY KIND STREAMS SECONDS
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any

import uvloop

from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.stream.frames import Usage
from stream_fabric.stream.ids import ReplicaId, StreamId, partition_of
from stream_fabric.stream.log import Append, AppendCode

_TOKEN = re.compile(rb'"content":" t(\d+)"')
_BODY = {"model": "sim-small", "stream": True, "max_tokens": 1 << 20, "messages": [{"role": "user", "content": "hi"}]}
_BATCH = 50
_READY_S = 20.0


class Reader(asyncio.Protocol):
    """One connection; keeps what it reads, so that every token can be checked at the end."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.parts: list[bytes] = []
        self.head = b""
        self.greeted = asyncio.get_running_loop().create_future()
        self.opened = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if not self.opened.done():
            self.head += data
            if not self.greeted.done():
                self.greeted.set_result(None)
            if b"resp_" in self.head:
                self.opened.set_result(None)
            return
        self.parts.append(data)
        self.group.count(data.count(b'"content":" t'))


class Group:
    """The streams of a partition: their next tokens leave when all have their last."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.streams: list[tuple[StreamId, str, int]] = []
        self._missing = 0
        self._whole = asyncio.Event()
        self.tokens = 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        self._missing -= tokens
        if self._missing <= 0:
            self._whole.set()

    async def run(self, log: RedisStreamLog, until: float) -> None:
        usage, step = Usage(), 0
        while time.monotonic() < until:
            step += 1
            self._missing += len(self.streams)
            self._whole.clear()
            batch = [
                Append(stream, epoch, head + step, head + step, b'0" t%d"' % step, usage)
                for stream, epoch, head in self.streams
            ]
            pieces = [batch[i : i + _BATCH] for i in range(0, len(batch), _BATCH)]
            for replies in await asyncio.gather(*(log.append(self.partition, piece) for piece in pieces)):
                if any(reply.code is not AppendCode.OK for reply in replies):
                    raise SystemExit(f"an append was refused: {replies}")
            async with asyncio.timeout(_READY_S):
                await self._whole.wait()


def cpu_us(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1000


def ticks(pid: int) -> tuple[int, int]:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]), int(fields[12])


async def _open(kind: str, port: int, key: str, group: Group) -> tuple[Reader, StreamId]:
    transport: Any
    transport, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(group), "127.0.0.1", port)
    body = json.dumps(_BODY).encode()
    if kind == "sse":
        transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
        )
    else:
        transport.write(
            b"GET /v1/stream HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %b\r\nupgrade: websocket\r\n"
            b"connection: Upgrade\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
            % key.encode()
        )
        await reader.greeted
        message = b'{"t":"create","ch":1,"body":%b}' % body
        transport.write(b"\x81\xfe" + len(message).to_bytes(2, "big") + b"\0\0\0\0" + message)
    async with asyncio.timeout(_READY_S):
        await reader.opened
    found = re.search(rb"resp_[0-9a-f]{32}", reader.head)
    assert found is not None, reader.head
    return reader, StreamId(found.group().decode())


async def main(argv: list[str]) -> None:
    port, gateway, redis = map(int, argv[:3])
    url, partitions, key, kind, streams, seconds = argv[3], int(argv[4]), argv[5], argv[6], int(argv[7]), float(argv[8])
    client = RedisClient(url)
    await client.start()
    looking = RedisStreamLog(client, Partitions(partitions))
    groups = [Group(k) for k in range(partitions)]
    readers = []
    for _ in range(streams):
        scratch = Group(-1)
        reader, stream = await _open(kind, port, key, scratch)
        reader.group = groups[partition_of(stream, partitions)]
        readers.append((reader, stream))
    await asyncio.sleep(1)  # the one token of the stalled engine has come
    replicas: set[ReplicaId] = set()
    for reader, stream in readers:
        (head,) = await looking.heads(reader.group.partition, [stream], None)
        assert head is not None and head.status == "live", head
        assert head.replica is not None
        replicas.add(head.replica)
        reader.group.streams.append((stream, str(head.epoch), head.last))
        reader.parts.clear()
    (replica,) = replicas
    log = RedisStreamLog(client, Partitions(partitions), replica)  # in its agent's name: another's would be fenced
    groups = [group for group in groups if group.streams]
    before, redis_before, ticks_before, began = cpu_us(gateway), cpu_us(redis), ticks(gateway), time.monotonic()
    tokens_before = sum(group.tokens for group in groups)
    await asyncio.gather(*(group.run(log, began + seconds) for group in groups))
    after, redis_after, ticks_after, took = cpu_us(gateway), cpu_us(redis), ticks(gateway), time.monotonic() - began
    tokens = sum(group.tokens for group in groups) - tokens_before
    for reader, stream in readers:
        seen = [int(number) for number in _TOKEN.findall(b"".join(reader.parts))]
        if seen != list(range(1, len(seen) + 1)) or not seen:
            raise SystemExit(f"stream {stream} is not whole: {seen[:5]} … {seen[-5:]}")
    user, kernel = (b - a for a, b in zip(ticks_before, ticks_after, strict=True))
    print(
        json.dumps(
            {
                "gateway_us": (after - before) / tokens,
                "redis_us": (redis_after - redis_before) / tokens,
                "tokens_per_s": tokens / took,
                "busy": (after - before) / 1e6 / took,
                "kernel": kernel / max(1, user + kernel),
            }
        )
    )
    await client.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:]))
