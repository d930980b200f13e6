"""Cancels of the streams of revoked keys and suspended users, while a part of Redis is away. On virtual time."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from stream_fabric.errors import FabricUnavailable
from stream_fabric.process.host import HostClock
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId, UserId, partition_of
from stream_fabric.stream.log import CancelReply
from stream_gw.auth import Revoked
from stream_gw.auth.keys import key_subject
from stream_gw.auth.users import user_subject
from stream_gw.delivery.hub import Hub
from stream_gw.streams.cancel import StreamCommands
from tests.gateway.in_process import silent
from tests.support.virtual import on_virtual_time

ACME = TenantId("acme")
STREAMS = [StreamId(f"s{number}") for number in range(5)]
OF_A_KEY = Revoked(ACME, frozenset({"abc"}), False)
OF_A_USER = Revoked(ACME, frozenset(), False, "ann")


class Fabric:
    """The log, the accounts and the index. What ``away`` names does not answer: streams, or "accounts", "index"."""

    partitions = 1

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.cancelled: list[StreamId] = []

    def _reach(self, name: str) -> None:
        if name in self.away:
            raise FabricUnavailable("Redis is away")

    async def cancel(self, stream: StreamId, tenant: TenantId) -> CancelReply:
        self._reach(stream)
        self.cancelled.append(stream)
        return CancelReply("accepted", None, "cancelled")

    async def reserved(self, tenant: TenantId) -> dict[StreamId, list[str]]:
        self._reach("accounts")
        return {stream: [key_subject("abc")] for stream in STREAMS}

    async def live(self, tenant: TenantId, user: UserId) -> list[StreamId]:
        self._reach("index")
        return STREAMS


def commands_on(fabric: Any, tasks: asyncio.TaskGroup) -> StreamCommands:
    hub = Hub(GatewayId("g"), fabric, HostClock(), silent, tasks)
    parts: Any = SimpleNamespace(log=fabric, accounts=fabric, index=fabric, hub=hub, random=random.Random(7))
    return StreamCommands(parts, Any)


@pytest.mark.parametrize("revoked", (OF_A_KEY, OF_A_USER), ids=("key", "user"))
@on_virtual_time
async def test_streams_whose_shard_is_away_are_cancelled_when_it_is_back_and_the_others_at_once(
    revoked: Revoked,
) -> None:
    fabric = Fabric()
    async with asyncio.TaskGroup() as tasks:
        fabric.away = {STREAMS[0], STREAMS[3]}
        commands_on(fabric, tasks).end_revoked(revoked)
        await asyncio.sleep(0.1)
        assert fabric.cancelled == [STREAMS[1], STREAMS[2], STREAMS[4]]
        await asyncio.sleep(60)
        fabric.away = {STREAMS[3]}
        await asyncio.sleep(15)
        assert fabric.cancelled[3:] == [STREAMS[0]], "none is cancelled twice"
        fabric.away.clear()
    assert fabric.cancelled[4:] == [STREAMS[3]]


class HalfSilent(Fabric):
    """A log of two partitions, of which 0 says nothing for five seconds, and then fails."""

    partitions = 2

    def __init__(self) -> None:
        super().__init__()
        names = [StreamId(f"s{number}") for number in range(1500)]
        self.silent, self.answering = ([s for s in names if partition_of(s, 2) == each] for each in (0, 1))

    async def cancel(self, stream: StreamId, tenant: TenantId) -> CancelReply:
        if partition_of(stream, 2) == 0:
            await asyncio.sleep(5)
            raise FabricUnavailable("Redis is away")
        return await super().cancel(stream, tenant)

    async def live(self, tenant: TenantId, user: UserId) -> list[StreamId]:
        return [*self.silent, *self.answering]


@on_virtual_time
async def test_a_silent_shard_delays_the_cancels_of_no_other() -> None:
    fabric = HalfSilent()
    async with asyncio.TaskGroup() as tasks:
        commands = commands_on(fabric, tasks)
        commands.end_revoked(OF_A_USER)
        await asyncio.sleep(0.1)
        assert fabric.cancelled == fabric.answering
        commands.stop_retries()


@pytest.mark.parametrize("revoked, part", ((OF_A_KEY, "accounts"), (OF_A_USER, "index"), (OF_A_USER, "accounts")))
@on_virtual_time
async def test_a_list_of_streams_that_cannot_be_read_is_read_again(revoked: Revoked, part: str) -> None:
    fabric = Fabric()
    async with asyncio.TaskGroup() as tasks:
        fabric.away = {part}
        commands_on(fabric, tasks).end_revoked(revoked)
        await asyncio.sleep(60)
        assert not fabric.cancelled
        fabric.away.clear()
    assert fabric.cancelled == STREAMS


@on_virtual_time
async def test_streams_of_a_suspended_user_that_the_index_has_forgotten_are_cancelled_too() -> None:
    """The index lists the newest of a user's streams; its running ones may be older."""

    class Reserved(Fabric):
        async def reserved(self, tenant: TenantId) -> dict[StreamId, list[str]]:
            users = {StreamId("old"): "ann", STREAMS[0]: "ann", StreamId("other"): "bob"}
            return {stream: [key_subject("abc"), user_subject(user)] for stream, user in users.items()}

    fabric = Reserved()
    async with asyncio.TaskGroup() as tasks:
        commands_on(fabric, tasks).end_revoked(OF_A_USER)
    assert fabric.cancelled == [*STREAMS, StreamId("old")]


def test_streams_that_are_not_cancelled_within_minutes_are_counted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @on_virtual_time
    async def revoke() -> None:
        fabric = Fabric()
        async with asyncio.TaskGroup() as tasks:
            fabric.away = set(STREAMS[:2])
            commands_on(fabric, tasks).end_revoked(OF_A_KEY)

    revoke()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert "tenant=acme streams=2 error=Redis is away" in caplog.text


@on_virtual_time
async def test_a_gateway_that_ends_does_not_wait_for_revocations() -> None:
    fabric, now = Fabric(), asyncio.get_running_loop().time
    began = now()
    async with asyncio.TaskGroup() as tasks:
        fabric.away = set(STREAMS)
        commands = commands_on(fabric, tasks)
        commands.end_revoked(OF_A_KEY)
        await asyncio.sleep(5)
        commands.stop_retries()
    assert now() - began < 6
