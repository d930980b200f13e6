"""CPU cost of telemetry in the emitting process: microseconds of an ``emit``, and of everything until an event is
acknowledged, by each transport and into the disk spool.

    python -m bench.telemetry [--kafka-servers 127.0.0.1:9092]

Redis is started for it; Kafka is measured where one is named, in a topic of its own that stays there. Exit code 1: an
``emit`` costs more than ``--bound`` microseconds, or an event was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.harness import Cores, describe, pin, table, temporary_folder
from bench.place import redis_on
from stream_fabric.events import AttemptTrace, CandidateScore, Event, Phases, RequestTrace, encode_event
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.process.settings import EventSettings
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.events import RedisEvents
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId
from telemetry.emit.delivery import SinkPolicy
from telemetry.emit.redis import RedisTransport
from telemetry.emit.spool import Spool
from telemetry.emit.transport import Record, Transport
from telemetry.kafka.transport import KafkaTransport
from tests.telemetry.sinks import make_sink, make_spool

MB = 1 << 20


class Nowhere:
    """Acknowledges at once."""

    name = "nowhere"

    async def send(self, batch: Sequence[Record]) -> None: ...

    async def close(self) -> None: ...


class Away(Nowhere):
    """Acknowledges nothing."""

    async def send(self, batch: Sequence[Record]) -> None:
        await asyncio.get_running_loop().create_future()


def events(count: int) -> list[Event]:
    """As of a busy gateway and agent: every field that a usual stream fills."""
    made: list[Event] = []
    scores = tuple(
        CandidateScore(ReplicaId(f"replica-{n}-5f3c9a1b22d0ee"), 41.25 * n, 512 * n, n, 13.5, "") for n in range(8)
    )
    for n in range(count):
        stream = StreamId(f"resp_{uuid.uuid4().hex}")
        request = RequestTrace(
            id=f"{stream}-1", at_us=1_795_000_000_000_000 + n, gateway=GatewayId("gateway-7c9d8-12-a1b2c3d4"),
            role="created", ended="completed", tenant=TenantId("acme"), wall_us=2_411_873,
            phases=Phases(312, 1_204, 0, 8_211, 91_002, 2_300_441, 4_113, 0, 0, 0, 6_590),
            stream=stream, request_id=f"req_{n}", trace_id=uuid.uuid4().hex, user_hash="9f86d081884c7d65",
            model="meta-llama/Llama-3.1-70B-Instruct", pool="llama-70b", replica=scores[0].replica, region="eu-1",
            dialect="openai.chat", transport="sse", tier="standard", finish_reason="stop", placement="prefix",
            scores=scores, prompt_tokens=1812, cached_tokens=1024, output_tokens=288, streamed_tokens=288,
            last_seq=301, ttft_us=101_442, price_micro=1881,
        )  # fmt: skip
        attempt = AttemptTrace(
            id=f"{stream}-a1", at_us=1_795_000_000_000_000 + n, stream=stream, tenant=TenantId("acme"),
            model="meta-llama/Llama-3.1-70B-Instruct", pool="llama-70b", replica=scores[0].replica, ended="completed",
            engine="vllm", region="eu-1", hardware="h200", tier="standard", trace_id=request.trace_id, inbox_us=811,
            engine_queue_us=8_211, prefill_us=91_002, decode_us=2_300_441, prompt_tokens=1812, cached_tokens=1024,
            output_tokens=288, generated_tokens=288, finish_reason="stop", last_seq=301, billed=True, price_micro=1881,
            itl_sketch=tuple(n % 7 for n in range(64)), itl_max_us=31_112, decoding_us=27_605_292,
        )  # fmt: skip
        made += (request, attempt)
    return made


async def emitting(made: Sequence[Event], kind: type, rounds: int) -> list[float]:
    """Microseconds of CPU of one emit, each round's mean."""
    chosen = [event for event in made if type(event) is kind]
    means = []
    for _ in range(rounds):
        async with make_sink(Nowhere(), None, SinkPolicy(memory_bytes_max=1 << 32)) as sink:
            gc.collect()
            began = time.thread_time()
            for event in chosen:
                sink.emit(event)
            means.append((time.thread_time() - began) / len(chosen) * 1e6)
            assert not sink.backlog.dropped
    return means


async def delivering(made: Sequence[Event], transport: Transport, spool: Spool | None = None) -> tuple[float, float]:
    """Microseconds of this process's CPU for an event, emit included; events a second."""
    sink = make_sink(transport, spool, SinkPolicy(memory_bytes_max=1 << 32, stuck_s=0.01))
    async with sink:
        cpu, began = time.process_time(), time.perf_counter()
        for number, event in enumerate(made):
            sink.emit(event)
            if number % 200 == 0:
                await asyncio.sleep(0)
        fate = sink.backlog.spooled if spool is not None else sink.backlog.sent
        most = len(made) - (500 if spool is not None else 0)  # a batch stays on its way, with a copy in the spool
        while fate.total() < most:
            await asyncio.sleep(0.005)
        cpu, took_s = time.process_time() - cpu, time.perf_counter() - began
        assert not sink.backlog.dropped, sink.backlog.dropped
    return cpu / len(made) * 1e6, len(made) / took_s


async def measure(args: argparse.Namespace, redis_url: str, folder: Path) -> int:
    made = events(args.events // 2)
    sizes = {
        kind: len(encode_event(next(one for one in made if type(one) is kind))) for kind in (RequestTrace, AttemptTrace)
    }
    rows: list[list[object]] = []
    worst = 0.0
    for kind, size in sizes.items():
        seen = await emitting(made, kind, args.rounds)
        worst = max(worst, statistics.median(seen))
        rows.append([f"emit, {kind.__name__} of {size} bytes", f"{statistics.median(seen):.1f}",
                     f"{min(seen):.1f} to {max(seen):.1f}", ""])  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        client = RedisClient(redis_url)
        await client.start()
        stack.push_async_callback(client.close)
        transports: list[tuple[str, Transport, Spool | None]] = [
            ("emit and batches, to nowhere", Nowhere(), None),
            ("to Redis", RedisTransport(RedisEvents(client, bytes_max=1 << 32), HostRandom()), None),
            ("to the spool", Away(), make_spool(folder, 1 << 32)),
        ]
        if args.kafka_servers:
            topic = f"bench-{uuid.uuid4().hex[:8]}"
            kafka = EventSettings(
                events="kafka", kafka_servers=args.kafka_servers, events_topic=topic, telemetry_create_topics=True
            )
            transport = KafkaTransport(kafka, HostClock())
            await transport.send([Record(b"{}", b"", "fleet")])
            transports.append(("to Kafka", transport, None))
        for name, transport, spool in transports:
            cpu_us, rate = await delivering(made, transport, spool)
            rows.append([name, f"{cpu_us:.1f}", "", f"{rate:,.0f}"])
    print(table(["what", "us an event", "range", "events/s"], rows))
    if worst > args.bound:
        print(f"an emit costs {worst:.1f} us, over the bound of {args.bound:g}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bound", type=float, default=25.0, help="microseconds of an emit (default 25)")
    parser.add_argument("--kafka-servers", default="")
    args = parser.parse_args()
    cores = Cores.pick()
    pin(os.getpid(), cores.rest)
    print(describe())
    with (
        redis_on(cores) as (url, _),
        temporary_folder() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(measure(args, url, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
