"""The telemetry store as the composition roots make it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stream_fabric.process.host import HostClock, HostRandom
from telemetry.store.store import Store


def make_store(url: str, reader_url: str = "") -> Store:
    return Store(url, reader_url, clock=HostClock(), random=HostRandom())


@asynccontextmanager
async def own_store(url: str) -> AsyncIterator[Store]:
    """A store in a database of its own, dropped at the end: many databases make each next one slower."""
    store = make_store(url)
    await store.open()
    try:
        yield store
        await store.command(f"DROP DATABASE IF EXISTS {re.findall(r'[=/](t[0-9a-f]{32})$', url)[0]}")
    finally:
        await store.close()
