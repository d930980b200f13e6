"""Sinks and spools with this host's clock and randomness."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from stream_fabric.process.host import HostClock, HostRandom
from telemetry.emit.delivery import SinkPolicy
from telemetry.emit.sink import Sink
from telemetry.emit.spool import Spool
from telemetry.emit.transport import Transport


def make_spool(root: Path, bytes_max: int) -> Spool:
    return Spool(root, bytes_max, HostClock(), HostRandom())


def make_sink(
    transport: Transport,
    spool: Spool | None = None,
    policy: SinkPolicy | None = None,
    registry: CollectorRegistry | None = None,
) -> Sink:
    return Sink(transport, spool, policy or SinkPolicy(), HostClock(), HostRandom(), registry)
