"""The telemetry store as the composition roots make it."""

from __future__ import annotations

from stream_fabric.process.host import HostClock, HostRandom
from telemetry.store.store import Store


def make_store(url: str, reader_url: str = "") -> Store:
    return Store(url, reader_url, clock=HostClock(), random=HostRandom())
