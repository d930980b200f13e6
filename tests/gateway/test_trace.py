"""The trace kept for each reader: every open stream has one, so it must be small."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any, cast

import msgspec
import pytest

from stream_fabric.errors import Draining
from stream_fabric.events import ReadEnd
from stream_fabric.pool.placement import Placed, Scored
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.frames import SCHEMA_MISMATCH, Check, ChoiceEnd, End, Note, Usage, encode
from stream_fabric.stream.ids import GatewayId, ReplicaId, TenantId, new_stream_id
from stream_fabric.stream.log import Append, AppendCode
from stream_gw.delivery.hub import Hub
from stream_gw.dialects.facts import StreamFacts
from stream_gw.observe.metrics import fault
from stream_gw.observe.trace import ReaderOutcome, ReaderTrace, Tracer
from stream_gw.streams.body_bytes import BodyBytes
from stream_gw.transport.http import Request
from tests.gateway.in_process import Reading, silent
from tests.support.events import Heard, SetClock
from tests.support.waiting import eventually

BYTES_MAX = 720
"""Size limit of a trace with two candidates, without objects that traces share."""


def reader(number: int) -> ReaderTrace:
    """A trace made as from the wire, where every string is a new object."""

    def name(replica: int) -> ReplicaId:
        return ReplicaId("".join(["host-12345-", str(replica), "-6920aabbcc"]))

    trace = ReaderTrace(Tracer(Heard(), HostClock(), GatewayId("g")), f"req_{number:024x}", "ws")
    scored = tuple(Scored(name(k), 12.5 + k, 780, 14, 42.25, "") for k in range(2))
    trace.placing = trace.received + 300
    trace.receive_placed(Placed(name(0), "prefix", scored, 55.5))
    told = msgspec.Raw(msgspec.json.encode({"replica": name(0), "attempt": 1}))
    trace.receive_control(encode(Note("started", body=told)), trace.placed + 900)
    trace.first = trace.started + 5000
    return trace


def test_readers_of_a_replica_share_its_name() -> None:
    one, two = reader(1), reader(2)
    assert one.replica == "host-12345-0-6920aabbcc"
    assert one.replica is two.replica


def test_a_readers_trace_is_small() -> None:
    one, two = reader(1), reader(2)
    own = [getattr(one, name) for name in one.__slots__ if name != "tracer"]
    shared = {id(getattr(two, name)) for name in two.__slots__}
    size = sys.getsizeof(one) + sum(sys.getsizeof(value) for value in own if id(value) not in shared)
    assert size <= BYTES_MAX


def test_a_reply_that_does_not_fit_its_schema_is_always_traced() -> None:
    for check, traced in ((Check("invalid", "/a", "wrong"), True), (Check("valid"), False), (None, False)):
        sink = Heard()
        trace = ReaderTrace(Tracer(sink, HostClock(), GatewayId("g"), one_in=1 << 30), "req_1", "whole")
        trace.facts = StreamFacts(new_stream_id(1, b"x" * 10), 1, "m")
        trace.receive_control(encode(ChoiceEnd(0, "stop", check=check)), 1)
        trace.finish("completed", end=End("completed", Usage(1, output=1)))
        told = [(each.ended, each.error_code, each.weight) for each in sink.requests]
        assert told == [("completed", SCHEMA_MISMATCH, 1)] * traced, "it stands for itself alone"


def test_a_drain_refuses_new_requests_and_sends_readers_elsewhere() -> None:
    for before, ended, status in (("refused", "refused", 503), ("failed", "drained", 200)):
        sink, outcomes = Heard(), list[ReaderOutcome]()
        trace = ReaderTrace(Tracer(sink, HostClock(), GatewayId("g"), on_outcome=outcomes.append), "req_1", "sse")
        trace.finish(cast(ReadEnd, before), error=Draining("this gateway is shutting down"))
        assert [(told.ended, told.http_status) for told in sink.requests] == [(ended, status)]
        assert [fault(outcome) for outcome in outcomes] == ["none"], "a deployment is no outage"


def test_the_phases_of_a_stream_that_is_cancelled_on_its_second_replica_add_up() -> None:
    clock, sink = SetClock(), Heard()

    def after(ms: int) -> int:
        clock.at_us += ms * 1000
        return clock.at_us

    def started(attempt: int) -> bytes:
        return encode(Note("started", body=msgspec.Raw(b'{"replica":"r%d","attempt":%d}' % (attempt, attempt))))

    trace = ReaderTrace(Tracer(sink, clock, GatewayId("g")), "req", "ws")
    trace.placing = after(1)
    after(1)
    trace.receive_placed(Placed(ReplicaId("r1"), "load", (), 0.0))
    trace.receive_control(started(1), after(1))
    trace.first = after(50)
    broke = after(5000)
    after(3000)
    trace.receive_break(broke)
    trace.receive_continuation()
    trace.receive_control(started(2), clock.at_us)
    after(2000)
    trace.finish("cancelled", end=End("cancelled", Usage(1, output=9)), epoch=2, tokens=9)
    (found,) = sink.requests
    assert (found.attempts, found.replica) == (2, "r2")
    assert (found.phases.recovery_us, found.phases.decode_us) == (3_000_000, 7_000_000)
    assert found.phases.residual_us == 0 and found.phases.total_us == found.wall_us


def test_what_placement_expects_begins_with_the_placement() -> None:
    """The limits of a plan and the moderation of the prompt come before it."""
    clock, outcomes = SetClock(), list[ReaderOutcome]()
    trace = ReaderTrace(Tracer(Heard(), clock, GatewayId("g"), on_outcome=outcomes.append), "req", "sse")
    trace.role, trace.placing = "created", clock.at_us
    clock.at_us += 2_000_000
    trace.receive_placed(Placed(ReplicaId("r"), "load", (), 50.0))
    trace.first = clock.at_us + 60_000
    trace.finish("completed", end=End("completed", Usage(1, output=1)))
    assert [outcome.ttft_error_us for outcome in outcomes] == [10_000]


async def test_the_time_between_one_producer_and_the_next_is_counted(redis_client: RedisClient) -> None:
    clock, tenant, epoch = SetClock(), TenantId("acme"), Epoch(1, "aa")
    began = clock.at_us
    stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
    async with asyncio.TaskGroup() as tasks:
        log = RedisStreamLog(redis_client, Partitions(4))
        hub = Hub(GatewayId("g"), log, clock, silent, tasks)
        trace = ReaderTrace(Tracer(Heard(), clock, GatewayId("g")), "req", "ws")
        outlet = Reading()
        subscription = hub.expect(stream, tenant, epoch, trace).attach(outlet)
        await log.create(stream, epoch, tenant, b"{}", GatewayId("g"))
        seq = 0
        # Two tokens of each producer, 1 s apart; the next one follows after 10, 100 and 1,000 s
        for pause_s in (10, 100, 1000, 0):
            for _ in range(2):
                seq += 1
                clock.at_us += 1_000_000
                hub.heard_us = clock.at_us
                part = Append(stream, str(epoch), seq, seq, b'0" x"', Usage(1, seq), b"", "")
                (reply,) = await log.append(log.partition(stream), [part])
                assert reply.code is AppendCode.OK
                subscription.local.receive(str(epoch).encode(), seq, seq, part.frames)
                await eventually(lambda: len(outlet.lines) == seq, "the token")  # noqa: B023
            clock.at_us += pause_s * 1_000_000
            taken = await log.takeover(stream, epoch, "bb")
            assert taken is not None
            epoch = taken.epoch
        assert (trace.first - began) / 1e6 == 1
        assert (trace.broke - trace.first) / 1e6 == 1 + 10 + 2 + 100 + 2, "the last frame before the last pause"
        assert trace.paused_us / 1e6 == (10 + 1) + (100 + 1), "until the first frame; the last pause is the producer's"
        subscription.close()


async def test_a_full_socket_is_no_stall_before_the_first_token(redis_client: RedisClient) -> None:
    """Other streams fill the WebSocket; this one waits 10 s in its queue, and then 5 s for its client."""
    clock, tenant, epoch = SetClock(), TenantId("acme"), Epoch(1, "aa")
    stream = new_stream_id(time.time_ns() // 1_000_000, os.urandom(10))
    async with asyncio.TaskGroup() as tasks:
        log = RedisStreamLog(redis_client, Partitions(4))
        hub = Hub(GatewayId("g"), log, clock, silent, tasks)
        trace = ReaderTrace(Tracer(Heard(), clock, GatewayId("g")), "req", "ws")
        trace.role = "created"
        outlet = Reading()
        outlet.full = True
        subscription = hub.expect(stream, tenant, epoch, trace).attach(outlet)
        await log.create(stream, epoch, tenant, b"{}", GatewayId("g"))
        note = encode(Note("started", body=msgspec.Raw(b'{"replica":"r","attempt":1}')))
        for seq, frame in ((1, note), (2, b'0" x"')):
            clock.at_us += 5_000_000
            hub.heard_us = clock.at_us
            (reply,) = await log.append(
                log.partition(stream), [Append(stream, str(epoch), seq, seq, frame, Usage(1, 1), b"", "")]
            )
            assert reply.code is AppendCode.OK
            subscription.local.receive(str(epoch).encode(), seq, seq, frame)
        clock.at_us += 5_000_000
        outlet.full = False
        subscription.resume()
        await eventually(lambda: len(outlet.lines) == 2, "the token")
        assert trace.stalled_us == 5_000_000
        subscription.close()


@pytest.mark.parametrize(
    ("traceparent", "ended", "spans"),
    [
        (f"00-{'a' * 32}-{'b' * 16}-00", "completed", False),
        (f"00-{'a' * 32}-{'b' * 16}-00", "failed", True),
        (f"00-{'a' * 32}-{'b' * 16}-01", "completed", True),
        (f"00-{'a' * 32}-{'b' * 16}-03", "completed", True),
        (f"00-{'0' * 32}-{'b' * 16}-00", "completed", True),
        (None, "completed", True),
    ],
)
def test_a_client_that_records_no_trace_gets_spans_of_failures_only(
    traceparent: str | None, ended: ReadEnd, spans: bool
) -> None:
    sink, sent = Heard(), list[str]()
    tracer = Tracer(sink, HostClock(), GatewayId("g"), on_trace=lambda trace, parent: sent.append(parent))
    trace = ReaderTrace(tracer, "req_1", "sse", traceparent)
    flag = "00" if traceparent and "a" in traceparent and traceparent.endswith("00") else "01"
    assert trace.traceparent(new_stream_id(1, b"x" * 10))[-3:] == f"-{flag}"
    trace.finish(ended)
    assert len(sink.requests) == 1, "ClickHouse has each"
    assert len(sent) == spans


async def test_what_follows_the_parsing_of_a_body_is_admission_and_not_the_gateways_time() -> None:
    """The look-up of an idempotency key, or of stored responses, may take long."""
    clock, sink = SetClock(), Heard()

    async def receive() -> dict[str, Any]:
        clock.at_us += 2000
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None: ...

    request = Request({"headers": [], "path": "/"}, receive, send, clock, HostRandom(), BodyBytes())
    assert await request.parsed(TenantId("t"), len) == 2
    clock.at_us += 700_000
    trace = request.trace(Tracer(sink, clock, GatewayId("g")), "sse")
    trace.receive_placed(Placed(ReplicaId("r1"), "load", (), 0.0))
    trace.finish("cancelled")
    (found,) = sink.requests
    assert (found.phases.gateway_us, found.phases.admission_us) == (2000, 700_000)
