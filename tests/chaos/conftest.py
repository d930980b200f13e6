"""Fixtures: the responses of an undisturbed run, accumulators of official packages, the previous release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.chaos.dialects import Accumulators
from tests.chaos.readers import Answer, SseReader
from tests.gateway.processes import Running, running
from tests.support.releases import previous_release

Undisturbed = Callable[[Iterable[int], int], Awaitable[dict[int, Answer]]]


@pytest.fixture(scope="session")
def calm() -> Iterator[Running]:
    """A platform that nothing happens to, as fast as it goes."""
    with running(sim="itl_ms=0,ttft_ms=0", gateways=1, replicas=1) as started:
        yield started


@pytest.fixture(scope="session")
def undisturbed(calm: Running) -> Undisturbed:
    """The answers of an undisturbed run, by seed: text depends on prompt and seed alone."""
    known: dict[tuple[int, int], Answer] = {}

    async def ask(seeds: Iterable[int], tokens: int) -> dict[int, Answer]:
        wanted = set(seeds)
        readers = [SseReader(calm.gates, seed, tokens) for seed in wanted if (seed, tokens) not in known]
        await asyncio.gather(*(reader.read() for reader in readers))
        for reader in readers:
            assert reader.status == "completed" and len(reader.connected_at) == 1
            known[reader.seed, tokens] = reader.answer
        return {seed: known[seed, tokens] for seed in wanted}

    return ask


@pytest.fixture(scope="session")
def accumulators() -> Iterator[Accumulators]:
    made = Accumulators()
    yield made
    made.close()


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source tree of the previous release."""
    return previous_release(tmp_path_factory.mktemp("previous"))
