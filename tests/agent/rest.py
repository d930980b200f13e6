"""Streams that another producer has begun, and their rest asked of an engine."""

from __future__ import annotations

from inference.agent.continuation import Part
from inference.agent.continued.healed import ask_for_rest
from inference.agent.observe.attempt_timing import AttemptTiming
from inference.agent.running import RunningStream
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.ports import Engine, FrameSink
from stream_fabric.process.host import HostClock
from stream_fabric.stream.ids import TenantId
from tests.agent.owner import Owner


def running(request: EngineRequest, before: int) -> RunningStream:
    """A stream with so many frames of its first producer."""
    work = Work(request, "2.bb", TenantId("t"), b"{}", None, base=before, attempt=2)
    return RunningStream(work, 0, lambda *_: None, Owner(), 0.0, AttemptTiming(HostClock(), 0, 0))


def submit_rest(engine: Engine, part: Part, sink: FrameSink) -> None:
    stream = running(part.request, 2)
    ask_for_rest(stream, part, sink, engine, lambda _, request, to: engine.submit(request, to))
