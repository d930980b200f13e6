"""The trace kept for each reader: every open stream has one, so it must be small."""

from __future__ import annotations

import sys

import msgspec

from stream_fabric.pool.placement import Placed, Scored
from stream_fabric.process.host import HostClock
from stream_fabric.stream.frames import Note, encode
from stream_fabric.stream.ids import GatewayId, ReplicaId
from stream_gw.observe.trace import ReaderTrace, Tracer
from tests.support.events import Heard

BYTES_MAX = 664
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
