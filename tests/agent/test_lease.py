"""What a replica tells its pool."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from inference.agent.chronicle import Chronicle
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings
from inference.agent.lease import Lease, LeasePolicy
from inference.agent.running import RunningStream
from inference.agent.times import Times
from stream_fabric.errors import FabricUnavailable
from stream_fabric.herald import Herald
from stream_fabric.ids import ReplicaId, StreamId, TenantId
from stream_fabric.ports import EngineRequest, NoEvents
from stream_fabric.redis.pool import RedisPools, ReplicaInfo, Report, Work
from tests.support.events import SetClock


class Pools(RedisPools):
    """``fails``: what happens while a renewal is on its way, of those that are lost."""

    def __init__(self, fails: list[Callable[[], None]]) -> None:
        self.fails = fails
        self.heard: list[list[StreamId]] = []
        self.ended: list[list[StreamId]] = []
        self.meanwhile: list[Callable[[], None]] = []
        """What happens while the answer to a report is on its way."""

    async def report(
        self,
        info: ReplicaInfo,
        *,
        ttl_s: float | None,
        ended: Sequence[StreamId] = (),
        running: Mapping[StreamId, str] | None = None,
    ) -> Report:
        if self.fails:
            self.fails.pop(0)()
            raise FabricUnavailable("lost")
        self.heard.append(list(running or ()))
        self.ended.append(list(ended))
        if self.meanwhile:
            self.meanwhile.pop(0)()
        return Report("", 0, 0)


def lease_of(
    pools: Pools, running: list[RunningStream], spawn: Callable[[Coroutine[Any, Any, None]], None] | None = None
) -> Lease:
    def no_one(*args: Any) -> None:
        raise AssertionError

    policy = LeasePolicy("p", "sim", ("m",), True, 0.3, 1.0)
    return Lease(
        policy, ReplicaId("r"), SimEngine(SimSettings()), pools, lambda: running, lambda: "ready",
        no_one, spawn or no_one,
        Chronicle(Herald(NoEvents(), SetClock(), "agent"), "p", ReplicaId("r"), 0.3),
    )  # fmt: skip


def stream(name: str, **more: Any) -> RunningStream:
    request = EngineRequest(StreamId(name), "chat", "m", msgspec.Raw(b"{}"))
    work = Work(request, "1.aa", TenantId("t"), b"", None, **more)
    owner: Any = None
    return RunningStream(work, 0, lambda stream, urgent: None, owner, 0.0, Times(0, 0, 0))


async def test_a_renewal_that_was_lost_is_composed_again() -> None:
    """The stream that came meanwhile is on the list that arrives, or its pool would forget it."""
    running: list[RunningStream] = []
    pools = Pools([lambda: running.append(stream("s"))])
    await lease_of(pools, running).renew()
    assert pools.heard == [[StreamId("s")]]
    pools.fails = [lambda: None] * 100
    with pytest.raises(FabricUnavailable):
        await lease_of(pools, running).renew()


async def test_an_end_that_is_said_again_while_a_report_is_on_its_way_is_told_again() -> None:
    """That report was made before, so the stream may have been placed here behind it."""
    pools = Pools([])
    lease = lease_of(pools, [], lambda soon: soon.close())
    lease.say_ended(StreamId("s"))
    pools.meanwhile = [lambda: lease.say_ended(StreamId("s"))]
    for _ in range(3):
        await lease.renew()
    assert pools.ended == [[StreamId("s")], [StreamId("s")], []]


async def test_what_is_still_to_come_is_what_answers_of_its_kind_have_within_its_limit() -> None:
    long, short = stream("long", output_tokens=1000), stream("short", output_tokens=20)
    limited = stream("limited", output_tokens=1000, output_limit=50)
    lease = lease_of(Pools([]), some := [long, short])
    per_ms = lease.info().decode_per_s / 1000
    assert lease.info().decode_ms * per_ms == pytest.approx(1020)
    some.append(limited)
    limited.tokens = 40
    long.tokens = 5000  # it is no nearer to its end
    assert lease.info().decode_ms * per_ms == pytest.approx(1030)
